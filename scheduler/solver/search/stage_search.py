"""The exact best strategies for the layers of one stage: label setting on (time, memory)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scheduler.solver.costs.cost_tables import CostTables, Floats, Ints
from scheduler.solver.search.stage_bounds import candidate_prices

_CLOSER_THAN = 1.0 - 1e-12
"""Only a relative gain above rounding error counts as faster."""


@dataclass(frozen=True, slots=True, eq=False)
class StageProblem:
    """Layers of the given types in a row; `entry` and `exit` say whether a stage comes before and after."""

    tables: CostTables
    types: Ints
    in_flight: int
    capacity_bytes: int
    entry: bool
    exit: bool

    @property
    def memory_bytes(self) -> Ints:
        """[T, S]: of one layer, with what its micro-batches in flight keep."""
        return self.tables.state_bytes + self.in_flight * self.tables.kept_bytes

    @property
    def step_s(self) -> Floats:
        """[n, S]: each layer's time, border gathers of the first and last one included."""
        steps = self.tables.time_s[self.types]
        if self.entry:
            steps[0] += self.tables.border_s[self.types[0]]
        if self.exit:
            steps[-1] += self.tables.border_s[self.types[-1]]
        return steps


@dataclass(frozen=True, slots=True)
class StageSolution:
    """The best choice of strategy numbers, one a layer; an infinite time means that nothing fits.

    `labels` counts the partial choices that were looked at. `proven` is false where the budget ran out first.
    """

    time_s: float
    choice: tuple[int, ...]
    labels: int = 0
    proven: bool = True


def solve_stage(problem: StageProblem, *, labels_max: int) -> StageSolution:
    """The least time of the stage within its memory, with the choice that reaches it.

    The stage's buffer is the largest of its strategies' buffers, which is not a sum. So the levels of the buffer
    are tried one by one: at level w only strategies that need at most w are allowed, and w is taken from the
    capacity. The optimum is found at the level of its own buffer, and no level admits a stage that does not fit.
    Each level is a shortest path under one knapsack constraint. Its Lagrangian bound skips it if it cannot win.
    """
    best = one_switch(problem)
    spent, proven = 0, True
    for bound, level, price in _levels(problem):
        if bound < best.time_s * _CLOSER_THAN:
            best, labels = _search_level(problem, level, price, best, labels_max - spent)
            spent += labels
            proven = spent <= labels_max
        if not proven:
            break
    return StageSolution(best.time_s, best.choice, spent, proven)


def one_switch(problem: StageProblem) -> StageSolution:
    """The best stage whose first layers all follow one strategy and the others a second one.

    A good start: the relaxation of a run of equal layers mixes two strategies at most.
    """
    tables, types = problem.tables, problem.types
    count, options = len(types), len(tables.strategies)
    time_s, memory = _switch_totals(problem.step_s), _switch_totals(problem.memory_bytes[types])
    # At border j the layers before j follow one, the others two; 0 < j < n, or j = n for one strategy throughout.
    change = tables.reshard_s[types[:-1]][:, tables.layouts[:, None], tables.layouts[None, :]]
    time_s[1:count] += change
    memory += np.maximum(tables.working_bytes[:, None], tables.working_bytes[None, :])
    time_s[0] = np.inf
    time_s[count][~np.eye(options, dtype=bool)] = np.inf
    time_s[memory > problem.capacity_bytes] = np.inf
    border, one, two = (int(index) for index in np.unravel_index(int(np.argmin(time_s)), time_s.shape))
    return StageSolution(float(time_s[border, one, two]), (one,) * border + (two,) * (count - border))


def _switch_totals(rows: Floats | Ints) -> Floats:
    """[n+1, S, S]: sum of `rows` [n, S] over the first j layers at one strategy and the rest at another."""
    zero = np.zeros((1, rows.shape[1]))
    before = np.concatenate([zero, np.cumsum(rows, axis=0)])
    after = np.concatenate([np.cumsum(rows[::-1], axis=0)[::-1], zero])
    return np.asarray(before[:, :, None] + after[:, None, :], dtype=np.float64)


