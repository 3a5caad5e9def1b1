"""Files that several processes look at: a reader sees the old one or the new one, never a part."""

from __future__ import annotations

import json
from pathlib import Path


def write_whole(path: Path, document: object) -> None:
    """`document` as JSON. Raises ValueError where it holds a number that JSON has no form for."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(document, allow_nan=False), encoding="utf-8")
    part.replace(path)
