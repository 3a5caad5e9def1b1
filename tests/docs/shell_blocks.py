"""Shell blocks of the documentation: fenced with ```bash, run unless a comment before them gives a reason not to."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(r"(?:<!-- not run: (?P<reason>[^>]+?) -->\n)?```bash\n(?P<script>.*?)```", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ShellBlock:
    """One block of a page. `reason` says why the block is not run; empty if it is."""

    page: Path
    script: str
    reason: str


def read_blocks(page: Path) -> list[ShellBlock]:
    """Return the shell blocks of a page in order."""
    matches = _BLOCK.finditer(page.read_text(encoding="utf-8"))
    return [ShellBlock(page, match["script"], match["reason"] or "") for match in matches]
