"""The best cuts of a chain into stages and the best order of groups, given the time of every candidate stage."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import inf, prod

import numpy as np

from scheduler.solver.instance import Floats, Ints, Objective

_ROUNDING_FACTOR = 1.0 + 1e-12


@dataclass(frozen=True, slots=True, eq=False)
class StageTimes:
    """Times of candidate stages of a pipeline of P devices in G groups over L layers.

    D = L - P + 1, because each stage has at least one layer:

        stages_s     [P, G, D, D]    device at position i, of group g, over the layers i + x to i + y
        hand_over_s  [P-1, G, G, D]  at cut i, between two groups, if the next stage begins with layer i + 1 + x
        counts       (G)             devices of each group
    """

    stages_s: Floats
    hand_over_s: Floats
    counts: tuple[int, ...]

    def limit_to(self, limit_s: float) -> StageTimes:
        """Return the same times with everything above `limit_s` forbidden."""
        stages_s = np.where(self.stages_s <= limit_s, self.stages_s, np.inf)
        return StageTimes(stages_s, np.where(self.hand_over_s <= limit_s, self.hand_over_s, np.inf), self.counts)


@dataclass(frozen=True, slots=True)
class Partition:
    """A partition of the layers into stages, with its times.

    `borders` are layer numbers 0 = b0 < b1 < ... < bP = L; stage i holds the layers b(i) to b(i+1) - 1, on a device of
    group `order[i]`. `sum_s` and `largest_s` are over stages and hand-overs.
    """

    sum_s: float
    largest_s: float
    order: tuple[int, ...]
    borders: tuple[int, ...]


def find_best_partition(
    times: StageTimes, objective: Objective, *, useful_s: float = inf, target_s: float = inf
) -> tuple[Partition | None, float]:
    """Return the partition with the smallest objective (None if none is finite), and a lower bound of the time.

    Partitions are enumerated in order of their sum. The smallest sum of all is a shortest path; next comes the smallest
    sum among those whose largest part is smaller than before, and so on. Each step lowers the largest part, so every
    trade-off between the two is met once. The enumeration ends when the sum alone rules out the rest, or when nothing
    below `useful_s` is left; in the latter case the partition is not the best one.

    Trade-offs that cannot win are skipped: no later sum is smaller than the last one, so it says how large the largest
    part may be for a time below `target_s` and below the best so far. The first to compare with is the partition with
    the smallest largest part. If partitions of `target_s` or longer were skipped, the bound is at most that.
    """
    narrowest_s = compute_smallest_bottleneck_s(times)
    best = _find_least_sum(times.limit_to(narrowest_s))
    if best is None:
        return None, inf
    best_s, skipped_s = objective.compute_time_s(best.sum_s, best.largest_s), inf
    found = _find_least_sum(times)
    while found is not None:
        cost_s = objective.compute_time_s(found.sum_s, found.largest_s)
        if cost_s < best_s:
            best, best_s = found, cost_s
        left_s = objective.compute_time_s(found.sum_s, narrowest_s)
        if left_s >= min(best_s, useful_s) or found.largest_s <= narrowest_s:
            proven_s = min(best_s, max(left_s, useful_s)) if left_s < best_s else best_s
            return best, min(proven_s, skipped_s)
        limit_s = float(np.nextafter(found.largest_s, 0.0))
        winning_s = objective.compute_largest_s(found.sum_s, min(best_s, target_s)) * _ROUNDING_FACTOR
        if winning_s < limit_s:
            limit_s, skipped_s = winning_s, min(best_s, target_s)
        found = _find_least_sum(times.limit_to(limit_s))
    return best, min(best_s, skipped_s)


def compute_quick_bound_s(times: StageTimes, objective: Objective) -> float:
    """Return the objective of the smallest sum and the smallest bottleneck, which no partition beats."""
    found = _find_least_sum(times)
    return inf if found is None else objective.compute_time_s(found.sum_s, compute_smallest_bottleneck_s(times))


def compute_smallest_bottleneck_s(times: StageTimes) -> float:
    """Return the minimum time of the largest stage or hand-over."""
    return float(_list_reaches(times, np.maximum)[-1][-1, :, -1].min())


def _find_least_sum(times: StageTimes) -> Partition | None:
    """Return the partition with the smallest sum.

    It is a shortest path over (devices used of each group, last group, border).
    """
    reaches = _list_reaches(times, np.add)
    return _trace_partition(times, reaches) if np.isfinite(reaches[-1][-1, :, -1]).any() else None


@lru_cache(maxsize=1024)
def _list_moves(counts: tuple[int, ...]) -> tuple[tuple[tuple[Ints, int], ...], ...]:
    """Return by position and group: the states that a device of the group can lead to, and what it adds to a state.

    A state numbers the devices used of all groups but the first, in mixed radix: the position and the state give those
    of the first group. The last state has used all devices.
    """
    sizes = [count + 1 for count in counts[1:]]
    used = np.array(list(np.ndindex(*sizes)), dtype=np.int64).reshape(prod(sizes), len(sizes))
    strides = [0, *(prod(sizes[group:]) for group in range(1, len(counts)))]
    moves = []
    for position in range(sum(counts)):
        first = position + 1 - used.sum(axis=1)
        possible = (first >= 0) & (first <= counts[0])
        digits = [first, *used.T]
        moves.append(tuple((np.flatnonzero(possible & (digits[g] > 0)), strides[g]) for g in range(len(counts))))
    return tuple(moves)


def _list_reaches(times: StageTimes, join: np.ufunc) -> list[Floats]:
    """Return [state, group, D] for each position: the least time up to its device, if that is of the group.

    `join` adds up times or takes the largest. Impossible states are infinite.
    """
    moves, depth = _list_moves(times.counts), times.stages_s.shape[2]
    states_count = prod(count + 1 for count in times.counts[1:])
    reaches: list[Floats] = []
    for position, moves_here in enumerate(moves):
        reach = np.full((states_count, len(times.counts), depth), np.inf)
        for group, (states, added) in enumerate(moves_here):
            if position:
                handed = join(reaches[-1][states - added], times.hand_over_s[position - 1, :, group]).min(axis=1)
                reach[states, group] = join(handed[:, :, None], times.stages_s[position, group]).min(axis=1)
            else:
                reach[states, group] = times.stages_s[0, group, 0]
        reaches.append(reach)
    return reaches


def _trace_partition(times: StageTimes, reaches: list[Floats]) -> Partition:
    """Return the partition that leads to the least sum, from its last device to its first."""
    devices, at = len(reaches), times.stages_s.shape[2] - 1
    state, group = len(reaches[-1]) - 1, int(reaches[-1][-1, :, -1].argmin())
    order, ends = [group], [at]
    for position in range(devices - 1, 0, -1):
        state -= _list_moves(times.counts)[position][group][1]
        handed = reaches[position - 1][state] + times.hand_over_s[position - 1, :, group]
        at = int((handed.min(axis=0) + times.stages_s[position, group, :, at]).argmin())
        group = int(handed[:, at].argmin())
        order.append(group)
        ends.append(at)
    order.reverse()
    ends.reverse()
    borders = (0, *(position + 1 + end for position, end in enumerate(ends)))
    parts_s = [float(times.stages_s[i, order[i], borders[i] - i, borders[i + 1] - i - 1]) for i in range(devices)]
    parts_s += [float(times.hand_over_s[i, order[i], order[i + 1], borders[i + 1] - i - 1]) for i in range(devices - 1)]
    return Partition(sum(parts_s), max(parts_s), tuple(order), borders)
