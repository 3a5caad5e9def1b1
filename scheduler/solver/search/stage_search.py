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

from scheduler.solver.instance import Floats, Ints
from scheduler.solver.search.stage_problem import LagrangianRelaxation, StageProblem, StageSolution

IMPROVEMENT_FACTOR = 1.0 - 1e-12
"""Only a relative gain above rounding error counts as faster."""

_REFINEMENTS = 2
_POINTS_PER_REFINEMENT = 9


_MAX_PAIRS_TRIED = 8
"""Number of the best pairs of moves that are tried until one has two different layers."""


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
        """Return a choice that fits, if there is any: for some buffer, each layer at its leanest strategy within it."""
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
        relaxation = LagrangianRelaxation.for_capacity(problem, allowed, capacity)
        price, bound_s, near = _maximize_dual(relaxation)
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
        rounding_s = (1.0 - self._closer) / 2 * self._best.time_s if self._closer < IMPROVEMENT_FACTOR else 0.0
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
        time_s, memory = self._problem.evaluate_choices(choice[None])
        if memory[0] <= self._problem.capacity_bytes and time_s[0] < self._best.time_s:
            self._best = StageSolution(float(time_s[0]), choice=tuple(choice.tolist()))


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


@dataclass(frozen=True, slots=True, eq=False)
class _Labels:
    """Partial choices up to some layer, as parallel arrays; `layout` counts in the relaxation's `layouts`."""

    time_s: Floats
    memory_bytes: Ints
    layout: Ints

    def select(self, rows: Ints) -> _Labels:
        return _Labels(self.time_s[rows], self.memory_bytes[rows], self.layout[rows])


@dataclass(frozen=True, slots=True, eq=False)
class LabelSearch:
    """Result of label setting.

    `choice` is empty if none is faster than the limit. `complete` is false if the budget ran out.
    """

    choice: tuple[int, ...]
    labels: int
    complete: bool


def find_fastest_below(
    relaxation: LagrangianRelaxation, *, price: float, limit_s: float, rounding_s: float, labels_max: int
) -> LabelSearch:
    """Return the fastest choice within the relaxation's capacity that takes less than `limit_s`, by label setting.

    Labels grow layer by layer. A label is dropped for one of three reasons: the minimum memory of the remaining layers
    no longer fits; the minimum time of the remaining layers, free or with memory at `price`, does not stay below the
    limit; another label of the same layout has no more memory and takes no more time. Strategies that fail the second
    test on their own, at the lowest reduced cost of the others, are left out beforehand.

    With `rounding_s` above 0, labels that differ in time by less than its n-th part count as equal, so the result may
    be slower than the fastest choice by up to `rounding_s`. This bounds the number of labels (Hassin, 1992).
    """
    problem = relaxation.problem
    step_s, memory = problem.step_s[:, relaxation.allowed], problem.memory_bytes[:, relaxation.allowed]
    layouts = np.searchsorted(relaxation.layouts, problem.layouts[relaxation.allowed])
    free, priced = relaxation.compute_completions(0.0), relaxation.compute_completions(price)
    useful = _find_useful_strategies(relaxation, price, priced, limit_s)
    rest_bytes = np.append(np.cumsum(memory.min(axis=1)[::-1])[::-1], 0)
    labels = _Labels(np.zeros(1), np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64))
    trail: list[tuple[Ints, Ints]] = []
    label_count, min_step_s = 0, rounding_s / len(step_s)
    for u in range(len(step_s)):
        columns = np.flatnonzero(useful[u])
        label_count += len(labels.time_s) * len(columns)
        if label_count > labels_max or not len(columns):
            return LabelSearch((), label_count, label_count <= labels_max)
        time_s = labels.time_s[:, None] + step_s[u, columns]
        if u:
            time_s = time_s + relaxation.reshard_s[u - 1][labels.layout[:, None], layouts[columns]]
        memory_bytes = labels.memory_bytes[:, None] + memory[u, columns]
        alive = (memory_bytes + rest_bytes[u + 1] <= relaxation.capacity_bytes) & (
            time_s + free[u, layouts[columns]] < limit_s
        )
        owed_s = price * (memory_bytes - relaxation.capacity_bytes)
        alive &= time_s + owed_s + priced[u, layouts[columns]] < limit_s
        parent, chosen = np.nonzero(alive)
        if not len(parent):
            return LabelSearch((), label_count, True)
        grown = _Labels(time_s[alive], memory_bytes[alive], layouts[columns][chosen])
        kept = _find_undominated_labels(grown, min_step_s)
        labels = grown.select(kept)
        trail.append((parent[kept], relaxation.allowed[columns[chosen[kept]]]))
    return LabelSearch(_trace_choice(int(np.argmin(labels.time_s)), trail), label_count, True)


