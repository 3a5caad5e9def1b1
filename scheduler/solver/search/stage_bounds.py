"""Lower bounds on the time of every candidate stage at once, by Lagrangian relaxation of its memory limit."""

from __future__ import annotations

from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from scheduler.solver.costs.cost_tables import CostTables, Floats, Ints

_Number = TypeVar("_Number", np.float64, np.int64)

_PRICES_MAX = 24
"""Any price gives a valid bound; more of them only sharpen it."""


def stage_lower_bounds(tables: CostTables, *, in_flight: int, capacity_bytes: int) -> Floats:
    """Bounds [L+1, L+1]: entry [a, b] bounds a stage of layers a to b-1 from below; infinite where none fits.

    For a stage of n layers, each layer u following strategy s(u):

    * the buffer of the stage is at least the mean of its layers' buffers: max w >= (1/n) sum w, so that
      sum (m + w / n) <= capacity holds for every stage that fits (and is exact if all follow one strategy);
    * for every price x >= 0 then  time >= sum min_s (t + x (m + w / n)) - x capacity  (weak duality);
    * changes of layout and border gathers cost at least 0 and are left out.

    The largest bound over a few prices is kept. Price 0 is always one of them: the time without any limit.
    """
    count = len(tables.types)
    lengths = np.arange(1, count + 1)
    memory = tables.state_bytes + in_flight * tables.kept_bytes
    # Rounding down keeps w / n a lower bound. Shape [n, T, S].
    loaded = memory[None] + (tables.working_bytes[None, :] // lengths[:, None])[:, None, :]
    prices = candidate_prices(tables.time_s, loaded[(count - 1) // 2])
    priced = (tables.time_s + prices[:, None, None] * loaded[:, None]).min(axis=-1)  # [n, prices, T]
    first, end = np.triu_indices(count + 1, k=1)
    length = end - first - 1  # Row of the length n = end - first.
    sums = _prefix_sums(priced[:, :, tables.types])
    time_s = sums[length, :, end] - sums[length, :, first] - prices * capacity_bytes
    least = _prefix_sums(loaded.min(axis=-1)[:, tables.types])
    fits = least[length, end] - least[length, first] <= capacity_bytes
    bounds = np.full((count + 1, count + 1), np.inf)
    bounds[first, end] = np.where(fits, time_s.max(axis=1), np.inf)
    return bounds


def candidate_prices(time_s: Floats, memory_bytes: Ints) -> Floats:
    """Prices of a byte worth trying: 0, and the slopes of each type's lower hull in the (memory, time) plane.

    The dual of the relaxation is piecewise linear, and bends only at such slopes.
    """
    slopes = {0.0}
    for times, sizes in zip(time_s.tolist(), memory_bytes.tolist(), strict=True):
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


def _prefix_sums(rows: NDArray[_Number]) -> NDArray[_Number]:
    """Along the last axis: entry j is the sum of the first j values, so that a window is one difference."""
    start = np.zeros((*rows.shape[:-1], 1), dtype=rows.dtype)
    return np.concatenate([start, np.cumsum(rows, axis=-1)], axis=-1)
