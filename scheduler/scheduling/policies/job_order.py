"""Orders of pending jobs, and allotments that preempt by an order.

An order returns the ids of pending jobs, first come first. An allotment gives every job its smallest count or nothing
(`allot_in_order`), by remaining time, remaining service or attained service. Least attained service needs no job's
length.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf
from statistics import median_high

from scheduler.domain.job import Intent, Job
from scheduler.domain.job_state import JobState
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.policies.allotment import Allotment, RankedJob, allot_in_order, wants_gpus
from scheduler.scheduling.policies.expected_length import deadline_slack_s, expected_remaining_s
from scheduler.scheduling.policies.settings import PolicySettings
from scheduler.scheduling.policies.speed import (
    efficient_gpus,
    node_sizes,
    remaining_on_fastest_model_s,
    remaining_s,
    step_time_s,
)

LAS_LIMITS_GPU_S = (3250.0, 7200.0)
"""Attained service at which a job moves to the second and to the third queue; Muri's simulator
(github.com/Rivendile/Muri, simulator/jobs.py) runs Tiresias with these limits."""

_ROUNDING_GPU_S = 1e-3
_ENTERING_S = 1.0
"""A job counts as entering a lower queue for this long, because a tick may come late."""


def first_come(snapshot: Snapshot, settings: PolicySettings) -> tuple[str, ...]:
    """Order by submission within priority."""
    queued = _pending_jobs(snapshot)
    return tuple(job.id for job in sorted(queued, key=lambda job: (-job.spec.priority, job.submitted_at_s, job.id)))


def shortest_remaining(snapshot: Snapshot, settings: PolicySettings) -> tuple[str, ...]:
    """Order by least remaining time at the job's minimum, within priority, with ageing.

    Remaining time is divided by 1 + waited / ageing_s, so that a long job moves forward while it waits (Lyra,
    EuroSys'23, section 5: shortest job first for base demand; ageing is our addition). An endless stream of short jobs
    could still pass it, so overdue jobs come first, in order of submission.
    """
    sizes = node_sizes(snapshot)

    def key(job: Job) -> tuple[float, float, float, str]:
        if is_overdue(job, snapshot.now_s, settings):
            return (-job.spec.priority, -1.0, job.submitted_at_s, job.id)
        length_s = remaining_s(snapshot, job, job.spec.min_gpus, sizes)
        ageing = 1.0 + _compute_waited_s(job, snapshot.now_s) / settings.ageing_s
        return (-job.spec.priority, length_s / ageing, job.submitted_at_s, job.id)

    return tuple(job.id for job in sorted(_pending_jobs(snapshot), key=key))


def least_service(snapshot: Snapshot, settings: PolicySettings) -> tuple[str, ...]:
    """Order as `shortest_remaining`, but by remaining time x GPUs.

    More jobs can start if jobs that need few GPUs go first (smallest service first, Tiresias, NSDI'19, section 3).

    Both refer to the fewest GPUs that the job uses efficiently. A job with a deadline that it can meet counts at most
    the time that it can still wait and meet it on those GPUs. A job of undeclared length counts as its owner's typical
    job, or as the median of the pending jobs while no job has ended.
    """
    sizes, now_s, patience_s = node_sizes(snapshot), snapshot.now_s, _patience_s(settings)
    pending = _pending_jobs(snapshot)
    default_s = _median_run_time_s(snapshot, pending, sizes)

    def key(job: Job) -> tuple[float, float, float, str]:
        waited_s = _compute_waited_s(job, now_s)
        if waited_s > patience_s:
            return (-job.spec.priority, -1.0, job.submitted_at_s, job.id)
        gpus = efficient_gpus(snapshot, job, sizes)
        length_s = expected_remaining_s(snapshot, job, gpus, sizes, default_s=default_s)
        ageing = 1.0 + waited_s / settings.ageing_s
        urgent_gpu_s = min(length_s, deadline_slack_s(snapshot, job, length_s, sizes)) * gpus
        return (-job.spec.priority, urgent_gpu_s / ageing, job.submitted_at_s, job.id)

    return tuple(job.id for job in sorted(pending, key=key))


def _median_run_time_s(snapshot: Snapshot, pending: Sequence[Job], sizes: Mapping[str, int]) -> float:
    """Return the median run time that pending jobs declare, 0 if none does or every length is known."""
    now_s = snapshot.now_s
    known = [job for job in pending if job.remaining_steps(now_s) is not None]
    if len(known) == len(pending) or not known:
        return 0.0
    return median_high(remaining_s(snapshot, job, job.spec.min_gpus, sizes) for job in known)


def remaining_service_gpu_s(snapshot: Snapshot, job: Job, sizes: Mapping[str, int]) -> float:
    """Return the remaining GPU-seconds of a job on the fewest GPUs that it uses efficiently."""
    gpus = efficient_gpus(snapshot, job, sizes)
    return expected_remaining_s(snapshot, job, gpus, sizes) * gpus


def shortest_job_first(snapshot: Snapshot, settings: PolicySettings) -> tuple[str, ...]:
    """Order by least total run time at the job's smallest count, within priority; jobs of unknown length come last."""
    sizes = node_sizes(snapshot)

    def key(job: Job) -> tuple[float, float, float, str]:
        step_s = step_time_s(snapshot, job, job.spec.min_gpus, sizes)
        known_s = job.spec.steps * step_s if step_s is not None else 0.0
        return (-job.spec.priority, known_s or job.spec.duration_estimate_s or inf, job.submitted_at_s, job.id)

    return tuple(job.id for job in sorted(_pending_jobs(snapshot), key=key))


def never_block_queue(snapshot: Snapshot, job: Job, settings: PolicySettings) -> bool:
    """Let later jobs pass a job that waits."""
    return False


def always_block_queue(snapshot: Snapshot, job: Job, settings: PolicySettings) -> bool:
    """Let no job pass one that waits: strict order."""
    return True


def is_overdue(job: Job, now_s: float, settings: PolicySettings) -> bool:
    """Return whether the job has waited so long that no job behind it may take GPUs that it could use."""
    return _compute_waited_s(job, now_s) > _patience_s(settings)


def _patience_s(settings: PolicySettings) -> float:
    return settings.patience_ageings * settings.ageing_s


def _compute_waited_s(job: Job, now_s: float) -> float:
    return job.account.waited_s + max(0.0, now_s - job.account.settled_at_s)


def _pending_jobs(snapshot: Snapshot) -> list[Job]:
    jobs = snapshot.jobs
    return [job for job_id in snapshot.index.waiting if (job := jobs[job_id]).intent is Intent.RUN]


def shortest_remaining_time(snapshot: Snapshot, capacity: int, settings: PolicySettings) -> Allotment:
    """Allot by least remaining run time at a job's smallest count."""

    def rank(job: Job, left_s: float) -> RankedJob:
        return RankedJob(job, (left_s,), ("remaining_s", left_s, "s remaining"))

    return _allot_by_remaining(snapshot, capacity, rank)


def shortest_remaining_service(snapshot: Snapshot, capacity: int, settings: PolicySettings) -> Allotment:
    """Allot by least remaining run time x GPUs (Tiresias, NSDI'19, section 3)."""

    def rank(job: Job, left_s: float) -> RankedJob:
        left_gpu_s = left_s * job.spec.min_gpus
        return RankedJob(job, (left_gpu_s,), ("remaining_gpu_s", left_gpu_s, "GPU-s remaining"))

    return _allot_by_remaining(snapshot, capacity, rank)


def least_attained_service(snapshot: Snapshot, capacity: int, settings: PolicySettings) -> Allotment:
    """Allot by discretised two-dimensional least attained service (Tiresias-L, NSDI'19, section 3.2).

    A job moves to the end of a lower queue each time its GPU-seconds pass a limit. A higher queue goes first and may
    preempt. Within a queue no running job is preempted, except that a job which has just moved there lets pending jobs
    pass. If `las_promote_ratio` is above 0, a job that waits that many times as long as it has run returns to the first
    queue (the paper's protection against starvation).
    """
    now_s, ranks, until_s = snapshot.now_s, [], inf
    left_gpu_s: dict[str, float] = {}
    for job in filter(wants_gpus, snapshot.jobs.values()):
        service_gpu_s, promoted_s = _compute_attained_service(job, now_s, settings.las_promote_ratio)
        queue = bisect_right(LAS_LIMITS_GPU_S, service_gpu_s + _ROUNDING_GPU_S)
        gpu_s_here = service_gpu_s - (LAS_LIMITS_GPU_S[queue - 1] if queue else 0.0)
        place = _find_place_in_queue(job, queue, gpu_s_here, now_s, settings)
        measure = ("attained_gpu_s", service_gpu_s, f"GPU-s used, queue {queue + 1}")
        ranks.append(RankedJob(job, (queue, *place), measure))
        if queue < len(LAS_LIMITS_GPU_S):
            left_gpu_s[job.id] = LAS_LIMITS_GPU_S[queue] - service_gpu_s
        if not job.is_placed and queue:
            until_s = min(until_s, promoted_s)
    allotment = allot_in_order(snapshot, capacity, ranks)
    for job_id, left in left_gpu_s.items():
        if gpus := snapshot.jobs[job_id].allocation.held_gpus or allotment.gpus.get(job_id, 0):
            until_s = min(until_s, now_s + left / gpus)
    return replace(allotment, valid_until_s=until_s)


def _find_place_in_queue(
    job: Job, queue: int, gpu_s_here: float, now_s: float, settings: PolicySettings
) -> tuple[float, float]:
    """Return the place of a job in its queue, in which it has used `gpu_s_here`: smaller goes first.

    The order is that of the lists in the authors' simulator (github.com/SymbioticLab/Tiresias, simulator/run_sim.py),
    which puts pending jobs behind running ones after each event and changes nothing else: running jobs as they started
    here, then jobs that stopped here, the last one first, then jobs as they entered, and a job that enters now.
    """
    account, allocation = job.account, job.allocation
    if job.is_placed:
        started_s = job.state_since_s if account.last_started_at_s is None else account.last_started_at_s
        entered_s = now_s - gpu_s_here / allocation.held_gpus
        if queue and started_s + _ROUNDING_GPU_S < entered_s and now_s - entered_s <= _ENTERING_S:
            return (3.0, 0.0)
        return (0.0, max(started_s, entered_s if queue else started_s))
    if account.first_started_at_s is None:
        return (2.0, job.submitted_at_s)
    # The GPUs that a preempted job holds until its workers have left count as service.
    has_run_here = not queue or gpu_s_here > settings.leave_grace_s_for(job) * job.spec.min_gpus
    return (1.0, -job.state_since_s) if has_run_here else (2.0, job.state_since_s)


def _allot_by_remaining(snapshot: Snapshot, capacity: int, rank: Callable[[Job, float], RankedJob]) -> Allotment:
    """Allot by remaining run time, which must not depend on the GPU model that a job holds.

    A job that starts on slow GPUs would otherwise rank as longer, and be preempted for the next pending job. Once it is
    pending it ranks as shorter again, and would start on the same GPUs, without end.
    """
    sizes, jobs = node_sizes(snapshot), filter(wants_gpus, snapshot.jobs.values())
    ranked = [rank(job, remaining_on_fastest_model_s(snapshot, job, job.spec.min_gpus, sizes)) for job in jobs]
    return allot_in_order(snapshot, capacity, ranked)


def _compute_attained_service(job: Job, now_s: float, promote_ratio: float) -> tuple[float, float]:
    """Return the GPU-seconds used, and the time at which a pending job is promoted.

    Of a promoted job, only the GPU-seconds of its current run count.

    No state is kept: waiting time and usage at a job's start stay constant while it runs. For a running job half the
    ratio applies, so that the time of its start does not undo its promotion.
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
