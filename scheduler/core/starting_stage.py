"""Stage of decide: base demand. Who starts, and why the others wait."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from scheduler.core.course import Course
from scheduler.core.targets import extended
from scheduler.domain import gpus as gpu_sets
from scheduler.domain.decision import StartJob
from scheduler.domain.job import Intent, Job
from scheduler.domain.job_state import JobState
from scheduler.domain.reason import Reason, ReasonCode
from scheduler.policies.placement import usable_by
from scheduler.policies.speed import least_gpus, node_sizes


def start_waiting(course: Course) -> None:
    """Base demand in order. A job that fits once flexible workers have shrunk gets room reserved for it, so that
    nobody behind it takes what is free meanwhile."""
    jobs = course.draft.jobs
    order = course.policies.order(course.view, course.settings)
    available, promised = course.draft.usable_gpus, _flexible_gpus(course) + course.releasing_gpus()
    sizes = node_sizes(course.draft.base)
    starters: dict[str, int] = {}
    for position, job_id in enumerate(order):
        need = least_gpus(course.draft.base, jobs[job_id], sizes)
        if need <= available:
            starters[job_id] = need
            available -= need
        elif need <= available + promised:
            promised -= need - available
            course.reserved_gpus += need - available
            available = 0
            _wait_for_release(course, job_id, need, position)
        else:
            _wait_for_gpus(course, job_id, need, available, position)
            if course.policies.strict:
                _wait_behind(course, order[position + 1 :], job_id)
                break
    widths = _starting_widths(course, starters, available)
    for job_id, least in starters.items():
        _start(course, jobs[job_id], widths.get(job_id, least))


def _starting_widths(course: Course, starters: Mapping[str, int], spare: int) -> Mapping[str, int]:
    """How wide new jobs start: as narrow as they can, unless GPUs are left over and nobody waits for them."""
    if course.policies.scale is None or course.waiting_for_gpus or not starters or spare <= 0:
        return {}
    wanted = course.policies.scale(course.view, starters, spare, course.settings)
    widths: dict[str, int] = {}
    for job_id, least in starters.items():
        widths[job_id] = min(max(wanted.get(job_id, least), least), least + spare)
        spare -= widths[job_id] - least
    return widths


def _start(course: Course, job: Job, width: int) -> None:
    """Start on `width` GPUs, else on the next smaller count that has room and a plan."""
    target = extended(course, job, width, job.spec.min_gpus)
    if target is None:
        _explain_misfit(course, job)
        return
    gpus, plan = target
    detail = f"next in order; {gpu_sets.count(gpus)} GPUs on {gpu_sets.text(gpus)} as {plan.summary()}"
    course.take(StartJob(job.id, gpus, plan, Reason(ReasonCode.FIRST_IN_ORDER, detail)))
    course.touched.add(job.id)


def _flexible_gpus(course: Course) -> int:
    """GPUs that running elastic jobs hold above their minimum and that may be taken now."""
    if course.policies.scale is None or course.draft.base.switches.resizes_frozen:
        return 0
    return sum(
        max(0, job.allocation.target_gpus - job.spec.min_gpus)
        for job in course.draft.jobs.values()
        if job.state is JobState.RUNNING and job.intent is Intent.RUN and job.id not in course.touched
    )


def _explain_misfit(course: Course, job: Job) -> None:
    room = usable_by(job, course.draft.rooms)
    free = sum(len(r.free) for r in room)
    numbers = {"needed_gpus": float(job.spec.min_gpus), "free_gpus": float(free)}
    if free >= job.spec.min_gpus:
        detail = f"{free} GPUs are free, but no plan is solved for the way they lie"
        course.waiting[job.id] = Reason(ReasonCode.WAITING_FOR_PLAN, detail, numbers)
    else:
        flavor = job.spec.gpu or "GPUs it may use"
        detail = f"needs {job.spec.min_gpus} {flavor}, {free} are free"
        course.waiting[job.id] = Reason(ReasonCode.NO_MATCHING_FLAVOR, detail, numbers)


def _wait_for_release(course: Course, job_id: str, need: int, position: int) -> None:
    detail = f"needs {need} GPUs; running jobs are giving theirs up for it"
    numbers = {"needed_gpus": float(need), "position": float(position + 1)}
    course.waiting[job_id] = Reason(ReasonCode.WAITING_FOR_RELEASE, detail, numbers)


def _wait_for_gpus(course: Course, job_id: str, need: int, free: int, position: int) -> None:
    numbers = {"needed_gpus": float(need), "free_gpus": float(free), "position": float(position + 1)}
    detail = f"needs {need} GPUs, {free} are free; number {position + 1} in the queue"
    course.waiting[job_id] = Reason(ReasonCode.INSUFFICIENT_GPUS, detail, numbers)
    course.waiting_for_gpus = True


def _wait_behind(course: Course, job_ids: Iterable[str], head: str) -> None:
    for job_id in job_ids:
        course.waiting[job_id] = Reason(ReasonCode.BEHIND_HEAD, f"waits behind {head}, the head of the queue")
