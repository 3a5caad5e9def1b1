"""Stage of decide: base demand. Who starts, and why the others wait."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set

from scheduler.domain import gpu_sets
from scheduler.domain.decisions import Reason, ReasonCode, StartJob
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.scheduling.cycle import SchedulingCycle
from scheduler.scheduling.gpu_budget import GpuBudget
from scheduler.scheduling.policies.job_order import is_overdue
from scheduler.scheduling.policies.placement import filter_usable
from scheduler.scheduling.policies.preemption import QuotaReclaimer
from scheduler.scheduling.policies.quota import QuotaState
from scheduler.scheduling.stages.defragmentation import count_whole_nodes, defragment_for, reserve_emptied_nodes
from scheduler.scheduling.stages.quota_preemption import cap_widths, hold_for_quota, reclaim_guarantee
from scheduler.scheduling.target_selection import Target, extend_target, find_mixed_target

GpuOffer = tuple[str, int]
"""A GPU model, and how many GPUs of it."""

_QUEUED = JobState.QUEUED


def start_pending_jobs(cycle: SchedulingCycle) -> None:
    """Base demand in order. A job that fits once flexible workers have shrunk gets room reserved for it, so that
    nobody behind it takes what is free meanwhile. Nobody delays the first that has to wait; where nobody can tell what
    would, nobody at all passes one that is overdue.

    Counts alone do not tell whether a job fits the way the free GPUs lie. One that does not is passed over, and
    what it was dealt is dealt again.
    """
    if not cycle.snapshot.ledger.waiting:
        return
    queue = cycle.policies.order(cycle.view, cycle.settings)
    if cycle.policies.backfill:
        reserve_emptied_nodes(cycle, queue)
    misfits: set[str] = set()
    while True:
        cycle.quota = book = cycle.snapshot.quota.copy()
        stock = GpuBudget(cycle)
        starters = _allocate_gpus(cycle, book, stock, book.order_jobs(queue), misfits)
        _start_jobs(cycle, book, stock, starters)
        failed = {job_id for job_id in starters if cycle.snapshot.jobs[job_id].state is _QUEUED}
        if not failed:
            break
        misfits |= failed
        queue = tuple(job_id for job_id in queue if cycle.snapshot.jobs[job_id].state is _QUEUED)
    _start_on_mixed_models(cycle, queue)
    if cycle.policies.backfill:
        _defragment_for_first(
            cycle, [job_id for job_id in queue if job_id in misfits or job_id in cycle.pending_starts]
        )


def _start_on_mixed_models(cycle: SchedulingCycle, queue: Iterable[str]) -> None:
    """Jobs that no GPU model alone can hold, on what all others have left of two."""
    if len(cycle.node_sizes) < 2:
        return
    for job_id in queue:
        job, reason = cycle.snapshot.jobs[job_id], cycle.waiting.get(job_id)
        if reason is None or reason.code is not ReasonCode.NO_MATCHING_FLAVOR or job.state is not _QUEUED:
            continue
        if cycle.quota and (why := cycle.quota.check_limits(job, job.spec.min_gpus)):
            cycle.waiting[job_id] = why
            continue
        if target := find_mixed_target(cycle, job, job.spec.min_gpus):
            if cycle.quota:
                cycle.quota.allocate(job, gpu_sets.count(target[0]))
            _start_on_target(cycle, job, target)


def _defragment_for_first(cycle: SchedulingCycle, queue: Iterable[str]) -> None:
    """Whole nodes for the first job that lacks nothing else, or gets what it lacks from elastic jobs."""
    job_id = next((job_id for job_id in queue if count_whole_nodes(cycle, cycle.snapshot.jobs[job_id])), None)
    if job_id and (nodes := defragment_for(cycle, cycle.snapshot.jobs[job_id])):
        cycle.pending_starts.pop(job_id, None)
        detail = f"needs {nodes} whole nodes; running jobs are moving off them"
        numbers = {"needed_nodes": float(nodes)}
        cycle.waiting[job_id] = Reason(ReasonCode.WAITING_FOR_PREEMPTED_WORKLOADS, detail, numbers)


def _allocate_gpus(
    cycle: SchedulingCycle, quota: QuotaState, budget: GpuBudget, queue: Sequence[str], misfits: Set[str]
) -> dict[str, GpuOffer]:
    """Who starts, with the GPU model and count that it is sure of; everybody else waits, with the reason."""
    givers = QuotaReclaimer(cycle.view, quota, cycle.settings, cycle.changed_jobs) if quota else None
    cycle.pending_starts.clear()
    cycle.quota_reductions.clear()
    cycle.waiting_for_gpus = False
    starters: dict[str, GpuOffer] = {}
    short: list[Job] = []
    for position, job_id in enumerate(queue):
        job = cycle.snapshot.jobs[job_id]
        budget.begin_job(job)
        if job_id in misfits and cycle.policies.strict_order:
            _record_wait_behind(cycle, queue[position + 1 :], job_id)
            break
        if job_id in misfits:
            _block_behind_overdue(cycle, budget, job)
        elif givers and hold_for_quota(cycle, budget, givers, job):
            continue
        elif offer := budget.offer(job):
            starters[job_id] = offer
            budget.allocate(job, *offer)
            quota.allocate(job, offer[1])
        elif promise := budget.pending_offer(job):
            quota.allocate(job, promise[1])
            cycle.pending_starts[job_id] = budget.allocate_pending(job, *promise)
            record_wait_for_release(cycle, job_id, promise[1], position)
        elif givers and reclaim_guarantee(cycle, budget, givers, job):
            continue
        else:
            _record_wait(cycle, budget, job, position)
            short.append(job)
            if cycle.policies.strict_order:
                _record_wait_behind(cycle, queue[position + 1 :], job_id)
                break
    offer = budget.min_feasible_offer(short[0]) if len(short) == 1 else None
    if offer and not quota.check_limits(short[0], offer[1]):  # nobody else waits: better slowly than not
        starters[short[0].id] = offer
        quota.allocate(short[0], offer[1])
        cycle.waiting_for_gpus = False
    return starters


def _block_behind_overdue(cycle: SchedulingCycle, budget: GpuBudget, job: Job) -> None:
    """For an overdue job that nobody is kept from delaying yet: with a start in sight it needs no more than that."""
    if not budget.has_reservation and is_overdue(job, cycle.now_s, cycle.settings) and budget.could_ever_fit(job):
        budget.block_behind(job)


def _start_jobs(cycle: SchedulingCycle, quota: QuotaState, budget: GpuBudget, starters: Mapping[str, GpuOffer]) -> None:
    """Start the jobs, as wide as it pays on GPUs that were dealt to nobody."""
    widths: dict[str, int] = {}
    for gpu in sorted({gpu for gpu, _ in starters.values()}):
        leasts = {job_id: least for job_id, (model, least) in starters.items() if model == gpu}
        widths |= cap_widths(
            cycle, quota, leasts, _compute_starting_widths(cycle, leasts, budget.unallocated_gpus(gpu))
        )
    for job_id, (_, least) in starters.items():
        start_job(cycle, cycle.snapshot.jobs[job_id], widths.get(job_id, least), least)


def _compute_starting_widths(cycle: SchedulingCycle, starters: Mapping[str, int], spare: int) -> Mapping[str, int]:
    """How wide new jobs start: as narrow as they can, unless GPUs are left over and nobody waits for them."""
    if cycle.policies.scale is None or cycle.waiting_for_gpus or not starters or spare <= 0:
        return {}
    wanted = cycle.policies.scale(cycle.view, starters, spare, cycle.settings)
    widths: dict[str, int] = {}
    for job_id, least in starters.items():
        widths[job_id] = min(max(wanted.get(job_id, least), least), least + spare)
        spare -= widths[job_id] - least
    return widths


def start_job(cycle: SchedulingCycle, job: Job, width: int, least: int) -> None:
    """Start on `width` GPUs, else on the next smaller count down to `least` that has room and a plan."""
    target = extend_target(cycle, job, width, least)
    if target is None:
        record_misfit(cycle, job, least)
        return
    _start_on_target(cycle, job, target)


def _start_on_target(cycle: SchedulingCycle, job: Job, target: Target) -> None:
    gpus, plan = target
    detail = f"next in order; {gpu_sets.format_gpu_count(gpu_sets.count(gpus))} on {gpu_sets.format_gpus(gpus)} as {plan.summarize()}"
    cycle.apply(StartJob(job.id, gpus, plan, Reason(ReasonCode.FIRST_IN_ORDER, detail)))
    cycle.waiting.pop(job.id, None)
    cycle.changed_jobs.add(job.id)


def record_misfit(cycle: SchedulingCycle, job: Job, need: int) -> None:
    room = filter_usable(job, cycle.rooms_for(job))
    free = sum(len(r.indices) for r in room)
    numbers = {"needed_gpus": float(need), "free_gpus": float(free)}
    if free >= need and any(wanted.curve_key == job.curve_key for wanted in cycle.missing_shapes):
        detail = f"{free} GPUs are free, but no plan is solved yet for the way they lie"
        cycle.waiting[job.id] = Reason(ReasonCode.WAITING_FOR_PLAN, detail, numbers)
    elif free >= need:
        detail = f"{free} GPUs are free on {len(room)} nodes, but no plan works on them the way they lie"
        cycle.waiting[job.id] = Reason(ReasonCode.TOPOLOGY_PLACEMENT_FAILED, detail, numbers)
    else:
        flavor = job.spec.gpu or "GPUs it may use"
        detail = f"needs {need} {flavor}, {free} are free"
        cycle.waiting[job.id] = Reason(ReasonCode.NO_MATCHING_FLAVOR, detail, numbers)


def record_wait_for_release(cycle: SchedulingCycle, job_id: str, need: int, position: int) -> None:
    detail = f"needs {gpu_sets.format_gpu_count(need)}; running jobs are giving theirs up for it"
    numbers = {"needed_gpus": float(need), "position": float(position + 1)}
    cycle.waiting[job_id] = Reason(ReasonCode.WAITING_FOR_PREEMPTED_WORKLOADS, detail, numbers)


def _record_wait(cycle: SchedulingCycle, budget: GpuBudget, job: Job, position: int) -> None:
    """Wait for GPUs that others use: behind an overdue job, as an overdue job, or in line."""
    need, free = budget.needed_gpus(job), budget.free_gpus(job)
    numbers = {"needed_gpus": float(need), "free_gpus": float(free), "position": float(position + 1)}
    if (head := budget.blocking_job(job)) is not None:
        detail = f"needs {gpu_sets.format_gpu_count(need)}, free now: {free}; waits behind {head}, which it would delay"
        cycle.waiting[job.id] = Reason(ReasonCode.BEHIND_HEAD_OF_QUEUE, detail, numbers)
        return
    if not budget.could_ever_fit(job):
        detail = f"needs {need} {job.spec.gpu or 'GPUs'}, more than all nodes have that it may use now"
        cycle.waiting[job.id] = Reason(ReasonCode.NO_MATCHING_FLAVOR, detail, numbers)
        return
    detail = f"needs {gpu_sets.format_gpu_count(need)}, free now: {free}; number {position + 1} in the queue"
    cycle.waiting[job.id] = Reason(ReasonCode.INSUFFICIENT_GPUS, detail, numbers)
    cycle.waiting_for_gpus = True
    budget.reserve_for(job)
    _block_behind_overdue(cycle, budget, job)


def _record_wait_behind(cycle: SchedulingCycle, job_ids: Iterable[str], head: str) -> None:
    """One reason for all: thousands may wait behind one, on every tick."""
    reason = Reason(ReasonCode.BEHIND_HEAD_OF_QUEUE, f"waits behind {head}, the head of the queue")
    cycle.waiting.update(dict.fromkeys(job_ids, reason))
