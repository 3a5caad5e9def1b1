"""Exact solution of the multiple-choice knapsack problem.

It selects one item of each group, with the largest total value within the budget.

The relaxation climbs the groups' concave hulls by falling slope (Sinha and Zoltners, Operations Research 27, 1979). Its
break slope is the price of a unit of budget. Every other item then loses a known amount against its group's best, and a
choice that loses more in total than the best one found so far is ruled out. The few remaining items go through a
dynamic program over the budget, the groups with least to lose first (Pisinger, EJOR 83, 1995).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, chain
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

CELLS_MAX = 1 << 22
"""Cells of the dynamic program that one call may fill. It takes 2,000 deliberately hard groups to approach it, and
then 0.2 s. Without the bounds, 60 groups of 8 items over 300 GPUs would be 144,000 cells."""

ROUNDING = 1e-12
"""Differences below this share of all values are rounding errors."""


class Item(NamedTuple):
    """A count of GPUs with the job's remaining run time on it."""

    gpus: int
    remaining_s: float


@dataclass(frozen=True, slots=True)
class Selection:
    """Positions of the chosen items, [groups].

    The best choice is worth at most `gap` more; 0 if this one is proven optimal.
    """

    items: Ints
    gap: float


def solve_knapsack(groups: Mapping[str, list[Item]], budget: int) -> Mapping[str, int]:
    """Return the counts that reduce the sum of remaining times most within the budget.

    At most `budget` GPUs are used above the first item of each group.

    The items of a group are in order of their GPUs. Gaps, and gains in any order, are allowed.
    """
    if not groups:
        return {}
    items = list(chain.from_iterable(groups.values()))
    starts = np.array(list(accumulate(map(len, groups.values()), initial=0))[:-1])
    gpus = np.array([item.gpus for item in items])
    values = np.array([-item.remaining_s for item in items])
    return dict(zip(groups, gpus[solve_multiple_choice(gpus, values, starts, budget).items].tolist(), strict=True))


def solve_multiple_choice(
    weights: Ints, values: Floats, starts: Ints, budget: int, *, cells_max: int = CELLS_MAX
) -> Selection:
    """Return the choice of largest value whose weight is at most `budget` above that of the first items together.

    The result is proven optimal, unless more than `cells_max` cells of the dynamic program are needed. The best
    choice found is then returned with its gap.

    Args:
        weights, values: [items], group after group, with rising weights within each; values are finite.
        starts: [groups], first positions.
    """
    owner = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(weights)))
    weights, values = weights - weights[starts][owner], values - values[starts][owner]
    unit = int(np.gcd.reduce(weights)) or 1
    weights, budget = weights // unit, max(0, budget) // unit
    chosen, room, price = _solve_relaxation(weights, values, owner, starts, budget)
    least = ROUNDING * float(np.abs(values).max())
    if room * price <= least:
        return Selection(chosen, 0.0)
    step = weights - weights[chosen][owner]
    loss = np.maximum(0.0, (values[chosen] - price * weights[chosen])[owner] - (values - price * weights))
    single = np.where(step <= room, loss + price * (room - step), inf)
    best = int(single.argmin())
    core = _CoreSearch(step, loss, owner, room, price)
    picked, gap = core.search(float(single[best]), least, cells_max)
    for item in [best] if picked is None else picked:
        chosen[owner[item]] = item
    return Selection(chosen, gap)


def _solve_relaxation(weights: Ints, values: Floats, owner: Ints, starts: Ints, budget: int) -> tuple[Ints, int, float]:
    """Return the items that the relaxation takes whole, the remaining budget, and the slope at which it is split."""
    hull = _upper_hull(weights, values)
    inside = owner[hull[1:]] == owner[hull[:-1]]
    low, high = hull[:-1][inside], hull[1:][inside]
    width = weights[high] - weights[low]
    slope = (values[high] - values[low]) / width
    order = np.argsort(-slope, kind="stable")[: int(np.count_nonzero(slope > 0.0))]
    filled = np.cumsum(width[order])
    taken = int(np.searchsorted(filled, budget, side="right"))
    chosen = starts.copy()
    np.maximum.at(chosen, owner[high[order[:taken]]], high[order[:taken]])
    room = budget - (int(filled[taken - 1]) if taken else 0)
    return chosen, room, float(slope[order[taken]]) if taken < len(order) else 0.0


def _upper_hull(weights: Ints, values: Floats) -> Ints:
    """Return positions on the upper concave hulls; a point below the line between two others is on none."""
    kept = np.arange(len(weights))
    while True:
        low, high = kept[:-1], kept[1:]
        width = weights[high] - weights[low]  # not above 0 between groups, because each starts at 0
        slope = (values[high] - values[low]) / np.maximum(width, 1)
        below = (width[:-1] > 0) & (width[1:] > 0) & (slope[:-1] < slope[1:])
        if not below.any():
            return kept
        kept = np.concatenate((kept[:1], high[:-1][~below], kept[-1:]))


