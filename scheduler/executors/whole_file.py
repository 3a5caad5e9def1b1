"""Files that several processes look at: a reader sees the old one or the new one, never a part."""

from __future__ import annotations

import json
import os
from pathlib import Path


def write_whole(path: Path, document: object, *, durable: bool = False) -> None:
    """`document` as JSON; where it is durable, whole after a power failure too, if it is there then. Raises ValueError
    where it holds a number that JSON has no form for."""
    part = path.with_name(f".{path.name}.part")
    with part.open("w", encoding="utf-8") as file:
        file.write(json.dumps(document, allow_nan=False))
        file.flush()
        if durable:
            os.fsync(file.fileno())
    part.replace(path)
