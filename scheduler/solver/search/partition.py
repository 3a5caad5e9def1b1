"""The best cuts of a chain into stages and the best order of groups, given the time of every candidate stage."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from scheduler.solver.instance import Floats, Ints, Objective


@dataclass(frozen=True, slots=True, eq=False)
class StageTimes:
    """Times of candidate stages of a pipeline of P devices in G groups (1 or 2) over L layers.

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
    times: StageTimes, objective: Objective, *, useful_s: float = inf
) -> tuple[Partition | None, float]:
    """Return the partition with the smallest objective (None if none is finite), and a lower bound of the time.

    Partitions are enumerated in order of their sum. The smallest sum of all is a shortest path; next comes the smallest
    sum among those whose largest part is smaller than before, and so on. Each step lowers the largest part, so every
    trade-off between the two is met once. The enumeration ends when the sum alone rules out the rest, or when nothing
    below `useful_s` is left; in the latter case the partition is not the best one.
    """
    narrowest_s = compute_smallest_bottleneck_s(times)
    best, best_s = None, inf
    found = _find_least_sum(times)
    while found is not None:
        cost_s = objective.compute_time_s(found.sum_s, found.largest_s)
        if cost_s < best_s:
            best, best_s = found, cost_s
        left_s = objective.compute_time_s(found.sum_s, narrowest_s)
        if left_s >= min(best_s, useful_s) or found.largest_s <= narrowest_s:
            return best, min(best_s, max(left_s, useful_s)) if left_s < best_s else best_s
        found = _find_least_sum(times.limit_to(np.nextafter(found.largest_s, 0.0)))
    return best, best_s


def compute_quick_bound_s(times: StageTimes, objective: Objective) -> float:
    """Return the objective of the smallest sum and the smallest bottleneck, which no partition beats."""
    found = _find_least_sum(times)
    return inf if found is None else objective.compute_time_s(found.sum_s, compute_smallest_bottleneck_s(times))


def compute_smallest_bottleneck_s(times: StageTimes) -> float:
    """Return the minimum time of the largest stage or hand-over."""
    reach = _init_reach(times)
    for position in range(1, len(times.stages_s)):
        arrived = np.maximum(reach[:, :, None], times.hand_over_s[position - 1][None]).min(axis=1)
        reach = _add_device(arrived, times, position, np.maximum)[0]
    return float(reach[times.counts[1] if len(times.counts) > 1 else 0, :, -1].min())


def _find_least_sum(times: StageTimes) -> Partition | None:
    """Return the partition with the smallest sum.

    It is a shortest path over (devices used of the second group, last group, border).
    """
    reach = _init_reach(times)
    trail: list[tuple[Ints, Ints]] = []
    for position in range(1, len(times.stages_s)):
        handed = reach[:, :, None] + times.hand_over_s[position - 1][None]  # [used, before, now, D]
        senders = handed.argmin(axis=1)
        reach, origins = _add_device(handed.min(axis=1), times, position, np.add)
        trail.append((senders, origins))
    used = times.counts[1] if len(times.counts) > 1 else 0
    group = int(reach[used, :, -1].argmin())
    if not np.isfinite(reach[used, group, -1]):
        return None
    return _trace_partition(times, trail, used, group)


def _init_reach(times: StageTimes) -> Floats:
    """Return [used, group, D]: times after the first device; impossible states are infinite."""
    groups, depth = times.stages_s.shape[1], times.stages_s.shape[2]
    used_max = times.counts[1] if groups > 1 else 0
    reach = np.full((used_max + 1, groups, depth), np.inf)
    if times.counts[0]:
        reach[0, 0] = times.stages_s[0, 0, 0]
    if used_max:
        reach[1, 1] = times.stages_s[0, 1, 0]
    return reach


def _add_device(arrived: Floats, times: StageTimes, position: int, join: np.ufunc) -> tuple[Floats, Ints]:
    """Add the device at `position`.

    Args:
        arrived: [used, group, D], the time that the device starts from, by its own group.
    """
    reach, origins = np.full_like(arrived, np.inf), np.zeros(arrived.shape, dtype=np.int64)
    used_max = len(arrived) - 1
    for group in range(arrived.shape[1]):
        shift = 1 if group else 0
        totals = join(arrived[: used_max + 1 - shift, group, :, None], times.stages_s[position, group])
        origins[shift:, group] = totals.argmin(axis=1)
        reach[shift:, group] = totals.min(axis=1)
    first_group_used = position + 1 - np.arange(used_max + 1)  # Devices used of the first group
    reach[(first_group_used > times.counts[0]) | (first_group_used < 0)] = np.inf
    return reach, origins


def _trace_partition(times: StageTimes, trail: list[tuple[Ints, Ints]], used: int, group: int) -> Partition:
    devices, depth = times.stages_s.shape[0], times.stages_s.shape[2]
    at, order, ends = depth - 1, [group], [depth - 1]
    for senders, origins in reversed(trail):
        x = int(origins[used, group, at])
        used -= 1 if group else 0
        group = int(senders[used, group, x])
        at = x
        order.append(group)
        ends.append(x)
    order.reverse()
    ends.reverse()
    borders = (0, *(position + 1 + end for position, end in enumerate(ends)))
    parts_s = [float(times.stages_s[i, order[i], borders[i] - i, borders[i + 1] - i - 1]) for i in range(devices)]
    parts_s += [float(times.hand_over_s[i, order[i], order[i + 1], borders[i + 1] - i - 1]) for i in range(devices - 1)]
    return Partition(sum(parts_s), max(parts_s), tuple(order), borders)
