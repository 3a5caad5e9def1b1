"""Progress of the ranks of one run on one node, from their statuses and from what their processes use. Pure.

A rank that has reported steps is judged by its session alone: ranks that wait for a hung one in a collective often
spin, so CPU and GPU prove nothing. Before the first step, and without a session, all processes of the run on the node
are judged by what they use. Time counts only while the agent looks: while the machine sleeps, or the agent is stopped,
nobody is hung.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median

from scheduler.domain.job_records import ReplanPhase
from scheduler.domain.observation import RankLiveness, RankPhase, RankStatus

LOOK_GAP_MAX_S = 2.0
"""Most time that counts between two looks."""
DIAGNOSIS_TIME_MAX_S = 3.0
DIAGNOSIS_SHARE = 0.1
"""Part of the timeout that is left for stacks, report and decision, so that a hang is diagnosed within the timeout."""
PATIENCE = 10.0
"""Multiple of the limit for ranks that start, save a checkpoint, read files or write to their logs."""
MEDIAN_STEPS, LONGEST_STEPS = 5.0, 2.0
"""A step may take this many times the median of recent steps, and of the longest one."""
_RECENT_STEPS = 20
_SAMPLES_PER_WINDOW = 60
_CPU_SHARE = 0.005
_CPU_S_MIN = 0.03
_IO_BYTES_MIN = 1 << 20
_GPU_S_MIN = 0.001


@dataclass(frozen=True, slots=True)
class RunActivity:
    """What all processes of a run on a node have used so far.

    Args:
        cpu_s: CPU time. The kernel counts it in units of 10 ms.
        io_bytes: bytes read from and written to files.
        log_bytes: output of the ranks.
        gpu_s: time in which their GPUs computed.
    """

    cpu_s: float = 0.0
    io_bytes: int = 0
    log_bytes: int = 0
    gpu_s: float = 0.0


@dataclass(slots=True)
class _SteppingRank:
    """A rank with a session: its last status, when it was written, and how long recent steps took."""

    status: RankStatus
    progressed_at_s: float
    stepped_at_s: float
    has_stepped: bool
    step_times_s: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT_STEPS))

    def update(self, status: RankStatus, now_s: float) -> None:
        steps = status.step - self.status.step
        if status.written_at_ns != self.status.written_at_ns:
            self.progressed_at_s = now_s
        if steps > 0 and status.phase in (RankPhase.RUNNING, RankPhase.SAVING):
            self.has_stepped = True
            self.step_times_s.append((now_s - self.stepped_at_s) / steps)
            self.stepped_at_s = now_s
        self.status = status

    def limit_s(self, timeout_s: float) -> float:
        times_s = self.step_times_s
        return max(timeout_s, MEDIAN_STEPS * median(times_s), LONGEST_STEPS * max(times_s)) if times_s else timeout_s


class RunLiveness:
    """Liveness of one run on one node.

    Args:
        ranks: the ranks on this node.
        timeout_s: the job's hang timeout.
    """

    def __init__(self, ranks: Iterable[int], timeout_s: float) -> None:
        self._ranks = tuple(ranks)
        self._timeout_s = timeout_s - min(DIAGNOSIS_TIME_MAX_S, DIAGNOSIS_SHARE * timeout_s)
        self._now_s = 0.0
        self._stepping: dict[int, _SteppingRank] = {}
        self._samples: deque[tuple[float, RunActivity]] = deque()
        self._activity = RunActivity()

    def observe(self, elapsed_s: float, statuses: Mapping[int, RankStatus], activity: RunActivity) -> None:
        """Take in a look at the run, `elapsed_s` after the one before."""
        self._now_s += min(elapsed_s, LOOK_GAP_MAX_S)
        for rank, status in statuses.items():
            if rank in self._stepping:
                self._stepping[rank].update(status, self._now_s)
            else:
                has_stepped = ReplanPhase.FIRST_STEP in status.phases_s
                self._stepping[rank] = _SteppingRank(status, self._now_s, self._now_s, has_stepped)
        self._activity = activity
        self._record_sample()

    def judge(self, rank: int) -> tuple[RankLiveness, float]:
        """Return the liveness of a rank, and how long it has made no progress in seconds."""
        stepping = self._stepping.get(rank)
        if stepping is None or not stepping.has_stepped:
            limit_s = self._observed_limit_s()
            is_idle = self._is_idle_for(limit_s)
            return (RankLiveness.IDLE, limit_s) if is_idle else (RankLiveness.BUSY, 0.0)
        still_s, limit_s = self._now_s - stepping.progressed_at_s, stepping.limit_s(self._timeout_s)
        is_saving = stepping.status.phase is RankPhase.SAVING
        if stepping.status.is_terminal:
            return RankLiveness.WORKING, 0.0
        if still_s < limit_s:
            return RankLiveness.WORKING if is_saving else RankLiveness.STEPPING, 0.0
        is_working = is_saving or self._has_output_since(self._now_s - limit_s / 2)
        if is_working and still_s < limit_s * PATIENCE:
            return RankLiveness.WORKING, 0.0
        return RankLiveness.STALLED, still_s

    def _record_sample(self) -> None:
        window_s = self._observed_limit_s()
        if not self._samples or self._now_s - self._samples[-1][0] >= self._timeout_s / _SAMPLES_PER_WINDOW:
            self._samples.append((self._now_s, self._activity))
        while len(self._samples) > 1 and self._samples[1][0] <= self._now_s - window_s:
            self._samples.popleft()

    def _observed_limit_s(self) -> float:
        """Return the limit of ranks without steps. A script that has a session and no step yet is starting."""
        return self._timeout_s * (PATIENCE if self._stepping else 1.0)

    def _is_idle_for(self, limit_s: float) -> bool:
        since_s, before = self._samples[0]
        if since_s > self._now_s - limit_s:
            return False
        after, window_s = self._activity, self._now_s - since_s
        return (
            after.cpu_s - before.cpu_s < max(_CPU_S_MIN, _CPU_SHARE * window_s)
            and after.io_bytes - before.io_bytes < _IO_BYTES_MIN
            and after.gpu_s - before.gpu_s < _GPU_S_MIN
            and after.log_bytes == before.log_bytes
        )

    def _has_output_since(self, since_s: float) -> bool:
        """Return whether the run wrote to its logs, or read or wrote files, since a time."""
        before = next((activity for at_s, activity in reversed(self._samples) if at_s <= since_s), self._activity)
        after = self._activity
        return after.log_bytes != before.log_bytes or after.io_bytes - before.io_bytes >= _IO_BYTES_MIN
