"""What quotas add to the stages that start and flex: who is refused, who gives way, and what scaling leaves alone."""

from __future__ import annotations

from collections.abc import Mapping

from scheduler.domain.decisions import PreemptJob, Reason, ReasonCode, ResizeJob
from scheduler.domain.gpu_sets import format_gpu_count
from scheduler.domain.job import Job
from scheduler.scheduling.cycle import SchedulingCycle
from scheduler.scheduling.gpu_budget import GpuBudget
from scheduler.scheduling.policies.preemption import QuotaReclaim, QuotaReclaimer
from scheduler.scheduling.policies.quota import QuotaState
from scheduler.scheduling.target_selection import reduce_target


def hold_for_quota(cycle: SchedulingCycle, budget: GpuBudget, reclaimer: QuotaReclaimer, job: Job) -> bool:
    """The job waits for a limit of its queue. Where flexible GPUs of its queue stand in its way, they are given up."""
    offer = budget.offer(job) or budget.pending_offer(job)
    gpus = offer[1] if offer else job.spec.min_gpus
    if (verdict := reclaimer.quota.check_limits(job, gpus)) is None:
        return False
    cycle.waiting[job.id] = verdict
    if counts := reclaimer.find_shrinks_within_limit(job, gpus):
        reason = Reason(
            ReasonCode.QUOTA_RECLAIMED, f"{job.id} needs room under {_name_limit(verdict)} of queue {job.spec.queue}"
        )
        cycle.quota_reductions |= {job_id: (count, reason) for job_id, count in counts.items()}
        reclaimer.quota.allocate(job, gpus)
    return True


def _name_limit(reason: Reason) -> str:
    return "the user limit" if reason.code is ReasonCode.WAITING_FOR_USER_LIMIT else "the limit"


def reclaim_guarantee(cycle: SchedulingCycle, budget: GpuBudget, reclaimer: QuotaReclaimer, job: Job) -> bool:
    """Others give way to the job, because its queue is guaranteed what they have; it waits until they have."""
    if (short := budget.shortage(job)) is None:
        return False
    gpu, gpus, missing = short
    if (found := reclaimer.find_reclaim(job, gpu, missing)) is None:
        return False
    detail = f"{job.id} needs {format_gpu_count(gpus)} of what queue {job.spec.queue} is guaranteed"
    reason = Reason(ReasonCode.QUOTA_RECLAIMED, detail)
    cycle.quota_reductions |= {job_id: (count, reason) for job_id, count in found.counts.items()}
    cycle.pending_starts[job.id] = budget.allocate_pending(job, gpu, gpus)
    reclaimer.quota.allocate(job, gpus)
    cycle.waiting_for_gpus = True
    cycle.waiting[job.id] = _reclaim_reason(cycle, found, job, gpus, missing)
    return True


def cap_widths(
    cycle: SchedulingCycle, quota: QuotaState, min_widths: Mapping[str, int], widths: Mapping[str, int]
) -> Mapping[str, int]:
    """How wide jobs may start that were dealt `leasts` already."""
    if not quota:
        return widths
    allowed: dict[str, int] = {}
    for job_id, width in widths.items():
        job = cycle.snapshot.jobs[job_id]
        more = min(width - min_widths[job_id], quota.headroom(job))
        quota.allocate(job, more)
        allowed[job_id] = min_widths[job_id] + more
    return allowed


def preempt_for_quota(cycle: SchedulingCycle) -> None:
    """Shrink or preempt those who have what a queue is guaranteed."""
    for job_id, (count, reason) in cycle.quota_reductions.items():
        job = cycle.snapshot.jobs[job_id]
        if not count:
            cycle.apply(PreemptJob(job_id, cycle.leave_by_s(job), reason))
        elif target := reduce_target(cycle, job, job.allocation.target, count):
            cycle.apply(ResizeJob(job_id, *target, cycle.leave_by_s(job), reason))
        cycle.changed_jobs.add(job_id)


def _reclaim_reason(cycle: SchedulingCycle, found: QuotaReclaim, job: Job, gpus: int, missing: int) -> Reason:
    numbers = {"needed_gpus": float(gpus), "missing_gpus": float(missing)}
    own = f"needs {format_gpu_count(gpus)} of what queue {job.spec.queue} is guaranteed"
    if found.protected_until_s is None:
        return Reason(ReasonCode.WAITING_FOR_PREEMPTED_WORKLOADS, f"{own}; who has them is giving them up", numbers)
    cycle.recheck_at_s = min(cycle.recheck_at_s, found.protected_until_s)
    left_s = found.protected_until_s - cycle.now_s
    numbers["held_until_s"] = found.protected_until_s
    detail = f"{own}; those who borrow them may run {left_s:.0f} s more, their minimum run time"
    return Reason(ReasonCode.HELD_BY_MINIMUM_RUNTIME, detail, numbers)
