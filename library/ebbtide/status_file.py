"""The status that each rank writes for the executor: phase, progress, memory, and where the time of a replan goes."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ebbtide.rank_status import RankPhase, RankStatus, ReplanPhase

logger = logging.getLogger(__name__)

_WRITE_PERIOD_S = 1.0  # the executor reads about once a second

# RuntimeErrors of torch and the CUDA libraries that have no class of their own.
_OUT_OF_MEMORY_MESSAGES = (
    "DefaultCPUAllocator: can't allocate memory",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "HIP out of memory",
    "HIP error: out of memory",
    "cudaErrorMemoryAllocation",
    "STATUS_ALLOC_FAILED",  # cuBLAS, cuDNN, cuSOLVER, cuSPARSE
    "CUFFT_ALLOC_FAILED",
    "Failed to CUDA calloc",  # NCCL, as are the next ones
    "Failed to CUDA host alloc",
)
# NCCL reports errors of CUDA as "Cuda failure 2 'out of memory'", older versions without the number.
_NCCL_OUT_OF_MEMORY = re.compile(r"Cuda failure (\d+ )?'?out of memory")
# cuBLAS says that it is not initialized if there is no memory for the handle. With a handle it means another error.
_CUBLAS_WITHOUT_MEMORY = re.compile(r"CUBLAS_STATUS_NOT_INITIALIZED when calling `?cublas(Lt)?Create")
_MAXRSS_UNIT_BYTES = 1 if sys.platform == "darwin" else 1024

# Index of field 22 of /proc/self/stat (proc_pid_stat(5)) among the fields after the program's name.
_START_TIME_FIELD = 19


class StatusFile:
    """The file `status-<rank>.json` in the run directory; without a directory the status is only kept in memory.

    The first and the last write raise OSError if they fail, because the executor would know nothing of this rank. Any
    other failed write, for example on a full disk, is retried with the next update.
    """

    def __init__(self, directory: Path | None, *, rank: int) -> None:
        self._path = None if directory is None else directory / f"status-{rank}.json"
        self._written_at_s = float("-inf")
        self._oom_kill_counter = OomKillCounter.for_this_process() if directory is not None else None
        self._rank = rank
        self._last_write_succeeded = False
        self.status = RankStatus(RankPhase.STARTING)
        self._write()

    def defers(self, phase: RankPhase) -> bool:
        """Return whether an update that changes progress alone would not be written now."""
        return self.status.phase is phase and time.monotonic() - self._written_at_s < _WRITE_PERIOD_S

    def merge(self, changes: Mapping[str, Any]) -> None:
        """Change fields of the status without writing it."""
        if changes:
            self.status = replace(self.status, **changes)

    def update(self, **changes: Any) -> None:
        """Change fields of the status.

        Changes of phase or checkpoint step, the end of a phase of a replan, such as the first step, and updates in a
        terminal phase are written at once, others at most once a second.
        """
        before, self.status = self.status, replace(self.status, **changes)
        is_change = _list_milestones(before) != _list_milestones(self.status)
        if is_change or self.status.phase.is_terminal or time.monotonic() - self._written_at_s >= _WRITE_PERIOD_S:
            self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        if self._oom_kill_counter is not None:
            self.status = replace(
                self.status, memory_events=str(self._oom_kill_counter.path), oom_kills=self._oom_kill_counter.read()
            )
        # Not asdict(), which copies deeply and takes most of the time of a write.
        document = {"rank": self._rank, "pid": os.getpid(), **vars(self.status)}
        document["traffic"] = None if self.status.traffic is None else asdict(self.status.traffic)
        del document["written_at_ns"]  # readers use the file's modification time
        is_first, self._written_at_s = math.isinf(self._written_at_s), time.monotonic()
        try:
            write_json_atomically(self._path, document, durable=False)
        except OSError as error:
            if is_first or self.status.phase.is_terminal:
                raise
            if self._last_write_succeeded:
                logger.warning("Cannot write the status of this rank; training continues: %s", error)
            self._last_write_succeeded = False
        else:
            self._last_write_succeeded = True


def _list_milestones(status: RankStatus) -> tuple[object, ...]:
    return status.phase, status.checkpoint_step, status.phases_s.keys()


def write_json_atomically(path: Path, document: object, *, durable: bool) -> None:
    """Replace the file so that readers see the old or the new document, never a part.

    Args:
        durable: also survive a power failure (fsync).
    """
    content = json.dumps(document).encode()  # json.dump() lacks the fast encoder
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with part.open("wb") as file:
        file.write(content)
        file.flush()
        if durable:
            os.fsync(file.fileno())
    part.replace(path)


def measure_peak_bytes() -> int:
    """Return the peak memory of this process: reserved by torch on its GPU, otherwise resident on the host.

    Reserved memory includes the fragmentation of torch's allocator, so it is what the GPU must have. torch is consulted
    only if the script has imported it.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_reserved())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT_BYTES


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether the error or one of its causes says that memory ran out."""
    return any(_indicates_out_of_memory(each) for each in _iterate_causes(error))


def _iterate_causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__


def _indicates_out_of_memory(error: BaseException) -> bool:
    torch = sys.modules.get("torch")
    if isinstance(error, (MemoryError, getattr(torch, "OutOfMemoryError", ()))):
        return True
    if not isinstance(error, RuntimeError):
        return False
    message = str(error)
    patterns = (_NCCL_OUT_OF_MEMORY, _CUBLAS_WITHOUT_MEMORY)
    return any(text in message for text in _OUT_OF_MEMORY_MESSAGES) or any(each.search(message) for each in patterns)


@dataclass(frozen=True)
class OomKillCounter:
    """The kernel's count of OOM kills in a control group."""

    path: Path

    @classmethod
    def for_this_process(
        cls, *, cgroup_file: Path = Path("/proc/self/cgroup"), cgroup_root: Path = Path("/sys/fs/cgroup")
    ) -> OomKillCounter | None:
        """Return the counter of this process's control group (v2 preferred over v1), or None if it cannot be read."""
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
        return next((cls(path) for path in candidates if os.access(path, os.R_OK)), None)

    def read(self) -> int | None:
        """Return the number of OOM kills so far, or None if the file does not state it."""
        try:
            words = self.path.read_text(encoding="ascii").split()
        except OSError:
            return None
        return int(words[words.index("oom_kill") + 1]) if "oom_kill" in words[:-1] else None