@dataclass(frozen=True, slots=True)
class _Layer:
    """One group merged into the program: for each deviation from `low` on, which of `items` leads to it."""

    low: int
    taken: NDArray[np.int16]
    items: Ints
    steps: Ints


class _CoreSearch:
    """Dynamic program over the deviation of the weight from the relaxed choice: [deviations] -> least loss.

    A choice with loss l and deviation d <= room misses the relaxation's bound by l + price x (room - d).
    """

    def __init__(self, step: Ints, loss: Floats, owner: Ints, room: int, price: float) -> None:
        self._step, self._loss, self._owner, self._room, self._price = step, loss, owner, room, price

    def search(self, miss: float, least: float, cells_max: int) -> tuple[list[int] | None, float]:
        """Return the items that differ from the relaxed choice (None: nothing misses less than `miss`), and the gap."""
        groups, up, down = self._groups(miss)
        layers: list[_Layer] = []
        found: tuple[int, int] | None = None
        low, losses, cells = 0, np.zeros(1), 0
        for at, group in enumerate(groups):
            items = group[self._loss[group] < miss]
            if miss <= least or not len(items):  # all later groups have more to lose
                break
            cells += len(losses) * len(items)
            if cells > cells_max:
                return self._backtrack(layers, found), miss
            layer, losses = self._merge(low, losses, items)
            deviation = np.arange(layer.low, layer.low + len(losses)) - self._room
            misses = losses + self._price * np.maximum(0, -deviation)
            misses[deviation > 0] = inf
            best = int(misses.argmin())
            if misses[best] < miss:
                miss, found = float(misses[best]), (len(layers), layer.low + best)
            bound = losses + np.where(deviation > 0, deviation * down[at + 1], -deviation * up[at + 1])
            alive = np.flatnonzero(bound < miss)
            layers.append(layer)
            if not len(alive):
                break
            low, losses = layer.low + int(alive[0]), losses[alive[0] : alive[-1] + 1]
        return self._backtrack(layers, found), 0.0

    def _groups(self, miss: float) -> tuple[list[Ints], Floats, Floats]:
        """Return useful items by group, those with least to lose first, and the cheapest rates of the later groups.

        The rates, for what follows each group, are the least losses at which a unit of weight can be added and removed.
        """
        items = np.flatnonzero((self._loss < miss) & (self._step != 0))
        if not len(items):
            return [], np.zeros(1), np.zeros(1)
        loss, owner, step = self._loss[items], self._owner[items], self._step[items]
        least = np.full(int(owner[-1]) + 1, inf)
        np.minimum.at(least, owner, loss)
        order = np.lexsort((owner, least[owner]))
        items, owner, step = items[order], owner[order], step[order]
        starts = np.concatenate(([0], np.flatnonzero(owner[1:] != owner[:-1]) + 1))
        rate = loss[order] / np.abs(step)
        rates = []
        for rising, otherwise in ((True, self._price), (False, miss)):
            by_group = np.minimum.reduceat(np.where((step > 0) == rising, rate, otherwise), starts)
            later = np.minimum.accumulate(by_group[::-1])[::-1]
            rates.append(np.append(np.minimum(later, otherwise), otherwise))
        ends = [*starts[1:].tolist(), len(items)]
        return [items[start:end] for start, end in zip(starts.tolist(), ends, strict=True)], rates[0], rates[1]

    def _merge(self, low: int, losses: Floats, items: Ints) -> tuple[_Layer, Floats]:
        steps = self._step[items]
        first, last = min(0, int(steps.min())), max(0, int(steps.max()))
        merged = np.full(len(losses) + last - first, inf)
        taken = np.full(len(merged), -1, np.int16)
        merged[-first : len(losses) - first] = losses
        for number, (step, loss) in enumerate(zip(steps.tolist(), self._loss[items].tolist(), strict=True)):
            part = slice(step - first, step - first + len(losses))
            reached = losses + loss
            better = reached < merged[part]
            np.copyto(merged[part], reached, where=better)
            np.copyto(taken[part], number, where=better)
        return _Layer(low + first, taken, items, steps), merged

    @staticmethod
    def _backtrack(layers: list[_Layer], found: tuple[int, int] | None) -> list[int] | None:
        if found is None:
            return None
        number, deviation = found
        picked = []
        for layer in reversed(layers[: number + 1]):
            taken = int(layer.taken[deviation - layer.low])
            if taken >= 0:
                picked.append(int(layer.items[taken]))
                deviation -= int(layer.steps[taken])
        return picked
