"""Label setting: the fastest choice of a stage's relaxation below a limit of time, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from scheduler.solver.instance import Floats, Ints
from scheduler.solver.search.stage_problem import LagrangianRelaxation


@dataclass(frozen=True, slots=True, eq=False)
class _Labels:
    """Partial choices up to some layer, as parallel arrays; `layout` counts in the relaxation's `layouts`.

    `host_bytes` are 0 if the host sets no limit.
    """

    time_s: Floats
    memory_bytes: Ints
    layout: Ints
    host_bytes: Ints

    def select(self, rows: Ints) -> _Labels:
        return _Labels(self.time_s[rows], self.memory_bytes[rows], self.layout[rows], self.host_bytes[rows])


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
    limit; another label of the same layout and as much host memory has no more memory and takes no more time.
    Strategies that fail the second test on their own, at the lowest reduced cost of the others, are left out
    beforehand.

    With `rounding_s` above 0, labels that differ in time by less than its n-th part count as equal, so the result may
    be slower than the fastest choice by up to `rounding_s`. This bounds the number of labels (Hassin, 1992).
    """
    problem = relaxation.problem
    step_s, memory = problem.step_s[:, relaxation.allowed], problem.memory_bytes[:, relaxation.allowed]
    layouts = np.searchsorted(relaxation.layouts, problem.layouts[relaxation.allowed])
    free, priced = relaxation.compute_completions(0.0), relaxation.compute_completions(price)
    useful = _find_useful_strategies(relaxation, price, priced, limit_s)
    host = np.zeros_like(memory) if problem.host_bytes is None else problem.host_bytes[:, relaxation.allowed]
    rate = problem.find_host_rate(relaxation.allowed, relaxation.capacity_bytes)[0]
    rest_bytes, host_rest_bytes = _sum_least_of_rest(memory), _sum_least_of_rest(host)
    both_rest_bytes = _sum_least_of_rest(memory + rate * host)
    both_capacity_bytes = relaxation.capacity_bytes + rate * problem.host_capacity_bytes
    none = np.zeros(1, dtype=np.int64)
    labels = _Labels(np.zeros(1), none, none, none)
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
        host_bytes = labels.host_bytes[:, None] + host[u, columns]
        if problem.host_bytes is not None:
            alive &= host_bytes + host_rest_bytes[u + 1] <= problem.host_capacity_bytes
            alive &= memory_bytes + rate * host_bytes + both_rest_bytes[u + 1] <= both_capacity_bytes
        priced_bytes = memory_bytes + relaxation.host_rate * host_bytes
        owed_s = price * (priced_bytes - relaxation.priced_capacity_bytes)
        alive &= time_s + owed_s + priced[u, layouts[columns]] < limit_s
        parent, chosen = np.nonzero(alive)
        if not len(parent):
            return LabelSearch((), label_count, True)
        grown = _Labels(time_s[alive], memory_bytes[alive], layouts[columns][chosen], host_bytes[alive])
        kept = _find_undominated_labels(grown, min_step_s)
        labels = grown.select(kept)
        trail.append((parent[kept], relaxation.allowed[columns[chosen[kept]]]))
    return LabelSearch(_trace_choice(int(np.argmin(labels.time_s)), trail), label_count, True)


def _sum_least_of_rest(sizes: Ints | Floats) -> Ints | Floats:
    """Return [n+1]: the sum of the least sizes [n, A] of the layers from u on."""
    return np.append(np.cumsum(sizes.min(axis=1)[::-1])[::-1], 0)


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
    least = costs + (before + after)[:, layouts] - price * relaxation.priced_capacity_bytes
    return np.asarray(least < limit_s)


def _find_undominated_labels(labels: _Labels, min_step_s: float) -> Ints:
    """Return the positions of labels that are not dominated.

    A label dominates another of the same layout if it is no worse in host memory, memory and time. With `min_step_s`
    above 0, its time may be longer by less than that among labels with as much host memory.
    """
    order = np.lexsort((labels.time_s, labels.memory_bytes, labels.host_bytes, labels.layout))
    layout, host = labels.layout[order], labels.host_bytes[order]
    is_new_layout = np.diff(layout, prepend=-1) != 0
    starts = np.flatnonzero(is_new_layout | (np.diff(host, prepend=-1) != 0))
    kept, front = list[Ints](), _Front()
    for group in np.split(order, starts[1:]):
        if len(kept) and is_new_layout[starts[len(kept)]]:
            front = _Front()
        group = group[front.improves(labels.memory_bytes[group], labels.time_s[group])]
        time_s = labels.time_s[group]
        least_before = np.concatenate([[np.inf], np.minimum.accumulate(time_s)[:-1]])[: len(group)]
        ahead = group[time_s < least_before]
        if min_step_s > 0.0 and len(ahead):
            ahead = ahead[_find_spaced(labels.time_s[ahead], min_step_s)]
        front = front.merge(labels.memory_bytes[ahead], labels.time_s[ahead])
        kept.append(ahead)
    return np.concatenate(kept)


@dataclass(frozen=True, slots=True, eq=False)
class _Front:
    """The labels of one layout with less host memory that no other one dominates: memory rises, time falls."""

    memory_bytes: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    time_s: Floats = field(default_factory=lambda: np.zeros(0))

    def improves(self, memory_bytes: Ints, time_s: Floats) -> NDArray[np.bool_]:
        """Return whether each label takes less time than all labels of the front that need no more memory."""
        if not len(self.time_s):
            return np.ones(len(time_s), dtype=np.bool_)
        before = np.searchsorted(self.memory_bytes, memory_bytes, side="right") - 1
        return np.asarray((before < 0) | (time_s < self.time_s[np.maximum(before, 0)]))

    def merge(self, memory_bytes: Ints, time_s: Floats) -> _Front:
        memory_bytes, time_s = np.append(self.memory_bytes, memory_bytes), np.append(self.time_s, time_s)
        order = np.lexsort((time_s, memory_bytes))
        return _Front(memory_bytes[order], np.minimum.accumulate(time_s[order]))


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
