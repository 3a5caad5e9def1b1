"""Stage of decide: flexible GPUs, those that jobs hold above their minimum.

Stage of decide: other plans on the same GPUs, for running jobs whose layers froze.
"""

from __future__ import annotations

from dataclasses import replace

from scheduler.domain.decisions import Reason, ReasonCode, ResizeJob
from scheduler.domain.fleet import LoanState
from scheduler.domain.job import Job
from scheduler.scheduling.cycle import ResourceKind, SchedulingCycle
from scheduler.scheduling.gpu_budget import count_releasing_gpus
from scheduler.scheduling.policies.quota import QuotaState, cap_to_quota
from scheduler.scheduling.policies.scaling import is_worthwhile, rearrangeable_at_s, remaining_work, time_saved_s
from scheduler.scheduling.stages.quota_preemption import preempt_for_quota
from scheduler.scheduling.target_selection import extend_target, is_resizable, reduce_target

_SHRINK_DETAILS = {
    ReasonCode.MAKES_ROOM_FOR_WAITING_JOB: "a waiting job needs the room",
    ReasonCode.GAIN_EXCEEDS_COST: "the GPUs gain more elsewhere",
    ReasonCode.RANGE_CHANGED: "its owner lowered its maximum",
}
_GROW_DETAILS = {
    ReasonCode.GAIN_EXCEEDS_COST: "GPUs are free and gain most here",
    ReasonCode.RANGE_CHANGED: "its owner raised its minimum",
}


def rebalance(cycle: SchedulingCycle) -> None:
    """Give waiting jobs the room that was reserved for them, at every tick; where nobody waits for room, move
    flexible GPUs to where the curves say they gain most, at full passes and when GPUs have just come free."""
    preempt_for_quota(cycle)
    enforce_ranges(cycle)
    if cycle.policies.scale is None or cycle.snapshot.original.switches.resizes_frozen:
        return
    if cycle.gpus_to_free:
        _shrink_for_pending(cycle)
    elif cycle.full_pass or _has_new_gpus(cycle):
        _rebalance_flexible_gpus(cycle)


def _has_new_gpus(cycle: SchedulingCycle) -> bool:
    """A job's last GPUs were seen free just now, or a lent node has begun to serve, and some job could have more."""
    ledger, jobs = cycle.snapshot.ledger, cycle.snapshot.jobs
    if not ledger.free_gpu_total or not ledger.below_maximum:
        return False
    if any(jobs[job_id].is_ended and not jobs[job_id].allocation.held_gpus for job_id in ledger.unsettled):
        return True
    loans = cycle.snapshot.loans.values()
    return any(loan.state is LoanState.ACTIVE and loan.state_since_s == cycle.now_s for loan in loans)


def enforce_ranges(cycle: SchedulingCycle) -> None:
    """Bring running jobs that are outside their (changed) range inside."""
    for job in cycle.snapshot.ledger.sort_by_submission(cycle.snapshot.ledger.out_of_range):
        _enforce_range(cycle, job)


def _shrink_for_pending(cycle: SchedulingCycle) -> None:
    """Shrink jobs that sit where the waiting ones could go."""
    releasing, arriving = count_releasing_gpus(cycle), cycle.policies.expected_arrivals(cycle.view, cycle.settings)
    for claim, gpus in cycle.gpus_to_free.items():
        missing = gpus - sum(releasing[claim.gpu, lent] for lent in ((False,) if claim.owned_only else (False, True)))
        if missing <= 0:
            continue
        flexible = cycle.snapshot.ledger.sort_by_submission(cycle.snapshot.ledger.above_minimum)
        jobs = {job.id: job for job in flexible if _can_free(cycle, job, claim)}
        book = QuotaState(cycle.view)
        if book:
            jobs = {job_id: job for job_id, job in jobs.items() if book.available_to_others(job, 1)}
        view = replace(cycle.view, jobs=jobs)
        for job_id, count in cycle.policies.shrink(view, missing + arriving, cycle.settings).items():
            job = cycle.snapshot.jobs[job_id]
            freed = book.available_to_others(job, job.allocation.target_gpus - count)
            book.release(job, freed)
            if freed:
                _shrink(cycle, job, job.allocation.target_gpus - freed)


def _can_free(cycle: SchedulingCycle, job: Job, kind: ResourceKind) -> bool:
    """Shrinking this job frees GPUs that the claim can use. Lent GPUs are given up first."""
    nodes = [cycle.snapshot.original.nodes[name] for name in job.allocation.target]
    if not nodes or not is_resizable(cycle, job) or nodes[0].gpu != kind.gpu:
        return False
    return not kind.owned_only or not any(cycle.view.is_lent(node) for node in nodes)


