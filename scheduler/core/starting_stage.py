"""Stage of decide: base demand. Who starts, and why the others wait."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set

from scheduler.core.clearing import clear_nodes, keep_cleared, whole_nodes
from scheduler.core.course import Course
from scheduler.core.mixed import mixed_target
from scheduler.core.quota_stage import is_reclaiming, is_refused, within_limits
from scheduler.core.stock import Stock
from scheduler.core.targets import Target, extended
from scheduler.domain import gpus as gpu_sets
from scheduler.domain.decision import StartJob
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.reason import Reason, ReasonCode
from scheduler.policies.ordering import is_overdue
from scheduler.policies.placement import usable_by
from scheduler.policies.quota import QuotaBook
from scheduler.policies.quota_reclaim import Givers

Offer = tuple[str, int]
"""A GPU model, and how many GPUs of it."""

_QUEUED = JobState.QUEUED


def start_waiting(course: Course) -> None:
    """Base demand in order. A job that fits once flexible workers have shrunk gets room reserved for it, so that
    nobody behind it takes what is free meanwhile. Nobody delays the first that has to wait; where nobody can tell what
    would, nobody at all passes one that is overdue.

    Counts alone do not tell whether a job fits the way the free GPUs lie. One that does not is passed over, and
    what it was dealt is dealt again.
    """
    if not course.draft.ledger.waiting:
        return
    queue = course.policies.order(course.view, course.settings)
    if course.policies.backfill:
        keep_cleared(course, queue)
    misfits: set[str] = set()
    while True:
        course.book = book = course.draft.quotas.copy()
        stock = Stock(course)
        starters = _deal(course, book, stock, book.order(queue), misfits)
        _start_all(course, book, stock, starters)
        failed = {job_id for job_id in starters if course.draft.jobs[job_id].state is _QUEUED}
        if not failed:
            break
        misfits |= failed
        queue = tuple(job_id for job_id in queue if course.draft.jobs[job_id].state is _QUEUED)
    _start_mixed(course, queue)
    if course.policies.backfill:
        _clear_for_first(course, [job_id for job_id in queue if job_id in misfits or job_id in course.promised])


def _start_mixed(course: Course, queue: Iterable[str]) -> None:
    """Jobs that no GPU model alone can hold, on what all others have left of two."""
    if len(course.node_sizes) < 2:
        return
    for job_id in queue:
        job, reason = course.draft.jobs[job_id], course.waiting.get(job_id)
        if reason is None or reason.code is not ReasonCode.NO_MATCHING_FLAVOR or job.state is not _QUEUED:
            continue
        if course.book and (why := course.book.verdict(job, job.spec.min_gpus)):
            course.waiting[job_id] = why
            continue
        if target := mixed_target(course, job, job.spec.min_gpus):
            if course.book:
                course.book.take(job, gpu_sets.count(target[0]))
            _start_on(course, job, target)


def _clear_for_first(course: Course, queue: Iterable[str]) -> None:
    """Whole nodes for the first job that lacks nothing else, or gets what it lacks from elastic jobs."""
    job_id = next((job_id for job_id in queue if whole_nodes(course, course.draft.jobs[job_id])), None)
    if job_id and (nodes := clear_nodes(course, course.draft.jobs[job_id])):
        course.promised.pop(job_id, None)
        detail = f"needs {nodes} whole nodes; running jobs are moving off them"
        numbers = {"needed_nodes": float(nodes)}
        course.waiting[job_id] = Reason(ReasonCode.WAITING_FOR_RELEASE, detail, numbers)


def _deal(course: Course, book: QuotaBook, stock: Stock, queue: Sequence[str], misfits: Set[str]) -> dict[str, Offer]:
    """Who starts, with the GPU model and count that it is sure of; everybody else waits, with the reason."""
    givers = Givers(course.view, book, course.settings, course.touched) if book else None
    course.promised.clear()
    course.giving_way.clear()
    course.waiting_for_gpus = False
    starters: dict[str, Offer] = {}
    short: list[Job] = []
    for position, job_id in enumerate(queue):
        job = course.draft.jobs[job_id]
        stock.come_to(job)
        if job_id in misfits and course.policies.strict:
            _wait_behind(course, queue[position + 1 :], job_id)
            break
        if job_id in misfits:
            _keep_place(course, stock, job)
        elif givers and is_refused(course, stock, givers, job):
            continue
        elif offer := stock.offer(job):
            starters[job_id] = offer
            stock.take(job, *offer)
            book.take(job, offer[1])
        elif promise := stock.promise(job):
            book.take(job, promise[1])
            course.promised[job_id] = stock.reserve(job, *promise)
            wait_for_release(course, job_id, promise[1], position)
        elif givers and is_reclaiming(course, stock, givers, job):
            continue
        else:
            _wait(course, stock, job, position)
            short.append(job)
            if course.policies.strict:
                _wait_behind(course, queue[position + 1 :], job_id)
                break
    offer = stock.meagre_offer(short[0]) if len(short) == 1 else None
    if offer and not book.verdict(short[0], offer[1]):  # nobody else waits: better slowly than not
        starters[short[0].id] = offer
        book.take(short[0], offer[1])
        course.waiting_for_gpus = False
    return starters


def _keep_place(course: Course, stock: Stock, job: Job) -> None:
    """For an overdue job that nobody is kept from delaying yet: with a start in sight it needs no more than that."""
    if not stock.keeps_a_start and is_overdue(job, course.now_s, course.settings) and stock.could_hold(job):
        stock.close(job)


def _start_all(course: Course, book: QuotaBook, stock: Stock, starters: Mapping[str, Offer]) -> None:
    """Start the jobs, as wide as it pays on GPUs that were dealt to nobody."""
    widths: dict[str, int] = {}
    for gpu in sorted({gpu for gpu, _ in starters.values()}):
        leasts = {job_id: least for job_id, (model, least) in starters.items() if model == gpu}
        widths |= within_limits(course, book, leasts, _starting_widths(course, leasts, stock.left(gpu)))
    for job_id, (_, least) in starters.items():
        start(course, course.draft.jobs[job_id], widths.get(job_id, least), least)


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


def start(course: Course, job: Job, width: int, least: int) -> None:
    """Start on `width` GPUs, else on the next smaller count down to `least` that has room and a plan."""
    target = extended(course, job, width, least)
    if target is None:
        explain_misfit(course, job, least)
        return
    _start_on(course, job, target)


def _start_on(course: Course, job: Job, target: Target) -> None:
    gpus, plan = target
    detail = f"next in order; {gpu_sets.counted(gpu_sets.count(gpus))} on {gpu_sets.text(gpus)} as {plan.summary()}"
    course.take(StartJob(job.id, gpus, plan, Reason(ReasonCode.FIRST_IN_ORDER, detail)))
    course.waiting.pop(job.id, None)
    course.touched.add(job.id)


def explain_misfit(course: Course, job: Job, need: int) -> None:
    room = usable_by(job, course.rooms_for(job))
    free = sum(len(r.free) for r in room)
    numbers = {"needed_gpus": float(need), "free_gpus": float(free)}
    if free >= need and any(wanted.curve_key == job.curve_key for wanted in course.wanted):
        detail = f"{free} GPUs are free, but no plan is solved yet for the way they lie"
        course.waiting[job.id] = Reason(ReasonCode.WAITING_FOR_PLAN, detail, numbers)
    elif free >= need:
        detail = f"{free} GPUs are free on {len(room)} nodes, but no plan works on them the way they lie"
        course.waiting[job.id] = Reason(ReasonCode.TOPOLOGY, detail, numbers)
    else:
        flavor = job.spec.gpu or "GPUs it may use"
        detail = f"needs {need} {flavor}, {free} are free"
        course.waiting[job.id] = Reason(ReasonCode.NO_MATCHING_FLAVOR, detail, numbers)


def wait_for_release(course: Course, job_id: str, need: int, position: int) -> None:
    detail = f"needs {gpu_sets.counted(need)}; running jobs are giving theirs up for it"
    numbers = {"needed_gpus": float(need), "position": float(position + 1)}
    course.waiting[job_id] = Reason(ReasonCode.WAITING_FOR_RELEASE, detail, numbers)


def _wait(course: Course, stock: Stock, job: Job, position: int) -> None:
    """Wait for GPUs that others use: behind an overdue job, as an overdue job, or in line."""
    need, free = stock.need(job), stock.free(job)
    numbers = {"needed_gpus": float(need), "free_gpus": float(free), "position": float(position + 1)}
    if (head := stock.held_back_by(job)) is not None:
        detail = f"needs {gpu_sets.counted(need)}, free now: {free}; waits behind {head}, which it would delay"
        course.waiting[job.id] = Reason(ReasonCode.BEHIND_HEAD, detail, numbers)
        return
    if not stock.could_hold(job):
        detail = f"needs {need} {job.spec.gpu or 'GPUs'}, more than all nodes have that it may use now"
        course.waiting[job.id] = Reason(ReasonCode.NO_MATCHING_FLAVOR, detail, numbers)
        return
    detail = f"needs {gpu_sets.counted(need)}, free now: {free}; number {position + 1} in the queue"
    course.waiting[job.id] = Reason(ReasonCode.INSUFFICIENT_GPUS, detail, numbers)
    course.waiting_for_gpus = True
    stock.keep_for(job)
    _keep_place(course, stock, job)


def _wait_behind(course: Course, job_ids: Iterable[str], head: str) -> None:
    """One reason for all: thousands may wait behind one, on every tick."""
    reason = Reason(ReasonCode.BEHIND_HEAD, f"waits behind {head}, the head of the queue")
    course.waiting.update(dict.fromkeys(job_ids, reason))
