"""The stage that re-plans jobs whose curve has changed: on the same GPUs, on fewer, or on more.

A curve changes when layers freeze, and when measured steps say that the GPUs or their links are not as fast as assumed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf

from scheduler.domain.decisions import Reason, ReasonCode, ResizeJob
from scheduler.domain.job import Job
from scheduler.domain.learned_constants import describe_constants
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.scheduling.cycle import SchedulingCycle, StageReport
from scheduler.scheduling.policies.quota import QuotaState, cap_to_quota
from scheduler.scheduling.policies.scaling import is_worthwhile, remaining_work, replan_ready_at_s, time_saved_s
from scheduler.scheduling.policies.speed import gpu_model
from scheduler.scheduling.target_selection import Target, extend_target, is_resizable, reduce_target


def replan_outdated_jobs(cycle: SchedulingCycle, assignment: Iterable[StageReport]) -> StageReport:
    """Give jobs with outdated plans a better one, on the number of GPUs that the scaling policy values most.

    This runs in every tick, because a later re-plan saves less. While jobs of `assignment` wait for GPUs that others
    must give up, a job keeps its GPUs: the assignment has already taken those that it wants.
    """
    if cycle.resizes_frozen:
        return StageReport()
    has_demands = any(report.demands for report in assignment)
    recheck_at_s = inf
    for job in cycle.index.sort_by_submission(cycle.index.needs_new_plan):
        if not job.is_curve_current or not is_resizable(cycle, job) or job.id in cycle.index.out_of_range:
            continue
        ready_at_s = replan_ready_at_s(job, cycle.settings)
        if cycle.now_s < ready_at_s:
            recheck_at_s = min(recheck_at_s, ready_at_s)
        else:
            _replan(cycle, job, has_demands=has_demands)
    return StageReport(recheck_at_s=recheck_at_s)


def _replan(cycle: SchedulingCycle, job: Job, *, has_demands: bool) -> None:
    """Re-plan the job if that pays on its present GPUs. It may then change their number at no further cost."""
    current, plan = job.allocation.plan, cycle.plan_for(job, job.allocation.target)
    if current is None or plan is None or plan.is_equivalent_to(current):
        return
    work = remaining_work(cycle.view, job)
    if not is_worthwhile(job, plan, work, cycle.settings):
        return
    target = None
    if cycle.policies.scale is not None and job.spec.is_elastic and not current.is_mixed and not has_demands:
        target = _choose_target(cycle, job, plan, work)
    gpus, plan = target or (job.allocation.target, plan)
    cycle.apply(
        ResizeJob(
            job.id, gpus, plan, cycle.leave_by_s(job), _build_reason(job, sum(map(len, gpus.values())), plan, work)
        )
    )


def _choose_target(cycle: SchedulingCycle, job: Job, plan: ParallelPlan, work: float) -> Target | None:
    """Return other GPUs with their plan, or None if the job should keep its own under `plan`.

    The job gives up GPUs only to a job that can use them, or if it is as fast without them. It grows within the limits
    of its queue as other jobs use them now, because those that are dealt fewer GPUs have not given them up.
    """
    wanted = _deal_gpus(cycle)
    held = job.allocation.target_gpus
    count = min(wanted.get(job.id, held), held + cycle.snapshot.quota.headroom(job))
    if count > held:
        target = extend_target(cycle, job, count, held + 1)
    elif count < held:
        target = reduce_target(cycle, job, job.allocation.target, count)
    else:
        return None
    if target is None or is_worthwhile(job, target[1], work, cycle.settings) or _is_wanted(cycle, job, wanted):
        return target
    return None


def _deal_gpus(cycle: SchedulingCycle) -> Mapping[str, int]:
    """Return the GPUs that the scaling policy deals to each job, within quotas."""
    assert cycle.policies.scale is not None
    spare = max(0, cycle.unreserved_gpu_total - cycle.policies.expected_arrivals(cycle.view, cycle.settings))
    return cap_to_quota(cycle.view, QuotaState(cycle.view), cycle.policies.scale(cycle.view, (), spare, cycle.settings))


def _is_wanted(cycle: SchedulingCycle, job: Job, wanted: Mapping[str, int]) -> bool:
    """Return whether another job on the same GPU model is dealt more GPUs than it holds."""
    jobs, sizes = cycle.snapshot.jobs, cycle.node_sizes
    growing = (jobs[job_id] for job_id, count in wanted.items() if count > jobs[job_id].allocation.target_gpus)
    model = gpu_model(cycle.view, job, sizes)
    return any(other.id != job.id and gpu_model(cycle.view, other, sizes) == model for other in growing)


def _build_reason(job: Job, gpus: int, plan: ParallelPlan, work: float) -> Reason:
    held = job.allocation.target_gpus
    before_s, after_s = job.step_time_s(), plan.iteration_time_s * job.curve_correction
    cause, code = _describe_cause(job)
    instead = f"{before_s:.3g} s" if gpus == held else f"{before_s:.3g} s on {held}"
    after = f"{after_s:.3g} s" if gpus == held else f"{after_s:.3g} s on {gpus} GPUs"
    detail = f"{cause}; a step takes {after} instead of {instead}"
    numbers = {
        "frozen_layers": float(job.freezing.layers),
        "step_time_s_before": before_s,
        "step_time_s": after_s,
        "saved_s": time_saved_s(job, plan, work),
    }
    return Reason(code, detail, numbers)


def _describe_cause(job: Job) -> tuple[str, ReasonCode]:
    if job.freezing.needs_new_plan:
        return f"{job.freezing.layers} layers are frozen", ReasonCode.LAYERS_FROZE
    return describe_constants(job.constants.newest), ReasonCode.STEPS_MEASURED