def _rebalance_flexible_gpus(cycle: SchedulingCycle) -> None:
    assert cycle.policies.scale is not None
    spare = max(0, cycle.unreserved_gpus - cycle.policies.expected_arrivals(cycle.view, cycle.settings))
    wanted = cycle.policies.scale(cycle.view, (), spare, cycle.settings)
    wanted = cap_to_quota(cycle.view, cycle.quota or QuotaState(cycle.view), wanted)
    for job_id, count in wanted.items():
        job = cycle.snapshot.jobs[job_id]
        if count < job.allocation.target_gpus and job_id not in cycle.changed_jobs:
            _shrink(cycle, job, count, ReasonCode.GAIN_EXCEEDS_COST)
    book = QuotaState(cycle.view)  # where somebody could not shrink after all, there is less room under a limit
    for job_id, count in wanted.items():
        job = cycle.snapshot.jobs[job_id]
        present = job.allocation.target_gpus
        most = min(count, present + cycle.unreserved_gpus, present + book.headroom(job))
        if most > present and job_id not in cycle.changed_jobs:
            _grow(cycle, job, most)
            book.allocate(job, cycle.snapshot.jobs[job_id].allocation.target_gpus - present)


def _enforce_range(cycle: SchedulingCycle, job: Job) -> None:
    if job.id in cycle.changed_jobs:
        return
    target = job.allocation.target_gpus
    if target > job.spec.max_gpus:
        _shrink(cycle, job, job.spec.max_gpus, ReasonCode.RANGE_CHANGED)
    elif target < (least := job.spec.min_gpus) and not QuotaState(cycle.view).check_limits(job, least - target):
        _grow(cycle, job, job.spec.min_gpus, ReasonCode.RANGE_CHANGED)


def _shrink(
    cycle: SchedulingCycle, job: Job, count: int, code: ReasonCode = ReasonCode.MAKES_ROOM_FOR_WAITING_JOB
) -> None:
    target = reduce_target(cycle, job, job.allocation.target, max(count, job.spec.min_gpus))
    if target is None:
        return
    gpus, plan = target
    cycle.apply(ResizeJob(job.id, gpus, plan, cycle.leave_by_s(job), Reason(code, _SHRINK_DETAILS[code])))
    cycle.changed_jobs.add(job.id)


def _grow(cycle: SchedulingCycle, job: Job, count: int, code: ReasonCode = ReasonCode.GAIN_EXCEEDS_COST) -> None:
    present = job.allocation.target_gpus
    target = extend_target(cycle, job, count, max(present + 1, job.spec.min_gpus))
    if target is None:
        return
    gpus, plan = target
    cycle.apply(ResizeJob(job.id, gpus, plan, cycle.leave_by_s(job), Reason(code, _GROW_DETAILS[code])))
    cycle.changed_jobs.add(job.id)


def rearrange_frozen_jobs(cycle: SchedulingCycle) -> None:
    """At every tick, not at full passes alone: it takes no GPU from anybody, so only its own cost is to be weighed, and
    the saving shrinks while it waits."""
    if cycle.snapshot.original.switches.resizes_frozen:
        return
    ledger = cycle.snapshot.ledger
    for job in ledger.sort_by_submission(ledger.needs_frozen_replan):
        if job.freezing.is_curve_current and is_resizable(cycle, job):
            _rearrange(cycle, job)


def _rearrange(cycle: SchedulingCycle, job: Job) -> None:
    ready_at_s = rearrangeable_at_s(job, cycle.settings)
    if cycle.now_s < ready_at_s:
        cycle.recheck_at_s = min(cycle.recheck_at_s, ready_at_s)
        return
    present, plan = job.allocation.plan, cycle.plan_for(job, job.allocation.target)
    if present is None or plan is None or plan.is_equivalent_to(present):
        return
    work = remaining_work(cycle.view, job)
    if not is_worthwhile(job, plan, work, cycle.settings):
        return
    before_s, after_s = job.step_time_s(), plan.iteration_time_s * job.curve_correction
    detail = f"{job.freezing.layers} layers are frozen: {after_s:.3g} s a step instead of {before_s:.3g} s"
    numbers = {
        "frozen_layers": float(job.freezing.layers),
        "step_time_s_before": before_s,
        "step_time_s": after_s,
        "saved_s": time_saved_s(job, plan, work),
    }
    reason = Reason(ReasonCode.LAYERS_FROZE, detail, numbers)
    cycle.apply(ResizeJob(job.id, job.allocation.target, plan, cycle.leave_by_s(job), reason))
    cycle.changed_jobs.add(job.id)
