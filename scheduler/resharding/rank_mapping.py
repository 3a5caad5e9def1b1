"""Assignment of the ranks of a new plan to GPUs that moves the fewest bytes of state.

It runs when the allocation of a job changes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, permutations
from math import lcm
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan
from scheduler.resharding.placement import GpuSlot, Placement, TensorSpec, check_slots, compute_sharding
from scheduler.resharding.shards import Floats, StateOverlap, compute_overlap

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
RankBlock = tuple[int, ...]
"""Ranks that move to the GPUs of another block together."""

_MAX_ENUMERATED_SIZE = 4
"""Up to this size all orders of a block are tried at once; above, one assignment problem each is faster."""

NodeSlots = tuple[GpuSlot, ...]
"""GPUs of one node, some of which are kept."""


@dataclass(frozen=True, slots=True)
class RankMapping:
    """New rank r runs on `slots[r]`.

    A rank on a GPU that the job already had keeps the parts that it needs of that GPU's old shards.

    Attributes:
        moved_bytes: bytes that all ranks together need and do not keep.
        network_bytes: the part of `moved_bytes` that no GPU of the same node held.
        moved_bytes_in_order: bytes that would move in the order in which the slots were given.
        floor_bytes: a bound that no order of the slots can beat: everything needed, less the smaller of two sums, of
            what each rank could keep at most and of what each slot could.
    """

    slots: tuple[GpuSlot, ...]
    moved_bytes: float
    network_bytes: float
    moved_bytes_in_order: float
    floor_bytes: float


def map_ranks(
    old: Placement,
    new_plan: ParallelPlan,
    new_slots: Sequence[GpuSlot],
    tensors: Sequence[TensorSpec],
    *,
    any_order: bool = False,
) -> RankMapping:
    """Return the order of `new_slots` under which the fewest bytes move.

    A plan's speed depends on which ranks share a node, so the order preserves what makes the given one fast. Whole
    nodes are exchanged first, then the ranks of a stage that communicate intensively, then GPUs within their node. Each
    step is an assignment problem that is solved optimally; all of them together need not be optimal. Of equally good
    exchanges, the one with the least network traffic is chosen, then the closest to the given order.

    Args:
        any_order: solve one assignment problem over all orders of GPUs for stages of one GPU model. This is the true
            optimum, for comparison and for clusters with one kind of link.

    Raises:
        ValueError: a plan is inconsistent, the plans have different numbers of layers, the tensors belong to other
            layers, or `new_slots` does not have one distinct slot per rank of `new_plan`.
    """
    return find_best_order(compute_overlap(old, new_plan, tensors), old, new_plan, new_slots, any_order=any_order)


def find_best_order(
    state_overlap: StateOverlap,
    old: Placement,
    new_plan: ParallelPlan,
    new_slots: Sequence[GpuSlot],
    *,
    any_order: bool = False,
) -> RankMapping:
    """Do the same as `map_ranks` with a known overlap of both plans, which is the same for all choices of slots."""
    given = tuple(new_slots)
    check_slots(new_plan, given)
    kept, near = compute_bytes_by_slot(state_overlap, old, given)
    order = list(range(len(given)))
    if any_order:
        _exchange_blocks(group_equivalent_ranks(new_plan), order, kept, near)
    else:
        _exchange_blocks(group_equivalent_nodes(new_plan, given, order), order, kept, near)
        _exchange_blocks(group_equivalent_units(new_plan, given, order), order, kept, near)
        _exchange_blocks(group_equivalent_nodes(new_plan, given, order), order, kept, near)
    ranks, needed = np.arange(len(given)), float(state_overlap.needed.sum())
    most_kept = min(kept.max(axis=1).sum(), kept.max(axis=0).sum())
    return RankMapping(
        slots=tuple(given[slot] for slot in order),
        moved_bytes=needed - float(kept[ranks, order].sum()),
        network_bytes=needed - float(near[ranks, order].sum()),
        moved_bytes_in_order=needed - float(np.trace(kept)),
        floor_bytes=needed - float(most_kept),
    )


def compute_bytes_by_slot(
    state_overlap: StateOverlap, old: Placement, slots: Sequence[GpuSlot]
) -> tuple[Floats, Floats]:
    """Return [ranks, slots] twice: bytes that the rank needs and that the GPU of the slot, or its node, held."""
    none = np.zeros((len(state_overlap.needed), 1))
    ranks = {slot: rank for rank, slot in enumerate(old.slots)}
    nodes = {node: number for number, node in enumerate(state_overlap.nodes)}
    kept = np.hstack([state_overlap.by_rank, none])[:, [ranks.get(slot, -1) for slot in slots]]
    near = np.hstack([state_overlap.by_node, none])[:, [nodes.get(slot.node, -1) for slot in slots]]
    return kept, near


def select_slots_to_keep(
    state_overlap: StateOverlap,
    old: Placement,
    new_plan: ParallelPlan,
    given: Sequence[GpuSlot],
    equivalent_sites: Sequence[Sequence[NodeSlots]],
) -> tuple[GpuSlot, ...]:
    """Return the slots for `new_plan` that keep the most state in place, starting from `given`.

    The result keeps at least as much state as `given`. Of equal choices, the one with the least network traffic is
    taken, then the one nearest to `given`. The ranks on each node of `given` move to one site as a whole, and there to
    the GPUs that hold most of what they need. Both are assignment problems and solved together: the gain of a pair of
    nodes is that of its best pairs of GPUs. Exchanges of ranks across nodes are not considered.

    Args:
        given: slots of `new_plan`, node by node.
        equivalent_sites: groups of sites, each of which can replace any other of its group.

    Raises:
        ValueError: `given` does not have one distinct slot per rank of `new_plan`.
    """
    check_slots(new_plan, tuple(given))
    pool = [slot for sites in equivalent_sites for site in sites for slot in site]
    numbers, taken = {slot: number for number, slot in enumerate(pool)}, frozenset(given)
    kept, near = compute_bytes_by_slot(state_overlap, old, pool)
    usual = np.array([slot in taken for slot in pool], dtype=np.float64)
    slots = list(given)
    blocks = {node: [rank for rank, _ in ranks] for node, ranks in groupby(enumerate(given), lambda at: at[1].node)}
    for sites in equivalent_sites:
        here = [blocks[site[0].node] for site in sites if site[0].node in blocks]
        columns = [[numbers[slot] for slot in site] for site in sites]
        homes = [site[0].node for site in sites]
        at_home = [[float(homes[number] == given[ranks[0]].node) for number in range(len(sites))] for ranks in here]
        for ranks, site in zip(here, _assign_sites(here, columns, kept, near, np.array(at_home)), strict=True):
            gains = [part[np.ix_(ranks, columns[site])] for part in (kept, np.broadcast_to(usual, kept.shape))]
            for rank, column in zip(ranks, _assign_rows(gains), strict=True):
                slots[rank] = sites[site][column]
    return tuple(slots)


def _assign_sites(
    blocks: Sequence[Sequence[int]], columns: Sequence[Sequence[int]], kept: Floats, near: Floats, at_home: Floats
) -> list[int]:
    """Return the site of each block of ranks."""
    if len(columns) == 1 or not blocks:
        return [0] * len(blocks)
    most, over_there = np.zeros((2, len(blocks), len(columns)))
    for block, ranks in enumerate(blocks):
        for site, slots in enumerate(columns):
            gain = kept[np.ix_(ranks, slots)]
            if gain.any():
                most[block, site] = gain[range(len(ranks)), _assign_rows([gain])].sum()
            over_there[block, site] = near[ranks, slots[0]].sum()
    return _assign_rows([most, over_there, at_home])


def _assign_rows(gains: Sequence[Floats]) -> list[int]:
    """Return the column of each row, if there are at least as many columns as rows.

    Rows without gain make the matrix square.
    """
    rows, columns = gains[0].shape
    more = np.zeros((columns - rows, columns))
    return find_best_assignment([np.vstack([gain, more]) for gain in gains])[:rows]


def _exchange_blocks(
    equivalent_blocks: Sequence[Sequence[RankBlock]], order: list[int], kept: Floats, near: Floats
) -> None:
    """Exchange the slots of equivalent blocks, then those within each block.

    `order`, the slot of each rank, is updated in place.

    No step makes the order worse, because leaving everything as it is remains possible.
    """
    for blocks in equivalent_blocks:
        slots = [[order[rank] for rank in block] for block in blocks]
        for block, other in zip(blocks, _assign_blocks(blocks, slots, kept, near), strict=True):
            for rank, slot in zip(block, _assign_within_block(block, slots[other], kept), strict=True):
                order[rank] = slot


def _assign_blocks(
    blocks: Sequence[RankBlock], slots: Sequence[Sequence[int]], kept: Floats, near: Floats
) -> list[int]:
    """Return, for each block of ranks, the block whose slots it gets. The slots of one block are on one node."""
    if len(blocks) == 1:
        return [0]
    ranks, columns = np.array(blocks), np.array(slots)
    most = _compute_max_kept(kept[ranks[:, None, :, None], columns[None, :, None, :]])
    over_there = near[ranks[:, None, :], columns[None, :, :1]].sum(axis=2)
    return find_best_assignment([most, over_there, _compute_closeness(ranks.min(axis=1), columns.min(axis=1))])


def _compute_max_kept(kept: Floats) -> Floats:
    """Return [blocks, blocks]: the most that a block can keep on the slots of another.

    The input is [blocks, blocks, size, size].
    """
    size = kept.shape[-1]
    rows = np.arange(size)
    if size <= _MAX_ENUMERATED_SIZE:
        most: Floats = np.max([kept[:, :, rows, list(p)].sum(axis=2) for p in permutations(range(size))], axis=0)
        return most
    most = np.zeros(kept.shape[:2])
    for pair in np.argwhere(kept.any(axis=(2, 3))):
        gain = kept[tuple(pair)]
        most[tuple(pair)] = gain[rows, find_best_assignment([gain])].sum()
    return most


def _assign_within_block(block: RankBlock, slots: Sequence[int], kept: Floats) -> list[int]:
    """Return the slots in the order of the ranks of `block`."""
    if len(block) == 1:
        return list(slots)
    gains = [kept[np.ix_(block, slots)], _compute_closeness(np.array(block), np.array(slots))]
    return [slots[number] for number in find_best_assignment(gains)]


def _compute_closeness(ranks: Floats, slots: Floats) -> Floats:
    """Return [ranks, slots]: negative squared distances.

    They break ties: of two ranks that could swap slots, the lower one gets the earlier slot.
    """
    apart: Floats = np.subtract.outer(ranks, slots).astype(np.float64)
    return -(apart**2)


def group_equivalent_nodes(plan: ParallelPlan, slots: Sequence[GpuSlot], order: Sequence[int]) -> list[list[RankBlock]]:
    """Return groups of equivalent nodes, each as the block of its ranks; `order` is the slot of each rank.

    Nodes are equivalent if they have the same number of ranks for stages of the same GPU models. Exchanging whole nodes
    keeps ranks together that share a node.
    """
    models = _gpu_models_by_rank(plan)
    by_node = map(tuple, _group_by_key((slots[slot].node, rank) for rank, slot in enumerate(order)))
    return _group_by_key((tuple(sorted(models[rank] for rank in block)), block) for block in by_node)


def group_equivalent_units(plan: ParallelPlan, slots: Sequence[GpuSlot], order: Sequence[int]) -> list[list[RankBlock]]:
    """Return groups of equivalent units: runs of ranks of one stage that share a node and communicate intensively.

    A unit contains whole tensor, Ulysses and ring groups, and those expert and hybrid shard groups that fit into a
    node. Everything else is sent to all of the stage, or of a wider such group, and each node keeps as many units
    of it. So units can be exchanged.
    """
    found, first = list[tuple[tuple[int, ...], RankBlock]](), 0
    for group in range(plan.pipeline_devices):
        stages = plan.stages[group :: plan.pipeline_devices]
        strategies = [strategy for stage in stages for strategy in stage.strategies]
        nodes = [slots[slot].node for slot in order[first : first + stages[0].gpus]]
        together = {size for strategy in strategies for size in _compute_group_sizes(strategy)}
        wide = sorted(size for size in together if not _fits_into_nodes(nodes, size))
        inner = (strategy.tp * strategy.ulysses * strategy.ring for strategy in strategies)
        size = lcm(*inner, *together.difference(wide))
        for start in range(0, len(nodes), size):
            end = start + size
            if len(set(nodes[start:end])) == 1:
                key = (group, *(at // width for width in wide for at in (start, end - 1)))
                found.append((key, tuple(range(first + start, first + end))))
        first += len(nodes)
    return _group_by_key(found)


def group_equivalent_ranks(plan: ParallelPlan) -> list[list[RankBlock]]:
    """Return single ranks, grouped by the GPU model of their stage."""
    return _group_by_key((model, (rank,)) for rank, model in enumerate(_gpu_models_by_rank(plan)))


def _gpu_models_by_rank(plan: ParallelPlan) -> list[str]:
    return [stage.gpu for stage in plan.stages[: plan.pipeline_devices] for _ in range(stage.gpus)]


def _compute_group_sizes(strategy: LayerStrategy) -> tuple[int, int]:
    """Return the number of consecutive ranks per stack of experts, and per copy of the layer."""
    spread = compute_sharding(strategy)
    hybrid = spread.shard_group if spread.shard_group < spread.replicas else 1
    return strategy.tp * strategy.ep, strategy.tp * hybrid


def _fits_into_nodes(nodes: Sequence[str], size: int) -> bool:
    return all(len(set(nodes[start : start + size])) == 1 for start in range(0, len(nodes), size))


def _group_by_key(pairs: Iterable[tuple[Key, Value]]) -> list[list[Value]]:
    groups: defaultdict[Key, list[Value]] = defaultdict(list)
    for key, value in pairs:
        groups[key].append(value)
    return list(groups.values())


def find_best_assignment(gains: Sequence[Floats]) -> list[int]:
    """Return the column of each row, each column once, under several objectives in order of priority.

    Of all assignments with the most of `gains[0]` [n, n], those with the most of `gains[1]` are chosen, and so on.
    Gains are whole numbers whose sums stay below 2^53, so that nothing is rounded. An assignment is optimal under one
    objective if and only if all its edges are tight under that objective's dual (complementary slackness), so each
    later objective chooses among the tight edges of those before it.
    """
    cost = -gains[0]
    columns = _solve_assignment(cost)
    for gain in gains[1:]:
        cost = np.where(_find_tight_edges(cost, columns), -gain, np.inf)
        columns = _solve_assignment(cost)
    return columns


def _solve_assignment(cost: Floats) -> list[int]:
    # Imported on the first resize: this import takes a quarter as long as all others of a process together.
    from scipy.optimize import linear_sum_assignment

    return list(map(int, linear_sum_assignment(cost)[1]))


def _find_tight_edges(cost: Floats, columns: Sequence[int]) -> NDArray[np.bool_]:
    """Return [n, n]: the edges without reduced cost.

    Let row i take the column of row k instead of its own, and compensate k for its loss: this costs detour[i, k]. At an
    optimum no round trip of detours gains, so shortest paths over them exist and form a dual (Bellman-Ford).
    """
    taken = cost[:, columns]
    detour = taken - np.diagonal(taken)
    price = detour.min(axis=1)
    for _ in range(len(cost)):
        shorter = (detour + price).min(axis=1)
        if np.array_equal(shorter, price):
            break
        price = shorter
    else:
        raise AssertionError("an optimal assignment has a dual")
    tight = np.empty(cost.shape, dtype=np.bool_)
    tight[:, columns] = detour - price[:, None] + price == 0
    return tight
