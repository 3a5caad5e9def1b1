"""The best strategies for the layers of one device within its memory: branch and bound over the buffer's size.

The buffer of a stage is the largest of its strategies' buffers, which is not a sum. So a node of the search is a band
of buffer sizes: strategies that need more than its upper end are forbidden, and its lower end is taken from the
capacity. That relaxes every choice whose buffer lies in the band, and the relaxation's Lagrangian bound closes most
bands. Another one is split at the buffer that its best choices need. Where they need no more than was taken off, label
setting solves the relaxation exactly.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from scheduler.solver.instance import Ints
from scheduler.solver.search.label_setting import fastest_below
from scheduler.solver.search.local_search import improved
from scheduler.solver.search.priced_paths import Relaxation
from scheduler.solver.search.stage_problem import StageProblem, StageSolution

CLOSER_THAN = 1.0 - 1e-12
"""Only a relative gain above rounding error counts as faster."""

_REFINEMENTS = 2
_POINTS = 9


@dataclass(frozen=True, slots=True, eq=False)
class _Band:
    """Buffer sizes `low` to `high` (indices into the sorted sizes), with the best dual bound and its price.

    `used` is the largest buffer size among the relaxation's best choices."""

    low: int
    high: int
    used: int
    relaxation: Relaxation
    bound_s: float
    price: float


def solve_stage(problem: StageProblem, *, tolerance: float = 0.0, labels_max: int) -> StageSolution:
    """The least time of the stage within its memory, with the choice that reaches it.

    Args:
        tolerance: stop where no choice can be faster by more than this ratio.
        labels_max: budget of work; where it runs out, `bound_s` stays below `time_s` by more than that.
    """
    return _StageSearch(problem, tolerance).run(labels_max)


