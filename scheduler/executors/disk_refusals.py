"""What a disk refuses, because it is full or read-only: told once, and tried again at the next look."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


class DiskRefusals:
    """Mutable on purpose: it remembers what was told."""

    def __init__(self) -> None:
        self._told: dict[str, str] = {}

    @contextmanager
    def put_off(self, what: str) -> Iterator[None]:
        """An OSError ends the block and nothing else: whoever calls does `what` again, until the disk takes it."""
        try:
            yield
        except OSError as failure:
            if self._told.get(what) != str(failure):
                logger.error("%s is put off until the disk takes it: %s", what, failure)
            self._told[what] = str(failure)
        else:
            self._told.pop(what, None)
