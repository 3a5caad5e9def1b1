"""Disk writes that survive full disks and concurrent readers."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)


class DeferredDiskWrites:
    """Log of failed disk writes that are retried later. Each failure is logged once."""

    def __init__(self) -> None:
        self._last_errors: dict[str, str] = {}

    @contextmanager
    def defer_on_error(self, description: str) -> Iterator[None]:
        """Suppress an OSError in the block and log it. The caller retries `description` on its next pass."""
        try:
            yield
        except OSError as error:
            if self._last_errors.get(description) != str(error):
                logger.error("%s failed and will be retried: %s", description, error)
            self._last_errors[description] = str(error)
        else:
            self._last_errors.pop(description, None)


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
