"""Stage of decide for policy sets that allot: bring what every job holds towards what it should hold now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from scheduler.domain import gpu_sets
from scheduler.domain.decisions import PreemptJob, Reason, ReasonCode, ResizeJob
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.snapshot_index import GpuKind
from scheduler.scheduling.cycle import SchedulingCycle
from scheduler.scheduling.gpu_budget import count_releasing_gpus
from scheduler.scheduling.policies.allotment import Allotment, capacity_by_kind, held_by_kind
from scheduler.scheduling.policies.quota import QuotaState
from scheduler.scheduling.policies.speed import min_feasible_gpus
from scheduler.scheduling.stages.rebalancing import enforce_ranges
from scheduler.scheduling.stages.starting import record_misfit, record_wait_for_release, start_job
from scheduler.scheduling.target_selection import extend_target, is_resizable, reduce_target


@dataclass(frozen=True, slots=True)
class Reduction:
    """GPUs that a running job would give up, so that it holds `left`; none of them means that it is preempted."""

    job: Job
    remaining_gpus: int
    freed: Counter[GpuKind]


@dataclass(slots=True)
class AllotmentState:
    """What is left while the allotment is gone through in order, and what has come of it so far."""

    free: Counter[GpuKind]
    pending: Counter[GpuKind]
    reductions: list[Reduction]
    quota: QuotaState
    starts: dict[str, int] = field(default_factory=dict)
    grows: dict[str, int] = field(default_factory=dict)
    accepted: list[tuple[Reduction, Job]] = field(default_factory=list)


def apply_allotment(cycle: SchedulingCycle) -> None:
    """Start who is allotted GPUs that are free, and make room for whoever is allotted more than that.

    Nobody gives up a GPU that nobody else is waiting for: a job that is allotted less, or nothing, keeps what it has
    until then. Growing needs a rest of `resize_pause_s`, and takes GPUs from others at full passes only. A job that
    fits by count but not the way the free GPUs lie, or that its queue's limit forbids to start, is left out, and the
    rest is allotted again.
    """
    enforce_ranges(cycle)
    left_out: set[str] = set()
    while True:
        allotment, over = _compute_allotment(cycle, left_out)
        left_out |= over
        if over:
            continue
        deal = _distribute(cycle, allotment)
        for job_id, count in deal.starts.items():
            job = cycle.snapshot.jobs[job_id]
            start_job(cycle, job, count, job.spec.min_gpus)
        misfits = {job_id for job_id in deal.starts if cycle.snapshot.jobs[job_id].state is JobState.QUEUED}
        if not misfits:
            break
        left_out |= misfits
    cycle.recheck_at_s = allotment.valid_until_s
    for offer, winner in deal.accepted:
        _apply_reduction(cycle, allotment, offer, winner)
    for job_id, count in deal.grows.items():
        _grow(cycle, cycle.snapshot.jobs[job_id], count)


def _compute_allotment(cycle: SchedulingCycle, left_out: set[str]) -> tuple[Allotment, set[str]]:
    """The allotment within the limits of the queues, and the waiting jobs that a limit keeps out of it."""
    assert cycle.policies.allot is not None
    view = cycle.view
    if left_out:
        view = replace(view, jobs={job_id: job for job_id, job in view.jobs.items() if job_id not in left_out})
    allotment = cycle.policies.allot(view, capacity_by_kind(view).total(), cycle.settings)
    book = QuotaState(replace(view, jobs={}))
    if not book:
        return allotment, set()
    gpus, over = dict(allotment.gpus), dict[str, Reason]()
    for job_id, count in allotment.gpus.items():
        job = view.jobs[job_id]
        within = max(job.spec.min_gpus, count - book.excess(job, count))
        if count and (why := book.check_limits(job, within)):
            over[job_id], gpus[job_id] = why, 0
        elif count:
            book.allocate(job, within)
            gpus[job_id] = within
    waiting = [job_id for job_id in over if not view.jobs[job_id].is_placed]
    cycle.waiting.update((job_id, over[job_id]) for job_id in waiting)
    return replace(allotment, gpus=gpus, waiting={**allotment.waiting, **over}), set(waiting)


def _distribute(cycle: SchedulingCycle, allotment: Allotment) -> AllotmentState:
    """Who starts and grows now, who gives up what for whom; all others wait, with the reason."""
    deal = AllotmentState(
        Counter(cycle.snapshot.ledger.free_gpus),
        count_releasing_gpus(cycle),
        _list_reductions(cycle, allotment),
        QuotaState(cycle.view),
    )
    jobs = cycle.snapshot.jobs
    for position, (job_id, count) in enumerate(allotment.gpus.items()):
        job, missing = jobs[job_id], count - jobs[job_id].allocation.target_gpus
        if job.is_placed and missing > 0 and _can_grow(cycle, job):
            _plan_growth(cycle, deal, job, _cap_to_limits(deal, job, count, may_reduce=cycle.full_pass))
        elif not job.is_placed and count:
            _plan_start(cycle, deal, job, _cap_to_limits(deal, job, count, may_reduce=True), position)
    for job_id, reason in allotment.waiting.items():
        if jobs[job_id].state is JobState.QUEUED and not allotment.gpus.get(job_id):
            cycle.waiting[job_id] = reason
    return deal


def _cap_to_limits(state: AllotmentState, job: Job, count: int, *, may_reduce: bool) -> int:
    """As many of `count` GPUs as the limits of the job's queue leave it now. With `offers`, those under the same limit
    that hold more than their allotment give up what is missing."""
    more = count - job.allocation.target_gpus
    over, of_user = state.quota.excess(job, more), state.quota.user_excess(job, more)
    missing = over
    for offer in tuple(state.reductions) if may_reduce else ():
        other = offer.job
        if missing > 0 and other.spec.queue == job.spec.queue and (not of_user or other.owner == job.owner):
            state.accepted.append((offer, job))
            state.reductions.remove(offer)
            state.pending += offer.freed
            missing -= other.allocation.target_gpus - offer.remaining_gpus
    return count - over


def _plan_start(cycle: SchedulingCycle, state: AllotmentState, job: Job, count: int, position: int) -> None:
    """GPUs to start on: those that are free, else also those that come free soon, else also what others give up."""
    least = min_feasible_gpus(cycle.view, job, cycle.node_sizes)
    if count < least and (why := state.quota.check_limits(job, least)):
        if job.state is JobState.QUEUED:
            cycle.waiting[job.id] = why
        return
    models = _kinds_by_model(cycle, job)
    for wanted in dict.fromkeys((count, least)):
        for kinds in models:
            if job.state is JobState.QUEUED and _sum_kinds(state.free, kinds) >= wanted:
                _deduct(wanted, kinds, state.free)
                state.quota.allocate(job, wanted)
                state.starts[job.id] = wanted
                return
        if any(_reserve_gpus(state, job, wanted, kinds, may_reduce=False) for kinds in models) or any(
            _reserve_gpus(state, job, wanted, kinds, may_reduce=True) for kinds in models
        ):
            if job.state is JobState.QUEUED:
                record_wait_for_release(cycle, job.id, wanted, position)
            return
    if job.state is JobState.QUEUED:
        record_misfit(cycle, job, job.spec.min_gpus)


def _plan_growth(cycle: SchedulingCycle, state: AllotmentState, job: Job, count: int) -> None:
    kinds = [kind for of_model in _kinds_by_model(cycle, job) for kind in of_model]
    missing = count - job.allocation.target_gpus
    if missing <= 0:
        return
    if _sum_kinds(state.free, kinds) >= missing:
        _deduct(missing, kinds, state.free)
        state.quota.allocate(job, missing)
        state.grows[job.id] = count
    elif (
        not _reserve_gpus(state, job, missing, kinds, may_reduce=cycle.full_pass)
        and (more := _sum_kinds(state.free, kinds)) > 0
    ):
        _deduct(more, kinds, state.free)
        state.quota.allocate(job, more)
        state.grows[job.id] = job.allocation.target_gpus + more


def _reserve_gpus(state: AllotmentState, job: Job, wanted: int, kinds: list[GpuKind], *, may_reduce: bool) -> bool:
    """Keep what comes free soon, and what is free, for the job; with `offers` also what others have to give up."""
    missing = wanted - _sum_kinds(state.pending, kinds) - _sum_kinds(state.free, kinds)
    chosen: list[Reduction] = []
    for offer in state.reductions if may_reduce else ():
        if missing > 0 and offer.job.id != job.id and (gain := _sum_kinds(offer.freed, kinds)):
            chosen.append(offer)
            missing -= gain
    if missing > 0:
        return False
    for offer in reversed(chosen):
        if missing + _sum_kinds(offer.freed, kinds) <= 0:  # a later one freed so much that this one need not give
            missing += _sum_kinds(offer.freed, kinds)
        else:
            state.accepted.append((offer, job))
            state.reductions.remove(offer)
            state.pending += offer.freed
    _deduct(wanted, kinds, state.pending, state.free)
    return True


def _list_reductions(cycle: SchedulingCycle, allotment: Allotment) -> list[Reduction]:
    """What running jobs hold beyond their allotment, in the order in which it is taken: parts before whole jobs, and
    of the jobs those first that come last. One that is about to run is let come to it."""
    if cycle.snapshot.original.switches.resizes_frozen:
        return []
    parts: list[Reduction] = []
    wholes: list[Reduction] = []
    losers = (job_id for job_id in allotment.waiting if job_id not in allotment.gpus)
    for job_id in reversed([*allotment.gpus, *losers]):
        job, left = cycle.snapshot.jobs[job_id], allotment.gpus.get(job_id, 0)
        if job.allocation.target_gpus > left and is_resizable(cycle, job) and (gives := _count_freed(cycle, job, left)):
            (parts if left else wholes).append(Reduction(job, left, gives))
    return parts + wholes


def _count_freed(cycle: SchedulingCycle, job: Job, remaining_gpus: int) -> Counter[GpuKind]:
    """The GPUs on nodes that others may use which a job gives up when it keeps `left`: lent ones first."""
    view, gives = cycle.view, Counter[GpuKind]()
    surplus = job.allocation.target_gpus - remaining_gpus
    for (gpu, lent), count in reversed(list(held_by_kind(view, job).items())):
        gives[gpu, lent] = min(count, max(0, surplus - gives.total()))
    for name, indices in job.allocation.target.items():
        node = view.nodes.get(name)
        if node is not None and not view.serves_training(node):
            gives[node.gpu, view.is_lent(node)] -= len(indices)
    return +gives


def _kinds_by_model(cycle: SchedulingCycle, job: Job) -> list[list[GpuKind]]:
    """The kinds of GPU that the job may take together: one list a model, the one with most free first."""
    free = cycle.snapshot.ledger.free_gpus
    held = {gpu for gpu, _ in held_by_kind(cycle.view, job)}
    models = sorted(held or ({job.spec.gpu} if job.spec.gpu else cycle.node_sizes))
    kinds = [[(gpu, lent) for lent in ((False, True) if job.spec.fungible else (False,))] for gpu in models]
    return sorted(kinds, key=lambda of_model: -sum(free.get(kind, 0) for kind in of_model))


def _sum_kinds(counts: Counter[GpuKind], kinds: Iterable[GpuKind]) -> int:
    return sum(counts[kind] for kind in kinds)


def _deduct(wanted: int, kinds: Iterable[GpuKind], *sources: Counter[GpuKind]) -> None:
    for counts in sources:
        for kind in kinds:
            part = min(wanted, max(0, counts[kind]))
            counts[kind] -= part
            wanted -= part


def _can_grow(cycle: SchedulingCycle, job: Job) -> bool:
    rested = cycle.now_s - job.state_since_s >= cycle.settings.resize_pause_s_for(job)
    at_least = job.allocation.target_gpus <= job.spec.min_gpus
    return is_resizable(cycle, job) and (rested or at_least) and not cycle.snapshot.original.switches.resizes_frozen


def _apply_reduction(cycle: SchedulingCycle, allotment: Allotment, reduction: Reduction, winner: Job) -> None:
    job, leave_by_s = reduction.job, cycle.leave_by_s(reduction.job)
    need = gpu_sets.format_gpu_count(allotment.gpus[winner.id])
    numbers = {"allotted_gpus": float(reduction.remaining_gpus), "needed_gpus": float(allotment.gpus[winner.id])}
    if reduction.remaining_gpus:
        target = reduce_target(cycle, job, job.allocation.target, reduction.remaining_gpus)
        if target is not None:
            gpus, plan = target
            detail = (
                f"its share is {gpu_sets.format_gpu_count(reduction.remaining_gpus)} now; {winner.id} is to have {need}"
            )
            reason = Reason(ReasonCode.MAKES_ROOM_FOR_WAITING_JOB, detail, numbers)
            cycle.apply(ResizeJob(job.id, gpus, plan, leave_by_s, reason))
    else:
        why = allotment.waiting.get(job.id)
        detail = f"{winner.id} comes before it and needs {need}" + (f"; {why.detail}" if why else "")
        numbers = {**(why.numbers if why else {}), **numbers}
        cycle.apply(PreemptJob(job.id, leave_by_s, Reason(ReasonCode.OUTRANKED, detail, numbers)))
    cycle.changed_jobs.add(job.id)


def _grow(cycle: SchedulingCycle, job: Job, count: int) -> None:
    present = job.allocation.target_gpus
    target = extend_target(cycle, job, count, present + 1)
    if target is None:
        return
    gpus, plan = target
    detail = f"GPUs are free, and its share is {gpu_sets.format_gpu_count(count)} now"
    reason = Reason(ReasonCode.GAIN_EXCEEDS_COST, detail, {"allotted_gpus": float(count)})
    cycle.apply(ResizeJob(job.id, gpus, plan, cycle.leave_by_s(job), reason))
    cycle.changed_jobs.add(job.id)
