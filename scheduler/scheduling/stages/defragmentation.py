"""Clearing: whole nodes for a waiting job whose plans need them, where enough GPUs are free or could be, but not so.

Other jobs are moved off the nodes that are cheapest to clear, if that pays: the moves cost fewer GPU-seconds, by what
reconfiguration takes, than the job's GPUs would be idle or elsewhere until such nodes come free by themselves. Until
the job starts, nobody behind it is put onto them. Nothing is remembered for that: what has been cleared stays cheapest.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import inf

from scheduler.domain import gpu_sets
from scheduler.domain.decisions import Reason, ReasonCode, ResizeJob
from scheduler.domain.fleet import Node
from scheduler.domain.job import Job
from scheduler.domain.scaling_curve import LinearCurve
from scheduler.scheduling.cycle import SchedulingCycle
from scheduler.scheduling.gpu_budget import expected_end_s
from scheduler.scheduling.policies.speed import gpu_model
from scheduler.scheduling.target_selection import Target, is_resizable, move_target, reduce_target


@dataclass(frozen=True, slots=True)
class _NodeCost:
    """A node, and how it could be cleared: by moving `jobs`, for so many GPU-seconds, or by waiting for them."""

    node: str
    jobs: frozenset[str]
    cost_gpu_s: float
    empty_at_s: float


def reserve_emptied_nodes(cycle: SchedulingCycle, queue: Sequence[str]) -> None:
    """Keep nobody behind the first job that needs whole nodes on the nodes that are being left, if they are enough."""
    for position, job_id in enumerate(queue):
        job = cycle.snapshot.jobs[job_id]
        count = count_whole_nodes(cycle, job)
        if count:
            cleared = [site.node for site in _rank_nodes(cycle, job) if not site.jobs]
            if len(cleared) >= count:
                cycle.reserve_nodes(cleared[:count], frozenset(queue[: position + 1]))
            return


def defragment_for(cycle: SchedulingCycle, job: Job) -> int:
    """Move others off whole nodes for a job that is first to need some. How many; 0 where none are to be had, or where
    it does not pay."""
    count = count_whole_nodes(cycle, job)
    if not count or cycle.snapshot.original.switches.resizes_frozen or len(sites := _rank_nodes(cycle, job)) < count:
        return 0
    chosen, by_itself_s = sites[:count], sorted(site.empty_at_s for site in sites)[count - 1]
    cost_gpu_s = sum(site.cost_gpu_s for site in chosen)
    if not cost_gpu_s <= cycle.policies.starting_gpus(cycle.view, job, cycle.node_sizes, None) * (
        by_itself_s - cycle.now_s
    ):
        return 0
    nodes = [site.node for site in chosen]
    targets = _find_targets(cycle, nodes, frozenset[str]().union(*(site.jobs for site in chosen)))
    if targets is None:
        return 0
    cycle.reserve_nodes(nodes, frozenset((job.id,)))
    reason = Reason(ReasonCode.DEFRAGMENTED, f"{job.id} needs whole nodes and is to have {', '.join(sorted(nodes))}")
    for moving, (gpus, plan) in targets:
        cycle.apply(ResizeJob(moving.id, gpus, plan, cycle.leave_by_s(moving), reason))
        cycle.changed_jobs.add(moving.id)
    return count


def count_whole_nodes(cycle: SchedulingCycle, job: Job) -> int:
    """How many whole nodes the job starts on; 0 where nothing is known against lying otherwise."""
    curve = cycle.view.curve(job)
    if isinstance(curve, LinearCurve) or not curve.infeasible:
        return 0
    gpu = gpu_model(cycle.view, job, cycle.node_sizes)
    size = cycle.node_sizes[gpu] if gpu else 0
    need = cycle.policies.starting_gpus(cycle.view, job, cycle.node_sizes, gpu) if size else 0
    return need // size if need and need % size == 0 and curve.has_infeasible_shape(need) else 0


def _rank_nodes(cycle: SchedulingCycle, job: Job) -> list[_NodeCost]:
    """The nodes that the job may use, cheapest first: of the commonest size of its GPU model, serving training."""
    view, gpu = cycle.view, gpu_model(cycle.view, job, cycle.node_sizes)
    found = [
        _evaluate_node(cycle, node)
        for node in view.nodes.values()
        if node.gpu == gpu and node.gpus == cycle.node_sizes[gpu] and view.serves_training(node)
        if job.spec.fungible or not view.is_lent(node)
    ]
    return sorted(found, key=lambda site: (site.cost_gpu_s, site.node))


def _evaluate_node(cycle: SchedulingCycle, node: Node) -> _NodeCost:
    """Each job counts as if it were on this node alone."""
    users = [cycle.snapshot.jobs[job_id] for job_id in sorted(cycle.snapshot.jobs_on_node(node.name))]
    staying = [user for user in users if node.name in user.allocation.target]
    cost_gpu_s = sum(
        cycle.settings.reconfiguration_s_for(user) * user.allocation.target_gpus if is_resizable(cycle, user) else inf
        for user in staying
    )
    clear_at_s = max((expected_end_s(user, cycle.now_s) for user in staying), default=cycle.now_s)
    return _NodeCost(node.name, frozenset(user.id for user in staying), cost_gpu_s, clear_at_s)


def _find_targets(
    cycle: SchedulingCycle, nodes: Collection[str], job_ids: Collection[str]
) -> list[tuple[Job, Target]] | None:
    """Where each of these jobs goes, the widest first; None where one finds no room beside `nodes`."""
    jobs = [cycle.snapshot.jobs[job_id] for job_id in sorted(job_ids)]
    rooms = {room.node: room for room in cycle.snapshot.rooms if room.node not in nodes}
    found: list[tuple[Job, Target]] = []
    for job in sorted(jobs, key=lambda job: -job.allocation.target_gpus):
        left = gpu_sets.without_nodes(job.allocation.target, nodes)
        present, base = (
            job.allocation.target_gpus,
            cycle.policies.starting_gpus(cycle.view, job, cycle.node_sizes, None),
        )
        target = move_target(cycle, job, left, rooms.values(), most=present, least=base) or reduce_target(
            cycle, job, left, present
        )
        if target is None or gpu_sets.count(target[0]) < min(base, present):
            return None
        found.append((job, target))
        for name, taken in gpu_sets.difference(target[0], left).items():
            rooms[name] = rooms[name].without(taken)
    return found