def read_process_start_s() -> float:
    """Return when this process started, on its monotonic clock, with the kernel's resolution of 10 ms.

    On systems without /proc, return the current time.
    """
    try:
        text = Path("/proc/self/stat").read_text(encoding="utf-8")
    except OSError:
        return time.monotonic()
    # The program's name, in parentheses, may contain spaces, so fields are counted after it.
    fields = text.rpartition(")")[2].split()
    started_s = int(fields[_START_TIME_FIELD]) / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)


class PhaseTimer:
    """Measure how long this process takes for each phase of a replan, on its own monotonic clock.

    Each phase is measured once, from the end of the previous one. The starting phases come before the leaving phases.
    """

    def __init__(self, started_at_s: float | None = None) -> None:
        self._phase_started_at_s: float = read_process_start_s() if started_at_s is None else started_at_s
        self._seconds_by_phase: dict[ReplanPhase, float] = {}

    @property
    def seconds_by_phase(self) -> Mapping[str, float]:
        return {phase.value: seconds for phase, seconds in self._seconds_by_phase.items()}

    def has_ended(self, phase: ReplanPhase) -> bool:
        return phase in self._seconds_by_phase

    @property
    def has_made_first_step(self) -> bool:
        return ReplanPhase.FIRST_STEP in self._seconds_by_phase

    def end_phase(self, phase: ReplanPhase) -> None:
        """End `phase` now, unless it has ended before."""
        if phase not in self._seconds_by_phase:
            now_s = time.monotonic()
            self._seconds_by_phase[phase], self._phase_started_at_s = now_s - self._phase_started_at_s, now_s

    def restart(self) -> None:
        """Start the next phase now, so that the time since the last phase counts for none."""
        self._phase_started_at_s = time.monotonic()

    def begin_leaving(self, waited_s: float) -> None:
        """Begin the leaving phases: a notice is acted on now, `waited_s` seconds after it was received."""
        if ReplanPhase.NOTICE not in self._seconds_by_phase:
            self._seconds_by_phase[ReplanPhase.NOTICE] = waited_s
            self._phase_started_at_s = time.monotonic()
