"""Stage of decide: take jobs off nodes that must be left."""

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
from scheduler.scheduling.cycle import ResourceKind, SchedulingCycle
from scheduler.scheduling.gpu_budget import count_pending_gpus
from scheduler.scheduling.policies.job_order import remaining_service_gpu_s
from scheduler.scheduling.policies.preemption import find_preemption_victims
from scheduler.scheduling.target_selection import Target, is_resizable, move_target, reduce_target


def evacuate_nodes(cycle: SchedulingCycle) -> None:
    """Take jobs off nodes that must be left: move to free GPUs, else shrink to the rest, else wait a little for GPUs
    that others elsewhere give up, else preempt."""
    ledger = cycle.snapshot.ledger
    leaving = set(ledger.must_vacate)
    affected = {job_id for node in leaving for job_id in ledger.holders[node].values()}
    stranded: list[Job] = []
    for job in ledger.sort_by_submission(affected):
        if job.is_placed and not leaving.isdisjoint(job.allocation.target) and not _evacuate_job(cycle, job, leaving):
            stranded.append(job)
    if stranded and cycle.policies.defers_evictions:
        soon, ordered = count_pending_gpus(cycle), _sort_by_service(cycle, stranded)
        stranded = [job for job in ordered if not _defer_eviction(cycle, job, leaving, soon)]
        _preempt_for_stranded(cycle, stranded, affected, soon)
        stranded = [job for job in stranded if not _defer_eviction(cycle, job, leaving, soon)]
    for job in stranded:
        cycle.apply(PreemptJob(job.id, cycle.leave_by_s(job), _eviction_reason(cycle, job, leaving)))


def _sort_by_service(cycle: SchedulingCycle, jobs: Iterable[Job]) -> list[Job]:
    return sorted(jobs, key=lambda job: (remaining_service_gpu_s(cycle.view, job, cycle.node_sizes), job.id))


def _preempt_for_stranded(
    cycle: SchedulingCycle, stranded: Sequence[Job], affected: Collection[str], pending: Counter[GpuKind]
) -> None:
    """Preempt jobs elsewhere that have more to do than those that would have to stop here."""
    able = [job for job in stranded if is_resizable(cycle, job) and _latest_stay_s(cycle, job) is not None]
    if not able:
        return
    for job_id, takers in find_preemption_victims(
        cycle.view, able, {*affected, *cycle.changed_jobs}, cycle.settings
    ).items():
        job = cycle.snapshot.jobs[job_id]
        detail = f"inference needs nodes back, and {', '.join(takers)} with less to do get its GPUs"
        cycle.apply(PreemptJob(job_id, cycle.leave_by_s(job), Reason(ReasonCode.OUTRANKED, detail)))
        for name, indices in job.allocation.target.items():
            node = cycle.view.nodes[name]
            pending[node.gpu, cycle.view.is_lent(node)] += len(indices)


def _evacuate_job(cycle: SchedulingCycle, job: Job, leaving: set[str]) -> bool:
    left = gpu_sets.without_nodes(job.allocation.target, leaving)
    target = _find_move_target(cycle, job, left) or reduce_target(cycle, job, left, job.spec.max_gpus)
    if target is None:
        return False
    gpus, plan = target
    cycle.apply(ResizeJob(job.id, gpus, plan, cycle.leave_by_s(job), _eviction_reason(cycle, job, leaving)))
    cycle.changed_jobs.add(job.id)
    return True


def _defer_eviction(cycle: SchedulingCycle, job: Job, leaving: set[str], pending: Counter[GpuKind]) -> bool:
    """Leave a running job where it is while others give up GPUs for it, as long as it could still save in time."""
    latest_s = _latest_stay_s(cycle, job)
    if latest_s is None or not is_resizable(cycle, job):
        return False
    model, need = cycle.snapshot.original.nodes[next(iter(job.allocation.target))].gpu, job.spec.min_gpus
    kinds = [(model, lent) for lent in ((False, True) if job.spec.fungible else (False,))]
    missing = need - gpu_sets.count(gpu_sets.without_nodes(job.allocation.target, leaving))
    if missing > sum(pending[kind] for kind in kinds):
        return False
    cycle.pending_moves[job.id] = (ResourceKind(model, owned_only=not job.spec.fungible), missing)
    for kind in kinds:
        taken = min(pending[kind], missing)
        pending[kind] -= taken
        missing -= taken
    cycle.changed_jobs.add(job.id)
    cycle.recheck_at_s = min(cycle.recheck_at_s, latest_s)
    return True


def _latest_stay_s(cycle: SchedulingCycle, job: Job) -> float | None:
    """Until when the job can stay and still save in time; None where that is past, or it has to go for another reason
    than a recall."""
    leaving = [name for name in job.allocation.target if name in cycle.snapshot.ledger.must_vacate]
    loans = [cycle.snapshot.loans.get(name) for name in leaving]
    deadlines = [loan.return_by_s for loan in loans if loan is not None and loan.return_by_s is not None]
    latest_s = min(deadlines, default=-inf) - cycle.settings.leave_grace_s_for(job)
    return latest_s if len(deadlines) == len(leaving) and cycle.now_s < latest_s else None


def _find_move_target(cycle: SchedulingCycle, job: Job, left: Gpus) -> Target | None:
    """The GPUs that stay, and free ones elsewhere for those that do not: as many as the job has, so that it is
    disturbed once and need not grow again; only enough for its minimum while others wait for GPUs."""
    most = job.allocation.target_gpus
    if cycle.snapshot.ledger.waiting:
        most = min(most, job.spec.min_gpus)
    return move_target(cycle, job, left, cycle.snapshot.rooms, most=most, least=job.spec.min_gpus)


def _eviction_reason(cycle: SchedulingCycle, job: Job, leaving: set[str]) -> Reason:
    nodes = sorted(leaving.intersection(job.allocation.target))
    states = [cycle.snapshot.original.nodes[name] for name in nodes]
    if any(node.state is NodeState.DOWN for node in states):
        return Reason(ReasonCode.NODE_DOWN, f"{', '.join(nodes)} went down")
    if any(node.draining for node in states):
        return Reason(ReasonCode.NODE_DRAINED, f"{', '.join(nodes)} is being drained")
    return Reason(ReasonCode.NODE_RECALLED, f"inference needs {', '.join(nodes)} back")
