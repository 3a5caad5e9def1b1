"""What a disk refuses, because it is full or read-only: told once, and tried again at the next look.

Files that several processes look at: a reader sees the old one or the new one, never a part.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)


class DeferredDiskWrites:
    """Mutable on purpose: it remembers what was told."""

    def __init__(self) -> None:
        self._told: dict[str, str] = {}

    @contextmanager
    def defer_on_error(self, description: str) -> Iterator[None]:
        """An OSError ends the block and nothing else: whoever calls does `what` again, until the disk takes it."""
        try:
            yield
        except OSError as failure:
            if self._told.get(description) != str(failure):
                logger.error("%s is put off until the disk takes it: %s", description, failure)
            self._told[description] = str(failure)
        else:
            self._told.pop(description, None)


def write_json_atomically(path: Path, document: object, *, durable: bool = False) -> None:
    """`document` as JSON; where it is durable, whole after a power failure too, if it is there then. Raises ValueError
    where it holds a number that JSON has no form for."""
    part = path.with_name(f".{path.name}.part")
    with part.open("w", encoding="utf-8") as file:
        file.write(json.dumps(document, allow_nan=False))
        file.flush()
        if durable:
            os.fsync(file.fileno())
    part.replace(path)
