"""Lower bounds on the time of every candidate stage at once, and the strategies that can be of use."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from itertools import pairwise

import numpy as np

from scheduler.solver.instance import Floats, Ints, StageCosts
from scheduler.solver.search.stage_problem import HOST_RATES

_MAX_PRICES = 24
"""Any price gives a valid bound; more prices only tighten it."""

_ENTRIES_MAX = 100_000
"""Most entries of an array of prices: more at once fit into no cache."""

_KINDS_SAMPLED = 8
"""Number of layer types that prices are derived from."""


class WindowEnds(IntEnum):
    """The ends of the chain that a window of layers touches."""

    NONE = 0
    FIRST = 1
    LAST = 2
    BOTH = 3

    @classmethod
    def of_position(cls, position: int, devices: int) -> WindowEnds:
        """Return the ends that the stage at a position of a pipeline touches."""
        return cls(int(position == 0) + 2 * int(position == devices - 1))


@dataclass(frozen=True, slots=True, eq=False)
class LayerWindows:
    """The candidate stages of a chain of layers; equal ones are counted once.

    Two windows are equal if their layers have equal types in equal order and both or neither touch the same end of the
    chain: they then cost the same at every position of a pipeline. With U distinct windows and T types:

        ids      [L+1, L+1]  number of the window of the layers a to b-1; -1 for a >= b
        counts   [U, T]      layers of each type in it, as floats for matrix products
        spans    [U, 2]      a and b of its first occurrence
    """

    types: Ints
    ids: Ints
    counts: Floats
    spans: Ints

    @property
    def lengths(self) -> Ints:
        return np.asarray(self.spans[:, 1] - self.spans[:, 0])

    def find_least_by_length(self, times_s: Floats) -> Floats:
        """Return [4, L]: the least of the times [U] of windows of n + 1 layers or more, by `WindowEnds`."""
        layers = len(self.types)
        ends = (self.spans[:, 0] == 0) + 2 * (self.spans[:, 1] == layers)
        least = np.full((len(WindowEnds), layers), np.inf)
        np.minimum.at(least, (ends, self.lengths - 1), times_s)
        return np.minimum.accumulate(least[:, ::-1], axis=1)[:, ::-1]


@lru_cache(maxsize=64)
def build_windows(types: tuple[int, ...], kinds: int) -> LayerWindows:
    """Return all windows of the chain `types`, which has `kinds` distinct types."""
    layers = len(types)
    ids = np.full((layers + 1, layers + 1), -1, dtype=np.int64)
    numbers: dict[tuple[bool, bool, tuple[int, ...]], int] = {}
    spans: list[tuple[int, int]] = []
    for first in range(layers):
        for end in range(first + 1, layers + 1):
            key = (first == 0, end == layers, types[first:end])
            number = numbers.setdefault(key, len(numbers))
            if number == len(spans):
                spans.append((first, end))
            ids[first, end] = number
    single = np.eye(kinds)[np.array(types)]
    before = np.concatenate([np.zeros((1, kinds)), np.cumsum(single, axis=0)])
    cut = np.array(spans)
    return LayerWindows(np.array(types, dtype=np.int64), ids, before[cut[:, 1]] - before[cut[:, 0]], cut)


def compute_stage_lower_bounds(
    windows: LayerWindows,
    costs: StageCosts,
    *,
    in_flight: float,
    capacity_bytes: int,
    prices: Floats,
    host_capacity_bytes: int = 0,
) -> Floats:
    """Return bounds [U]: a time that no stage of each window can beat; infinite if none fits.

    For a stage of n layers, in which layer u follows strategy s(u):

    * The buffer of the stage is at least the mean of its layers' buffers: max w >= (1/n) sum w. So sum (m + w / n) <=
      capacity holds for every stage that fits (and is exact if all layers follow one strategy).
    * For every price x >= 0, time >= sum min_s (t + x (m + w / n)) - x capacity (weak duality).
    * Changes of layout and border gathers cost at least 0 and are left out.
    * Memory of the host is left out of the times, and decides with that of the GPU whether a stage can fit.

    The largest bound over `prices` [X] counts. Windows of similar length share n, the largest of them, so that w / n
    remains a lower bound.
    """
    bounds = np.full(len(windows.spans), np.inf)
    classes = np.array(_list_length_classes(int(windows.lengths.max())))
    at_once = max(1, _ENTRIES_MAX // (costs.time_s.size * len(prices)))
    number_of_class = np.searchsorted(classes, windows.lengths) - 1
    for begin in range(0, len(classes) - 1, at_once):
        longest = classes[1:][begin : begin + at_once]
        terms = _LayerTerms.build(costs, longest, in_flight=in_flight, prices=prices)
        for number in range(len(longest)):
            rows = np.flatnonzero(number_of_class == begin + number)
            bounds[rows] = terms.compute_bounds_s(number, windows.counts[rows], capacity_bytes, host_capacity_bytes)
    return bounds


def compute_lower_bounds(
    counts: Floats,
    costs: StageCosts,
    *,
    length: int,
    in_flight: float,
    capacity_bytes: int,
    prices: Floats,
    host_capacity_bytes: int = 0,
) -> Floats:
    """Return the same for stages of `counts` [U, T] layers of each type, with at most `length` layers in total."""
    terms = _LayerTerms.build(costs, np.array([length]), in_flight=in_flight, prices=prices)
    return terms.compute_bounds_s(0, counts, capacity_bytes, host_capacity_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class _LayerTerms:
    """The least that a layer of each type adds to a stage of each of K lengths.

    prices  [X]
    priced  [K, X, T]  time and priced memory
    rates   [R]        of exchange between bytes of the host and of the GPU; only 0 if the host sets no limit
    least   [K, R, T]  memory of the GPU, and of the host at these rates
    """

    prices: Floats
    priced: Floats
    rates: Floats
    least: Floats

    @classmethod
    def build(cls, costs: StageCosts, lengths: Ints, *, in_flight: float, prices: Floats) -> _LayerTerms:
        memory, host = costs.compute_memory_bytes(in_flight), costs.compute_host_bytes(in_flight)
        loaded = memory.T[:, None] + (costs.working_bytes[:, None] // lengths)[:, :, None]  # [S, K, T]
        priced = (costs.time_s.T[:, None, None] + prices[:, None] * loaded[:, :, None]).min(axis=0)
        if host is None:
            return cls(prices, priced, np.zeros(1), loaded.min(axis=0)[:, None].astype(np.float64))
        rates = np.array(HOST_RATES)
        return cls(prices, priced, rates, (loaded[:, :, None] + rates[:, None] * host.T[:, None, None]).min(axis=0))

    def compute_bounds_s(self, number: int, counts: Floats, capacity_bytes: int, host_capacity_bytes: int) -> Floats:
        """Return bounds [U] of stages of `counts` [U, T] layers, whose length is at most that of this number.

        At every rate of exchange, GPU and host together must have room for the least of both (surrogate duality).
        """
        bounds = (counts @ self.priced[number].T - self.prices * capacity_bytes).max(axis=1)
        room = capacity_bytes + self.rates * host_capacity_bytes
        return np.where((counts @ self.least[number].T <= room).all(axis=1), bounds, np.inf)


def _list_length_classes(longest: int) -> list[int]:
    """Return 0, 1, 2, 3, 4, 6, 9, ... up to `longest`."""
    classes = [0]
    while classes[-1] < longest:
        classes.append(min(longest, max(classes[-1] + 1, classes[-1] * 3 // 2)))
    return classes


def compute_candidate_prices(time_s: Floats, memory_bytes: Ints) -> Floats:
    """Return useful prices of a byte: 0, and the slopes of lower hulls in the (memory, time) plane of layer types.

    The dual of the relaxation is piecewise linear and bends only at such slopes.
    """
    sampled = np.unique(np.linspace(0, len(time_s) - 1, _KINDS_SAMPLED).round().astype(int))
    slopes = {0.0}
    for times, sizes in zip(time_s[sampled].tolist(), memory_bytes[sampled].tolist(), strict=True):
        slopes.update(_compute_hull_slopes(sorted(zip(sizes, times, strict=True))))
    ordered = np.array(sorted(slopes))
    if len(ordered) <= _MAX_PRICES:
        return ordered
    chosen: Floats = ordered[np.linspace(0, len(ordered) - 1, _MAX_PRICES).round().astype(int)]
    return chosen


def _compute_hull_slopes(points: list[tuple[int, float]]) -> list[float]:
    """Return the slopes of the falling edges of the lower convex hull, as positive numbers."""
    hull: list[tuple[int, float]] = []
    for size, time_s in points:
        if hull and time_s >= hull[-1][1]:
            continue  # Needs more memory and no less time.
        if hull and size == hull[-1][0]:
            hull.pop()
        while len(hull) > 1 and _compute_slope(hull[-2], hull[-1]) <= _compute_slope(hull[-1], (size, time_s)):
            hull.pop()
        hull.append((size, time_s))
    return [_compute_slope(left, right) for left, right in pairwise(hull)]


def _compute_slope(left: tuple[int, float], right: tuple[int, float]) -> float:
    return (left[1] - right[1]) / (right[0] - left[0])


def find_undominated(costs: StageCosts, *, in_flight_max: float) -> Ints:
    """Return the numbers of the strategies that can be of use, ascending.

    Strategy a dominates b if both leave the same layout and, for every layer type, a takes no more time, no more at a
    border, no more buffer, and no more memory of GPU and host with 1 and with `in_flight_max` micro-batches in flight
    (memory is linear in between). Replacing b by a in any plan then costs nothing. Of equal strategies the first one
    stays.
    """
    rows = list_comparable_costs(costs, in_flight_max=in_flight_max)
    kept = []
    for layout in np.unique(costs.layouts).tolist():
        members = np.flatnonzero(costs.layouts == layout)
        kept.append(members[find_undominated_columns(rows[:, members])])
    return np.sort(np.concatenate(kept))


def list_comparable_costs(costs: StageCosts, *, in_flight_max: float) -> Floats:
    """Return [R, S]: all costs of each strategy but for its layout. Less is better in each row."""
    return np.concatenate(
        [
            costs.time_s,
            costs.border_s,
            costs.compute_memory_bytes(1.0).astype(np.float64),
            costs.compute_memory_bytes(in_flight_max).astype(np.float64),
            costs.working_bytes[None].astype(np.float64),
            *(host.astype(np.float64) for host in _list_host_costs(costs, in_flight_max)),
        ]
    )


def _list_host_costs(costs: StageCosts, in_flight_max: float) -> list[Ints]:
    held = [costs.compute_host_bytes(1.0)]
    held += [costs.compute_host_bytes(in_flight_max)] if costs.host_kept_bytes is not None else []
    return [each for each in held if each is not None]


def find_undominated_columns(columns: Floats) -> Ints:
    """Return the columns of [R, S] that no other column undercuts or equals in all rows; of equal ones the first."""
    no_worse = (columns[:, :, None] <= columns[:, None, :]).all(axis=0)
    # Of two equal strategies, only the earlier one dominates.
    strictly = no_worse & (~no_worse.T | np.triu(np.ones_like(no_worse), k=1))
    return np.flatnonzero(~strictly.any(axis=0))
