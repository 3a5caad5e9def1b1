"""The best assignment under several objectives, one after the other.

Which ranks of a plan may exchange their GPUs without making the plan slower than the solver thought it.

Which new rank goes to which GPU, so that the fewest bytes of state move when a job's allocation changes.

Which GPUs a job keeps when it gets fewer, so that the fewest bytes of its state move.
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

GainMatrix = NDArray[np.float64]


def find_best_assignment(gains: Sequence[GainMatrix]) -> list[int]:
    """The column of each row, each column once. Of all assignments with the most of `gains[0]` [n, n] those with the
    most of `gains[1]`, and so on.

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


def _solve_assignment(cost: GainMatrix) -> list[int]:
    # Imported once a job is resized: it takes as long as a quarter of all else that a process has to import.
    from scipy.optimize import linear_sum_assignment  # type: ignore[import-untyped]  # scipy ships no types

    return list(map(int, linear_sum_assignment(cost)[1]))


def _find_tight_edges(cost: GainMatrix, columns: Sequence[int]) -> NDArray[np.bool_]:
    """[n, n]: edges without reduced cost. Row i taking the column of row k instead of its own, and k being paid back
    what it loses, costs detour[i, k]; at an optimum no round trip of detours gains, so shortest paths over them exist
    and are a dual (Bellman-Ford)."""
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


Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
RankBlock = tuple[int, ...]
"""Ranks that go to the GPUs of another block together."""


def group_equivalent_nodes(plan: ParallelPlan, slots: Sequence[GpuSlot], order: Sequence[int]) -> list[list[RankBlock]]:
    """The ranks of each node, `order` being the seat of each rank. Nodes are alike with as many ranks, for stages of
    the same GPU models: exchanging them as a whole leaves together who was together."""
    models = _gpu_models_by_rank(plan)
    by_node = map(tuple, _group_by_key((slots[seat].node, rank) for rank, seat in enumerate(order)))
    return _group_by_key((tuple(sorted(models[rank] for rank in block)), block) for block in by_node)


def group_equivalent_units(plan: ParallelPlan, slots: Sequence[GpuSlot], order: Sequence[int]) -> list[list[RankBlock]]:
    """Runs of ranks of one stage that share a node and have all their quick communication among themselves: tensor,
    Ulysses and ring groups, and those expert and hybrid shard groups that fit into a node. What else they send goes to
    all of the stage, or of a wider such group, alike, and each node keeps as many of those, so they may change places.
    """
    found, first = list[tuple[tuple[int, ...], RankBlock]](), 0
    for group in range(plan.pipeline_devices):
        stages = plan.stages[group :: plan.pipeline_devices]
        strategies = [strategy for stage in stages for strategy in stage.strategies]
        nodes = [slots[seat].node for seat in order[first : first + stages[0].gpus]]
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
    """Each rank by itself; alike are those whose stages want the same GPU model."""
    return _group_by_key((model, (rank,)) for rank, model in enumerate(_gpu_models_by_rank(plan)))


def _gpu_models_by_rank(plan: ParallelPlan) -> list[str]:
    return [stage.gpu for stage in plan.stages[: plan.pipeline_devices] for _ in range(stage.gpus)]


def _compute_group_sizes(strategy: LayerStrategy) -> tuple[int, int]:
    """Consecutive ranks that share a stack of experts, and that share a copy of the layer while others have another."""
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


_MAX_ENUMERATED_SIZE = 4
"""Up to this size all orders of a block are tried at once; above, one assignment problem each is faster."""


@dataclass(frozen=True, slots=True)
class RankMapping:
    """New rank r goes to `seats[r]`; a rank on a GPU that the job had keeps what it needs of that GPU's old shards.

    `moved_bytes` is what all ranks together need beside that, and `network_bytes` the part of it that no GPU of the
    same node had. `moved_bytes_in_order` is what would move in the order in which the seats were given. `floor_bytes`
    is a bound that no order of the seats can beat, whatever it does to speed: everything needed, less the smaller of
    two sums, of what each rank could keep at most and of what each seat could.
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
    """The order of `new_seats` under which the fewest bytes move, as assignment problems.

    A plan's speed rests on which ranks share a node, so the order keeps what is fast about the given one: whole nodes
    are exchanged, then within a stage the ranks that talk most (`exchanges`), then GPUs within their node. Each step
    is optimal by itself, all of them together need not be. `any_order` solves one assignment problem over all orders
    of GPUs for stages of one GPU model: the true optimum, for comparison, and for who has one kind of link only.
    Of equally good exchanges the one that gets least over the network is taken, then the closest to the given order.

    Raises:
        ValueError: a plan contradicts itself, the plans have unlike numbers of layers, the tensors belong to other
            layers, or `new_seats` are not one for each rank of `new_plan`, all different.
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
    """`rank_mapping` where the overlap of both plans is known already: it is the same for all choices of seats."""
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
        slots=tuple(given[seat] for seat in order),
        moved_bytes=needed - float(kept[ranks, order].sum()),
        network_bytes=needed - float(near[ranks, order].sum()),
        moved_bytes_in_order=needed - float(np.trace(kept)),
        floor_bytes=needed - float(most_kept),
    )


def compute_bytes_by_slot(
    state_overlap: StateOverlap, old: Placement, slots: Sequence[GpuSlot]
) -> tuple[Floats, Floats]:
    """[ranks, seats] twice: what the GPU of that seat held of what the rank needs, and what its node held."""
    none = np.zeros((len(state_overlap.needed), 1))
    ranks = {seat: rank for rank, seat in enumerate(old.slots)}
    nodes = {node: number for number, node in enumerate(state_overlap.nodes)}
    kept = np.hstack([state_overlap.by_rank, none])[:, [ranks.get(seat, -1) for seat in slots]]
    near = np.hstack([state_overlap.by_node, none])[:, [nodes.get(seat.node, -1) for seat in slots]]
    return kept, near


