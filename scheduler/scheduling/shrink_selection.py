"""keeping: which GPUs a job keeps that gets fewer, where the rules of placement leave a choice.

The rules come first: a job gives up lent nodes before its own, then the nodes of which it has the fewest GPUs, and what
stays has the shape that its plan is for. Between nodes that are alike in all of that, and between the GPUs of one
node, bytes decide: those stay that hold most of what the new ranks need. Without a difference the first by name do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache

from scheduler.domain import gpu_sets
from scheduler.domain.gpu_sets import Gpus, GpuShape, RankPlacement
from scheduler.domain.job import Job
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.resharding.placement import GpuSlot, Placement
from scheduler.resharding.rank_mapping import select_slots_to_keep
from scheduler.scheduling.cycle import SchedulingCycle
from scheduler.scheduling.rank_placement import (
    canonicalize_seats,
    compute_cached_overlap,
    find_best_mapping,
    knows_shards,
)

GpusByNode = tuple[tuple[GpuSlot, ...], ...]


def select_part(cycle: SchedulingCycle, pool: Gpus, count: int) -> Gpus:
    """The first `count` GPUs of `pool` by the rules of placement."""
    part: dict[str, tuple[int, ...]] = {}
    for name in _sort_for_retention(cycle, pool):
        if count > 0:
            part[name] = pool[name][:count]
            count -= len(part[name])
    return part


def select_part_of_shape(cycle: SchedulingCycle, pool: Gpus, shape: GpuShape) -> Gpus:
    """Large shares first: whichever nodes they take, the smaller ones still find theirs."""
    nodes, part = cycle.snapshot.original.nodes, dict[str, tuple[int, ...]]()
    for group in sorted(shape.groups, key=lambda group: -group.gpus_per_node):
        fitting = [
            name
            for name in _sort_for_retention(cycle, pool)
            if name not in part and nodes[name].gpu == group.gpu and len(pool[name]) >= group.gpus_per_node
        ]
        part.update({name: pool[name][: group.gpus_per_node] for name in fitting[: group.nodes]})
    return part


def select_cheapest_part(cycle: SchedulingCycle, job: Job, pool: Gpus, part: Gpus, plan: ParallelPlan) -> Gpus:
    """Of the parts of `pool` that the rules of placement like as much as `part`, the one from which `plan` needs the
    fewest bytes moved, and of equals the one that needs the fewest over the network; `part` where it is one of them,
    and where the plan is for other GPUs, which the law then tells."""
    count = gpu_sets.count(part)
    if count == gpu_sets.count(pool) or count != plan.world_size:
        return part
    if pool.keys().isdisjoint(job.allocation.target) or not knows_shards(job, plan):
        return part
    view, old_plan = cycle.view, job.allocation.plan
    assert old_plan is not None
    old, given = view.rank_placement(job.allocation), view.default_rank_placement(part)
    seats = view.default_rank_placement(
        _choose_gpus(old_plan, old, plan, given, _group_equivalent_nodes(cycle, pool, part))
    )
    if _count_per_node(seats) != _count_per_node(given):
        seats = view.default_rank_placement(
            _choose_gpus(old_plan, old, plan, given, [[_gpus_of_node(pool, name)] for name in part])
        )
    usual, other = (_compute_moved_bytes(old_plan, old, plan, option) for option in (given, seats))
    return _group_by_node(seats) if other < usual else part


def _group_equivalent_nodes(cycle: SchedulingCycle, pool: Gpus, part: Gpus) -> list[list[RankPlacement]]:
    """The GPUs of each node of `pool`, those together of which the rules prefer none but by name."""
    nodes, view = cycle.snapshot.original.nodes, cycle.view
    groups = defaultdict[tuple[str, bool, int], list[str]](list)
    for name in sorted(pool):
        groups[nodes[name].gpu, view.is_lent(nodes[name]), len(pool[name])].append(name)
    return [
        [_gpus_of_node(pool, name) for name in names] for names in groups.values() if not part.keys().isdisjoint(names)
    ]


def _gpus_of_node(pool: Gpus, name: str) -> RankPlacement:
    return tuple((name, index) for index in pool[name])


def _choose_gpus(
    old_plan: ParallelPlan,
    old: RankPlacement,
    plan: ParallelPlan,
    given: RankPlacement,
    groups: Sequence[Sequence[RankPlacement]],
) -> Gpus:
    pool = tuple(seat for sites in groups for site in sites for seat in site)
    old_alike, given_alike, pool_alike = canonicalize_seats(old, given, pool)
    to_alike = dict(zip(pool, pool_alike, strict=True))
    sites_alike = tuple(tuple(tuple(to_alike[seat] for seat in site) for site in sites) for sites in groups)
    kept = frozenset(_choose_kept(old_plan, old_alike, plan, given_alike, sites_alike))
    return _group_by_node(tuple(seat for seat in pool if to_alike[seat] in kept))


def _compute_moved_bytes(
    old_plan: ParallelPlan, old: RankPlacement, plan: ParallelPlan, seats: RankPlacement
) -> tuple[float, float]:
    """Bytes that move in the best order of these seats, and those of them that pass the network."""
    old_alike, seats_alike = canonicalize_seats(old, seats)
    mapping = find_best_mapping(old_plan, old_alike, plan, seats_alike)
    return mapping.moved_bytes, mapping.network_bytes


@lru_cache(maxsize=1024)
def _choose_kept(
    old_plan: ParallelPlan,
    old: tuple[GpuSlot, ...],
    plan: ParallelPlan,
    given: tuple[GpuSlot, ...],
    sites: tuple[GpusByNode, ...],
) -> tuple[GpuSlot, ...]:
    both = compute_cached_overlap(old_plan, old, plan)
    return select_slots_to_keep(both, Placement(old_plan, old), plan, given, sites)


def _group_by_node(seats: RankPlacement) -> Gpus:
    nodes = sorted({node for node, _ in seats})
    return {node: tuple(sorted(index for name, index in seats if name == node)) for node in nodes}


def _count_per_node(seats: RankPlacement) -> list[int]:
    """GPUs of each node in the order of ranks: a plan's groups fit nodes in this order only."""
    widths: dict[str, int] = {}
    for node, _ in seats:
        widths[node] = widths.get(node, 0) + 1
    return list(widths.values())


def _sort_for_retention(cycle: SchedulingCycle, gpus: Gpus) -> list[str]:
    """Lent nodes are given up first, then the nodes with the fewest of the job's GPUs."""
    nodes, view = cycle.snapshot.original.nodes, cycle.view
    return sorted(gpus, key=lambda name: (view.is_lent(nodes[name]), -len(gpus[name]), name))
