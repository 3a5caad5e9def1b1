"""How long a job is expected to need, if it does not say so itself, and whether it can meet its deadline."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from scheduler.domain.job import Job
from scheduler.domain.run_times import find_typical_run_time_s
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.policies.speed import fastest_remaining_s, remaining_s


def expected_remaining_s(
    snapshot: Snapshot, job: Job, gpus: int, sizes: Mapping[str, int], *, default_s: float = 0.0
) -> float:
    """Return the remaining run time on `gpus` GPUs, in seconds.

    A job of undeclared length is expected to run as long as the typical job of its owner, or of its queue or the
    cluster if the owner has no ended jobs. Once half of that has passed, it is expected to need as much service again
    as it has had, as `remaining_s` assumes.

    Args:
        default_s: run time of a job of undeclared length on its smallest number of GPUs while no job has ended.
    """
    if job.remaining_steps(snapshot.now_s) is not None:
        return remaining_s(snapshot, job, gpus, sizes)
    typical_s = job.spec.duration_estimate_s
    if typical_s is None:
        typical_s = find_typical_run_time_s(snapshot.run_times, job, snapshot.queues)
    done_gpu_s = job.account.gpu_s
    typical_gpu_s = (default_s if typical_s is None else typical_s) * job.spec.min_gpus
    return max(typical_gpu_s - done_gpu_s, done_gpu_s) / gpus


def deadline_slack_s(snapshot: Snapshot, job: Job, length_s: float, sizes: Mapping[str, int]) -> float:
    """Return how long the job can still wait and meet its deadline if it then runs for `length_s`.

    The slack is 0 if it can meet the deadline on more GPUs only. It is infinite, as without a deadline, if the job
    cannot meet the deadline on any number of GPUs, or if its length is undeclared, so that nobody can tell.
    """
    if job.spec.deadline_s is None or job.remaining_steps(snapshot.now_s) is None:
        return inf
    left_s = job.deadline_at_s - snapshot.now_s
    if length_s <= left_s:
        return left_s - length_s
    return 0.0 if fastest_remaining_s(snapshot, job, sizes) <= left_s else inf
