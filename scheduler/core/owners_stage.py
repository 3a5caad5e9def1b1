"""Stage of decide: what owners asked of their jobs, and jobs that have no future."""

from __future__ import annotations

from scheduler.core.course import Course, run_time_ends_s
from scheduler.domain import gpus as gpu_sets
from scheduler.domain.decision import RejectJob, StopJob, SuspendRun
from scheduler.domain.gpu_shape import canonical_counts
from scheduler.domain.job import Intent, Job
from scheduler.domain.job_state import JobState
from scheduler.domain.memory_record import MEMORY_TRIES_MAX
from scheduler.domain.reason import Reason, ReasonCode
from scheduler.domain.scaling_curve import LINEAR_CURVE, LinearCurve
from scheduler.policies.speed import packed


def honour_owners(course: Course) -> None:
    """Cancel and suspend what owners asked to; end jobs that ran too long or never can."""
    for job in course.draft.ledger.ordered(course.draft.ledger.watched):
        if job.intent is Intent.CANCEL:
            course.take(StopJob(job.id, course.now_s, Reason(ReasonCode.OWNER_ASKED, "cancelled by its owner")))
        elif _ran_too_long(course, job):
            detail = f"it has run for its maxRunTime, {job.spec.run_time_s_max:.0f} s"
            course.take(StopJob(job.id, course.leave_by_s(job), Reason(ReasonCode.RUN_TIME_EXCEEDED, detail)))
        elif job.intent is Intent.SUSPEND and job.state is not JobState.SUSPENDED:
            reason = Reason(ReasonCode.OWNER_ASKED, "suspended by its owner")
            course.take(SuspendRun(job.id, course.leave_by_s(job), reason))
        elif job.state is JobState.QUEUED and (why := _never_feasible(course, job)):
            course.take(RejectJob(job.id, _no_plan(job, why)))
        elif job.state is JobState.PLANNING:
            course.waiting[job.id] = _why_planning(course, job)
        elif job.state is JobState.SUSPENDED:
            course.waiting[job.id] = Reason(ReasonCode.SUSPENDED, "suspended by its owner")


def _ran_too_long(course: Course, job: Job) -> bool:
    ends_s = run_time_ends_s(job)
    return ends_s is not None and course.now_s >= ends_s


def _why_planning(course: Course, job: Job) -> Reason:
    """A shape is solved for GPUs that the fleet has: without any, the solver is not what the job waits for. Nor is it
    where the job only pauses after a death by memory."""
    if job.spec.gpu and job.spec.gpu not in course.node_sizes:
        return Reason(ReasonCode.NO_MATCHING_FLAVOR, f"no node has {job.spec.gpu}")
    memory = job.memory
    numbers = {"memory_deaths": float(len(memory.deaths)), "memory_factor": memory.factor} if memory.deaths else {}
    if memory.retry_at_s is not None and course.draft.base.curve(job).is_solved_for(job.spec.min_gpus):
        pause_s = memory.retry_at_s - course.now_s
        detail = f"it died of memory {len(memory.deaths)} of {MEMORY_TRIES_MAX} times and pauses for {pause_s:.0f} s"
        return Reason(ReasonCode.BACKING_OFF, detail, {**numbers, "retry_at_s": memory.retry_at_s})
    thrifty = f" that fits with {memory.factor:.2f} times its predicted memory" if memory.percent > 100 else ""
    detail = f"no plan for its minimum of {gpu_sets.counted(job.spec.min_gpus)}{thrifty} is solved yet"
    return Reason(ReasonCode.WAITING_FOR_PLAN, detail, numbers)


def _no_plan(job: Job, why: str) -> Reason:
    memory = job.memory
    if not memory.deaths:
        return Reason(ReasonCode.NO_FEASIBLE_PLAN, why)
    detail = (
        f"{why}; it needs {memory.factor:.2f} times what is predicted, for it died of memory as {memory.deaths[-1]}"
    )
    return Reason(ReasonCode.NO_FEASIBLE_PLAN, detail, {"memory_factor": memory.factor})


def _never_feasible(course: Course, job: Job) -> str:
    """Why no count of the job's range can ever run on any GPU of the fleet; empty while one can or may."""
    curve = course.draft.base.curve(job) if job.spec.has_profile else LINEAR_CURVE
    if isinstance(curve, LinearCurve) or not curve.infeasible:
        return ""
    why = ""
    for gpu, size in course.node_sizes.items():
        if job.spec.gpu not in ("", gpu):
            continue
        for count in canonical_counts(job.spec.min_gpus, job.spec.max_gpus, size):
            shape = packed(gpu, count, size)
            if shape not in curve.infeasible:
                return ""
            why = f"no plan fits, not even {shape}: {curve.infeasible[shape]}"
    return why
