"""Stage for policy sets that allot GPUs to every job: bring each job to its allotment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from scheduler.domain import gpu_sets
from scheduler.domain.decisions import PreemptJob, Reason, ReasonCode, ResizeJob
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.snapshot_index import GpuKind
from scheduler.scheduling.cycle import SchedulingCycle, StageReport
from scheduler.scheduling.node_misfit import explain_node_misfit
from scheduler.scheduling.pending_gpus import count_releasing_gpus
from scheduler.scheduling.policies.allotment import Allot, Allotment, capacity_by_kind, held_by_kind
from scheduler.scheduling.policies.quota import QuotaState
from scheduler.scheduling.policies.speed import min_feasible_gpus
from scheduler.scheduling.stages.rebalancing import enforce_ranges
from scheduler.scheduling.stages.starting import misfit_reason, release_reason, start_job
from scheduler.scheduling.target_selection import extend_target, is_resizable, is_undecided, reduce_target


@dataclass(frozen=True, slots=True)
class Reduction:
    """GPUs that a running job would give up. If `remaining_gpus` is 0, the job is preempted."""

    job: Job
    remaining_gpus: int
    freed: Counter[GpuKind]


@dataclass(slots=True)
class AllotmentState:
    """Remaining GPUs while jobs are served in the order of the allotment, and the choices so far."""

    free: Counter[GpuKind]
    pending: Counter[GpuKind]
    reductions: list[Reduction]
    quota: QuotaState
    starts: dict[str, int] = field(default_factory=dict)
    grows: dict[str, int] = field(default_factory=dict)
    accepted: list[tuple[Reduction, Job]] = field(default_factory=list)
    waiting: dict[str, Reason] = field(default_factory=dict)


def apply_allotment(cycle: SchedulingCycle, allot: Allot) -> StageReport:
    """Start and grow jobs on free GPUs, and take further GPUs from jobs that hold more than their allotment.

    A job that is allotted fewer GPUs, or none, keeps its GPUs until another job needs them. A job grows only after
    `resize_pause_s` without a resize, and takes GPUs from others in full passes only. A job that does not fit the
    distribution of the free GPUs, or that a limit of its queue holds back, is left out, and the rest is allotted again.
    """
    enforce_ranges(cycle)
    waiting = _find_node_misfits(cycle)
    left_out = set(waiting)
    while True:
        allotment, limited = _compute_allotment(cycle, allot, left_out)
        waiting |= limited
        left_out |= limited.keys()
        if limited:
            continue
        state = _distribute(cycle, allotment)
        waiting |= state.waiting
        misfits = _start_jobs(cycle, state.starts, waiting)
        if not misfits:
            break
        left_out |= misfits
    for reduction, winner in state.accepted:
        _apply_reduction(cycle, allotment, reduction, winner)
    for job_id, count in state.grows.items():
        _grow(cycle, cycle.snapshot.jobs[job_id], count)
    return StageReport(waiting, recheck_at_s=allotment.valid_until_s)


def _find_node_misfits(cycle: SchedulingCycle) -> dict[str, Reason]:
    """Return the pending jobs whose pods fit on too few nodes. They get no share, so that they delay no other job."""
    found: dict[str, Reason] = {}
    for job in map(cycle.snapshot.jobs.__getitem__, cycle.index.waiting if cycle.index.has_capacities else ()):
        alone = cycle.fit.count_alone(job)
        if alone is None:
            continue
        usable = max((_sum_kinds(Counter(alone), kinds) for kinds in _kinds_by_model(cycle, job)), default=0)
        if usable < job.spec.min_gpus and (reason := explain_node_misfit(cycle, job, usable, {})):
            found[job.id] = reason
    return found


def _start_jobs(cycle: SchedulingCycle, starts: Mapping[str, int], waiting: dict[str, Reason]) -> set[str]:
    """Start jobs, and return the ids of those that do not fit."""
    for job_id, count in starts.items():
        job = cycle.snapshot.jobs[job_id]
        if reason := start_job(cycle, job, count, job.spec.min_gpus):
            waiting[job_id] = reason
        else:
            waiting.pop(job_id, None)
    return {job_id for job_id in starts if cycle.snapshot.jobs[job_id].state is JobState.QUEUED}


def _compute_allotment(cycle: SchedulingCycle, allot: Allot, left_out: set[str]) -> tuple[Allotment, dict[str, Reason]]:
    """Return the allotment within the limits of the queues, and the pending jobs that a limit holds back."""
    view = cycle.view
    if left_out:
        view = replace(view, jobs={job_id: job for job_id, job in view.jobs.items() if job_id not in left_out})
    allotment = allot(view, capacity_by_kind(view).total(), cycle.settings)
    quota = QuotaState(replace(view, jobs={}))
    if not quota:
        return allotment, {}
    gpus, limited = dict(allotment.gpus), dict[str, Reason]()
    for job_id, count in allotment.gpus.items():
        job = view.jobs[job_id]
        within = max(job.spec.min_gpus, count - quota.excess(job, count))
        if count and (reason := quota.check_limits(job, within)):
            limited[job_id], gpus[job_id] = reason, 0
        elif count:
            quota.allocate(job, within)
            gpus[job_id] = within
    pending = {job_id: reason for job_id, reason in limited.items() if not view.jobs[job_id].is_placed}
    return replace(allotment, gpus=gpus, waiting={**allotment.waiting, **limited}), pending


def _distribute(cycle: SchedulingCycle, allotment: Allotment) -> AllotmentState:
    """Choose the jobs that start and grow now, and the reductions they need. All others stay pending, with a reason."""
    state = AllotmentState(
        Counter(cycle.index.free_gpus),
        count_releasing_gpus(cycle),
        _list_reductions(cycle, allotment),
        QuotaState(cycle.view),
    )
    jobs = cycle.snapshot.jobs
    for position, (job_id, count) in enumerate(allotment.gpus.items()):
        job, missing = jobs[job_id], count - jobs[job_id].allocation.target_gpus
        if job.is_placed and missing > 0 and _can_grow(cycle, job):
            _plan_growth(cycle, state, job, _cap_to_limits(state, job, count, may_reduce=cycle.full_pass))
        elif not job.is_placed and count:
            _plan_start(cycle, state, job, _cap_to_limits(state, job, count, may_reduce=True), position)
    for job_id, reason in allotment.waiting.items():
        if jobs[job_id].state is JobState.QUEUED and not allotment.gpus.get(job_id):
            state.waiting[job_id] = reason
    return state


def _cap_to_limits(state: AllotmentState, job: Job, count: int, *, may_reduce: bool) -> int:
    """Return how many of `count` GPUs the limits of the job's queue permit now.

    With `may_reduce`, jobs under the same limit that hold more than their allotment give up the missing GPUs.
    """
    more = count - job.allocation.target_gpus
    quota = state.quota
    over, over_user, limiting = quota.excess(job, more), quota.user_excess(job, more), quota.limiting_queue(job)
    missing = over
    for reduction in tuple(state.reductions) if may_reduce else ():
        other = reduction.job
        is_own = not over_user or other.owner_key == job.owner_key
        if missing > 0 and quota.limiting_queue(other) == limiting and is_own:
            _accept(state, reduction, job)
            missing -= other.allocation.target_gpus - reduction.remaining_gpus
    return count - over


def _plan_start(cycle: SchedulingCycle, state: AllotmentState, job: Job, count: int, position: int) -> None:
    """Plan to start the job on free GPUs, or reserve GPUs that are being released or that other jobs give up."""
    min_gpus = min_feasible_gpus(cycle.view, job, cycle.node_sizes)
    if count < min_gpus and (reason := state.quota.check_limits(job, min_gpus)):
        if job.state is JobState.QUEUED:
            state.waiting[job.id] = reason
        return
    models, usable = _kinds_by_model(cycle, job), cycle.fit.count_free(job)
    is_limited = usable is not None or cycle.fit.find_feasible_nodes(job) is not None
    for wanted in dict.fromkeys((count, min_gpus)):
        for kinds in models:
            if usable is not None and _sum_kinds(Counter(usable), kinds) < wanted:
                continue
            if job.state is JobState.QUEUED and _sum_kinds(state.free, kinds) >= wanted:
                _deduct(wanted, kinds, state.free)
                state.quota.allocate(job, wanted)
                state.starts[job.id] = wanted
                return
        if is_limited:
            continue  # GPUs that others give up may be on nodes where its pods do not fit
        if any(_reserve_gpus(state, job, wanted, kinds, may_reduce=False) for kinds in models) or any(
            _reserve_gpus(state, job, wanted, kinds, may_reduce=True) for kinds in models
        ):
            if job.state is JobState.QUEUED:
                state.waiting[job.id] = release_reason(wanted, position)
            return
    if job.state is JobState.QUEUED:
        state.waiting[job.id] = misfit_reason(cycle, job, job.spec.min_gpus)


def _plan_growth(cycle: SchedulingCycle, state: AllotmentState, job: Job, count: int) -> None:
    """Plan to grow the job on free GPUs, or reserve GPUs of other jobs and grow by the free GPUs meanwhile."""
    kinds = [kind for of_model in _kinds_by_model(cycle, job) for kind in of_model]
    missing = count - job.allocation.target_gpus
    if missing <= 0 or count < job.spec.min_gpus:  # its range was raised, and a limit keeps it below
        return
    if _sum_kinds(state.free, kinds) >= missing:
        _deduct(missing, kinds, state.free)
        state.quota.allocate(job, missing)
        state.grows[job.id] = count
    elif (
        not _reserve_gpus(state, job, missing, kinds, may_reduce=cycle.full_pass)
        and (more := _sum_kinds(state.free, kinds)) > 0
        and job.allocation.target_gpus + more >= job.spec.min_gpus
    ):
        _deduct(more, kinds, state.free)
        state.quota.allocate(job, more)
        state.grows[job.id] = job.allocation.target_gpus + more


def _reserve_gpus(state: AllotmentState, job: Job, wanted: int, kinds: list[GpuKind], *, may_reduce: bool) -> bool:
    """Reserve GPUs for the job, and return whether there were enough.

    These are GPUs that are being released, free GPUs, and with `may_reduce` GPUs that other jobs must give up.
    """
    missing = wanted - _sum_kinds(state.pending, kinds) - _sum_kinds(state.free, kinds)
    chosen: list[Reduction] = []
    for reduction in state.reductions if may_reduce else ():
        if missing > 0 and reduction.job.id != job.id and (gain := _sum_kinds(reduction.freed, kinds)):
            chosen.append(reduction)
            missing -= gain
    if missing > 0:
        return False
    for reduction in reversed(chosen):
        if missing + _sum_kinds(reduction.freed, kinds) <= 0:  # the others free enough without this one
            missing += _sum_kinds(reduction.freed, kinds)
        else:
            _accept(state, reduction, job)
    _deduct(wanted, kinds, state.pending, state.free)
    return True


def _accept(state: AllotmentState, reduction: Reduction, winner: Job) -> None:
    state.accepted.append((reduction, winner))
    state.reductions.remove(reduction)
    state.pending += reduction.freed


def _list_reductions(cycle: SchedulingCycle, allotment: Allotment) -> list[Reduction]:
    """Return the GPUs that running jobs hold beyond their allotment, in the order in which they are taken.

    Parts of jobs come before whole jobs, and the last jobs of the allotment come first.
    """
    if cycle.resizes_frozen:
        return []
    parts: list[Reduction] = []
    whole_jobs: list[Reduction] = []
    unserved = (job_id for job_id in allotment.waiting if job_id not in allotment.gpus)
    for job_id in reversed([*allotment.gpus, *unserved]):
        job, remaining = cycle.snapshot.jobs[job_id], allotment.gpus.get(job_id, 0)
        if job.allocation.target_gpus <= remaining or not is_undecided(cycle, job):
            continue
        if remaining and not job.is_resizable:
            continue
        if freed := _count_freed(cycle, job, remaining):
            (parts if remaining else whole_jobs).append(Reduction(job, remaining, freed))
    return parts + whole_jobs


def _count_freed(cycle: SchedulingCycle, job: Job, remaining_gpus: int) -> Counter[GpuKind]:
    """Count the GPUs, usable by other jobs, that a job gives up when it keeps `remaining_gpus`. Lent ones go first."""
    view, freed = cycle.view, Counter[GpuKind]()
    surplus = job.allocation.target_gpus - remaining_gpus
    for (gpu, lent), count in reversed(list(held_by_kind(view, job).items())):
        freed[gpu, lent] = min(count, max(0, surplus - freed.total()))
    for name, indices in job.allocation.target.items():
        node = view.nodes.get(name)
        if node is not None and not view.serves_training(node):
            freed[node.gpu, view.is_lent(node)] -= len(indices)
    return +freed


def _kinds_by_model(cycle: SchedulingCycle, job: Job) -> list[list[GpuKind]]:
    """Return the kinds of GPU that the job can use, one list for each model, the model with most free GPUs first."""
    free = cycle.index.free_gpus
    held = {gpu for gpu, _ in held_by_kind(cycle.view, job)}
    models = sorted(held or ({job.spec.gpu} if job.spec.gpu else cycle.node_sizes))
    kinds = [[(gpu, lent) for lent in ((False, True) if job.accepts_lent_nodes else (False,))] for gpu in models]
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
    is_pause_over = cycle.now_s - job.state_since_s >= cycle.settings.resize_pause_s_for(job)
    at_minimum = job.allocation.target_gpus <= job.spec.min_gpus
    return is_resizable(cycle, job) and (is_pause_over or at_minimum) and not cycle.resizes_frozen


def _apply_reduction(cycle: SchedulingCycle, allotment: Allotment, reduction: Reduction, winner: Job) -> None:
    job, leave_by_s = reduction.job, cycle.leave_by_s(reduction.job)
    needed = gpu_sets.format_gpu_count(allotment.gpus[winner.id])
    numbers = {"allotted_gpus": float(reduction.remaining_gpus), "needed_gpus": float(allotment.gpus[winner.id])}
    if reduction.remaining_gpus:
        target = reduce_target(cycle, job, job.allocation.target, reduction.remaining_gpus)
        if target is not None:
            gpus, plan = target
            share = gpu_sets.format_gpu_count(reduction.remaining_gpus)
            detail = f"its share is now {share}; {winner.id} gets {needed}"
            reason = Reason(ReasonCode.MAKES_ROOM_FOR_WAITING_JOB, detail, numbers)
            cycle.apply(ResizeJob(job.id, gpus, plan, leave_by_s, reason))
    else:
        waiting = allotment.waiting.get(job.id)
        detail = f"{winner.id} has precedence and needs {needed}" + (f"; {waiting.detail}" if waiting else "")
        numbers = {**(waiting.numbers if waiting else {}), **numbers}
        cycle.apply(PreemptJob(job.id, leave_by_s, Reason(ReasonCode.OUTRANKED, detail, numbers)))
    cycle.settle(job.id)


def _grow(cycle: SchedulingCycle, job: Job, count: int) -> None:
    current_gpus = job.allocation.target_gpus
    target = extend_target(cycle, job, count, max(current_gpus + 1, job.spec.min_gpus))
    if target is None:
        return
    gpus, plan = target
    detail = f"GPUs are free; its share is now {gpu_sets.format_gpu_count(count)}"
    reason = Reason(ReasonCode.GAIN_EXCEEDS_COST, detail, {"allotted_gpus": float(count)})
    cycle.apply(ResizeJob(job.id, gpus, plan, cycle.leave_by_s(job), reason))
