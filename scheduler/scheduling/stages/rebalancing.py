"""The stage that moves flexible GPUs between jobs.

Flexible GPUs are those above a job's minimum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from scheduler.domain import gpu_sets
from scheduler.domain.decisions import Reason, ReasonCode, ResizeJob
from scheduler.domain.fleet import LoanState
from scheduler.domain.gpu_sets import Gpus
from scheduler.domain.job import Job
from scheduler.scheduling.cycle import ResourceKind, SchedulingCycle, StageReport
from scheduler.scheduling.pending_gpus import count_releasing_gpus
from scheduler.scheduling.policies.model_mix import split_unlike
from scheduler.scheduling.policies.quota import QuotaState, cap_to_quota
from scheduler.scheduling.policies.speed import gpu_model
from scheduler.scheduling.stages.mixed_growth import grow_over_models, release_unlike
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
            _shrink(cycle, job, job.allocation.target, job.spec.max_gpus, ReasonCode.RANGE_CHANGED)
        elif current_gpus < min_gpus and not QuotaState(cycle.view).check_limits(job, min_gpus - current_gpus):
            _grow(cycle, job, min_gpus, ReasonCode.RANGE_CHANGED)


def _shrink_for_demands(cycle: SchedulingCycle, demands: Mapping[ResourceKind, int]) -> None:
    """Shrink jobs on GPUs that the demands can use."""
    releasing, arriving = count_releasing_gpus(cycle), cycle.policies.expected_arrivals(cycle.view, cycle.settings)
    for kind, gpus in demands.items():
        missing = gpus - sum(releasing[kind.gpu, lent] for lent in ((False,) if kind.owned_only else (False, True)))
        missing -= release_unlike(cycle, kind, missing)
        if missing <= 0:
            continue
        flexible = cycle.index.sort_by_submission(cycle.index.above_minimum)
        jobs = {job.id: _on_home_model(cycle, job) for job in flexible if _can_free(cycle, job, kind)}
        quota = QuotaState(cycle.view)
        if quota:
            jobs = {job_id: job for job_id, job in jobs.items() if quota.available_to_others(job, 1)}
        view = replace(cycle.view, jobs=jobs)
        for job_id, count in cycle.policies.shrink(view, missing + arriving, cycle.settings).items():
            job, own = cycle.snapshot.jobs[job_id], jobs[job_id].allocation.target
            freed = quota.available_to_others(job, gpu_sets.count(own) - count)
            quota.release(job, freed)
            if freed:
                remaining = gpu_sets.count(own) - freed
                _shrink(cycle, job, own, remaining, ReasonCode.MAKES_ROOM_FOR_WAITING_JOB)


def _on_home_model(cycle: SchedulingCycle, job: Job) -> Job:
    """Return the job as if it held only GPUs of its home model, which is what it shrinks within."""
    if job.allocation.plan is None or not job.allocation.plan.is_mixed:
        return job
    own, _ = split_unlike(cycle.view, job, job.allocation.target)
    return replace(job, allocation=replace(job.allocation, target=own))


def _can_free(cycle: SchedulingCycle, job: Job, kind: ResourceKind) -> bool:
    """Return whether shrinking the job frees GPUs of the kind. A job gives up lent GPUs first."""
    if not job.allocation.target or not is_resizable(cycle, job):
        return False
    nodes = [cycle.snapshot.original.nodes[name] for name in _on_home_model(cycle, job).allocation.target]
    if nodes[0].gpu != kind.gpu or not kind.includes(job.allocation.target):
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
    arriving = cycle.policies.expected_arrivals(cycle.view, cycle.settings)
    if len(cycle.node_sizes) < 2 or cycle.policies.deal_nodes is None:
        spare = max(0, cycle.unreserved_gpu_total - arriving)
        _resize_to(cycle, cycle.policies.scale(cycle.view, (), spare, cycle.settings), quota)
        return
    for gpu, jobs in _group_by_home_model(cycle).items():
        spare = max(0, cycle.count_unreserved_gpus(gpu) - arriving)
        view = replace(cycle.view, jobs=jobs)
        _resize_to(cycle, cycle.policies.scale(view, (), spare, cycle.settings), None)
    grow_over_models(cycle)


def _group_by_home_model(cycle: SchedulingCycle) -> Mapping[str, dict[str, Job]]:
    """Return the jobs by their home model, as if they held only GPUs of it: these are dealt first.

    A job that also holds other models is valued at its present speed, so it gives them up only for a faster plan.
    """
    groups: dict[str, dict[str, Job]] = {}
    for job_id in sorted(cycle.index.running):
        job = cycle.snapshot.jobs[job_id]
        if gpu := gpu_model(cycle.view, job, cycle.node_sizes):
            groups.setdefault(gpu, {})[job_id] = _on_home_model(cycle, job)
    return groups


def _resize_to(cycle: SchedulingCycle, wanted: Mapping[str, int], quota: QuotaState | None) -> None:
    wanted = cap_to_quota(cycle.view, quota or QuotaState(cycle.view), wanted)
    for job_id, count in wanted.items():
        job = cycle.snapshot.jobs[job_id]
        own = _on_home_model(cycle, job).allocation.target
        if count < gpu_sets.count(own) and job_id not in cycle.settled_jobs:
            _shrink(cycle, job, own, count, ReasonCode.GAIN_EXCEEDS_COST)
    quota = QuotaState(cycle.view)  # counted again, because some jobs may not have been able to shrink
    for job_id, count in wanted.items():
        job = _on_home_model(cycle, cycle.snapshot.jobs[job_id])
        current_gpus = job.allocation.target_gpus
        wanted_gpus = min(count, current_gpus + cycle.unreserved_gpu_total, current_gpus + quota.headroom(job))
        if wanted_gpus > current_gpus and job_id not in cycle.settled_jobs:
            _grow(cycle, job, wanted_gpus, ReasonCode.GAIN_EXCEEDS_COST)
            quota.allocate(job, cycle.snapshot.jobs[job_id].allocation.target_gpus - current_gpus)


def _shrink(cycle: SchedulingCycle, job: Job, kept: Gpus, count: int, code: ReasonCode) -> None:
    """Shrink the job to `count` GPUs of `kept`."""
    target = reduce_target(cycle, job, kept, max(count, job.spec.min_gpus))
    if target is not None:
        gpus, plan = target
        cycle.apply(ResizeJob(job.id, gpus, plan, cycle.leave_by_s(job), Reason(code, _SHRINK_DETAILS[code])))


def _grow(cycle: SchedulingCycle, job: Job, count: int, code: ReasonCode) -> None:
    min_gpus = max(job.allocation.target_gpus + 1, job.spec.min_gpus)
    target = extend_target(cycle, job, count, min_gpus)
    if target is not None:
        gpus, plan = target
        cycle.apply(ResizeJob(job.id, gpus, plan, cycle.leave_by_s(job), Reason(code, _GROW_DETAILS[code])))
