"""Stage of decide: flexible GPUs, those that jobs hold above their minimum."""

from __future__ import annotations

from scheduler.core.course import Course
from scheduler.core.targets import extended, reduced
from scheduler.domain import gpus as gpu_sets
from scheduler.domain.decision import ResizeJob
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.reason import Reason, ReasonCode

_WHY_LESS = {
    ReasonCode.MAKES_ROOM: "a waiting job needs the room",
    ReasonCode.GAIN: "the GPUs gain more elsewhere",
    ReasonCode.RANGE_CHANGED: "its owner lowered its maximum",
}
_WHY_MORE = {
    ReasonCode.GAIN: "GPUs are free and gain most here",
    ReasonCode.RANGE_CHANGED: "its owner raised its minimum",
}


def flex(course: Course) -> None:
    """Give waiting jobs the room that was reserved for them, at every tick; where nobody waits for room, move
    flexible GPUs to where the curves say they gain most, at full passes."""
    for job in list(course.draft.jobs.values()):
        _fit_range(course, job)
    if course.policies.scale is None or course.draft.base.switches.resizes_frozen:
        return
    if course.reserved_gpus:
        _make_room(course)
    elif course.full_pass:
        _rebalance(course)


def _make_room(course: Course) -> None:
    missing = course.reserved_gpus - course.releasing_gpus()
    if missing <= 0:
        return
    for job_id, count in course.policies.make_room(course.view, missing, course.settings).items():
        if job_id not in course.touched:
            _shrink(course, course.draft.jobs[job_id], count)


def _rebalance(course: Course) -> None:
    assert course.policies.scale is not None
    wanted = course.policies.scale(course.view, (), course.draft.usable_gpus, course.settings)
    for job_id, count in wanted.items():
        job = course.draft.jobs[job_id]
        if count < job.allocation.target_gpus and job_id not in course.touched:
            _shrink(course, job, count, ReasonCode.GAIN)
    for job_id, count in wanted.items():
        job = course.draft.jobs[job_id]
        present = job.allocation.target_gpus
        if count > present and job_id not in course.touched and course.draft.usable_gpus:
            _grow(course, job, min(count, present + course.draft.usable_gpus))


def _fit_range(course: Course, job: Job) -> None:
    """A running job outside its (changed) range is brought inside."""
    target = job.allocation.target_gpus
    if job.state is not JobState.RUNNING or job.id in course.touched:
        return
    if target > job.spec.max_gpus:
        _shrink(course, job, job.spec.max_gpus, ReasonCode.RANGE_CHANGED)
    elif target < job.spec.min_gpus:
        _grow(course, job, job.spec.min_gpus, ReasonCode.RANGE_CHANGED)


def _shrink(course: Course, job: Job, count: int, code: ReasonCode = ReasonCode.MAKES_ROOM) -> None:
    target = reduced(course, job, job.allocation.target, max(count, job.spec.min_gpus))
    if target is None:
        return
    gpus, plan = target
    given_up = gpu_sets.minus(job.allocation.target, gpus)
    course.take(ResizeJob(job.id, gpus, plan, course.leave_by_s(given_up), Reason(code, _WHY_LESS[code])))
    course.touched.add(job.id)


def _grow(course: Course, job: Job, count: int, code: ReasonCode = ReasonCode.GAIN) -> None:
    present = job.allocation.target_gpus
    target = extended(course, job, count, present + 1)
    if target is None:
        return
    gpus, plan = target
    leave_by_s = course.now_s + course.settings.leave_grace_s
    course.take(ResizeJob(job.id, gpus, plan, leave_by_s, Reason(code, _WHY_MORE[code])))
    course.touched.add(job.id)
