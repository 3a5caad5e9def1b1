"""The best strategies for the layers of one device within its memory: branch and bound over the buffer's size.

The buffer of a stage is the largest of its strategies' buffers, so it is not a sum. A node of the search is therefore a
band of buffer sizes: strategies that need more than its upper end are forbidden, and its lower end is subtracted from
the capacity. This relaxes every choice whose buffer is in the band, and the relaxation's Lagrangian bound closes most
bands. Any other band is split at the buffer that its best choices need. If they need no more than was subtracted, label
setting solves the relaxation exactly.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from scheduler.solver.instance import Ints
from scheduler.solver.search.label_setting import find_fastest_below
from scheduler.solver.search.local_search import fit_host, improve_choice
from scheduler.solver.search.stage_problem import HOST_RATES, LagrangianRelaxation, StageProblem, StageSolution

IMPROVEMENT_FACTOR = 1.0 - 1e-12
"""Only a relative gain above rounding error counts as faster."""

_PRICED_RATES = HOST_RATES[4::4]
_REFINEMENTS = 2
_POINTS_PER_REFINEMENT = 9


@dataclass(frozen=True, slots=True, eq=False)
class _Band:
    """Buffer sizes `low` to `high` (indices into the sorted sizes), with the best dual bound and its price.

    `used` is the largest buffer size among the relaxation's best choices.
    """

    low: int
    high: int
    used: int
    relaxation: LagrangianRelaxation
    bound_s: float
    price: float


def solve_stage(problem: StageProblem, *, tolerance: float = 0.0, labels_max: int) -> StageSolution:
    """Return the minimum time of the stage within its memory, with the choice that achieves it.

    Args:
        tolerance: stop if no choice can be faster by more than this ratio.
        labels_max: budget of work. If it runs out, `bound_s` is below `time_s` by more than the tolerance.
    """
    return _StageSearch(problem, tolerance).run(labels_max)


class _StageSearch:
    """Branch and bound over bands, ordered by their bound.

    Bands that are to be split come first, because splitting is cheap and finds good choices. The search keeps the best
    choice so far and the lowest bound of all closed bands.
    """

    def __init__(self, problem: StageProblem, tolerance: float) -> None:
        self._problem = problem
        self._sizes = np.unique(problem.working_bytes)
        self._closer = min(IMPROVEMENT_FACTOR, 1.0 - tolerance)
        self._best = StageSolution()
        self._floor_s = inf
        self._bands: list[tuple[bool, float, int, _Band]] = []

    def run(self, labels_max: int) -> StageSolution:
        lean = self._find_lean_choice()
        if lean is None:
            return self._best
        self._record_choice(lean)
        self._open_band(0, len(self._sizes) - 1)
        labels = 0
        while self._bands:
            band = heapq.heappop(self._bands)[3]
            if band.bound_s >= self._limit_s:
                self._floor_s = min(self._floor_s, band.bound_s)
            elif band.used > band.low:
                self._split_band(band, band.used)
            else:
                labels += self._solve_band(band, labels_max - labels)
        bound_s = min(self._best.time_s, self._floor_s)
        return replace(self._best, bound_s=bound_s, labels=labels)

    @property
    def _limit_s(self) -> float:
        return self._best.time_s * self._closer

    def _find_lean_choice(self) -> Ints | None:
        """Return a choice that fits into the GPU, if there is any.

        It is for some buffer each layer at its leanest strategy within it.
        """
        problem = self._problem
        order = np.argsort(problem.working_bytes, kind="stable")
        needs = np.minimum.accumulate(problem.memory_bytes[:, order], axis=1).sum(axis=0) + problem.working_bytes[order]
        at = int(np.argmin(needs))
        if needs[at] > problem.capacity_bytes:
            return None
        return np.asarray(order[problem.memory_bytes[:, order[: at + 1]].argmin(axis=1)])

    def _open_band(self, low: int, high: int) -> None:
        """Bound a band and offer the choices found on the way."""
        problem = self._problem
        allowed = np.flatnonzero(problem.working_bytes <= self._sizes[high])
        capacity = int(problem.capacity_bytes - self._sizes[low])
        if problem.memory_bytes[:, allowed].min(axis=1).sum() > capacity:
            return
        if problem.find_host_rate(allowed, capacity)[1] > 0:
            return
        relaxation, price, bound_s, near = _relax(problem, allowed, capacity)
        for choice in near:
            self._record_choice(choice)
        if bound_s < self._limit_s:
            for choice in near:
                self._record_choice(improve_choice(problem, allowed, choice))
        used = max(self._buffer_index(choice) for choice in near)
        band = _Band(low, high, used, relaxation, bound_s, price)
        heapq.heappush(self._bands, (used <= low, bound_s, low, band))

    def _split_band(self, band: _Band, at: int) -> None:
        """Split the band at buffer size `at`.

        From there on, that size is subtracted from the capacity. Below, it is unavailable.
        """
        self._open_band(band.low, at - 1)
        self._open_band(at, band.high)

    def _solve_band(self, band: _Band, labels_max: int) -> int:
        """Solve the band's relaxation, whose optimum may need a larger buffer than was subtracted.

        Return the labels spent.

        Half of the tolerance is for labels that are close to others, the other half for choices close to the best.
        """
        is_rounded = self._closer < IMPROVEMENT_FACTOR and self._best.time_s < inf
        rounding_s = (1.0 - self._closer) / 2 * self._best.time_s if is_rounded else 0.0
        limit_s = min(self._best.time_s * IMPROVEMENT_FACTOR, self._best.time_s - rounding_s)
        found = find_fastest_below(
            band.relaxation, price=band.price, limit_s=limit_s, rounding_s=rounding_s, labels_max=labels_max
        )
        bound_s = limit_s - rounding_s if found.complete else band.bound_s
        if found.choice:
            choice = np.array(found.choice)
            size = self._buffer_index(choice)
            if size > band.low and not self._fits(choice):
                self._split_band(band, size)
                return found.labels
            self._record_choice(choice)
            bound_s = self._best.time_s - rounding_s
        self._floor_s = min(self._floor_s, max(bound_s, band.bound_s))
        return found.labels

    def _buffer_index(self, choice: Ints) -> int:
        return int(np.searchsorted(self._sizes, self._problem.working_bytes[choice].max()))

    def _fits(self, choice: Ints) -> bool:
        return bool(self._problem.evaluate_choices(choice[None])[1][0] <= self._problem.capacity_bytes)

    def _record_choice(self, choice: Ints) -> None:
        """Keep the choice if it fits and is the fastest one so far. One that needs too much of the host is changed."""
        choice = fit_host(self._problem, choice)
        time_s = float(self._problem.evaluate_choices(choice[None])[0][0])
        if time_s < self._best.time_s and self._problem.fits(choice):
            self._best = StageSolution(time_s, choice=tuple(choice.tolist()))


def _relax(
    problem: StageProblem, allowed: Ints, capacity_bytes: int
) -> tuple[LagrangianRelaxation, float, float, list[Ints]]:
    """Return the relaxation with the best bound, its price and bound, and the choices near the capacity of each.

    The host's memory has a price only where the choices without one need too much of it.
    """
    plain = LagrangianRelaxation.for_capacity(problem, allowed, capacity_bytes)
    price, bound_s, near = _maximize_dual(plain)
    best = plain, price, bound_s
    if all(problem.compute_host_slack(choice) >= 0 for choice in near):
        return *best, near
    for rate in _PRICED_RATES:
        relaxation = LagrangianRelaxation.for_capacity(problem, allowed, capacity_bytes, host_rate=rate)
        price, bound_s, more = _maximize_dual(relaxation)
        near += more
        best = (relaxation, price, bound_s) if bound_s > best[2] else best
    return *best, near


def _maximize_dual(relaxation: LagrangianRelaxation) -> tuple[float, float, list[Ints]]:
    """Return the best price, its bound, and the choices on both sides of the capacity.

    The dual is concave in the price, so it is bracketed ever closer.
    """
    start = relaxation.problem.prices
    prices = np.append(
        start, [start[-1] * 4, start[-1] * 64]
    )  # Higher prices, in case resharding keeps a costly layout.
    bounds, choices = relaxation.find_shortest_paths(prices)
    tried = [(prices, bounds, choices)]
    for _ in range(_REFINEMENTS):
        at = int(np.argmax(bounds))
        low, high = prices[max(at - 1, 0)], prices[min(at + 1, len(prices) - 1)]
        if high <= low:
            break
        prices = np.linspace(low, high, _POINTS_PER_REFINEMENT)
        bounds, choices = relaxation.find_shortest_paths(prices)
        tried.append((prices, bounds, choices))
    every_price, every_bound, every_choice = (np.concatenate(parts) for parts in zip(*tried, strict=True))
    at = int(np.argmax(every_bound))
    return float(every_price[at]), float(every_bound[at]), _find_nearest_choices(relaxation, every_choice)


def _find_nearest_choices(relaxation: LagrangianRelaxation, choices: Ints) -> list[Ints]:
    """Return the fastest choice within the relaxation's capacity, and the leanest one beyond it."""
    problem = relaxation.problem
    time_s, memory = problem.evaluate_choices(choices)
    memory = memory - problem.working_bytes[choices].max(axis=1)
    near = []
    for side, order in ((memory <= relaxation.capacity_bytes, time_s), (memory > relaxation.capacity_bytes, memory)):
        rows = np.flatnonzero(side)
        if len(rows):
            near.append(choices[rows[np.argmin(order[rows])]])
    return near
