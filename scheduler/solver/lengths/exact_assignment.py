"""Exact assignment of few sequences to groups, over all multisets, by branch and bound."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from scheduler.solver.lengths.fluid_bound import SortedBatch
from scheduler.solver.lengths.group_assignment import GroupAssignment, list_multisets

EXACT_SEQUENCES_MAX = 7
"""Sequences up to which an assignment is exact. The tree has at most this many levels."""


def assign_exactly(batch: SortedBatch, best: GroupAssignment | None) -> GroupAssignment | None:
    """Return the fastest assignment over all multisets, or None if none fits in memory.

    Args:
        best: a known assignment, or None.
    """
    slowest_s = float(batch.times.max(axis=0).sum())
    limit_s = best.time_s if best is not None else slowest_s
    for row in list_multisets(batch, limit_s):
        degrees = tuple(int(d) for d, n in zip(batch.costs.degrees[::-1], row[::-1], strict=True) for _ in range(n))
        search = _AssignmentSearch(batch, degrees, best.time_s if best is not None else inf)
        search.extend(0, [0.0] * len(degrees), [degree * batch.costs.gpu_tokens_max for degree in degrees], [])
        if search.groups:
            best = GroupAssignment(degrees, tuple(search.groups), search.best_s)
    return best


@dataclass(slots=True)
class _AssignmentSearch:
    """Depth-first search over the groups of each sequence, the longest first."""

    batch: SortedBatch
    degrees: tuple[int, ...]
    best_s: float
    groups: tuple[int, ...] = ()

    def extend(self, position: int, finish: list[float], free: list[int], chosen: list[int]) -> None:
        """Try every group for the sequence at `position`; of equal groups, the first."""
        if position == len(self.batch.lengths):
            self.best_s, self.groups = max(finish), tuple(chosen)
            return
        tokens, seen = int(self.batch.lengths[position]), set()
        for group, degree in enumerate(self.degrees):
            state = (degree, finish[group], free[group])
            end = finish[group] + float(self.batch.times[degree.bit_length() - 1, position])
            if state in seen or free[group] < tokens or end >= self.best_s:
                continue
            seen.add(state)
            finish[group], free[group] = end, free[group] - tokens
            self.extend(position + 1, finish, free, [*chosen, group])
            _, finish[group], free[group] = state
