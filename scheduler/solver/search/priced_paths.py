"""Priced paths: the best strategies of a stage when memory is not limited but paid for, at many prices at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scheduler.solver.instance import Floats, Ints
from scheduler.solver.search.stage_problem import StageProblem


@dataclass(frozen=True, slots=True, eq=False)
class Relaxation:
    """The Lagrangian relaxation of a stage to `allowed` strategies [A], sorted by layout, and to a memory capacity.

    For every price x >= 0 the least of time + x (memory - capacity) bounds the time from below. It is a shortest path
    over the layers, whose nodes are the layouts.
    """

    problem: StageProblem
    allowed: Ints
    starts: Ints
    kinds: Ints
    capacity_bytes: int

    @classmethod
    def of(cls, problem: StageProblem, allowed: Ints, capacity_bytes: int) -> Relaxation:
        ordered = allowed[np.argsort(problem.layouts[allowed], kind="stable")]
        kinds, starts = np.unique(problem.layouts[ordered], return_index=True)
        return cls(problem, ordered, starts, kinds, capacity_bytes)

    @property
    def reshard_s(self) -> Floats:
        """[n-1, k, k] between the layouts in use."""
        return np.asarray(self.problem.reshard_s[:, self.kinds[:, None], self.kinds[None, :]])

    def costs(self, prices: Floats) -> Floats:
        """[X, n, A]: time of each layer plus what its memory costs."""
        step_s, memory = self.problem.step_s[:, self.allowed], self.problem.memory_bytes[:, self.allowed]
        return np.asarray(step_s + prices[:, None, None] * memory)

    def shortest(self, prices: Floats) -> tuple[Floats, Ints]:
        """Bounds [X] and the choices [X, n] that reach them under each price."""
        costs = self.costs(prices)
        best = np.minimum.reduceat(costs, self.starts, axis=2)
        reshard_s = self.reshard_s
        reach, came_from = best[:, 0], []
        for u in range(1, best.shape[1]):
            totals = reach[:, :, None] + reshard_s[u - 1]
            came_from.append(totals.argmin(axis=1))
            reach = totals.min(axis=1) + best[:, u]
        bounds = reach.min(axis=1) - prices * self.capacity_bytes
        return bounds, self._choices(costs, reach.argmin(axis=1), came_from)

    def _choices(self, costs: Floats, last: Ints, came_from: list[Ints]) -> Ints:
        rows = np.arange(len(last))
        path = [last]
        for origins in reversed(came_from):
            path.append(origins[rows, path[-1]])
        layouts = np.stack(path[::-1], axis=1)  # [X, n], positions in `kinds`
        ends = np.append(self.starts[1:], len(self.allowed))
        outside = np.arange(len(self.allowed))
        inside = (outside >= self.starts[layouts][..., None]) & (outside < ends[layouts][..., None])
        return np.asarray(self.allowed[np.where(inside, costs, np.inf).argmin(axis=2)])

    def completions(self, price: float) -> Floats:
        """[n, k]: the least priced cost of all layers after u if layer u has layout k."""
        best = np.minimum.reduceat(self.costs(np.array([price]))[0], self.starts, axis=1)
        reshard_s = self.reshard_s
        after = np.zeros_like(best)
        for u in range(len(best) - 2, -1, -1):
            after[u] = (reshard_s[u] + (best[u + 1] + after[u + 1])[None, :]).min(axis=1)
        return after
