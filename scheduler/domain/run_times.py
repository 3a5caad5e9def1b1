"""Run times of ended jobs, by which a job of undeclared length is ranked."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from statistics import median_high

from scheduler.domain.job import Job
from scheduler.domain.job_queue import find_limiting_queue
from scheduler.domain.job_state import JobState

RUN_TIMES_KEPT = 15
"""Ended jobs that a typical run time is the median of."""
HISTORIES_MAX = 4096
"""Histories that a snapshot holds. The one that was longest without an ended job is dropped first."""

_CLUSTER = "cluster"


@dataclass(frozen=True, slots=True)
class RunTimes:
    """Run times of the last ended jobs of an owner, a queue or the cluster, the newest last.

    A run time is the job's GPU-seconds divided by its smallest number of GPUs: the time that it would have taken there
    under linear scaling. `updated_at_s` is when the newest job was archived.
    """

    updated_at_s: float
    run_times_s: tuple[float, ...]

    @property
    def typical_s(self) -> float:
        return median_high(self.run_times_s)

    def with_run_time(self, run_time_s: float, at_s: float) -> RunTimes:
        return RunTimes(at_s, (*self.run_times_s[1 - RUN_TIMES_KEPT :], run_time_s))


def find_typical_run_time_s(known: Mapping[str, RunTimes], job: Job, queues: Collection[str]) -> float | None:
    """Return the typical run time of the job's owner, else that of its queue, else of the cluster, else None."""
    return next((known[key].typical_s for key in _list_keys(job, queues) if key in known), None)


def record_run_time(
    known: Mapping[str, RunTimes], job: Job, queues: Collection[str], at_s: float
) -> dict[str, RunTimes]:
    """Return the histories with an ended job.

    A failed job says nothing about the length of those that succeed, nor does one that never ran. A cancelled job would
    have run longer, so it counts only if it is no shorter than the typical one.
    """
    updated = dict(known)
    if job.state is JobState.FAILED or job.account.gpu_s <= 0.0:
        return updated
    run_time_s = job.account.gpu_s / job.spec.min_gpus
    for key in _list_keys(job, queues):
        before = updated.get(key)
        if job.state is JobState.CANCELLED and before is not None and run_time_s < before.typical_s:
            continue
        updated[key] = (before or RunTimes(at_s, ())).with_run_time(run_time_s, at_s)
    while len(updated) > HISTORIES_MAX:
        del updated[min(updated, key=lambda key: (key == _CLUSTER, updated[key].updated_at_s, key))]
    return updated


def _list_keys(job: Job, queues: Collection[str]) -> Iterator[str]:
    if job.owner_key:
        yield f"owner {job.owner_key}"
    yield f"queue {find_limiting_queue(job.spec.queue, queues)}"
    yield _CLUSTER
