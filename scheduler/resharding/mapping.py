"""Which new rank goes to which GPU, so that the fewest bytes of state move when a job's allocation changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np

from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.resharding.assignment import best_assignment
from scheduler.resharding.exchanges import Block, alike_ranks, alike_units, nodes_alike
from scheduler.resharding.overlap import Floats, Overlap, overlap
from scheduler.resharding.placement import Placement, Seat, check_seats
from scheduler.resharding.tensors import TensorFacts

_ENUMERATED_MAX = 4
"""Up to this size all orders of a block are tried at once; above, one assignment problem each is faster."""


@dataclass(frozen=True, slots=True)
class Mapping:
    """New rank r goes to `seats[r]`; a rank on a GPU that the job had keeps what it needs of that GPU's old shards.

    `moved_bytes` is what all ranks together need beside that, and `network_bytes` the part of it that no GPU of the
    same node had. `moved_bytes_in_order` is what would move in the order in which the seats were given. `floor_bytes`
    is a bound that no order of the seats can beat, whatever it does to speed: everything needed, less the smaller of
    two sums, of what each rank could keep at most and of what each seat could.
    """

    seats: tuple[Seat, ...]
    moved_bytes: float
    network_bytes: float
    moved_bytes_in_order: float
    floor_bytes: float


def rank_mapping(
    old: Placement,
    new_plan: ParallelPlan,
    new_seats: Sequence[Seat],
    tensors: Sequence[TensorFacts],
    *,
    any_order: bool = False,
) -> Mapping:
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
    return best_order(overlap(old, new_plan, tensors), old, new_plan, new_seats, any_order=any_order)


def best_order(
    both: Overlap, old: Placement, new_plan: ParallelPlan, new_seats: Sequence[Seat], *, any_order: bool = False
) -> Mapping:
    """`rank_mapping` where the overlap of both plans is known already: it is the same for all choices of seats."""
    given = tuple(new_seats)
    check_seats(new_plan, given)
    kept, near = by_seat(both, old, given)
    order = list(range(len(given)))
    if any_order:
        _exchange(alike_ranks(new_plan), order, kept, near)
    else:
        _exchange(nodes_alike(new_plan, given, order), order, kept, near)
        _exchange(alike_units(new_plan, given, order), order, kept, near)
        _exchange(nodes_alike(new_plan, given, order), order, kept, near)
    ranks, needed = np.arange(len(given)), float(both.needed.sum())
    most_kept = min(kept.max(axis=1).sum(), kept.max(axis=0).sum())
    return Mapping(
        seats=tuple(given[seat] for seat in order),
        moved_bytes=needed - float(kept[ranks, order].sum()),
        network_bytes=needed - float(near[ranks, order].sum()),
        moved_bytes_in_order=needed - float(np.trace(kept)),
        floor_bytes=needed - float(most_kept),
    )


def by_seat(both: Overlap, old: Placement, seats: Sequence[Seat]) -> tuple[Floats, Floats]:
    """[ranks, seats] twice: what the GPU of that seat held of what the rank needs, and what its node held."""
    none = np.zeros((len(both.needed), 1))
    ranks = {seat: rank for rank, seat in enumerate(old.seats)}
    nodes = {node: number for number, node in enumerate(both.nodes)}
    kept = np.hstack([both.by_rank, none])[:, [ranks.get(seat, -1) for seat in seats]]
    near = np.hstack([both.by_node, none])[:, [nodes.get(seat.node, -1) for seat in seats]]
    return kept, near


def _exchange(alike: Sequence[Sequence[Block]], order: list[int], kept: Floats, near: Floats) -> None:
    """Deal the seats of alike blocks out among them anew, then those of each block among its ranks. `order` is the
    seat of each rank; no step makes it worse, because it may leave all as it is."""
    for blocks in alike:
        seats = [[order[rank] for rank in block] for block in blocks]
        for block, other in zip(blocks, _best_blocks(blocks, seats, kept, near), strict=True):
            for rank, seat in zip(block, _best_within(block, seats[other], kept), strict=True):
                order[rank] = seat


def _best_blocks(blocks: Sequence[Block], seats: Sequence[Sequence[int]], kept: Floats, near: Floats) -> list[int]:
    """For each block of ranks the block whose seats it gets. Seats of one block are on one node."""
    if len(blocks) == 1:
        return [0]
    ranks, columns = np.array(blocks), np.array(seats)
    most = _most_kept(kept[ranks[:, None, :, None], columns[None, :, None, :]])
    over_there = near[ranks[:, None, :], columns[None, :, :1]].sum(axis=2)
    return best_assignment([most, over_there, _closeness(ranks.min(axis=1), columns.min(axis=1))])


def _most_kept(kept: Floats) -> Floats:
    """[blocks, blocks] of [blocks, blocks, size, size]: the most that a block can keep on the seats of another."""
    size = kept.shape[-1]
    rows = np.arange(size)
    if size <= _ENUMERATED_MAX:
        most: Floats = np.max([kept[:, :, rows, list(p)].sum(axis=2) for p in permutations(range(size))], axis=0)
        return most
    most = np.zeros(kept.shape[:2])
    for pair in np.argwhere(kept.any(axis=(2, 3))):
        gain = kept[tuple(pair)]
        most[tuple(pair)] = gain[rows, best_assignment([gain])].sum()
    return most


def _best_within(block: Block, seats: Sequence[int], kept: Floats) -> list[int]:
    """The seats in the order of the ranks of `block`."""
    if len(block) == 1:
        return list(seats)
    gains = [kept[np.ix_(block, seats)], _closeness(np.array(block), np.array(seats))]
    return [seats[number] for number in best_assignment(gains)]


def _closeness(ranks: Floats, seats: Floats) -> Floats:
    """[ranks, seats]: squares, so that of two ranks that could swap their seats the lower gets the earlier."""
    apart: Floats = np.subtract.outer(ranks, seats).astype(np.float64)
    return -(apart**2)
