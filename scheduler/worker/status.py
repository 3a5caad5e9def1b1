"""StatusFile: what one rank says of itself, by which the executor judges it."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from scheduler.domain.rank_status import RankPhase, RankStatus
from scheduler.worker.memory import OomKillCount

logger = logging.getLogger(__name__)

# A reader looks a few times a second; writing each of a thousand short steps would only wear the disk.
_WRITE_PERIOD_S = 0.2


class StatusFile:
    """Keeps `status-<rank>.json` in a run directory; without a directory it only remembers.

    Where the first word or the last one cannot be written, that is raised (OSError): nobody would know of this rank. A
    disk that is full in between ends no training: what is new is written as soon as there is room.
    """

    def __init__(self, directory: Path | None, *, rank: int) -> None:
        self._path = None if directory is None else directory / f"status-{rank}.json"
        self._written_s = float("-inf")
        self._kills = OomKillCount.of_this_process() if directory is not None else None
        self._rank = rank
        self._is_heard = False
        self.status = RankStatus(RankPhase.STARTING)
        self._write()

    def update(self, **changes: Any) -> None:
        """Takes the changed fields over; a change of phase or checkpoint, and what comes after the last phase, is
        written at once, the rest at most 5 times a second."""
        before, self.status = self.status, replace(self.status, **changes)
        told = (before.phase, before.checkpoint_step) == (self.status.phase, self.status.checkpoint_step)
        at_once = not told or self.status.phase.is_end
        if at_once or time.monotonic() - self._written_s >= _WRITE_PERIOD_S:
            self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        if self._kills is not None:
            self.status = replace(self.status, memory_events=str(self._kills.path), oom_kills=self._kills.read())
        document = {"rank": self._rank, "pid": os.getpid(), **asdict(self.status)}
        del document["written_at_ns"]  # the file has a time of its own
        is_first, self._written_s = math.isinf(self._written_s), time.monotonic()
        try:
            write_json_atomically(self._path, document, durable=False)
        except OSError as failure:
            if is_first or self.status.phase.is_end:
                raise
            if self._is_heard:
                logger.warning("this rank goes on, but cannot say how far it is: %s", failure)
            self._is_heard = False
        else:
            self._is_heard = True


def write_json_atomically(path: Path, document: object, *, durable: bool) -> None:
    """Readers see the old file or the new one, never a part; where it is durable, after a power failure too."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with part.open("w", encoding="utf-8") as file:
        json.dump(document, file)
        file.flush()
        if durable:
            os.fsync(file.fileno())
    part.replace(path)
