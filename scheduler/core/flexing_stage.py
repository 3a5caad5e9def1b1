"""Stage of decide: flexible GPUs, those that jobs hold above their minimum."""

from __future__ import annotations

from dataclasses import replace

from scheduler.core.course import Claim, Course
from scheduler.core.quota_stage import give_way
from scheduler.core.stock import releasing_by_kind
from scheduler.core.targets import extended, may_shrink, reduced
from scheduler.domain.decision import ResizeJob
from scheduler.domain.job import Job
from scheduler.domain.loan import LoanState
from scheduler.domain.reason import Reason, ReasonCode
from scheduler.policies.quota import QuotaBook, within_quota

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
    flexible GPUs to where the curves say they gain most, at full passes and when GPUs have just come free."""
    give_way(course)
    fit_ranges(course)
    if course.policies.scale is None or course.draft.base.switches.resizes_frozen:
        return
    if course.reserved:
        _make_room(course)
    elif course.full_pass or _came_free(course):
        _rebalance(course)


def _came_free(course: Course) -> bool:
    """A job's last GPUs were seen free just now, or a lent node has begun to serve, and some job could have more."""
    ledger, jobs = course.draft.ledger, course.draft.jobs
    if not ledger.usable_gpus or not ledger.growable:
        return False
    if any(jobs[job_id].is_ended and not jobs[job_id].allocation.held_gpus for job_id in ledger.unsettled):
        return True
    loans = course.draft.loans.values()
    return any(loan.state is LoanState.ACTIVE and loan.state_since_s == course.now_s for loan in loans)


def fit_ranges(course: Course) -> None:
    """Bring running jobs that are outside their (changed) range inside."""
    for job in course.draft.ledger.ordered(course.draft.ledger.misfits):
        _fit_range(course, job)


def _make_room(course: Course) -> None:
    """Shrink jobs that sit where the waiting ones could go."""
    releasing, arriving = releasing_by_kind(course), course.policies.arriving(course.view, course.settings)
    for claim, gpus in course.reserved.items():
        missing = gpus - sum(releasing[claim.gpu, lent] for lent in ((False,) if claim.owned_only else (False, True)))
        if missing <= 0:
            continue
        flexible = course.draft.ledger.ordered(course.draft.ledger.flexible)
        jobs = {job.id: job for job in flexible if _serves(course, job, claim)}
        book = QuotaBook(course.view)
        if book:
            jobs = {job_id: job for job_id, job in jobs.items() if book.spare(job, 1)}
        view = replace(course.view, jobs=jobs)
        for job_id, count in course.policies.make_room(view, missing + arriving, course.settings).items():
            job = course.draft.jobs[job_id]
            freed = book.spare(job, job.allocation.target_gpus - count)
            book.give_back(job, freed)
            if freed:
                _shrink(course, job, job.allocation.target_gpus - freed)


def _serves(course: Course, job: Job, claim: Claim) -> bool:
    """Shrinking this job frees GPUs that the claim can use. Lent GPUs are given up first."""
    nodes = [course.draft.base.nodes[name] for name in job.allocation.target]
    if not nodes or not may_shrink(course, job) or nodes[0].gpu != claim.gpu:
        return False
    return not claim.owned_only or not any(course.view.is_lent(node) for node in nodes)


def _rebalance(course: Course) -> None:
    assert course.policies.scale is not None
    spare = max(0, course.usable_gpus - course.policies.arriving(course.view, course.settings))
    wanted = course.policies.scale(course.view, (), spare, course.settings)
    wanted = within_quota(course.view, course.book or QuotaBook(course.view), wanted)
    for job_id, count in wanted.items():
        job = course.draft.jobs[job_id]
        if count < job.allocation.target_gpus and job_id not in course.touched:
            _shrink(course, job, count, ReasonCode.GAIN)
    book = QuotaBook(course.view)  # where somebody could not shrink after all, there is less room under a limit
    for job_id, count in wanted.items():
        job = course.draft.jobs[job_id]
        present = job.allocation.target_gpus
        most = min(count, present + course.usable_gpus, present + book.headroom(job))
        if most > present and job_id not in course.touched:
            _grow(course, job, most)
            book.take(job, course.draft.jobs[job_id].allocation.target_gpus - present)


def _fit_range(course: Course, job: Job) -> None:
    if job.id in course.touched:
        return
    target = job.allocation.target_gpus
    if target > job.spec.max_gpus:
        _shrink(course, job, job.spec.max_gpus, ReasonCode.RANGE_CHANGED)
    elif target < (least := job.spec.min_gpus) and not QuotaBook(course.view).verdict(job, least - target):
        _grow(course, job, job.spec.min_gpus, ReasonCode.RANGE_CHANGED)


def _shrink(course: Course, job: Job, count: int, code: ReasonCode = ReasonCode.MAKES_ROOM) -> None:
    target = reduced(course, job, job.allocation.target, max(count, job.spec.min_gpus))
    if target is None:
        return
    gpus, plan = target
    course.take(ResizeJob(job.id, gpus, plan, course.leave_by_s(job), Reason(code, _WHY_LESS[code])))
    course.touched.add(job.id)


def _grow(course: Course, job: Job, count: int, code: ReasonCode = ReasonCode.GAIN) -> None:
    present = job.allocation.target_gpus
    target = extended(course, job, count, max(present + 1, job.spec.min_gpus))
    if target is None:
        return
    gpus, plan = target
    course.take(ResizeJob(job.id, gpus, plan, course.leave_by_s(job), Reason(code, _WHY_MORE[code])))
    course.touched.add(job.id)
