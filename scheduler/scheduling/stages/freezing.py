"""The stage that re-plans jobs with frozen layers."""

from __future__ import annotations

from math import inf

from scheduler.domain.decisions import Reason, ReasonCode, ResizeJob
from scheduler.domain.job import Job
from scheduler.scheduling.cycle import SchedulingCycle, StageReport
from scheduler.scheduling.policies.scaling import is_worthwhile, remaining_work, replan_ready_at_s, time_saved_s
from scheduler.scheduling.target_selection import is_resizable


def replan_frozen_jobs(cycle: SchedulingCycle) -> StageReport:
    """Give jobs with frozen layers a better plan on the same GPUs.

    This runs in every tick, because it takes no GPUs from other jobs, and a later re-plan saves less.
    """
    if cycle.resizes_frozen:
        return StageReport()
    recheck_at_s = inf
    for job in cycle.index.sort_by_submission(cycle.index.needs_frozen_replan):
        if not job.freezing.is_curve_current or not is_resizable(cycle, job):
            continue
        ready_at_s = replan_ready_at_s(job, cycle.settings)
        if cycle.now_s < ready_at_s:
            recheck_at_s = min(recheck_at_s, ready_at_s)
        else:
            _replan(cycle, job)
    return StageReport(recheck_at_s=recheck_at_s)


def _replan(cycle: SchedulingCycle, job: Job) -> None:
    current, plan = job.allocation.plan, cycle.plan_for(job, job.allocation.target)
    if current is None or plan is None or plan.is_equivalent_to(current):
        return
    work = remaining_work(cycle.view, job)
    if not is_worthwhile(job, plan, work, cycle.settings):
        return
    before_s, after_s = job.step_time_s(), plan.iteration_time_s * job.curve_correction
    detail = f"{job.freezing.layers} layers are frozen; a step takes {after_s:.3g} s instead of {before_s:.3g} s"
    numbers = {
        "frozen_layers": float(job.freezing.layers),
        "step_time_s_before": before_s,
        "step_time_s": after_s,
        "saved_s": time_saved_s(job, plan, work),
    }
    reason = Reason(ReasonCode.LAYERS_FROZE, detail, numbers)
    cycle.apply(ResizeJob(job.id, job.allocation.target, plan, cycle.leave_by_s(job), reason))
