"""Orders that preempt: by the time or the service that a job still needs, or by the service that it has had.

Each allots every job its smallest count or nothing (`allot_in_order`). Least attained service needs no job's length.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from math import inf

from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.snapshot import Snapshot
from scheduler.policies.allotment import Allotment, Rank, allot_in_order, wants_gpus
from scheduler.policies.settings import PolicySettings
from scheduler.policies.speed import node_sizes, remaining_s

LAS_LIMITS_GPU_S = (3250.0, 7200.0)
"""Attained service at which a job falls into the second and into the third queue: with these limits Muri's simulator
(github.com/Rivendile/Muri, simulator/jobs.py) runs Tiresias."""
_ROUNDING_GPU_S = 1e-3


def shortest_remaining_time(snapshot: Snapshot, capacity: int, settings: PolicySettings) -> Allotment:
    """Least run time to go at a job's smallest count first."""

    def rank(job: Job, left_s: float) -> Rank:
        return Rank(job, (left_s,), ("remaining_s", left_s, "s to go"))

    return _by_remaining(snapshot, capacity, rank)


def shortest_remaining_service(snapshot: Snapshot, capacity: int, settings: PolicySettings) -> Allotment:
    """Least run time to go times GPUs first (Tiresias, NSDI'19, section 3)."""

    def rank(job: Job, left_s: float) -> Rank:
        left_gpu_s = left_s * job.spec.min_gpus
        return Rank(job, (left_gpu_s,), ("remaining_gpu_s", left_gpu_s, "GPU-s to go"))

    return _by_remaining(snapshot, capacity, rank)


def least_attained_service(snapshot: Snapshot, capacity: int, settings: PolicySettings) -> Allotment:
    """Discretised two-dimensional least attained service (Tiresias-L, NSDI'19, section 3.2).

    A job falls into a lower queue each time its GPU-seconds pass a limit. A higher queue goes first and may preempt;
    within a queue nobody who runs is preempted, and those who wait come in order of submission. Where
    `las_promote_ratio` is above 0, a job that waits that many times as long as it has run begins anew in the first
    queue (the paper's knob against starvation).
    """
    now_s, ranks, until_s = snapshot.now_s, [], inf
    for job in filter(wants_gpus, snapshot.jobs.values()):
        service_gpu_s, promoted_s = _service(job, now_s, settings.las_promote_ratio)
        queue = bisect_right(LAS_LIMITS_GPU_S, service_gpu_s + _ROUNDING_GPU_S)
        ranks.append(Rank(job, (queue,), ("attained_gpu_s", service_gpu_s, f"GPU-s had, queue {queue + 1}")))
        if job.is_placed and queue < len(LAS_LIMITS_GPU_S):
            until_s = min(until_s, now_s + (LAS_LIMITS_GPU_S[queue] - service_gpu_s) / job.allocation.held_gpus)
        elif not job.is_placed and queue:
            until_s = min(until_s, promoted_s)
    return replace(allot_in_order(snapshot, capacity, ranks), valid_until_s=until_s)


def _by_remaining(snapshot: Snapshot, capacity: int, rank: Callable[[Job, float], Rank]) -> Allotment:
    sizes, jobs = node_sizes(snapshot), filter(wants_gpus, snapshot.jobs.values())
    return allot_in_order(
        snapshot, capacity, [rank(job, remaining_s(snapshot, job, job.spec.min_gpus, sizes)) for job in jobs]
    )


def _service(job: Job, now_s: float, promote_ratio: float) -> tuple[float, float]:
    """GPU-seconds had, of a promoted job only those of its present run; and when a waiting job will be promoted.

    Nothing has to be remembered: all that a job had waited when it started, and had had, stand still while it runs.
    Half the ratio holds for one that runs, so that the time of its start does not undo its promotion.
    """
    account, allocation = job.account, job.allocation
    total_gpu_s = account.gpu_s + max(0.0, now_s - account.settled_at_s) * allocation.held_gpus
    if promote_ratio <= 0:
        return total_gpu_s, inf
    if job.is_placed:
        run_s = now_s - job.state_since_s if job.state is JobState.RUNNING else 0.0
        run_gpu_s = min(total_gpu_s, run_s * allocation.held_gpus)
        bar_s = 0.5 * promote_ratio * (total_gpu_s - run_gpu_s) / job.spec.min_gpus
        return (run_gpu_s if 0 < bar_s <= account.waited_s else total_gpu_s), inf
    promoted_s = job.state_since_s + promote_ratio * total_gpu_s / job.spec.min_gpus
    return (0.0 if promoted_s <= now_s else total_gpu_s), promoted_s