def _find_useful_strategies(
    relaxation: LagrangianRelaxation, price: float, after: Floats, limit_s: float
) -> np.ndarray:
    """Return [n, A]: the strategies that some choice below the limit can use, by the relaxation's reduced cost."""
    costs = relaxation.compute_costs(np.array([price]))[0]
    best = np.minimum.reduceat(costs, relaxation.starts, axis=1)
    reshard_s = relaxation.reshard_s
    before = np.zeros_like(best)
    for u in range(1, len(best)):
        before[u] = ((before[u - 1] + best[u - 1])[:, None] + reshard_s[u - 1]).min(axis=0)
    layouts = np.searchsorted(relaxation.layouts, relaxation.problem.layouts[relaxation.allowed])
    least = costs + (before + after)[:, layouts] - price * relaxation.capacity_bytes
    return np.asarray(least < limit_s)


def _find_undominated_labels(labels: _Labels, min_step_s: float) -> Ints:
    """Return the positions of labels that are not dominated.

    A label dominates another of the same layout if it is better in both memory and time, less `step_least_s`.
    """
    order = np.lexsort((labels.time_s, labels.memory_bytes, labels.layout))
    borders = np.flatnonzero(np.diff(labels.layout[order])) + 1
    kept = []
    for group in np.split(order, borders):
        time_s = labels.time_s[group]
        least_before = np.concatenate([[np.inf], np.minimum.accumulate(time_s)[:-1]])
        ahead = group[time_s < least_before]
        kept.append(ahead if min_step_s == 0.0 else ahead[_find_spaced(labels.time_s[ahead], min_step_s)])
    return np.concatenate(kept)


def _find_spaced(falling_s: Floats, step_s: float) -> Ints:
    """Return positions in a falling series, each the first at least `step_s` below the one before."""
    cells = np.floor((falling_s[0] - falling_s) / step_s)
    # The first value of a cell represents the cell: no later value in it is a whole step below.
    return np.flatnonzero(np.diff(cells, prepend=-1.0) > 0)


def _trace_choice(at: int, trail: list[tuple[Ints, Ints]]) -> tuple[int, ...]:
    choice = []
    for parents, strategies in reversed(trail):
        choice.append(int(strategies[at]))
        at = int(parents[at])
    return tuple(reversed(choice))


@dataclass(frozen=True, slots=True, eq=False)
class _Moves:
    """Changes of one layer to another strategy of its layout, within the buffer in use; parallel arrays."""

    layer: Ints
    strategy: Ints
    gain_s: Floats
    growth_bytes: Ints


def improve_choice(problem: StageProblem, allowed: Ints, choice: Ints) -> Ints:
    """Improve a choice by local search.

    Trade time for memory until the choice fits, then move one or two layers while it gets faster.
    """
    choice, at = choice.copy(), np.arange(len(choice))
    step_s, memory = problem.step_s[:, allowed], problem.memory_bytes[:, allowed]
    layouts, working = problem.layouts[allowed], problem.working_bytes[allowed]
    for _ in range(2 * len(choice)):
        buffer_bytes = int(problem.working_bytes[choice].max())
        held = problem.memory_bytes[at, choice]
        slack = problem.capacity_bytes - buffer_bytes - int(held.sum())
        usable = (layouts == problem.layouts[choice][:, None]) & (working <= buffer_bytes)
        layer, column = np.nonzero(usable & (allowed != choice[:, None]))
        if not len(layer):
            break
        moves = _Moves(
            layer=layer,
            strategy=allowed[column],
            gain_s=problem.step_s[at, choice][layer] - step_s[layer, column],
            growth_bytes=memory[layer, column] - held[layer],
        )
        steps = _find_leaner_move(moves) if slack < 0 else _find_faster_moves(moves, slack)
        if not len(steps):
            break
        choice[moves.layer[steps]] = moves.strategy[steps]
    return choice


def _find_leaner_move(moves: _Moves) -> Ints:
    """Return the move that frees memory at the least cost in time per byte."""
    rate = np.where(moves.growth_bytes < 0, moves.gain_s / np.minimum(moves.growth_bytes, -1), inf)
    best = int(np.argmin(rate))
    return np.array([best] if rate[best] < inf else [], dtype=np.int64)


def _find_faster_moves(moves: _Moves, slack: int) -> Ints:
    """Return the move, or the pair of moves of two layers, that gains most and grows by at most `slack`."""
    alone_s = np.where(moves.growth_bytes <= slack, moves.gain_s, -inf)
    single = int(np.argmax(alone_s))
    order = np.argsort(moves.growth_bytes, kind="stable")
    growth, gain_s = moves.growth_bytes[order], moves.gain_s[order]
    leads = np.maximum.accumulate(gain_s)
    leader = np.maximum.accumulate(np.where(gain_s == leads, np.arange(len(order)), 0))
    partner = np.searchsorted(growth, slack - growth, side="right") - 1
    total_s = np.where(partner >= 0, gain_s + leads[partner], -inf)
    for one in np.argsort(-total_s, kind="stable")[:_MAX_PAIRS_TRIED]:
        if total_s[one] <= max(alone_s[single], 0.0):
            break
        pair = order[[one, leader[partner[one]]]]
        if moves.layer[pair[0]] != moves.layer[pair[1]]:
            return np.asarray(pair)
    return np.array([single] if alone_s[single] > 0 else [], dtype=np.int64)
