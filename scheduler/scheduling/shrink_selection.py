"""Choose which GPUs a job keeps when it gets fewer.

The rules of placement come first: a job gives up lent nodes before owned ones, then the nodes of which it has the
fewest GPUs, and the rest has the shape of its plan. Among GPUs that these rules do not distinguish, it keeps those
that hold most of the bytes that the new ranks need. Ties are broken by name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache

from scheduler.domain import gpu_sets
from scheduler.domain.gpu_sets import Gpus, GpuShape, RankPlacement
from scheduler.domain.job import Job
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.domain.snapshot import Snapshot
from scheduler.resharding.placement import GpuSlot, Placement
from scheduler.resharding.rank_mapping import select_slots_to_keep
from scheduler.scheduling.rank_placement import (
    canonicalize_slots,
    compute_cached_overlap,
    find_best_mapping,
    knows_shards,
)

SlotsByNode = tuple[tuple[GpuSlot, ...], ...]


def select_part(snapshot: Snapshot, pool: Gpus, count: int) -> Gpus:
    """Return `count` GPUs of `pool`, those that the rules of placement keep longest."""
    part: dict[str, tuple[int, ...]] = {}
    for name in _sort_for_retention(snapshot, pool):
        if count > 0:
            part[name] = pool[name][:count]
            count -= len(part[name])
    return part


def select_part_of_shape(snapshot: Snapshot, pool: Gpus, shape: GpuShape) -> Gpus:
    """Return GPUs of `pool` that have the given shape."""
    part: dict[str, tuple[int, ...]] = {}
    # The groups with the most GPUs a node choose first: the smaller ones then still find their nodes.
    for group in sorted(shape.groups, key=lambda group: -group.gpus_per_node):
        fitting = [
            name
            for name in _sort_for_retention(snapshot, pool)
            if name not in part and snapshot.nodes[name].gpu == group.gpu and len(pool[name]) >= group.gpus_per_node
        ]
        part.update({name: pool[name][: group.gpus_per_node] for name in fitting[: group.nodes]})
    return part


def select_cheapest_part(snapshot: Snapshot, job: Job, pool: Gpus, part: Gpus, plan: ParallelPlan) -> Gpus:
    """Return the part of `pool`, equivalent to `part` under the rules of placement, that moves the fewest bytes.

    Of equals, the part that moves the fewest bytes over the network is chosen, then `part` itself. `part` is also
    returned if the plan is for another number of GPUs.
    """
    count = gpu_sets.count(part)
    if count == gpu_sets.count(pool) or count != plan.world_size:
        return part
    if pool.keys().isdisjoint(job.allocation.target) or not knows_shards(job, plan):
        return part
    # `job` may be given as if it held only part of its GPUs, but its shards are on all of them.
    held = snapshot.jobs[job.id].allocation
    old_plan = held.plan
    assert old_plan is not None
    old, usual = snapshot.rank_placement(held), snapshot.default_rank_placement(part)
    groups = _group_equivalent_nodes(snapshot, pool, part)
    chosen = snapshot.default_rank_placement(_choose_gpus(old_plan, old, plan, usual, groups))
    if _count_per_node(chosen) != _count_per_node(usual):
        nodes = [[_slots_of_node(pool, name)] for name in part]
        chosen = snapshot.default_rank_placement(_choose_gpus(old_plan, old, plan, usual, nodes))
    usual_bytes, chosen_bytes = (_compute_moved_bytes(old_plan, old, plan, new) for new in (usual, chosen))
    return _group_by_node(chosen) if chosen_bytes < usual_bytes else part


def _sort_for_retention(snapshot: Snapshot, gpus: Gpus) -> list[str]:
    """Return the nodes in the order in which they are kept: owned ones, then those with most of the job's GPUs."""
    return sorted(gpus, key=lambda name: (snapshot.is_lent(snapshot.nodes[name]), -len(gpus[name]), name))


def _group_equivalent_nodes(snapshot: Snapshot, pool: Gpus, part: Gpus) -> list[list[RankPlacement]]:
    """Group the GPUs of nodes that the rules of placement distinguish by name alone."""
    nodes = snapshot.nodes
    groups = defaultdict[tuple[str, bool, int], list[str]](list)
    for name in sorted(pool):
        groups[nodes[name].gpu, snapshot.is_lent(nodes[name]), len(pool[name])].append(name)
    used = [names for names in groups.values() if not part.keys().isdisjoint(names)]
    return [[_slots_of_node(pool, name) for name in names] for names in used]


def _slots_of_node(pool: Gpus, name: str) -> RankPlacement:
    return tuple((name, index) for index in pool[name])


def _choose_gpus(
    old_plan: ParallelPlan,
    old: RankPlacement,
    plan: ParallelPlan,
    usual: RankPlacement,
    groups: Sequence[Sequence[RankPlacement]],
) -> Gpus:
    pool = tuple(slot for nodes in groups for node in nodes for slot in node)
    old_slots, usual_slots, pool_slots = canonicalize_slots(old, usual, pool)
    canonical = dict(zip(pool, pool_slots, strict=True))
    canonical_groups = tuple(tuple(tuple(canonical[slot] for slot in node) for node in nodes) for nodes in groups)
    kept = frozenset(_choose_slots(old_plan, old_slots, plan, usual_slots, canonical_groups))
    return _group_by_node(tuple(slot for slot in pool if canonical[slot] in kept))


@lru_cache(maxsize=1024)
def _choose_slots(
    old_plan: ParallelPlan,
    old: tuple[GpuSlot, ...],
    plan: ParallelPlan,
    usual: tuple[GpuSlot, ...],
    groups: tuple[SlotsByNode, ...],
) -> tuple[GpuSlot, ...]:
    overlap = compute_cached_overlap(old_plan, old, plan)
    return select_slots_to_keep(overlap, Placement(old_plan, old), plan, usual, groups)


def _compute_moved_bytes(
    old_plan: ParallelPlan, old: RankPlacement, plan: ParallelPlan, new: RankPlacement
) -> tuple[float, float]:
    """Return the bytes that move in the best order of these GPUs, and how many of them cross the network."""
    old_slots, new_slots = canonicalize_slots(old, new)
    mapping = find_best_mapping(old_plan, old_slots, plan, new_slots)
    return mapping.moved_bytes, mapping.network_bytes


def _group_by_node(placement: RankPlacement) -> Gpus:
    nodes = sorted({node for node, _ in placement})
    return {node: tuple(sorted(index for name, index in placement if name == node)) for node in nodes}


def _count_per_node(placement: RankPlacement) -> list[int]:
    """Return the GPUs of each node in the order of ranks. A plan's groups fit the nodes in this order only."""
    counts: dict[str, int] = {}
    for node, _ in placement:
        counts[node] = counts.get(node, 0) + 1
    return list(counts.values())
