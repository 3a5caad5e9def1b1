"""Disk writes that concurrent readers see whole."""

from __future__ import annotations

import json
import os
from pathlib import Path


def write_json_atomically(path: Path, document: object, *, durable: bool = False) -> None:
    """Write `document` as JSON by rename, so that readers see the old or the new file, never a part.

    With `durable`, the file is complete even after a power failure. Raises ValueError for numbers that JSON cannot
    represent.
    """
    part = path.with_name(f".{path.name}.part")
    with part.open("w", encoding="utf-8") as file:
        file.write(json.dumps(document, allow_nan=False))
        file.flush()
        if durable:
            os.fsync(file.fileno())
    part.replace(path)