class _StageSearch:
    """Bands wait by their bound, those to be split first, as that is cheap and finds good choices on the way. The best
    choice so far and the least bound of all closed bands are kept."""

    def __init__(self, problem: StageProblem, tolerance: float) -> None:
        self._problem = problem
        self._sizes = np.unique(problem.working_bytes)
        self._closer = min(CLOSER_THAN, 1.0 - tolerance)
        self._best = StageSolution()
        self._floor_s = inf
        self._bands: list[tuple[bool, float, int, _Band]] = []

    def run(self, labels_max: int) -> StageSolution:
        lean = self._leanest()
        if lean is None:
            return self._best
        self._offer(lean)
        self._open(0, len(self._sizes) - 1)
        labels = 0
        while self._bands:
            band = heapq.heappop(self._bands)[3]
            if band.bound_s >= self._limit_s:
                self._floor_s = min(self._floor_s, band.bound_s)
            elif band.used > band.low:
                self._split(band, band.used)
            else:
                labels += self._settle(band, labels_max - labels)
        bound_s = min(self._best.time_s, self._floor_s)
        return replace(self._best, bound_s=bound_s, labels=labels)

    @property
    def _limit_s(self) -> float:
        return self._best.time_s * self._closer

    def _leanest(self) -> Ints | None:
        """A choice that fits, if there is any: for some buffer, each layer at its leanest strategy within it."""
        problem = self._problem
        order = np.argsort(problem.working_bytes, kind="stable")
        needs = np.minimum.accumulate(problem.memory_bytes[:, order], axis=1).sum(axis=0) + problem.working_bytes[order]
        at = int(np.argmin(needs))
        if needs[at] > problem.capacity_bytes:
            return None
        return np.asarray(order[problem.memory_bytes[:, order[: at + 1]].argmin(axis=1)])

    def _open(self, low: int, high: int) -> None:
        """Bounds a band, and looks for choices on the way."""
        problem = self._problem
        allowed = np.flatnonzero(problem.working_bytes <= self._sizes[high])
        capacity = int(problem.capacity_bytes - self._sizes[low])
        if problem.memory_bytes[:, allowed].min(axis=1).sum() > capacity:
            return
        relaxation = Relaxation.of(problem, allowed, capacity)
        price, bound_s, near = _dual(relaxation)
        for choice in near:
            self._offer(choice)
        if bound_s < self._limit_s:
            for choice in near:
                self._offer(improved(problem, allowed, choice))
        used = max(self._size_of(choice) for choice in near)
        band = _Band(low, high, used, relaxation, bound_s, price)
        heapq.heappush(self._bands, (used <= low, bound_s, low, band))

    def _split(self, band: _Band, at: int) -> None:
        """From buffer size `at` on, that much is taken from the capacity; below, it is not to be had."""
        self._open(band.low, at - 1)
        self._open(at, band.high)

    def _settle(self, band: _Band, labels_max: int) -> int:
        """Solves the band's relaxation. Its optimum may need a larger buffer than was taken off.

        Half of the tolerance goes to labels that are close to others, the other half to choices close to the best.
        """
        rounding_s = (1.0 - self._closer) / 2 * self._best.time_s if self._closer < CLOSER_THAN else 0.0
        limit_s = min(self._best.time_s * CLOSER_THAN, self._best.time_s - rounding_s)
        found = fastest_below(
            band.relaxation, price=band.price, limit_s=limit_s, rounding_s=rounding_s, labels_max=labels_max
        )
        bound_s = limit_s - rounding_s if found.complete else band.bound_s
        if found.choice:
            choice = np.array(found.choice)
            size = self._size_of(choice)
            if size > band.low and not self._fits(choice):
                self._split(band, size)
                return found.labels
            self._offer(choice)
            bound_s = self._best.time_s - rounding_s
        self._floor_s = min(self._floor_s, max(bound_s, band.bound_s))
        return found.labels

    def _size_of(self, choice: Ints) -> int:
        return int(np.searchsorted(self._sizes, self._problem.working_bytes[choice].max()))

    def _fits(self, choice: Ints) -> bool:
        return bool(self._problem.weigh(choice[None])[1][0] <= self._problem.capacity_bytes)

    def _offer(self, choice: Ints) -> None:
        time_s, memory = self._problem.weigh(choice[None])
        if memory[0] <= self._problem.capacity_bytes and time_s[0] < self._best.time_s:
            self._best = StageSolution(float(time_s[0]), choice=tuple(choice.tolist()))


def _dual(relaxation: Relaxation) -> tuple[float, float, list[Ints]]:
    """The best price, its bound, and the choices on both sides of the capacity.

    The dual is concave in the price, so it is bracketed ever closer.
    """
    start = relaxation.problem.prices
    prices = np.append(start, [start[-1] * 4, start[-1] * 64])  # Where resharding keeps a costly layout.
    bounds, choices = relaxation.shortest(prices)
    tried = [(prices, bounds, choices)]
    for _ in range(_REFINEMENTS):
        at = int(np.argmax(bounds))
        low, high = prices[max(at - 1, 0)], prices[min(at + 1, len(prices) - 1)]
        if high <= low:
            break
        prices = np.linspace(low, high, _POINTS)
        bounds, choices = relaxation.shortest(prices)
        tried.append((prices, bounds, choices))
    every_price, every_bound, every_choice = (np.concatenate(parts) for parts in zip(*tried, strict=True))
    at = int(np.argmax(every_bound))
    return float(every_price[at]), float(every_bound[at]), _near(relaxation, every_choice)


def _near(relaxation: Relaxation, choices: Ints) -> list[Ints]:
    """The fastest choice that keeps to the relaxation's capacity, and the leanest one that does not."""
    problem = relaxation.problem
    time_s, memory = problem.weigh(choices)
    memory = memory - problem.working_bytes[choices].max(axis=1)
    near = []
    for side, order in ((memory <= relaxation.capacity_bytes, time_s), (memory > relaxation.capacity_bytes, memory)):
        rows = np.flatnonzero(side)
        if len(rows):
            near.append(choices[rows[np.argmin(order[rows])]])
    return near
