"""RankStatus: what one rank says of itself in a file, by which the executor judges it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from scheduler.domain.rank_status import RankPhase
from scheduler.domain.replan import LoadTraffic
from scheduler.worker.memory import OomKillCount

# A reader looks a few times a second; writing each of a thousand short steps would only wear the disk.
_WRITE_PERIOD_S = 0.2


@dataclass(frozen=True, slots=True)
class RankStatus:
    """`step` is the last finished one, `checkpoint_step` that of the last complete checkpoint. `cause`: a failure's,
    `out-of-memory` or empty. `peak_bytes`: the most memory that this process has had at once. `phases_s`: seconds by
    `ReplanPhase`. `memory_events`, `oom_kills`: where the kernel counts whom it kills for memory in this process's
    control group, and that count when this was written, so that whoever sees it dead can tell what killed it.
    `frozen_layers`: so many of the first layers are frozen; None until the script says so. `traffic`: what this rank
    has read of a checkpoint; None where it read none or did not count."""

    rank: int
    pid: int
    phase: RankPhase = RankPhase.STARTING
    step: int = 0
    checkpoint_step: int | None = None
    loss: float | None = None
    samples_per_s: float | None = None
    reason: str = ""
    cause: str = ""
    peak_bytes: int | None = None
    phases_s: Mapping[str, float] = field(default_factory=dict)
    memory_events: str = ""
    oom_kills: int | None = None
    frozen_layers: int | None = None
    traffic: LoadTraffic | None = None


class StatusFile:
    """Keeps `status-<rank>.json` in a run directory; without a directory it only remembers."""

    def __init__(self, directory: Path | None, *, rank: int) -> None:
        self._path = None if directory is None else directory / f"status-{rank}.json"
        self._written_s = float("-inf")
        self._kills = OomKillCount.of_this_process() if directory is not None else None
        self.status = RankStatus(rank=rank, pid=os.getpid())
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
        write_json_atomically(self._path, asdict(self.status), durable=False)
        self._written_s = time.monotonic()


def write_json_atomically(path: Path, document: object, *, durable: bool) -> None:
    """Readers see the old file or the new one, never a part; where it is durable, after a power failure too."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with part.open("w", encoding="utf-8") as file:
        json.dump(document, file)
        file.flush()
        if durable:
            os.fsync(file.fileno())
    part.replace(path)
