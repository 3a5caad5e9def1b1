"""Vacate whole nodes for a pending job whose plans need them while enough GPUs are free on other nodes.

Other jobs are moved off the nodes that are cheapest to vacate, if the moves cost fewer GPU-seconds of reconfiguration
than the pending job would wait for such nodes. Until the job starts, no later job is placed on these nodes. Nothing is
remembered between ticks, because nodes that are being vacated stay the cheapest ones.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import inf

from scheduler.domain import gpu_sets
from scheduler.domain.decisions import Reason, ReasonCode, ResizeJob
from scheduler.domain.fleet import Node
from scheduler.domain.job import Job
from scheduler.scheduling.cycle import SchedulingCycle
from scheduler.scheduling.policies.backfill import estimate_end_s
from scheduler.scheduling.policies.speed import gpu_model
from scheduler.scheduling.target_selection import Target, is_resizable, move_target, reduce_target


@dataclass(frozen=True, slots=True)
class _NodeCost:
    """A node that can be vacated by moving `jobs`, for `cost_gpu_s`, or by waiting for their end at `empty_at_s`."""

    node: str
    jobs: frozenset[str]
    cost_gpu_s: float
    empty_at_s: float


def reserve_emptied_nodes(cycle: SchedulingCycle, queue: Sequence[str]) -> None:
    """Keep later jobs off nodes that are being vacated for the first job that needs whole nodes, if they are enough."""
    for position, job_id in enumerate(queue):
        job = cycle.snapshot.jobs[job_id]
        count = count_whole_nodes(cycle, job)
        if count:
            emptied = [each.node for each in _rank_nodes(cycle, job) if not each.jobs]
            if len(emptied) >= count:
                cycle.reserve_nodes(emptied[:count], queue[: position + 1])
            return


def defragment_for(cycle: SchedulingCycle, job: Job) -> int:
    """Move other jobs off whole nodes for a pending job. Return how many nodes, 0 if impossible or too expensive."""
    count = count_whole_nodes(cycle, job)
    if not count or cycle.resizes_frozen or len(ranked := _rank_nodes(cycle, job)) < count:
        return 0
    chosen, empty_at_s = ranked[:count], sorted(each.empty_at_s for each in ranked)[count - 1]
    cost_gpu_s = sum(each.cost_gpu_s for each in chosen)
    waiting_gpus = cycle.policies.starting_gpus(cycle.view, job, cycle.node_sizes, None)
    if cost_gpu_s == inf or not cost_gpu_s <= waiting_gpus * (empty_at_s - cycle.now_s):
        return 0
    nodes = [each.node for each in chosen]
    targets = _find_targets(cycle, nodes, frozenset[str]().union(*(each.jobs for each in chosen)))
    if targets is None:
        return 0
    cycle.reserve_nodes(nodes, (job.id,))
    reason = Reason(ReasonCode.DEFRAGMENTED, f"{job.id} needs whole nodes and gets {', '.join(sorted(nodes))}")
    for moving, (gpus, plan) in targets:
        cycle.apply(ResizeJob(moving.id, gpus, plan, cycle.leave_by_s(moving), reason))
    return count


def count_whole_nodes(cycle: SchedulingCycle, job: Job) -> int:
    """Return how many whole nodes the policy set vacates for the job."""
    policies = cycle.policies
    return policies.count_whole_nodes(cycle.view, job, cycle.node_sizes, starting_gpus=policies.starting_gpus)


def _rank_nodes(cycle: SchedulingCycle, job: Job) -> list[_NodeCost]:
    """Return the nodes of the usual size of the job's GPU model that it can use, the cheapest to vacate first."""
    view, gpu = cycle.view, gpu_model(cycle.view, job, cycle.node_sizes)
    feasible = cycle.fit.find_feasible_nodes(job)
    nodes = [
        _evaluate_node(cycle, node)
        for node in view.nodes.values()
        if node.gpu == gpu and node.gpus == cycle.node_sizes[gpu] and view.serves_training(node)
        if (job.accepts_lent_nodes or not view.is_lent(node)) and not view.is_partly_lent(node)
        if feasible is None or node.name in feasible
    ]
    return sorted(nodes, key=lambda each: (each.cost_gpu_s, each.node))


def _evaluate_node(cycle: SchedulingCycle, node: Node) -> _NodeCost:
    """Return the cost of vacating the node, with each job counted as if it were on this node alone."""
    users = [cycle.snapshot.jobs[job_id] for job_id in sorted(cycle.snapshot.jobs_on_node(node.name))]
    staying = [user for user in users if node.name in user.allocation.target]
    cost_gpu_s = sum(
        cycle.settings.reconfiguration_s_for(user) * user.allocation.target_gpus if is_resizable(cycle, user) else inf
        for user in staying
    )
    empty_at_s = max((estimate_end_s(user, cycle.now_s) for user in staying), default=cycle.now_s)
    return _NodeCost(node.name, frozenset(user.id for user in staying), cost_gpu_s, empty_at_s)


def _find_targets(
    cycle: SchedulingCycle, nodes: Collection[str], job_ids: Collection[str]
) -> list[tuple[Job, Target]] | None:
    """Return a target outside `nodes` for each job, or None if one does not fit. The widest job chooses first."""
    jobs = [cycle.snapshot.jobs[job_id] for job_id in sorted(job_ids)]
    free_gpus = {free.node: free for free in cycle.snapshot.free_gpus if free.node not in nodes}
    found: list[tuple[Job, Target]] = []
    for job in sorted(jobs, key=lambda job: -job.allocation.target_gpus):
        kept = gpu_sets.without_nodes(job.allocation.target, nodes)
        current_gpus = min(job.allocation.target_gpus, job.spec.max_gpus)
        base = cycle.policies.starting_gpus(cycle.view, job, cycle.node_sizes, None)
        target = move_target(cycle, job, kept, free_gpus.values(), max_gpus=current_gpus, min_gpus=base)
        target = target or reduce_target(cycle, job, kept, current_gpus)
        if target is None or gpu_sets.count(target[0]) < min(base, current_gpus):
            return None
        found.append((job, target))
        for name, taken in gpu_sets.difference(target[0], kept).items():
            left = free_gpus.pop(name).without(taken)
            # What the moved job requests is not deducted here, so a node of known capacity takes one job only.
            if left.indices and cycle.view.nodes[name].capacity is None:
                free_gpus[name] = left
    return found
