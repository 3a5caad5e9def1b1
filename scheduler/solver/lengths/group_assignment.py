"""Group multisets of one micro-batch, and the assignment of its sequences to the groups of a multiset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scheduler.solver.lengths.batch_plan import MicroBatch, SequenceGroup
from scheduler.solver.lengths.fluid_bound import SortedBatch
from scheduler.solver.lengths.sequence_costs import Counts, Floats

ROUNDING = 1e-9
"""Relative slack of comparisons between sums of floating-point numbers in a different order."""


@dataclass(frozen=True, slots=True)
class GroupAssignment:
    """Groups of one micro-batch with their sequences.

    Attributes:
        degrees: of the groups, descending. They add up to all GPUs.
        groups: group of each sequence, in the order of the sorted batch.
        time_s: seconds of the slowest group, without `micro_batch_s`.
    """

    degrees: tuple[int, ...]
    groups: tuple[int, ...]
    time_s: float

    def build_micro_batch(self, batch: SortedBatch, positions: Counts) -> MicroBatch:
        """Return the micro-batch of groups that hold sequences or not. `positions` are those of the sequences."""
        degrees = batch.costs.degrees
        groups = []
        for index, degree in enumerate(self.degrees):
            members = [sequence for sequence, group in enumerate(self.groups) if group == index]
            time_s = float(batch.times[degrees.index(degree), members].sum())
            groups.append(SequenceGroup(degree, tuple(int(positions[member]) for member in members), time_s))
        return MicroBatch(tuple(groups), self.time_s + batch.costs.micro_batch_s)


def list_multisets(batch: SortedBatch, limit_s: float) -> Counts:
    """Return the multisets of groups whose fluid bound is at most `limit_s`, for all sequences as one micro-batch.

    The degrees are chosen from the largest down. The groups of a degree take the longest sequences that are left,
    because short sequences lose most on large groups. A choice is dropped when the GPUs that are left cannot finish the
    sequences that are left within the limit, each divided freely (`compute_work`).

    Returns:
        Groups of each degree, shape [multisets, degrees], degrees ascending; those with the most time to spare first.
    """
    costs, size = batch.costs, len(batch.lengths)
    first_fast = [int(first) for first in batch.find_first_fast(np.array(limit_s))]
    if first_fast[-1]:
        return np.zeros((0, len(costs.degrees)), np.int64)
    positions, least_work = _sum_least_work(batch, first_fast)
    counts, left, done = np.zeros((1, len(costs.degrees)), np.int64), np.array([costs.gpus]), np.zeros(1)
    for index in reversed(range(len(costs.degrees))):
        degree, sums = costs.degrees[index], batch.time_sums[index]
        rows, chosen = _list_choices(left // degree, only_all=index == 0)
        counts, left = counts[rows], left[rows] - degree * chosen
        counts[:, index] = chosen
        reached = np.interp(done[rows], positions, sums) + chosen * limit_s
        spare_s = reached - sums[-1]
        done = np.interp(reached, sums, positions)
        rest = least_work[-1] - np.interp(done, positions, least_work)
        is_feasible = rest <= left * limit_s + ROUNDING * least_work[-1]
        # Smaller groups would be too slow for, or too small to hold, the longest sequence that is left.
        next_first = first_fast[index - 1] if index else size
        is_feasible &= done >= next_first - ROUNDING * size
        counts, left, done, spare_s = (part[is_feasible] for part in (counts, left, done, spare_s))
    return counts[np.argsort(-spare_s, kind="stable")]


def _list_choices(counts_max: Counts, *, only_all: bool) -> tuple[Counts, Counts]:
    """Return rows and numbers: for each row the numbers 0 to its maximum, or the maximum alone."""
    if only_all:
        return np.arange(len(counts_max)), counts_max
    rows = np.repeat(np.arange(len(counts_max)), counts_max + 1)
    starts = np.cumsum(counts_max + 1) - (counts_max + 1)
    return rows, np.arange(len(rows)) - starts[rows]


def _sum_least_work(batch: SortedBatch, first_fast: Sequence[int]) -> tuple[Floats, Floats]:
    """Return positions 0 to the number of sequences, and the least GPU-seconds of the sequences before each.

    `first_fast` is the first sequence that each degree, or a smaller one, finishes in time.
    """
    size = last = len(batch.lengths)
    sums = np.zeros(size + 1)
    for degree, times, begin in zip(batch.costs.degrees, batch.times, first_fast, strict=True):
        sums[begin + 1 : last + 1] = degree * times[begin:last]
        last = begin
    return np.arange(size + 1, dtype=np.float64), sums.cumsum()


def assign_earliest(batch: SortedBatch, multisets: Counts) -> list[GroupAssignment | None]:
    """Assign each sequence, the longest first, to the group that would finish it first and has memory for it.

    Args:
        multisets: groups of each degree, shape [multisets, degrees].

    Returns:
        One assignment for each multiset, or None where a sequence found no memory.
    """
    if not len(multisets):
        return []
    costs = batch.costs
    degrees = np.array(costs.degrees)
    width = int(multisets.sum(axis=1).max())
    # Shape [multisets, groups]: index of the degree of each group, descending; padding comes last.
    order = np.arange(len(degrees))[::-1]
    kinds = np.array([np.pad(np.repeat(order, row[::-1]), (0, width - row.sum())) for row in multisets])
    is_group = np.arange(width) < multisets.sum(axis=1)[:, None]
    finish = np.where(is_group, 0.0, np.inf)
    free = degrees[kinds] * costs.gpu_tokens_max
    rows, chosen = np.arange(len(multisets)), np.empty((len(batch.lengths), len(multisets)), np.int64)
    for position, tokens in enumerate(batch.lengths):
        ends = finish + batch.times[:, position][kinds]
        ends[free < tokens] = np.inf
        best = ends.argmin(axis=1)
        chosen[position] = best
        finish[rows, best] = ends[rows, best]
        free[rows, best] -= tokens
    finish[~is_group] = 0.0
    times = finish.max(axis=1)
    return [
        GroupAssignment(tuple(degrees[kinds[row]][is_group[row]].tolist()), tuple(chosen[:, row].tolist()), float(time))
        if np.isfinite(time)
        else None
        for row, time in enumerate(times)
    ]
