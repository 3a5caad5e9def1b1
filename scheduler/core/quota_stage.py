"""What quotas add to the stages that start and flex: who is refused, who gives way, and what scaling leaves alone."""

from __future__ import annotations

from collections.abc import Mapping

from scheduler.core.course import Course
from scheduler.core.stock import Stock
from scheduler.core.targets import reduced
from scheduler.domain.decision import PreemptJob, ResizeJob
from scheduler.domain.gpus import counted
from scheduler.domain.job import Job
from scheduler.domain.reason import Reason, ReasonCode
from scheduler.policies.quota import QuotaBook
from scheduler.policies.quota_reclaim import Givers, QuotaReclaim


def is_refused(course: Course, stock: Stock, givers: Givers, job: Job) -> bool:
    """The job waits for a limit of its queue. Where flexible GPUs of its queue stand in its way, they are given up."""
    offer = stock.offer(job) or stock.promise(job)
    gpus = offer[1] if offer else job.spec.min_gpus
    if (verdict := givers.book.verdict(job, gpus)) is None:
        return False
    course.waiting[job.id] = verdict
    if counts := givers.room_within_limit(job, gpus):
        reason = Reason(
            ReasonCode.QUOTA_RECLAIMED, f"{job.id} needs room under {_which(verdict)} of queue {job.spec.queue}"
        )
        course.giving_way |= {job_id: (count, reason) for job_id, count in counts.items()}
        givers.book.take(job, gpus)
    return True


def _which(verdict: Reason) -> str:
    return "the user limit" if verdict.code is ReasonCode.WAITING_FOR_USER_LIMIT else "the limit"


def is_reclaiming(course: Course, stock: Stock, givers: Givers, job: Job) -> bool:
    """Others give way to the job, because its queue is guaranteed what they have; it waits until they have."""
    if (short := stock.shortage(job)) is None:
        return False
    gpu, gpus, missing = short
    if (found := givers.reclaim(job, gpu, missing)) is None:
        return False
    detail = f"{job.id} needs {counted(gpus)} of what queue {job.spec.queue} is guaranteed"
    reason = Reason(ReasonCode.QUOTA_RECLAIMED, detail)
    course.giving_way |= {job_id: (count, reason) for job_id, count in found.counts.items()}
    course.promised[job.id] = stock.reserve(job, gpu, gpus)
    givers.book.take(job, gpus)
    course.waiting_for_gpus = True
    course.waiting[job.id] = _why_reclaiming(course, found, job, gpus, missing)
    return True


def within_limits(
    course: Course, book: QuotaBook, leasts: Mapping[str, int], widths: Mapping[str, int]
) -> Mapping[str, int]:
    """How wide jobs may start that were dealt `leasts` already."""
    if not book:
        return widths
    allowed: dict[str, int] = {}
    for job_id, width in widths.items():
        job = course.draft.jobs[job_id]
        more = min(width - leasts[job_id], book.headroom(job))
        book.take(job, more)
        allowed[job_id] = leasts[job_id] + more
    return allowed


def give_way(course: Course) -> None:
    """Shrink or preempt those who have what a queue is guaranteed."""
    for job_id, (count, reason) in course.giving_way.items():
        job = course.draft.jobs[job_id]
        if not count:
            course.take(PreemptJob(job_id, course.leave_by_s(job), reason))
        elif target := reduced(course, job, job.allocation.target, count):
            course.take(ResizeJob(job_id, *target, course.leave_by_s(job), reason))
        course.touched.add(job_id)


def _why_reclaiming(course: Course, found: QuotaReclaim, job: Job, gpus: int, missing: int) -> Reason:
    numbers = {"needed_gpus": float(gpus), "missing_gpus": float(missing)}
    own = f"needs {counted(gpus)} of what queue {job.spec.queue} is guaranteed"
    if found.held_until_s is None:
        return Reason(ReasonCode.WAITING_FOR_RELEASE, f"{own}; who has them is giving them up", numbers)
    course.recheck_s = min(course.recheck_s, found.held_until_s)
    left_s = found.held_until_s - course.now_s
    numbers["held_until_s"] = found.held_until_s
    detail = f"{own}; those who borrow them may run {left_s:.0f} s more, their minimum run time"
    return Reason(ReasonCode.HELD_BY_MINIMUM_RUNTIME, detail, numbers)
