"""StatusFile: what one rank says of itself, by which the executor judges it.

What a rank knows of its memory: how much it has had, whether an error means that it ran out, and whom the kernel
killed for memory beside it. torch is asked only where the script has imported it.

PhaseWatch: how long one process took for each of its parts of a re-plan, by its own monotonic clock alone.
"""

from __future__ import annotations

import json
import logging
import math
import os
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from scheduler.domain.job_records import ReplanPhase
from scheduler.domain.observation import RankPhase, RankStatus

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
        self._written_at_s = float("-inf")
        self._oom_kill_counter = OomKillCounter.for_this_process() if directory is not None else None
        self._rank = rank
        self._last_write_succeeded = False
        self.status = RankStatus(RankPhase.STARTING)
        self._write()

    def update(self, **changes: Any) -> None:
        """Takes the changed fields over; a change of phase or checkpoint, and what comes after the last phase, is
        written at once, the rest at most 5 times a second."""
        before, self.status = self.status, replace(self.status, **changes)
        told = (before.phase, before.checkpoint_step) == (self.status.phase, self.status.checkpoint_step)
        at_once = not told or self.status.phase.is_terminal
        if at_once or time.monotonic() - self._written_at_s >= _WRITE_PERIOD_S:
            self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        if self._oom_kill_counter is not None:
            self.status = replace(
                self.status, memory_events=str(self._oom_kill_counter.path), oom_kills=self._oom_kill_counter.read()
            )
        document = {"rank": self._rank, "pid": os.getpid(), **asdict(self.status)}
        del document["written_at_ns"]  # the file has a time of its own
        is_first, self._written_at_s = math.isinf(self._written_at_s), time.monotonic()
        try:
            write_json_atomically(self._path, document, durable=False)
        except OSError as failure:
            if is_first or self.status.phase.is_terminal:
                raise
            if self._last_write_succeeded:
                logger.warning("this rank goes on, but cannot say how far it is: %s", failure)
            self._last_write_succeeded = False
        else:
            self._last_write_succeeded = True


def write_json_atomically(path: Path, document: object, *, durable: bool) -> None:
    """Readers see the old file or the new one, never a part; where it is durable, after a power failure too."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with part.open("w", encoding="utf-8") as file:
        json.dump(document, file)
        file.flush()
        if durable:
            os.fsync(file.fileno())
    part.replace(path)


# RuntimeErrors of torch that have no class of their own.
_OUT_OF_MEMORY_MESSAGES = ("DefaultCPUAllocator: can't allocate memory", "CUDA error: out of memory")
_MAXRSS_UNIT_BYTES = 1 if sys.platform == "darwin" else 1024


def measure_peak_bytes() -> int:
    """The most memory that this process has had at once: allocated by torch on its GPU, else resident on the host."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT_BYTES


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether the error, or one that it was raised from, says that memory ran out."""
    return any(_indicates_out_of_memory(each) for each in _iterate_causes(error))


def _iterate_causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__


def _indicates_out_of_memory(error: BaseException) -> bool:
    torch = sys.modules.get("torch")
    if isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY_MESSAGES)


@dataclass(frozen=True, slots=True)
class OomKillCounter:
    """The file in which the kernel counts whom it has killed for memory in a control group."""

    path: Path

    @classmethod
    def for_this_process(
        cls, *, cgroup_file: Path = Path("/proc/self/cgroup"), cgroup_root: Path = Path("/sys/fs/cgroup")
    ) -> Self | None:
        """None on a system that has no such file. cgroup v2 is looked for before v1."""
        try:
            lines = cgroup_file.read_text(encoding="utf-8").splitlines()
        except OSError:
            return None
        groups = {controllers: path.lstrip("/") for _, controllers, path in (line.split(":", 2) for line in lines)}
        candidates: list[Path] = []
        if "" in groups:
            candidates += [cgroup_root / groups[""] / name for name in ("memory.events.local", "memory.events")]
        if "memory" in groups:
            candidates.append(cgroup_root / "memory" / groups["memory"] / "memory.oom_control")
        return next((cls(path) for path in candidates if path.is_file()), None)

    def read(self) -> int | None:
        """How many so far; None where the file does not say (any more)."""
        try:
            words = self.path.read_text(encoding="ascii").split()
        except OSError:
            return None
        return int(words[words.index("oom_kill") + 1]) if "oom_kill" in words[:-1] else None


_START_TIME_FIELD = 19
"""Of the fields of /proc/self/stat behind the program's name (proc_pid_stat(5), field 22)."""


def read_process_start_s() -> float:
    """When this process was started, on its monotonic clock; by the kernel's ticks, which are 10 ms."""
    # The name of the program, in brackets, may hold blanks: what follows it is counted from there.
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    started_s = int(fields[_START_TIME_FIELD]) / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)


class PhaseTimer:
    """`began_s`: when the process began to be this rank, on `time.monotonic`; default: when it was started. Each phase
    counts once, from the end of the one before, and those of coming before those of leaving."""

    def __init__(self, started_at_s: float | None = None) -> None:
        self._phase_started_at_s: float = read_process_start_s() if started_at_s is None else started_at_s
        self._seconds_by_phase: dict[ReplanPhase, float] = {}

    @property
    def seconds_by_phase(self) -> Mapping[str, float]:
        return {phase.value: seconds for phase, seconds in self._seconds_by_phase.items()}

    def has_ended(self, phase: ReplanPhase) -> bool:
        return phase in self._seconds_by_phase

    def end_phase(self, phase: ReplanPhase) -> None:
        """The phase ends now."""
        if phase not in self._seconds_by_phase:
            now_s = time.monotonic()
            self._seconds_by_phase[phase], self._phase_started_at_s = now_s - self._phase_started_at_s, now_s

    def restart(self) -> None:
        """The next phase begins only now; what was before is none."""
        self._phase_started_at_s = time.monotonic()

    def begin_leaving(self, waited_s: float) -> None:
        """A notice is followed now that has waited so long for a step boundary. The phases of leaving begin."""
        if ReplanPhase.NOTICE not in self._seconds_by_phase:
            self._seconds_by_phase[ReplanPhase.NOTICE] = waited_s
            self._phase_started_at_s = time.monotonic()
