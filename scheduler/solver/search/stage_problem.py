"""The strategies of the layers of one device within its memory, and the Lagrangian relaxation of that problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from scheduler.solver.instance import Floats, Ints, StageCosts

HOST_RATES = (0.0, *(sixteenths / 16 for sixteenths in range(1, 33)), 4.0, 8.0)
"""Rates of exchange between bytes of the host and of the GPU. With sixteenths, sums of floats are exact."""


@dataclass(frozen=True, slots=True, eq=False)
class StageProblem:
    """Choose a strategy for each of n layers, out of S strategies with K layouts:

    step_s         [n, S]       of each layer, border gathers included
    memory_bytes   [n, S]       of each layer, with the activations of its micro-batches in flight
    working_bytes  [S]          buffer of the stage; the largest one counts
    layouts        [S]
    reshard_s      [n-1, K, K]  between a layer and the next
    host_bytes     [n, S]       of each layer in host memory; None if the host sets no limit
    """

    step_s: Floats
    memory_bytes: Ints
    working_bytes: Ints
    layouts: Ints
    reshard_s: Floats
    prices: Floats
    capacity_bytes: int
    host_bytes: Ints | None = None
    host_capacity_bytes: int = 0

    def fits(self, choice: Ints) -> bool:
        """Return whether a choice [n] fits into the memory of the GPU and of the host."""
        is_within = bool(self.evaluate_choices(choice[None])[1][0] <= self.capacity_bytes)
        return is_within and self.compute_host_slack(choice) >= 0

    def compute_host_slack(self, choice: Ints) -> int:
        """Return the host memory that a choice [n] leaves free, negative if it needs too much."""
        if self.host_bytes is None:
            return 0
        return self.host_capacity_bytes - int(self.host_bytes[np.arange(len(choice)), choice].sum())

    def find_host_rate(self, allowed: Ints, capacity_bytes: int) -> tuple[float, float]:
        """Return a rate of exchange between bytes of the host and of the GPU, and by how much no choice fits at it.

        At every rate x >= 0, the sum of min (memory + x host) over the layers is at most capacity + x host capacity if
        some choice fits (surrogate duality). The rate is the one at which the least is left; 0 if the host sets no
        limit.
        """
        if self.host_bytes is None:
            return 0.0, 0.0
        memory, host = self.memory_bytes[:, allowed], self.host_bytes[:, allowed]
        excess = [
            (float((memory + rate * host).min(axis=1).sum()) - capacity_bytes - rate * self.host_capacity_bytes, rate)
            for rate in HOST_RATES
        ]
        most, rate = max(excess)
        return rate, most

    def evaluate_choices(self, choices: Ints) -> tuple[Floats, Ints]:
        """Return (time, memory) [X] of choices [X, n], the buffer included."""
        at = np.arange(choices.shape[1])
        layouts = self.layouts[choices]
        time_s = self.step_s[at, choices].sum(axis=1)
        time_s = time_s + self.reshard_s[at[:-1], layouts[:, :-1], layouts[:, 1:]].sum(axis=1)
        return time_s, self.memory_bytes[at, choices].sum(axis=1) + self.working_bytes[choices].max(axis=1)


@dataclass(frozen=True, slots=True)
class StageSolution:
    """The best choice found, one strategy number per layer, and a time that no choice can beat.

    Infinite times mean that nothing fits. `labels` counts the partial choices that were generated.
    """

    time_s: float = inf
    bound_s: float = inf
    choice: tuple[int, ...] = ()
    labels: int = 0


def build_stage_problem(
    costs: StageCosts,
    types: Ints,
    chunks: Sequence[tuple[int, int]],
    *,
    in_flight: float,
    capacity_bytes: int,
    prices: Floats,
    host_capacity_bytes: int = 0,
) -> StageProblem:
    """Return the problem of a device that holds the layers a to b-1 of the chain `types` for every (a, b) in `chunks`.

    A hand-over is between two chunks, so both ends gather there and no resharding is needed.
    """
    held = np.concatenate([types[first:end] for first, end in chunks])
    step_s, reshard_s = costs.time_s[held], costs.reshard_s[held[:-1]]
    start = 0
    for first, end in chunks:
        last = start + end - first - 1
        if first > 0:
            step_s[start] += costs.border_s[types[first]]
        if end < len(types):
            step_s[last] += costs.border_s[types[end - 1]]
        if start > 0:
            reshard_s[start - 1] = 0.0
        start = last + 1
    memory, host = costs.compute_memory_bytes(in_flight)[held], costs.compute_host_bytes(in_flight)
    return StageProblem(
        step_s,
        memory,
        costs.working_bytes,
        costs.layouts,
        reshard_s,
        prices,
        capacity_bytes,
        host_bytes=None if host is None else host[held],
        host_capacity_bytes=host_capacity_bytes,
    )


@dataclass(frozen=True, slots=True, eq=False)
class LagrangianRelaxation:
    """The Lagrangian relaxation of a stage with `allowed` strategies [A], sorted by layout, and a memory capacity.

    For every price x >= 0, the minimum of time + x (memory - capacity) is a lower bound of the time. It is a shortest
    path over the layers, whose nodes are the layouts. Memory and capacity include `host_rate` times those of the host.
    """

    problem: StageProblem
    allowed: Ints
    starts: Ints
    layouts: Ints
    capacity_bytes: int
    host_rate: float = 0.0

    @classmethod
    def for_capacity(
        cls, problem: StageProblem, allowed: Ints, capacity_bytes: int, *, host_rate: float = 0.0
    ) -> LagrangianRelaxation:
        ordered = allowed[np.argsort(problem.layouts[allowed], kind="stable")]
        kinds, starts = np.unique(problem.layouts[ordered], return_index=True)
        return cls(problem, ordered, starts, kinds, capacity_bytes, host_rate)

    @property
    def priced_capacity_bytes(self) -> float:
        return self.capacity_bytes + self.host_rate * self.problem.host_capacity_bytes

    @property
    def reshard_s(self) -> Floats:
        """[n-1, k, k]: between the layouts in use."""
        return np.asarray(self.problem.reshard_s[:, self.layouts[:, None], self.layouts[None, :]])

    def compute_costs(self, prices: Floats) -> Floats:
        """Return [X, n, A]: time of each layer plus the price of its memory."""
        step_s = self.problem.step_s[:, self.allowed]
        memory: Ints | Floats = self.problem.memory_bytes[:, self.allowed]
        if self.problem.host_bytes is not None and self.host_rate:
            memory = memory + self.host_rate * self.problem.host_bytes[:, self.allowed]
        return np.asarray(step_s + prices[:, None, None] * memory)

    def find_shortest_paths(self, prices: Floats) -> tuple[Floats, Ints]:
        """Return bounds [X] and the choices [X, n] that reach them under each price."""
        costs = self.compute_costs(prices)
        best = np.minimum.reduceat(costs, self.starts, axis=2)
        reshard_s = self.reshard_s
        reach, came_from = best[:, 0], []
        for u in range(1, best.shape[1]):
            totals = reach[:, :, None] + reshard_s[u - 1]
            came_from.append(totals.argmin(axis=1))
            reach = totals.min(axis=1) + best[:, u]
        bounds = reach.min(axis=1) - prices * self.priced_capacity_bytes
        return bounds, self._trace_choices(costs, reach.argmin(axis=1), came_from)

    def _trace_choices(self, costs: Floats, last: Ints, came_from: list[Ints]) -> Ints:
        rows = np.arange(len(last))
        path = [last]
        for origins in reversed(came_from):
            path.append(origins[rows, path[-1]])
        layouts = np.stack(path[::-1], axis=1)  # [X, n], positions in `self.layouts`
        ends = np.append(self.starts[1:], len(self.allowed))
        outside = np.arange(len(self.allowed))
        inside = (outside >= self.starts[layouts][..., None]) & (outside < ends[layouts][..., None])
        return np.asarray(self.allowed[np.where(inside, costs, np.inf).argmin(axis=2)])

    def compute_completions(self, price: float) -> Floats:
        """Return [n, k]: the least priced cost of all layers after u if layer u has layout k."""
        best = np.minimum.reduceat(self.compute_costs(np.array([price]))[0], self.starts, axis=1)
        reshard_s = self.reshard_s
        after = np.zeros_like(best)
        for u in range(len(best) - 2, -1, -1):
            after[u] = (reshard_s[u] + (best[u + 1] + after[u + 1])[None, :]).min(axis=1)
        return after
