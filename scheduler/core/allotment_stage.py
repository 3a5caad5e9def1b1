"""Stage of decide for policy sets that allot: bring what every job holds towards what it should hold now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from scheduler.core.course import Course
from scheduler.core.flexing_stage import fit_ranges
from scheduler.core.starting_stage import explain_misfit, start, wait_for_release
from scheduler.core.stock import releasing_by_kind
from scheduler.core.targets import extended, may_shrink, reduced
from scheduler.domain import gpus as gpu_sets
from scheduler.domain.decision import PreemptJob, ResizeJob
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.ledger import Kind
from scheduler.domain.reason import Reason, ReasonCode
from scheduler.policies.allotment import Allotment, capacity_by_kind, held_by_kind
from scheduler.policies.quota import QuotaBook
from scheduler.policies.speed import least_gpus


@dataclass(frozen=True, slots=True)
class Offer:
    """GPUs that a running job would give up, so that it holds `left`; none of them means that it is preempted."""

    job: Job
    left: int
    gives: Counter[Kind]


@dataclass(slots=True)
class Deal:
    """What is left while the allotment is gone through in order, and what has come of it so far."""

    free: Counter[Kind]
    soon: Counter[Kind]
    offers: list[Offer]
    book: QuotaBook
    starts: dict[str, int] = field(default_factory=dict)
    grows: dict[str, int] = field(default_factory=dict)
    given_up: list[tuple[Offer, Job]] = field(default_factory=list)


def settle_allotment(course: Course) -> None:
    """Start who is allotted GPUs that are free, and make room for whoever is allotted more than that.

    Nobody gives up a GPU that nobody else is waiting for: a job that is allotted less, or nothing, keeps what it has
    until then. Growing needs a rest of `resize_pause_s`, and takes GPUs from others at full passes only. A job that
    fits by count but not the way the free GPUs lie, or that its queue's limit forbids to start, is left out, and the
    rest is allotted again.
    """
    fit_ranges(course)
    left_out: set[str] = set()
    while True:
        allotment, over = _allotment(course, left_out)
        left_out |= over
        if over:
            continue
        deal = _deal(course, allotment)
        for job_id, count in deal.starts.items():
            job = course.draft.jobs[job_id]
            start(course, job, count, job.spec.min_gpus)
        misfits = {job_id for job_id in deal.starts if course.draft.jobs[job_id].state is JobState.QUEUED}
        if not misfits:
            break
        left_out |= misfits
    course.recheck_s = allotment.valid_until_s
    for offer, winner in deal.given_up:
        _give_up(course, allotment, offer, winner)
    for job_id, count in deal.grows.items():
        _grow(course, course.draft.jobs[job_id], count)


def _allotment(course: Course, left_out: set[str]) -> tuple[Allotment, set[str]]:
    """The allotment within the limits of the queues, and the waiting jobs that a limit keeps out of it."""
    assert course.policies.allot is not None
    view = course.view
    if left_out:
        view = replace(view, jobs={job_id: job for job_id, job in view.jobs.items() if job_id not in left_out})
    allotment = course.policies.allot(view, capacity_by_kind(view).total(), course.settings)
    book = QuotaBook(replace(view, jobs={}))
    if not book:
        return allotment, set()
    gpus, over = dict(allotment.gpus), dict[str, Reason]()
    for job_id, count in allotment.gpus.items():
        job = view.jobs[job_id]
        within = max(job.spec.min_gpus, count - book.excess(job, count))
        if count and (why := book.verdict(job, within)):
            over[job_id], gpus[job_id] = why, 0
        elif count:
            book.take(job, within)
            gpus[job_id] = within
    waiting = [job_id for job_id in over if not view.jobs[job_id].is_placed]
    course.waiting.update((job_id, over[job_id]) for job_id in waiting)
    return replace(allotment, gpus=gpus, waiting={**allotment.waiting, **over}), set(waiting)


def _deal(course: Course, allotment: Allotment) -> Deal:
    """Who starts and grows now, who gives up what for whom; all others wait, with the reason."""
    deal = Deal(
        Counter(course.draft.ledger.free), releasing_by_kind(course), _offers(course, allotment), QuotaBook(course.view)
    )
    jobs = course.draft.jobs
    for position, (job_id, count) in enumerate(allotment.gpus.items()):
        job, missing = jobs[job_id], count - jobs[job_id].allocation.target_gpus
        if job.is_placed and missing > 0 and _may_grow(course, job):
            _find_more(course, deal, job, _within_limits(deal, job, count, offers=course.full_pass))
        elif not job.is_placed and count:
            _find_room(course, deal, job, _within_limits(deal, job, count, offers=True), position)
    for job_id, reason in allotment.waiting.items():
        if jobs[job_id].state is JobState.QUEUED and not allotment.gpus.get(job_id):
            course.waiting[job_id] = reason
    return deal


def _within_limits(deal: Deal, job: Job, count: int, *, offers: bool) -> int:
    """As many of `count` GPUs as the limits of the job's queue leave it now. With `offers`, those under the same limit
    that hold more than their allotment give up what is missing."""
    more = count - job.allocation.target_gpus
    over, of_user = deal.book.excess(job, more), deal.book.user_excess(job, more)
    missing = over
    for offer in tuple(deal.offers) if offers else ():
        other = offer.job
        if missing > 0 and other.spec.queue == job.spec.queue and (not of_user or other.owner == job.owner):
            deal.given_up.append((offer, job))
            deal.offers.remove(offer)
            deal.soon += offer.gives
            missing -= other.allocation.target_gpus - offer.left
    return count - over


def _find_room(course: Course, deal: Deal, job: Job, count: int, position: int) -> None:
    """GPUs to start on: those that are free, else also those that come free soon, else also what others give up."""
    least = least_gpus(course.view, job, course.node_sizes)
    if count < least and (why := deal.book.verdict(job, least)):
        if job.state is JobState.QUEUED:
            course.waiting[job.id] = why
        return
    models = _models(course, job)
    for wanted in dict.fromkeys((count, least)):
        for kinds in models:
            if job.state is JobState.QUEUED and _total(deal.free, kinds) >= wanted:
                _take(wanted, kinds, deal.free)
                deal.book.take(job, wanted)
                deal.starts[job.id] = wanted
                return
        if any(_wait_for(deal, job, wanted, kinds, offers=False) for kinds in models) or any(
            _wait_for(deal, job, wanted, kinds, offers=True) for kinds in models
        ):
            if job.state is JobState.QUEUED:
                wait_for_release(course, job.id, wanted, position)
            return
    if job.state is JobState.QUEUED:
        explain_misfit(course, job, job.spec.min_gpus)


def _find_more(course: Course, deal: Deal, job: Job, count: int) -> None:
    kinds = [kind for of_model in _models(course, job) for kind in of_model]
    missing = count - job.allocation.target_gpus
    if missing <= 0:
        return
    if _total(deal.free, kinds) >= missing:
        _take(missing, kinds, deal.free)
        deal.book.take(job, missing)
        deal.grows[job.id] = count
    elif not _wait_for(deal, job, missing, kinds, offers=course.full_pass) and (more := _total(deal.free, kinds)) > 0:
        _take(more, kinds, deal.free)
        deal.book.take(job, more)
        deal.grows[job.id] = job.allocation.target_gpus + more


def _wait_for(deal: Deal, job: Job, wanted: int, kinds: list[Kind], *, offers: bool) -> bool:
    """Keep what comes free soon, and what is free, for the job; with `offers` also what others have to give up."""
    missing = wanted - _total(deal.soon, kinds) - _total(deal.free, kinds)
    chosen: list[Offer] = []
    for offer in deal.offers if offers else ():
        if missing > 0 and offer.job.id != job.id and (gain := _total(offer.gives, kinds)):
            chosen.append(offer)
            missing -= gain
    if missing > 0:
        return False
    for offer in reversed(chosen):
        if missing + _total(offer.gives, kinds) <= 0:  # a later one freed so much that this one need not give
            missing += _total(offer.gives, kinds)
        else:
            deal.given_up.append((offer, job))
            deal.offers.remove(offer)
            deal.soon += offer.gives
    _take(wanted, kinds, deal.soon, deal.free)
    return True


def _offers(course: Course, allotment: Allotment) -> list[Offer]:
    """What running jobs hold beyond their allotment, in the order in which it is taken: parts before whole jobs, and
    of the jobs those first that come last. One that is about to run is let come to it."""
    if course.draft.base.switches.resizes_frozen:
        return []
    parts: list[Offer] = []
    wholes: list[Offer] = []
    losers = (job_id for job_id in allotment.waiting if job_id not in allotment.gpus)
    for job_id in reversed([*allotment.gpus, *losers]):
        job, left = course.draft.jobs[job_id], allotment.gpus.get(job_id, 0)
        if job.allocation.target_gpus > left and may_shrink(course, job) and (gives := _given(course, job, left)):
            (parts if left else wholes).append(Offer(job, left, gives))
    return parts + wholes


def _given(course: Course, job: Job, left: int) -> Counter[Kind]:
    """The GPUs on nodes that others may use which a job gives up when it keeps `left`: lent ones first."""
    view, gives = course.view, Counter[Kind]()
    surplus = job.allocation.target_gpus - left
    for (gpu, lent), count in reversed(list(held_by_kind(view, job).items())):
        gives[gpu, lent] = min(count, max(0, surplus - gives.total()))
    for name, indices in job.allocation.target.items():
        node = view.nodes.get(name)
        if node is not None and not view.serves_training(node):
            gives[node.gpu, view.is_lent(node)] -= len(indices)
    return +gives


def _models(course: Course, job: Job) -> list[list[Kind]]:
    """The kinds of GPU that the job may take together: one list a model, the one with most free first."""
    free = course.draft.ledger.free
    held = {gpu for gpu, _ in held_by_kind(course.view, job)}
    models = sorted(held or ({job.spec.gpu} if job.spec.gpu else course.node_sizes))
    kinds = [[(gpu, lent) for lent in ((False, True) if job.spec.fungible else (False,))] for gpu in models]
    return sorted(kinds, key=lambda of_model: -sum(free.get(kind, 0) for kind in of_model))


def _total(counts: Counter[Kind], kinds: Iterable[Kind]) -> int:
    return sum(counts[kind] for kind in kinds)


def _take(wanted: int, kinds: Iterable[Kind], *sources: Counter[Kind]) -> None:
    for counts in sources:
        for kind in kinds:
            part = min(wanted, max(0, counts[kind]))
            counts[kind] -= part
            wanted -= part


def _may_grow(course: Course, job: Job) -> bool:
    rested = course.now_s - job.state_since_s >= course.settings.resize_pause_of(job)
    at_least = job.allocation.target_gpus <= job.spec.min_gpus
    return may_shrink(course, job) and (rested or at_least) and not course.draft.base.switches.resizes_frozen


def _give_up(course: Course, allotment: Allotment, offer: Offer, winner: Job) -> None:
    job, leave_by_s = offer.job, course.leave_by_s(offer.job)
    need = gpu_sets.counted(allotment.gpus[winner.id])
    numbers = {"allotted_gpus": float(offer.left), "needed_gpus": float(allotment.gpus[winner.id])}
    if offer.left:
        target = reduced(course, job, job.allocation.target, offer.left)
        if target is not None:
            gpus, plan = target
            detail = f"its share is {gpu_sets.counted(offer.left)} now; {winner.id} is to have {need}"
            reason = Reason(ReasonCode.MAKES_ROOM, detail, numbers)
            course.take(ResizeJob(job.id, gpus, plan, leave_by_s, reason))
    else:
        why = allotment.waiting.get(job.id)
        detail = f"{winner.id} comes before it and needs {need}" + (f"; {why.detail}" if why else "")
        numbers = {**(why.numbers if why else {}), **numbers}
        course.take(PreemptJob(job.id, leave_by_s, Reason(ReasonCode.OUTRANKED, detail, numbers)))
    course.touched.add(job.id)


def _grow(course: Course, job: Job, count: int) -> None:
    present = job.allocation.target_gpus
    target = extended(course, job, count, present + 1)
    if target is None:
        return
    gpus, plan = target
    detail = f"GPUs are free, and its share is {gpu_sets.counted(count)} now"
    reason = Reason(ReasonCode.GAIN, detail, {"allotted_gpus": float(count)})
    course.take(ResizeJob(job.id, gpus, plan, course.leave_by_s(job), reason))
    course.touched.add(job.id)
