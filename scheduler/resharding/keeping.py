"""Which GPUs a job keeps when it gets fewer, so that the fewest bytes of its state move."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.resharding.assignment import best_assignment
from scheduler.resharding.mapping import by_seat
from scheduler.resharding.overlap import Floats, Overlap
from scheduler.resharding.placement import Placement, Seat, check_seats

Site = tuple[Seat, ...]
"""GPUs of one node out of which some are kept."""


def seats_to_keep(
    both: Overlap, old: Placement, new_plan: ParallelPlan, given: Sequence[Seat], alike: Sequence[Sequence[Site]]
) -> tuple[Seat, ...]:
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
    check_seats(new_plan, tuple(given))
    pool = [seat for sites in alike for site in sites for seat in site]
    numbers, taken = {seat: number for number, seat in enumerate(pool)}, frozenset(given)
    kept, near = by_seat(both, old, pool)
    usual = np.array([seat in taken for seat in pool], dtype=np.float64)
    seats = list(given)
    blocks = {node: [rank for rank, _ in ranks] for node, ranks in groupby(enumerate(given), lambda at: at[1].node)}
    for sites in alike:
        here = [blocks[site[0].node] for site in sites if site[0].node in blocks]
        columns = [[numbers[seat] for seat in site] for site in sites]
        homes = [site[0].node for site in sites]
        at_home = [[float(homes[number] == given[ranks[0]].node) for number in range(len(sites))] for ranks in here]
        for ranks, site in zip(here, _sites(here, columns, kept, near, np.array(at_home)), strict=True):
            gains = [part[np.ix_(ranks, columns[site])] for part in (kept, np.broadcast_to(usual, kept.shape))]
            for rank, column in zip(ranks, _assigned(gains), strict=True):
                seats[rank] = sites[site][column]
    return tuple(seats)


def _sites(
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
                most[block, site] = gain[range(len(ranks)), _assigned([gain])].sum()
            over_there[block, site] = near[ranks, seats[0]].sum()
    return _assigned([most, over_there, at_home])


def _assigned(gains: Sequence[Floats]) -> list[int]:
    """The column of each row, where there may be more columns than rows: rows without gain make it a square."""
    rows, columns = gains[0].shape
    more = np.zeros((columns - rows, columns))
    return best_assignment([np.vstack([gain, more]) for gain in gains])[:rows]
