"""Label setting: the exact best choice for a stage, where no simpler bound has settled it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scheduler.solver.instance import Floats, Ints
from scheduler.solver.search.priced_paths import Relaxation


@dataclass(frozen=True, slots=True, eq=False)
class _Labels:
    """Partial choices up to some layer, as parallel arrays; `layout` counts in the relaxation's `kinds`."""

    time_s: Floats
    memory_bytes: Ints
    layout: Ints

    def take(self, rows: Ints) -> _Labels:
        return _Labels(self.time_s[rows], self.memory_bytes[rows], self.layout[rows])


@dataclass(frozen=True, slots=True, eq=False)
class LabelSearch:
    """Outcome: the choice, or an empty one where none is faster than the limit; `complete` unless work ran out."""

    choice: tuple[int, ...]
    labels: int
    complete: bool


def fastest_below(
    relaxation: Relaxation, *, price: float, limit_s: float, rounding_s: float, labels_max: int
) -> LabelSearch:
    """The fastest choice within the relaxation's capacity that takes less than `limit_s`.

    Labels grow layer by layer. One is dropped for one of three reasons: the least memory of the layers to come does not
    fit any more; even the least time of the layers to come, free or with memory at `price`, does not stay below the
    limit; another label of the same layout has no more memory and no more time. Strategies that fail the second test
    on their own, in the best company (reduced cost), are left out beforehand.

    With `rounding_s` above 0, labels that differ in time by less than its n-th part count as equal, so that the answer
    may be slower than the fastest choice by up to `rounding_s`. That bounds the number of labels (Hassin, 1992).
    """
    problem = relaxation.problem
    step_s, memory = problem.step_s[:, relaxation.allowed], problem.memory_bytes[:, relaxation.allowed]
    layouts = np.searchsorted(relaxation.kinds, problem.layouts[relaxation.allowed])
    free, priced = relaxation.completions(0.0), relaxation.completions(price)
    useful = _useful(relaxation, price, priced, limit_s)
    rest_bytes = np.append(np.cumsum(memory.min(axis=1)[::-1])[::-1], 0)
    labels = _Labels(np.zeros(1), np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64))
    trail: list[tuple[Ints, Ints]] = []
    made, step_least_s = 0, rounding_s / len(step_s)
    for u in range(len(step_s)):
        columns = np.flatnonzero(useful[u])
        made += len(labels.time_s) * len(columns)
        if made > labels_max or not len(columns):
            return LabelSearch((), made, made <= labels_max)
        time_s = labels.time_s[:, None] + step_s[u, columns]
        if u:
            time_s = time_s + relaxation.reshard_s[u - 1][labels.layout[:, None], layouts[columns]]
        size = labels.memory_bytes[:, None] + memory[u, columns]
        alive = (size + rest_bytes[u + 1] <= relaxation.capacity_bytes) & (time_s + free[u, layouts[columns]] < limit_s)
        owed_s = price * (size - relaxation.capacity_bytes)
        alive &= time_s + owed_s + priced[u, layouts[columns]] < limit_s
        parent, chosen = np.nonzero(alive)
        if not len(parent):
            return LabelSearch((), made, True)
        grown = _Labels(time_s[alive], size[alive], layouts[columns][chosen])
        kept = _undominated(grown, step_least_s)
        labels = grown.take(kept)
        trail.append((parent[kept], relaxation.allowed[columns[chosen[kept]]]))
    return LabelSearch(_backtrack(int(np.argmin(labels.time_s)), trail), made, True)


def _useful(relaxation: Relaxation, price: float, after: Floats, limit_s: float) -> np.ndarray:
    """[n, A]: strategies that some choice below the limit may use, by the relaxation's reduced cost."""
    costs = relaxation.costs(np.array([price]))[0]
    best = np.minimum.reduceat(costs, relaxation.starts, axis=1)
    reshard_s = relaxation.reshard_s
    before = np.zeros_like(best)
    for u in range(1, len(best)):
        before[u] = ((before[u - 1] + best[u - 1])[:, None] + reshard_s[u - 1]).min(axis=0)
    layouts = np.searchsorted(relaxation.kinds, relaxation.problem.layouts[relaxation.allowed])
    least = costs + (before + after)[:, layouts] - price * relaxation.capacity_bytes
    return np.asarray(least < limit_s)


def _undominated(labels: _Labels, step_least_s: float) -> Ints:
    """Positions of labels that no other one of the same layout beats in both memory and time, less `step_least_s`."""
    order = np.lexsort((labels.time_s, labels.memory_bytes, labels.layout))
    borders = np.flatnonzero(np.diff(labels.layout[order])) + 1
    kept = []
    for group in np.split(order, borders):
        time_s = labels.time_s[group]
        least_before = np.concatenate([[np.inf], np.minimum.accumulate(time_s)[:-1]])
        ahead = group[time_s < least_before]
        kept.append(ahead if step_least_s == 0.0 else ahead[_spaced(labels.time_s[ahead], step_least_s)])
    return np.concatenate(kept)


def _spaced(falling_s: Floats, step_s: float) -> Ints:
    """Positions in a falling series, each the first at least `step_s` below the one before."""
    cells = np.floor((falling_s[0] - falling_s) / step_s)
    # The first of a cell stands for the rest of it: no later one of the same cell is a whole step below.
    return np.flatnonzero(np.diff(cells, prepend=-1.0) > 0)


def _backtrack(at: int, trail: list[tuple[Ints, Ints]]) -> tuple[int, ...]:
    choice = []
    for parents, strategies in reversed(trail):
        choice.append(int(strategies[at]))
        at = int(parents[at])
    return tuple(reversed(choice))
