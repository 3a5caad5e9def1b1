"""The stage that moves flexible GPUs between jobs.

Flexible GPUs are those above a job's minimum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from scheduler.domain.decisions import Reason, ReasonCode, ResizeJob
from scheduler.domain.fleet import LoanState
from scheduler.domain.job import Job
from scheduler.scheduling.cycle import ResourceKind, SchedulingCycle, StageReport
from scheduler.scheduling.gpu_budget import count_releasing_gpus
from scheduler.scheduling.policies.quota import QuotaState, cap_to_quota
from scheduler.scheduling.stages.quota_preemption import apply_reductions
from scheduler.scheduling.stages.starting import StartingReport
from scheduler.scheduling.target_selection import extend_target, is_resizable, reduce_target

_SHRINK_DETAILS = {
    ReasonCode.MAKES_ROOM_FOR_WAITING_JOB: "a pending job needs the GPUs",
    ReasonCode.GAIN_EXCEEDS_COST: "other jobs gain more from the GPUs",
    ReasonCode.RANGE_CHANGED: "its owner lowered its maximum",
}
_GROW_DETAILS = {
    ReasonCode.GAIN_EXCEEDS_COST: "it gains most from GPUs that are free",
    ReasonCode.RANGE_CHANGED: "its owner raised its minimum",
}


def rebalance(cycle: SchedulingCycle, evacuation: StageReport, starting: StartingReport) -> StageReport:
    """Free the GPUs that pending and displaced jobs demand. Without demands, move flexible GPUs to the largest gain.

    Demands are served in every tick. GPUs are moved for gain in full passes, and when GPUs have just become free.
    """
    apply_reductions(cycle, starting.reductions)
    enforce_ranges(cycle)
    if cycle.policies.scale is None or cycle.resizes_frozen:
        return StageReport()
    demands = Counter[ResourceKind]()
    for demand in (*evacuation.demands.values(), *starting.demands.values()):
        demands[demand.kind] += demand.gpus
    if demands:
        _shrink_for_demands(cycle, demands)
    elif cycle.full_pass or _has_new_gpus(cycle):
        _move_flexible_gpus(cycle, starting.quota)
    return StageReport()


def enforce_ranges(cycle: SchedulingCycle) -> None:
    """Resize running jobs that are outside their range, because it was changed."""
    for job in cycle.index.sort_by_submission(cycle.index.out_of_range):
        if job.id in cycle.settled_jobs:
            continue
        current_gpus, min_gpus = job.allocation.target_gpus, job.spec.min_gpus
        if current_gpus > job.spec.max_gpus:
            _shrink(cycle, job, job.spec.max_gpus, ReasonCode.RANGE_CHANGED)
        elif current_gpus < min_gpus and not QuotaState(cycle.view).check_limits(job, min_gpus - current_gpus):
            _grow(cycle, job, min_gpus, ReasonCode.RANGE_CHANGED)


def _shrink_for_demands(cycle: SchedulingCycle, demands: Mapping[ResourceKind, int]) -> None:
    """Shrink jobs on GPUs that the demands can use."""
    releasing, arriving = count_releasing_gpus(cycle), cycle.policies.expected_arrivals(cycle.view, cycle.settings)
    for kind, gpus in demands.items():
        missing = gpus - sum(releasing[kind.gpu, lent] for lent in ((False,) if kind.owned_only else (False, True)))
        if missing <= 0:
            continue
        flexible = cycle.index.sort_by_submission(cycle.index.above_minimum)
        jobs = {job.id: job for job in flexible if _can_free(cycle, job, kind)}
        quota = QuotaState(cycle.view)
        if quota:
            jobs = {job_id: job for job_id, job in jobs.items() if quota.available_to_others(job, 1)}
        view = replace(cycle.view, jobs=jobs)
        for job_id, count in cycle.policies.shrink(view, missing + arriving, cycle.settings).items():
            job = cycle.snapshot.jobs[job_id]
            freed = quota.available_to_others(job, job.allocation.target_gpus - count)
            quota.release(job, freed)
            if freed:
                remaining = job.allocation.target_gpus - freed
                _shrink(cycle, job, remaining, ReasonCode.MAKES_ROOM_FOR_WAITING_JOB)


def _can_free(cycle: SchedulingCycle, job: Job, kind: ResourceKind) -> bool:
    """Return whether shrinking the job frees GPUs of the kind. A job gives up lent GPUs first."""
    nodes = [cycle.snapshot.original.nodes[name] for name in job.allocation.target]
    if not nodes or not is_resizable(cycle, job) or nodes[0].gpu != kind.gpu:
        return False
    return not kind.owned_only or not any(cycle.view.is_lent(node) for node in nodes)


def _has_new_gpus(cycle: SchedulingCycle) -> bool:
    """Return whether GPUs became free just now, by the end of a job or a new loan, and some job could grow."""
    index, jobs = cycle.index, cycle.snapshot.jobs
    if not index.free_gpu_total or not index.below_maximum:
        return False
    if any(jobs[job_id].is_ended and not jobs[job_id].allocation.held_gpus for job_id in index.unsettled):
        return True
    loans = cycle.snapshot.loans.values()
    return any(loan.state is LoanState.ACTIVE and loan.state_since_s == cycle.now_s for loan in loans)


def _move_flexible_gpus(cycle: SchedulingCycle, quota: QuotaState | None) -> None:
    """Shrink and grow running jobs to the counts that the scaling policy computes, within quotas."""
    assert cycle.policies.scale is not None
    spare = max(0, cycle.unreserved_gpu_total - cycle.policies.expected_arrivals(cycle.view, cycle.settings))
    wanted = cycle.policies.scale(cycle.view, (), spare, cycle.settings)
    wanted = cap_to_quota(cycle.view, quota or QuotaState(cycle.view), wanted)
    for job_id, count in wanted.items():
        job = cycle.snapshot.jobs[job_id]
        if count < job.allocation.target_gpus and job_id not in cycle.settled_jobs:
            _shrink(cycle, job, count, ReasonCode.GAIN_EXCEEDS_COST)
    quota = QuotaState(cycle.view)  # counted again, because some jobs may not have been able to shrink
    for job_id, count in wanted.items():
        job = cycle.snapshot.jobs[job_id]
        current_gpus = job.allocation.target_gpus
        wanted_gpus = min(count, current_gpus + cycle.unreserved_gpu_total, current_gpus + quota.headroom(job))
        if wanted_gpus > current_gpus and job_id not in cycle.settled_jobs:
            _grow(cycle, job, wanted_gpus, ReasonCode.GAIN_EXCEEDS_COST)
            quota.allocate(job, cycle.snapshot.jobs[job_id].allocation.target_gpus - current_gpus)


def _shrink(cycle: SchedulingCycle, job: Job, count: int, code: ReasonCode) -> None:
    target = reduce_target(cycle, job, job.allocation.target, max(count, job.spec.min_gpus))
    if target is not None:
        gpus, plan = target
        cycle.apply(ResizeJob(job.id, gpus, plan, cycle.leave_by_s(job), Reason(code, _SHRINK_DETAILS[code])))


def _grow(cycle: SchedulingCycle, job: Job, count: int, code: ReasonCode) -> None:
    min_gpus = max(job.allocation.target_gpus + 1, job.spec.min_gpus)
    target = extend_target(cycle, job, count, min_gpus)
    if target is not None:
        gpus, plan = target
        cycle.apply(ResizeJob(job.id, gpus, plan, cycle.leave_by_s(job), Reason(code, _GROW_DETAILS[code])))