def _levels(problem: StageProblem) -> list[tuple[float, int, float]]:
    """(lower bound, buffer, best price) of each level of the buffer, the most promising first."""
    working, types = problem.tables.working_bytes, problem.types
    steps, memory = problem.step_s, problem.memory_bytes
    levels = []
    for level in sorted(set(working.tolist())):
        allowed = working <= level
        capacity = problem.capacity_bytes - level
        if memory[:, allowed].min(axis=1)[types].sum() > capacity:
            continue
        prices = candidate_prices(problem.tables.time_s[:, allowed], memory[:, allowed])
        priced = steps[:, allowed] + prices[:, None, None] * memory[types][:, allowed]
        bounds = priced.min(axis=-1).sum(axis=-1) - prices * capacity
        at = int(np.argmax(bounds))
        levels.append((float(bounds[at]), level, float(prices[at])))
    return sorted(levels)


def _search_level(
    problem: StageProblem, level: int, price: float, best: StageSolution, labels_max: int
) -> tuple[StageSolution, int]:
    """Extends labels layer by layer, and drops a label for one of three reasons:

    * even the least memory of the layers to come does not fit any more;
    * even the least time of the layers to come, without a limit or with memory at `price`, is not below `best`;
    * another label of the same layout has no more memory and no more time.

    Returns the better of `best` and the best stage of this level, and the number of labels made.
    """
    tables, types = problem.tables, problem.types
    allowed = np.flatnonzero(tables.working_bytes <= level)
    capacity, layouts = problem.capacity_bytes - level, tables.layouts[allowed]
    step_s, memory = problem.step_s[:, allowed], problem.memory_bytes[types][:, allowed]
    rest_bytes = _remaining(memory)
    rest_s, rest_priced_s = _remaining(step_s), _remaining(step_s + price * memory)
    limit_s = best.time_s * _CLOSER_THAN
    frontier = _Frontier(np.zeros(1), np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64))
    trail: list[tuple[Ints, Ints]] = []
    made = 0
    for u in range(len(types)):
        time_s = frontier.time_s[:, None] + step_s[u]
        if u:
            time_s = time_s + tables.reshard_s[types[u - 1]][frontier.layout[:, None], layouts]
        size = frontier.memory_bytes[:, None] + memory[u]
        made += time_s.size
        alive = (size + rest_bytes[u + 1] <= capacity) & (time_s + rest_s[u + 1] < limit_s)
        alive &= time_s + price * (size - capacity) + rest_priced_s[u + 1] < limit_s
        parent, chosen = np.nonzero(alive)
        if not len(parent) or made > labels_max:
            return best, made
        labels = _Frontier(time_s[alive], size[alive], layouts[chosen])
        kept = _undominated(labels)
        frontier = _Frontier(labels.time_s[kept], labels.memory_bytes[kept], labels.layout[kept])
        trail.append((parent[kept], allowed[chosen[kept]]))
    return _backtrack(frontier, trail), made


@dataclass(frozen=True, slots=True, eq=False)
class _Frontier:
    """Labels after some layer: parallel arrays."""

    time_s: Floats
    memory_bytes: Ints
    layout: Ints


def _remaining(rows: Floats | Ints) -> Floats | Ints:
    """[n+1]: the least that the layers from u on can add."""
    least = rows.min(axis=1)[::-1]
    return np.concatenate([np.cumsum(least)[::-1], np.zeros(1, dtype=rows.dtype)])


def _undominated(labels: _Frontier) -> Ints:
    """Positions of labels that no other one of the same layout beats in both time and memory."""
    order = np.lexsort((labels.time_s, labels.memory_bytes, labels.layout))
    borders = np.flatnonzero(np.diff(labels.layout[order])) + 1
    kept = []
    for group in np.split(order, borders):
        time_s = labels.time_s[group]
        least_before = np.concatenate([[np.inf], np.minimum.accumulate(time_s)[:-1]])
        kept.append(group[time_s < least_before])
    return np.concatenate(kept)


def _backtrack(frontier: _Frontier, trail: list[tuple[Ints, Ints]]) -> StageSolution:
    at = int(np.argmin(frontier.time_s))
    time_s, choice = float(frontier.time_s[at]), []
    for parents, strategies in reversed(trail):
        choice.append(int(strategies[at]))
        at = int(parents[at])
    return StageSolution(time_s, tuple(reversed(choice)))