def _exchange_blocks(
    equivalent_blocks: Sequence[Sequence[RankBlock]], order: list[int], kept: Floats, near: Floats
) -> None:
    """Deal the seats of alike blocks out among them anew, then those of each block among its ranks. `order` is the
    seat of each rank; no step makes it worse, because it may leave all as it is."""
    for blocks in equivalent_blocks:
        seats = [[order[rank] for rank in block] for block in blocks]
        for block, other in zip(blocks, _assign_blocks(blocks, seats, kept, near), strict=True):
            for rank, seat in zip(block, _assign_within_block(block, seats[other], kept), strict=True):
                order[rank] = seat


def _assign_blocks(
    blocks: Sequence[RankBlock], slots: Sequence[Sequence[int]], kept: Floats, near: Floats
) -> list[int]:
    """For each block of ranks the block whose seats it gets. Seats of one block are on one node."""
    if len(blocks) == 1:
        return [0]
    ranks, columns = np.array(blocks), np.array(slots)
    most = _compute_max_kept(kept[ranks[:, None, :, None], columns[None, :, None, :]])
    over_there = near[ranks[:, None, :], columns[None, :, :1]].sum(axis=2)
    return find_best_assignment([most, over_there, _compute_closeness(ranks.min(axis=1), columns.min(axis=1))])


def _compute_max_kept(kept: Floats) -> Floats:
    """[blocks, blocks] of [blocks, blocks, size, size]: the most that a block can keep on the seats of another."""
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
    """The seats in the order of the ranks of `block`."""
    if len(block) == 1:
        return list(slots)
    gains = [kept[np.ix_(block, slots)], _compute_closeness(np.array(block), np.array(slots))]
    return [slots[number] for number in find_best_assignment(gains)]


def _compute_closeness(ranks: Floats, slots: Floats) -> Floats:
    """[ranks, seats]: squares, so that of two ranks that could swap their seats the lower gets the earlier."""
    apart: Floats = np.subtract.outer(ranks, slots).astype(np.float64)
    return -(apart**2)


NodeSlots = tuple[GpuSlot, ...]
"""GPUs of one node out of which some are kept."""


def select_slots_to_keep(
    state_overlap: StateOverlap,
    old: Placement,
    new_plan: ParallelPlan,
    given: Sequence[GpuSlot],
    equivalent_sites: Sequence[Sequence[NodeSlots]],
) -> tuple[GpuSlot, ...]:
    """Another choice than `given`, the seats of `new_plan` node by node, under which at least as much of the old state
    stays where it is, and first of all as much as possible; what no choice improves stays as it is given.

    `alike` are groups of sites of which each may stand in for any other of its group. The ranks on each node of `given`
    go to one site as a whole, and there to the GPUs that hold most of what they need. Both are assignment problems and
    solved together: the gain of a pair of nodes is that of its best pairs of GPUs. Of equal choices the one that
    gets least over the network is taken, then the one nearest to `given`. What ranks could keep by changing places
    across nodes is not looked for.

    Raises:
        ValueError: `given` are not one for each rank of `new_plan`, all different.
    """
    check_slots(new_plan, tuple(given))
    pool = [seat for sites in equivalent_sites for site in sites for seat in site]
    numbers, taken = {seat: number for number, seat in enumerate(pool)}, frozenset(given)
    kept, near = compute_bytes_by_slot(state_overlap, old, pool)
    usual = np.array([seat in taken for seat in pool], dtype=np.float64)
    seats = list(given)
    blocks = {node: [rank for rank, _ in ranks] for node, ranks in groupby(enumerate(given), lambda at: at[1].node)}
    for sites in equivalent_sites:
        here = [blocks[site[0].node] for site in sites if site[0].node in blocks]
        columns = [[numbers[seat] for seat in site] for site in sites]
        homes = [site[0].node for site in sites]
        at_home = [[float(homes[number] == given[ranks[0]].node) for number in range(len(sites))] for ranks in here]
        for ranks, site in zip(here, _assign_sites(here, columns, kept, near, np.array(at_home)), strict=True):
            gains = [part[np.ix_(ranks, columns[site])] for part in (kept, np.broadcast_to(usual, kept.shape))]
            for rank, column in zip(ranks, _assign_rows(gains), strict=True):
                seats[rank] = sites[site][column]
    return tuple(seats)


def _assign_sites(
    blocks: Sequence[Sequence[int]], columns: Sequence[Sequence[int]], kept: Floats, near: Floats, at_home: Floats
) -> list[int]:
    """The site of each block of ranks."""
    if len(columns) == 1 or not blocks:
        return [0] * len(blocks)
    most, over_there = np.zeros((2, len(blocks), len(columns)))
    for block, ranks in enumerate(blocks):
        for site, seats in enumerate(columns):
            gain = kept[np.ix_(ranks, seats)]
            if gain.any():
                most[block, site] = gain[range(len(ranks)), _assign_rows([gain])].sum()
            over_there[block, site] = near[ranks, seats[0]].sum()
    return _assign_rows([most, over_there, at_home])


def _assign_rows(gains: Sequence[Floats]) -> list[int]:
    """The column of each row, where there may be more columns than rows: rows without gain make it a square."""
    rows, columns = gains[0].shape
    more = np.zeros((columns - rows, columns))
    return find_best_assignment([np.vstack([gain, more]) for gain in gains])[:rows]
