"""Stage: let running jobs grow onto whole nodes of other GPU models, and give such nodes up again.

A part of a job on other models than its home model is taken and given up in whole nodes. What remains always has a
solved plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from scheduler.domain import gpu_sets
from scheduler.domain.decisions import Reason, ReasonCode, ResizeJob
from scheduler.domain.gpu_sets import FreeGpus, Gpus
from scheduler.domain.job import Job
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.scheduling.cycle import ResourceKind, SchedulingCycle
from scheduler.scheduling.policies.model_mix import split_unlike
from scheduler.scheduling.policies.scaling import remaining_work, time_saved_s
from scheduler.scheduling.target_selection import is_resizable


def grow_over_models(cycle: SchedulingCycle) -> None:
    """Deal free whole nodes of each model to jobs that hold others, where a solved mixed plan gains most."""
    if len(cycle.node_sizes) < 2 or cycle.policies.deal_nodes is None:
        return
    for gpu in sorted(cycle.node_sizes):
        free = _list_free_nodes(cycle, gpu)
        deal = cycle.policies.deal_nodes(cycle.view, gpu, free, cycle.settled_jobs, cycle.settings)
        cycle.missing_shapes.update(dict.fromkeys(deal.wanted))
        held = {job_id: len(_held_nodes(cycle, cycle.snapshot.jobs[job_id], gpu)) for job_id in deal.nodes}
        for job_id in sorted(deal.nodes, key=lambda job_id: (deal.nodes[job_id] > held[job_id], job_id)):
            _change_nodes(cycle, cycle.snapshot.jobs[job_id], gpu, deal.nodes[job_id])


def release_unlike(cycle: SchedulingCycle, kind: ResourceKind, missing: int) -> int:
    """Let jobs give up nodes of a model that is not their home model. Return the GPUs freed, up to `missing` or more.

    The job that such a node helps least comes first. Each gives up all its nodes of the model.
    """
    freed = 0
    for job, gpus, plan in sorted(_list_releases(cycle, kind), key=lambda release: _lost_per_gpu(cycle, *release)):
        if freed >= missing:
            break
        freed += job.allocation.target_gpus - gpu_sets.count(gpus)
        detail = f"a pending job needs the {kind.gpu} GPUs"
        reason = Reason(ReasonCode.MAKES_ROOM_FOR_WAITING_JOB, detail)
        cycle.apply(ResizeJob(job.id, gpus, plan, cycle.leave_by_s(job), reason))
    return freed


def _list_free_nodes(cycle: SchedulingCycle, gpu: str) -> list[FreeGpus]:
    """Return the wholly free, unreserved nodes of a model that have the usual size."""
    unreserved = (room for room in cycle.snapshot.free_gpus if room.node not in cycle.reservation.nodes)
    return [room for room in unreserved if room.gpu == gpu and len(room.indices) == cycle.node_sizes[gpu]]


def _held_nodes(cycle: SchedulingCycle, job: Job, gpu: str) -> list[str]:
    """Return the job's nodes of a model, those that it keeps longest first: owned ones, then by name."""
    view = cycle.view
    held = (name for name in job.allocation.target if view.nodes[name].gpu == gpu)
    return sorted(held, key=lambda name: (view.is_lent(view.nodes[name]), name))


def _change_nodes(cycle: SchedulingCycle, job: Job, gpu: str, count: int) -> None:
    """Resize the job to `count` nodes of a model and keep its other GPUs. Owned free nodes are taken first.

    It gets fewer nodes if jobs before it have used up a limit that they share.
    """
    nodes = _held_nodes(cycle, job, gpu)
    count = min(count, len(nodes) + cycle.snapshot.quota.headroom(job) // cycle.node_sizes[gpu])
    rooms = cycle.usable_gpus(job, _list_free_nodes(cycle, gpu))
    usable = sorted((room for room in rooms if len(room.indices) == cycle.node_sizes[gpu]), key=_owned_first)
    added = {room.node: room.indices for room in usable[: max(0, count - len(nodes))]}
    if count == len(nodes) or len(nodes) + len(added) < count:
        return
    kept = gpu_sets.without_nodes(job.allocation.target, nodes[count:])
    gpus = gpu_sets.union(kept, added)
    if plan := cycle.plan_on(job, cycle.view.shape_of(gpus), request_missing=False):
        cycle.apply(ResizeJob(job.id, gpus, plan, cycle.leave_by_s(job), _explain_mix(cycle, job, gpus, plan)))


def _owned_first(room: FreeGpus) -> tuple[bool, str]:
    return room.is_lent, room.node


def _explain_mix(cycle: SchedulingCycle, job: Job, gpus: Gpus, plan: ParallelPlan) -> Reason:
    before_s, after_s = job.step_time_s(), plan.iteration_time_s * job.curve_correction
    now, then = (cycle.view.shape_of(each) for each in (job.allocation.target, gpus))
    detail = f"{then} take {after_s:.3g} s a step, {now} {before_s:.3g} s"
    if not job.has_reported:
        detail = f"{detail} (estimated)"
    if gpu_sets.count(gpus) < job.allocation.target_gpus:
        detail = f"other jobs gain more from the nodes; {detail}"
    numbers: Mapping[str, float] = {
        "step_time_s_before": before_s,
        "step_time_s": after_s,
        "saved_s": time_saved_s(job, plan, remaining_work(cycle.view, job)),
    }
    return Reason(ReasonCode.GAIN_EXCEEDS_COST, detail, numbers)


def _list_releases(cycle: SchedulingCycle, kind: ResourceKind) -> Iterator[tuple[Job, Gpus, ParallelPlan]]:
    """Yield each job with unlike GPUs of the kind, the GPUs that it would keep, and their plan."""
    for job in cycle.index.sort_by_submission(cycle.index.above_minimum):
        plan = job.allocation.plan
        if plan is None or not plan.is_mixed or not is_resizable(cycle, job):
            continue
        _, unlike = split_unlike(cycle.view, job, job.allocation.target)
        nodes = [name for name in unlike if cycle.view.nodes[name].gpu == kind.gpu]
        if not nodes or not kind.includes(nodes):
            continue
        if kind.owned_only and any(cycle.view.is_lent(cycle.view.nodes[name]) for name in nodes):
            continue
        gpus = gpu_sets.without_nodes(job.allocation.target, nodes)
        rest = cycle.plan_for(job, gpus)
        if rest is not None and gpu_sets.count(gpus) >= job.spec.min_gpus:
            yield job, gpus, rest


def _lost_per_gpu(cycle: SchedulingCycle, job: Job, gpus: Gpus, plan: ParallelPlan) -> tuple[float, str]:
    lost_s = -time_saved_s(job, plan, remaining_work(cycle.view, job))
    return lost_s / (job.allocation.target_gpus - gpu_sets.count(gpus)), job.id
