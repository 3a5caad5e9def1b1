"""Stage of decide: other plans on the same GPUs, for running jobs whose layers froze."""

from __future__ import annotations

from scheduler.core.course import Course
from scheduler.core.targets import may_shrink
from scheduler.domain.decision import ResizeJob
from scheduler.domain.job import Job
from scheduler.domain.reason import Reason, ReasonCode
from scheduler.policies.rearranging import pays, ready_s, saved_s
from scheduler.policies.scaling import work_of


def rearrange_frozen(course: Course) -> None:
    """At every tick, not at full passes alone: it takes no GPU from anybody, so only its own cost is to be weighed, and
    the saving shrinks while it waits."""
    if course.draft.base.switches.resizes_frozen:
        return
    ledger = course.draft.ledger
    for job in ledger.ordered(ledger.refrozen):
        if job.freezing.is_on_curve and may_shrink(course, job):
            _rearrange(course, job)


def _rearrange(course: Course, job: Job) -> None:
    ready_at_s = ready_s(job, course.settings)
    if course.now_s < ready_at_s:
        course.recheck_s = min(course.recheck_s, ready_at_s)
        return
    present, plan = job.allocation.plan, course.plan_for(job, job.allocation.target)
    if present is None or plan is None or plan.runs_like(present):
        return
    work = work_of(course.view, job)
    if not pays(job, plan, work, course.settings):
        return
    before_s, after_s = job.step_time_s(), plan.iteration_time_s * job.curve_correction
    detail = f"{job.freezing.layers} layers are frozen: {after_s:.3g} s a step instead of {before_s:.3g} s"
    numbers = {
        "frozen_layers": float(job.freezing.layers),
        "step_time_s_before": before_s,
        "step_time_s": after_s,
        "saved_s": saved_s(job, plan, work),
    }
    reason = Reason(ReasonCode.LAYERS_FROZE, detail, numbers)
    course.take(ResizeJob(job.id, job.allocation.target, plan, course.leave_by_s(job), reason))
    course.touched.add(job.id)
