"""Lower bounds on the time of every candidate stage at once, by Lagrangian relaxation of its memory limit."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from scheduler.solver.instance import Floats, Ints, StageCosts
from scheduler.solver.search.windows import Windows

_PRICES_MAX = 24
"""Any price gives a valid bound; more of them only sharpen it."""

_KINDS_SAMPLED = 8
"""Layer types that prices are taken from."""


def stage_lower_bounds(
    windows: Windows, costs: StageCosts, *, in_flight: float, capacity_bytes: int, prices: Floats
) -> Floats:
    """Bounds [U]: a time that no stage of each window can beat; infinite where none fits.

    For a stage of n layers, each layer u following strategy s(u):

    * the buffer of the stage is at least the mean of its layers' buffers: max w >= (1/n) sum w, so that
      sum (m + w / n) <= capacity holds for every stage that fits (and is exact if all follow one strategy);
    * for every price x >= 0 then  time >= sum min_s (t + x (m + w / n)) - x capacity  (weak duality);
    * changes of layout and border gathers cost at least 0 and are left out.

    The largest bound over `prices` [X] is kept. Windows of similar length share n, the largest of them, which keeps
    w / n a lower bound.
    """
    bounds = np.full(len(windows.spans), np.inf)
    lengths = windows.lengths
    for shortest, longest in pairwise(_length_classes(int(lengths.max()))):
        rows = np.flatnonzero((lengths > shortest) & (lengths <= longest))
        if len(rows):
            bounds[rows] = lower_bounds(
                windows.counts[rows],
                costs,
                length=longest,
                in_flight=in_flight,
                capacity_bytes=capacity_bytes,
                prices=prices,
            )
    return bounds


def lower_bounds(
    counts: Floats, costs: StageCosts, *, length: int, in_flight: float, capacity_bytes: int, prices: Floats
) -> Floats:
    """The same for stages of `counts` [U, T] layers of each type, `length` in all at most."""
    loaded = costs.memory_bytes(in_flight) + costs.working_bytes // length
    priced = (costs.time_s + prices[:, None, None] * loaded).min(axis=-1)  # [X, T]
    bounds = (counts @ priced.T - prices * capacity_bytes).max(axis=1)
    return np.where(counts @ loaded.min(axis=1) <= capacity_bytes, bounds, np.inf)


def _length_classes(longest: int) -> list[int]:
    """0, 1, 2, 3, 4, 6, 9, ... up to `longest`."""
    classes = [0]
    while classes[-1] < longest:
        classes.append(min(longest, max(classes[-1] + 1, classes[-1] * 3 // 2)))
    return classes


def candidate_prices(time_s: Floats, memory_bytes: Ints) -> Floats:
    """Prices of a byte worth trying: 0, and the slopes of lower hulls in the (memory, time) plane of layer types.

    The dual of the relaxation is piecewise linear, and bends only at such slopes.
    """
    sampled = np.unique(np.linspace(0, len(time_s) - 1, _KINDS_SAMPLED).round().astype(int))
    slopes = {0.0}
    for times, sizes in zip(time_s[sampled].tolist(), memory_bytes[sampled].tolist(), strict=True):
        slopes.update(_hull_slopes(sorted(zip(sizes, times, strict=True))))
    ordered = np.array(sorted(slopes))
    if len(ordered) <= _PRICES_MAX:
        return ordered
    chosen: Floats = ordered[np.linspace(0, len(ordered) - 1, _PRICES_MAX).round().astype(int)]
    return chosen


def _hull_slopes(points: list[tuple[int, float]]) -> list[float]:
    """Steepness of the falling edges of the lower convex hull, as positive numbers."""
    hull: list[tuple[int, float]] = []
    for size, time_s in points:
        if hull and time_s >= hull[-1][1]:
            continue  # More memory and no less time.
        if hull and size == hull[-1][0]:
            hull.pop()
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], (size, time_s)):
            hull.pop()
        hull.append((size, time_s))
    return [_slope(left, right) for left, right in pairwise(hull)]


def _slope(left: tuple[int, float], right: tuple[int, float]) -> float:
    return (left[1] - right[1]) / (right[0] - left[0])
