"""Measured times of the way back: from the recall of a node until inference serves from it again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

TIMES_KEPT = 100
START_S_MAX = 3_600.0
"""A longer start is none: the replica has lost its readiness since, and regained it."""
_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class LeaveTime:
    """Seconds from the recall of a node until a job had left it."""

    job_id: str
    seconds: float


@dataclass(frozen=True, slots=True)
class ReturnTimes:
    """The last measured times of a pool, the newest last; at most `TIMES_KEPT` of each kind.

    Args:
        start_times_s: seconds from the scheduling of an inference replica on a node until it was ready.
        newest_start_at_s: when the newest of these replicas became ready.
        wake_times_s: seconds that sleeping replicas took from the order to wake until they served.
        newest_wake_at_s: when the newest of these began to serve.
    """

    leave_times: tuple[LeaveTime, ...] = ()
    start_times_s: tuple[float, ...] = ()
    newest_start_at_s: float = 0.0
    wake_times_s: tuple[float, ...] = ()
    newest_wake_at_s: float = 0.0

    def with_leave_time(self, job_id: str, seconds: float) -> ReturnTimes:
        return replace(self, leave_times=(*self.leave_times[1 - TIMES_KEPT :], LeaveTime(job_id, seconds)))

    def with_start(self, ready_at_s: float, seconds: float) -> ReturnTimes:
        """Return the record with a replica's start, or the same record if it is too long, or not a newer one."""
        if ready_at_s <= self.newest_start_at_s or not 0.0 <= seconds <= START_S_MAX:
            return self
        return replace(
            self,
            start_times_s=(*self.start_times_s[1 - TIMES_KEPT :], seconds),
            newest_start_at_s=ready_at_s,
        )

    def with_wake(self, serving_at_s: float, seconds: float) -> ReturnTimes:
        """Return the record with the wake of a replica, or the same record if it is not a newer one."""
        if serving_at_s <= self.newest_wake_at_s or not 0.0 <= seconds <= START_S_MAX:
            return self
        return replace(
            self,
            wake_times_s=(*self.wake_times_s[1 - TIMES_KEPT :], seconds),
            newest_wake_at_s=serving_at_s,
        )


NO_RETURN_TIMES = ReturnTimes()


def bound_next_s(times_s: Sequence[float]) -> float | None:
    """Return the time that the next one exceeds with a probability of at most 5%, or None below 19 measured times.

    Without any assumption but that the order of the times carries no information, the next of n + 1 times is at most
    the k-th smallest of n with probability k / (n + 1) (Vovk, Gammerman and Shafer, "Algorithmic Learning in a Random
    World", section 2.2).
    """
    rank = ceil((len(times_s) + 1) * _SHARE)
    return sorted(times_s)[rank - 1] if 0 < rank <= len(times_s) else None


def group_leave_times(measured: Mapping[str, ReturnTimes]) -> dict[str, list[float]]:
    """Return the times in which each job left nodes of any pool, in seconds, by job id."""
    by_job: dict[str, list[float]] = {}
    for times in measured.values():
        for each in times.leave_times:
            by_job.setdefault(each.job_id, []).append(each.seconds)
    return by_job
