"""Quotas while jobs start: jobs that wait for a limit, and running jobs that return GPUs that a queue is guaranteed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from scheduler.domain.decisions import PreemptJob, Reason, ReasonCode, ResizeJob
from scheduler.domain.gpu_sets import format_gpu_count
from scheduler.domain.job import Job
from scheduler.scheduling.cycle import GpuDemand, SchedulingCycle
from scheduler.scheduling.gpu_budget import GpuBudget
from scheduler.scheduling.policies.preemption import QuotaReclaim, QuotaReclaimer
from scheduler.scheduling.policies.quota import QuotaState
from scheduler.scheduling.target_selection import reduce_target

Reductions = Mapping[str, tuple[int, Reason]]
"""By running job, the GPUs that it keeps, 0 if it is preempted, and why."""


@dataclass(frozen=True, slots=True)
class QuotaWait:
    """A job that is pending because of a quota: the reason, the GPUs that others give up, and when to check again."""

    reason: Reason
    reductions: Reductions = field(default_factory=dict)
    demand: GpuDemand | None = None
    recheck_at_s: float = inf


class StartLimits:
    """Limits of queues and users while jobs start.

    `planned` counts the GPUs that jobs will hold once running jobs have given up theirs and pending jobs have got
    theirs. Jobs start before running jobs give up GPUs, so what jobs hold now must also leave room for a start.
    """

    def __init__(self, held: QuotaState) -> None:
        self.planned, self._held = held.copy(), held.copy()

    def check(self, job: Job, gpus: int) -> Reason | None:
        """Return why the job may not start on `gpus` now, or None if the limits permit it."""
        return self.planned.check_limits(job, gpus) or self._held.check_limits(job, gpus)

    def headroom(self, job: Job) -> int:
        """Return how many more GPUs a job that starts now may get."""
        return min(self.planned.headroom(job), self._held.headroom(job))

    def allocate(self, job: Job, gpus: int) -> None:
        """Count `gpus` more of a job that starts now."""
        self.planned.allocate(job, gpus)
        self._held.allocate(job, gpus)


def hold_for_limit(budget: GpuBudget, reclaimer: QuotaReclaimer, job: Job) -> QuotaWait | None:
    """Hold a job that would exceed a limit of its queue. Flexible GPUs of the queue are given up if that helps.

    It does not help if too few GPUs would be free for the job. The running jobs would grow again in the next full pass,
    and shrink again after that, without end.
    """
    offer = budget.offer(job) or budget.pending_offer(job)
    gpus = offer[1] if offer else job.spec.min_gpus
    if (reason := reclaimer.quota.check_limits(job, gpus)) is None:
        return None
    if offer is None and not _can_reclaim_shortage(budget, reclaimer.quota, job):
        return QuotaWait(reason)
    counts = reclaimer.find_shrinks_within_limit(job, gpus)
    if not counts:
        return QuotaWait(reason)
    reclaimer.quota.allocate(job, gpus)
    limit = "user limit" if reason.code is ReasonCode.WAITING_FOR_USER_LIMIT else "limit"
    queue = reclaimer.quota.limiting_queue(job)
    why = Reason(ReasonCode.QUOTA_RECLAIMED, f"{job.id} needs GPUs within the {limit} of queue {queue}")
    return QuotaWait(reason, {job_id: (count, why) for job_id, count in counts.items()})


def _can_reclaim_shortage(budget: GpuBudget, quota: QuotaState, job: Job) -> bool:
    """Return whether GPUs that are not counted as pending could be enough for the minimum of a job without an offer.

    These are the flexible GPUs within the guarantee of the job's queue, and those that borrowers return. A job of an
    undeclared queue has neither: the guarantee of queue `default`, whose limit applies to it, is not its own.
    """
    if (shortage := budget.shortage(job)) is None:
        return False  # it is too large, or would delay the reserved start of an earlier job
    _, gpus, missing = shortage
    missing_of_min = missing - (gpus - job.spec.min_gpus)
    if quota.is_guaranteed(job):
        return missing_of_min <= quota.reclaimable_gpus(job)
    return missing_of_min <= quota.own_flexible(quota.account(job))


def reclaim_guarantee(
    cycle: SchedulingCycle, budget: GpuBudget, reclaimer: QuotaReclaimer, job: Job
) -> QuotaWait | None:
    """Take GPUs that the job's queue is guaranteed from the jobs that borrow them. The job waits until they left."""
    if (shortage := budget.shortage(job)) is None:
        return None
    gpu, gpus, missing = shortage
    if cycle.fit.needs_one_node(job):
        return None  # borrowers may give up GPUs of several nodes
    if (found := reclaimer.find_reclaim(job, gpu, missing, cycle.fit.find_feasible_nodes(job))) is None:
        return None
    detail = f"{job.id} needs {format_gpu_count(gpus)} of the guarantee of queue {job.spec.queue}"
    why = Reason(ReasonCode.QUOTA_RECLAIMED, detail)
    demand = budget.allocate_pending(job, gpu, gpus)
    reclaimer.quota.allocate(job, gpus)
    return QuotaWait(
        _reclaim_reason(cycle, found, job, gpus, missing),
        {job_id: (count, why) for job_id, count in found.counts.items()},
        demand,
        inf if found.protected_until_s is None else found.protected_until_s,
    )


def _reclaim_reason(cycle: SchedulingCycle, found: QuotaReclaim, job: Job, gpus: int, missing: int) -> Reason:
    numbers = {"needed_gpus": float(gpus), "missing_gpus": float(missing)}
    needed = f"needs {format_gpu_count(gpus)} of the guarantee of queue {job.spec.queue}"
    if found.protected_until_s is None:
        detail = f"{needed}; running jobs are giving them back"
        return Reason(ReasonCode.WAITING_FOR_PREEMPTED_WORKLOADS, detail, numbers)
    left_s = found.protected_until_s - cycle.now_s
    numbers["held_until_s"] = found.protected_until_s
    detail = f"{needed}; the jobs that borrow them are protected for another {left_s:.0f} s by the minimum run time"
    return Reason(ReasonCode.HELD_BY_MINIMUM_RUNTIME, detail, numbers)


def cap_widths(
    cycle: SchedulingCycle, limits: StartLimits, min_widths: Mapping[str, int], widths: Mapping[str, int]
) -> Mapping[str, int]:
    """Cap the widths of jobs that start to the limits of their queues. `min_widths` are allocated already."""
    if not limits.planned:
        return widths
    allowed: dict[str, int] = {}
    for job_id, width in widths.items():
        job = cycle.snapshot.jobs[job_id]
        more = min(width - min_widths[job_id], limits.headroom(job))
        limits.allocate(job, more)
        allowed[job_id] = min_widths[job_id] + more
    return allowed


def apply_reductions(cycle: SchedulingCycle, reductions: Reductions) -> None:
    """Shrink or preempt the jobs that give up GPUs because of a quota."""
    for job_id, (count, reason) in reductions.items():
        job = cycle.snapshot.jobs[job_id]
        if not count:
            cycle.apply(PreemptJob(job_id, cycle.leave_by_s(job), reason))
        elif target := reduce_target(cycle, job, job.allocation.target, count):
            cycle.apply(ResizeJob(job_id, *target, cycle.leave_by_s(job), reason))
        cycle.settle(job_id)
