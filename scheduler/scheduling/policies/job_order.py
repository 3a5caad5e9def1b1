"""Who comes next: functions Snapshot -> ids of the waiting jobs, first come first.

Orders that preempt: by the time or the service that a job still needs, or by the service that it has had.

Each allots every job its smallest count or nothing (`allot_in_order`). Least attained service needs no job's length.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf

from scheduler.domain.job import Intent, Job
from scheduler.domain.job_state import JobState
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.policies.allotment import Allotment, RankedJob, allot_in_order, wants_gpus
from scheduler.scheduling.policies.settings import PolicySettings
from scheduler.scheduling.policies.speed import efficient_gpus, node_sizes, remaining_s, step_time_s


def first_come(snapshot: Snapshot, settings: PolicySettings) -> tuple[str, ...]:
    """Order of submission within priority."""
    queued = _pending_jobs(snapshot)
    return tuple(job.id for job in sorted(queued, key=lambda job: (-job.spec.priority, job.submitted_at_s, job.id)))


def shortest_remaining(snapshot: Snapshot, settings: PolicySettings) -> tuple[str, ...]:
    """Least remaining time at the job's minimum first, within priority, with ageing.

    Remaining time is divided by 1 + waited / ageing_s, so that a long job comes nearer to the front while it waits
    (Lyra, EuroSys'23, section 5: shortest job first for base demand; the ageing is ours). That alone lets an endless
    stream of short jobs pass, so overdue ones come first, in order of submission.
    """
    sizes = node_sizes(snapshot)

    def key(job: Job) -> tuple[float, float, float, str]:
        if is_overdue(job, snapshot.now_s, settings):
            return (-job.spec.priority, -1.0, job.submitted_at_s, job.id)
        length_s = remaining_s(snapshot, job, job.spec.min_gpus, sizes)
        ageing = 1.0 + _waited_s(job, snapshot.now_s) / settings.ageing_s
        return (-job.spec.priority, length_s / ageing, job.submitted_at_s, job.id)

    return tuple(job.id for job in sorted(_pending_jobs(snapshot), key=key))


def least_service(snapshot: Snapshot, settings: PolicySettings) -> tuple[str, ...]:
    """As `shortest_remaining`, by remaining time x GPUs: of jobs that want the same GPUs more can start with those that
    want little of them (smallest service first, Tiresias, NSDI'19, section 3).

    Both are those on the fewest GPUs that are used well. A job with a deadline is taken for no longer than the time it
    can still wait and meet it on those.
    """
    sizes, now_s, patience_s = node_sizes(snapshot), snapshot.now_s, _patience_s(settings)

    def key(job: Job) -> tuple[float, float, float, str]:
        waited_s = _waited_s(job, now_s)
        if waited_s > patience_s:
            return (-job.spec.priority, -1.0, job.submitted_at_s, job.id)
        gpus = efficient_gpus(snapshot, job, sizes)
        length_s = remaining_s(snapshot, job, gpus, sizes)
        slack_s = max(0.0, job.deadline_at_s - now_s - length_s)
        ageing = 1.0 + waited_s / settings.ageing_s
        urgent_gpu_s = min(length_s, slack_s) * gpus
        return (-job.spec.priority, urgent_gpu_s / ageing, job.submitted_at_s, job.id)

    return tuple(job.id for job in sorted(_pending_jobs(snapshot), key=key))


def remaining_service_gpu_s(snapshot: Snapshot, job: Job, sizes: Mapping[str, int]) -> float:
    """GPU-seconds that the job has to go, on the fewest GPUs that are used well."""
    gpus = efficient_gpus(snapshot, job, sizes)
    return remaining_s(snapshot, job, gpus, sizes) * gpus


def shortest_job_first(snapshot: Snapshot, settings: PolicySettings) -> tuple[str, ...]:
    """Least run time in all at the job's smallest count first, within priority; last come those of unknown length."""
    sizes = node_sizes(snapshot)

    def key(job: Job) -> tuple[float, float, float, str]:
        step_s = step_time_s(snapshot, job, job.spec.min_gpus, sizes)
        known_s = job.spec.steps * step_s if step_s is not None else 0.0
        return (-job.spec.priority, known_s or job.spec.duration_estimate_s or inf, job.submitted_at_s, job.id)

    return tuple(job.id for job in sorted(_pending_jobs(snapshot), key=key))


def is_overdue(job: Job, now_s: float, settings: PolicySettings) -> bool:
    """The job has waited so long that nobody behind it may take GPUs that it could use."""
    return _waited_s(job, now_s) > _patience_s(settings)


def _patience_s(settings: PolicySettings) -> float:
    return settings.patience_ageings * settings.ageing_s


def _waited_s(job: Job, now_s: float) -> float:
    return job.account.waited_s + max(0.0, now_s - job.account.settled_at_s)


def _pending_jobs(snapshot: Snapshot) -> list[Job]:
    jobs = snapshot.jobs
    return [job for job_id in snapshot.index.waiting if (job := jobs[job_id]).intent is Intent.RUN]


LAS_LIMITS_GPU_S = (3250.0, 7200.0)
"""Attained service at which a job falls into the second and into the third queue: with these limits Muri's simulator
(github.com/Rivendile/Muri, simulator/jobs.py) runs Tiresias."""
_ROUNDING_GPU_S = 1e-3


def shortest_remaining_time(snapshot: Snapshot, capacity: int, settings: PolicySettings) -> Allotment:
    """Least run time to go at a job's smallest count first."""

    def rank(job: Job, left_s: float) -> RankedJob:
        return RankedJob(job, (left_s,), ("remaining_s", left_s, "s to go"))

    return _allot_by_remaining(snapshot, capacity, rank)


def shortest_remaining_service(snapshot: Snapshot, capacity: int, settings: PolicySettings) -> Allotment:
    """Least run time to go times GPUs first (Tiresias, NSDI'19, section 3)."""

    def rank(job: Job, left_s: float) -> RankedJob:
        left_gpu_s = left_s * job.spec.min_gpus
        return RankedJob(job, (left_gpu_s,), ("remaining_gpu_s", left_gpu_s, "GPU-s to go"))

    return _allot_by_remaining(snapshot, capacity, rank)


def least_attained_service(snapshot: Snapshot, capacity: int, settings: PolicySettings) -> Allotment:
    """Discretised two-dimensional least attained service (Tiresias-L, NSDI'19, section 3.2).

    A job falls into a lower queue each time its GPU-seconds pass a limit. A higher queue goes first and may preempt;
    within a queue nobody who runs is preempted, and those who wait come in order of submission. Where
    `las_promote_ratio` is above 0, a job that waits that many times as long as it has run begins anew in the first
    queue (the paper's knob against starvation).
    """
    now_s, ranks, until_s = snapshot.now_s, [], inf
    for job in filter(wants_gpus, snapshot.jobs.values()):
        service_gpu_s, promoted_s = _attained_service(job, now_s, settings.las_promote_ratio)
        queue = bisect_right(LAS_LIMITS_GPU_S, service_gpu_s + _ROUNDING_GPU_S)
        ranks.append(RankedJob(job, (queue,), ("attained_gpu_s", service_gpu_s, f"GPU-s had, queue {queue + 1}")))
        if job.is_placed and queue < len(LAS_LIMITS_GPU_S):
            until_s = min(until_s, now_s + (LAS_LIMITS_GPU_S[queue] - service_gpu_s) / job.allocation.held_gpus)
        elif not job.is_placed and queue:
            until_s = min(until_s, promoted_s)
    return replace(allot_in_order(snapshot, capacity, ranks), valid_until_s=until_s)


def _allot_by_remaining(snapshot: Snapshot, capacity: int, rank: Callable[[Job, float], RankedJob]) -> Allotment:
    sizes, jobs = node_sizes(snapshot), filter(wants_gpus, snapshot.jobs.values())
    return allot_in_order(
        snapshot, capacity, [rank(job, remaining_s(snapshot, job, job.spec.min_gpus, sizes)) for job in jobs]
    )


def _attained_service(job: Job, now_s: float, promote_ratio: float) -> tuple[float, float]:
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
