"""Python and diff blocks of the guides."""

from __future__ import annotations

import re
from pathlib import Path

GUIDES = Path(__file__).resolve().parents[2] / "docs" / "how-to"


def read_python_blocks(guide: str) -> list[str]:
    """Return the Python blocks of a guide in order."""
    return _read_blocks(guide, "python")


def read_diffs(guide: str) -> list[str]:
    """Return the diff blocks of a guide in order."""
    return _read_blocks(guide, "diff")


def _read_blocks(guide: str, language: str) -> list[str]:
    text = (GUIDES / f"{guide}.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
