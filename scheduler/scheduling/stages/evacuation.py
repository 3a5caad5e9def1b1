"""Stage: take jobs off nodes that must be vacated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from math import inf

from scheduler.domain import gpu_sets
from scheduler.domain.decisions import PreemptJob, Reason, ReasonCode, ResizeJob
from scheduler.domain.fleet import NodeState
from scheduler.domain.gpu_sets import Gpus
from scheduler.domain.job import Job
from scheduler.domain.snapshot_index import GpuKind
from scheduler.scheduling.cycle import GpuDemand, ResourceKind, SchedulingCycle, StageReport
from scheduler.scheduling.pending_gpus import count_pending_gpus
from scheduler.scheduling.policies.job_order import remaining_service_gpu_s
from scheduler.scheduling.target_selection import Target, is_undecided, move_target, reduce_target


def evacuate_nodes(cycle: SchedulingCycle) -> StageReport:
    """Move jobs to free GPUs elsewhere, else shrink them, else preempt them.

    Some policy sets let a job wait on its node while others give up GPUs for it, as long as it can still save in time.
    The report then has its demand for GPUs.
    """
    index = cycle.index
    leaving = set(index.must_vacate)
    affected = {job_id for node in leaving for job_id in index.holders[node].values()}
    stranded: list[Job] = []
    for job in index.sort_by_submission(affected):
        if job.is_placed and not leaving.isdisjoint(job.allocation.target) and not _evacuate_job(cycle, job, leaving):
            stranded.append(job)
    demands: dict[str, GpuDemand] = {}
    recheck_at_s = inf
    if stranded and cycle.policies.find_eviction_victims is not None:
        pending, ordered = count_pending_gpus(cycle), _sort_by_service(cycle, stranded)
        deferred = _defer_evictions(cycle, ordered, leaving, pending)
        stranded = [job for job in ordered if job.id not in deferred]
        _preempt_for_stranded(cycle, stranded, affected, pending)
        deferred |= _defer_evictions(cycle, stranded, leaving, pending)
        stranded = [job for job in stranded if job.id not in deferred]
        demands = {job_id: demand for job_id, (demand, _) in deferred.items()}
        recheck_at_s = min((latest_s for _, latest_s in deferred.values()), default=inf)
    for job in stranded:
        cycle.apply(PreemptJob(job.id, cycle.leave_by_s(job), _eviction_reason(cycle, job, leaving)))
    return StageReport(demands=demands, recheck_at_s=recheck_at_s)


def _evacuate_job(cycle: SchedulingCycle, job: Job, leaving: set[str]) -> bool:
    kept = gpu_sets.without_nodes(job.allocation.target, leaving)
    target = _find_move_target(cycle, job, kept) or reduce_target(cycle, job, kept, job.spec.max_gpus)
    if target is None:
        return False
    gpus, plan = target
    cycle.apply(ResizeJob(job.id, gpus, plan, cycle.leave_by_s(job), _eviction_reason(cycle, job, leaving)))
    return True


def _find_move_target(cycle: SchedulingCycle, job: Job, kept: Gpus) -> Target | None:
    """Replace the lost GPUs by free ones: all of them, so that the job need not grow again later.

    The job gets no more than its maximum, which its owner may have lowered below what it holds. While other jobs wait
    for GPUs, it gets only enough for its minimum.
    """
    max_gpus = min(job.allocation.target_gpus, job.spec.max_gpus)
    if cycle.index.waiting:
        max_gpus = min(max_gpus, job.spec.min_gpus)
    return move_target(cycle, job, kept, cycle.snapshot.free_gpus, max_gpus=max_gpus, min_gpus=job.spec.min_gpus)


def _defer_evictions(
    cycle: SchedulingCycle, jobs: Iterable[Job], leaving: set[str], pending: Counter[GpuKind]
) -> dict[str, tuple[GpuDemand, float]]:
    """Leave jobs where they are if others give up enough GPUs for them, and take these GPUs off `pending`.

    Returns, by job, the demand for GPUs and the latest time at which the job can still save before it must leave.
    """
    deferred: dict[str, tuple[GpuDemand, float]] = {}
    for job in jobs:
        latest_s = _latest_stay_s(cycle, job)
        if latest_s is None or not is_undecided(cycle, job):
            continue
        model = cycle.snapshot.original.nodes[next(iter(job.allocation.target))].gpu
        kinds = [(model, lent) for lent in ((False, True) if job.accepts_lent_nodes else (False,))]
        kept = gpu_sets.count(gpu_sets.without_nodes(job.allocation.target, leaving))
        missing = job.spec.min_gpus - kept
        if missing > sum(pending[kind] for kind in kinds):
            continue
        deferred[job.id] = (GpuDemand(ResourceKind(model, owned_only=not job.accepts_lent_nodes), missing), latest_s)
        for kind in kinds:
            taken = min(pending[kind], missing)
            pending[kind] -= taken
            missing -= taken
        cycle.settle(job.id)
    return deferred


def _preempt_for_stranded(
    cycle: SchedulingCycle, stranded: Sequence[Job], affected: Collection[str], pending: Counter[GpuKind]
) -> None:
    """Preempt jobs on other nodes that have more work left than stranded jobs, and add their GPUs to `pending`."""
    able = [
        job
        for job in stranded
        if is_undecided(cycle, job)
        and _latest_stay_s(cycle, job) is not None
        and cycle.fit.find_feasible_nodes(job) is None
        and not cycle.fit.needs_one_node(job)
    ]
    if not able:
        return
    assert cycle.policies.find_eviction_victims is not None
    exempt = {*affected, *cycle.settled_jobs}
    victims = cycle.policies.find_eviction_victims(cycle.view, able, exempt, cycle.settings)
    for job_id, takers in victims.items():
        job = cycle.snapshot.jobs[job_id]
        detail = f"inference needs nodes back; its GPUs go to {', '.join(takers)} with less work left"
        cycle.apply(PreemptJob(job_id, cycle.leave_by_s(job), Reason(ReasonCode.OUTRANKED, detail)))
        for name, indices in job.allocation.target.items():
            node = cycle.view.nodes[name]
            pending[node.gpu, cycle.view.is_lent(node)] += len(indices)


def _sort_by_service(cycle: SchedulingCycle, jobs: Iterable[Job]) -> list[Job]:
    return sorted(jobs, key=lambda job: (remaining_service_gpu_s(cycle.view, job, cycle.node_sizes), job.id))


def _latest_stay_s(cycle: SchedulingCycle, job: Job) -> float | None:
    """Return how long the job can stay and still save in time, or None if that time has passed.

    Also None if a node must be vacated for another reason than a recall.
    """
    leaving = [name for name in job.allocation.target if name in cycle.index.must_vacate]
    loans = [cycle.snapshot.loans.get(name) for name in leaving]
    deadlines = [loan.return_by_s for loan in loans if loan is not None and loan.return_by_s is not None]
    latest_s = min(deadlines, default=-inf) - cycle.settings.leave_grace_s_for(job)
    return latest_s if len(deadlines) == len(leaving) and cycle.now_s < latest_s else None


def _eviction_reason(cycle: SchedulingCycle, job: Job, leaving: set[str]) -> Reason:
    names = sorted(leaving.intersection(job.allocation.target))
    nodes = [cycle.snapshot.original.nodes[name] for name in names]
    listed = f"{'node' if len(names) == 1 else 'nodes'} {', '.join(names)}"
    if any(node.state is NodeState.DOWN for node in nodes):
        return Reason(ReasonCode.NODE_DOWN, f"{listed} went down")
    if any(node.draining for node in nodes):
        return Reason(ReasonCode.NODE_DRAINED, f"draining {listed}")
    return Reason(ReasonCode.NODE_RECALLED, f"inference needs {listed} back")
