"""Random single stages, small enough to enumerate every choice."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from scheduler.solver.instance import Floats, Ints, StageCosts
from scheduler.solver.search.stage_bounds import LayerWindows, build_windows, compute_candidate_prices
from scheduler.solver.search.stage_problem import StageProblem, build_stage_problem

Chunks = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class RandomStage:
    """A device that holds `chunks` of the chain `types`."""

    types: Ints
    costs: StageCosts
    chunks: Chunks
    in_flight: float
    capacity_bytes: int
    host_capacity_bytes: int = 0

    @property
    def prices(self) -> Floats:
        return compute_candidate_prices(self.costs.time_s, self.costs.compute_memory_bytes(self.in_flight))

    @property
    def problem(self) -> StageProblem:
        return build_stage_problem(
            self.costs,
            self.types,
            self.chunks,
            in_flight=self.in_flight,
            capacity_bytes=self.capacity_bytes,
            host_capacity_bytes=self.host_capacity_bytes,
            prices=self.prices,
        )

    @property
    def windows(self) -> LayerWindows:
        return build_windows(tuple(self.types.tolist()), len(self.costs.time_s))

    @cached_property
    def choices(self) -> Ints:
        """[N, n]: all choices."""
        held = sum(end - first for first, end in self.chunks)
        every: Ints = np.indices([self.costs.strategies] * held).reshape(held, -1).T
        return every

    @cached_property
    def priced(self) -> tuple[Floats, Ints]:
        """(time, memory) [N] of all choices, from the definition."""
        costs, at = self.costs, 0
        time_s, memory = np.zeros(len(self.choices)), np.zeros(len(self.choices), dtype=np.int64)
        for first, end in self.chunks:
            for u in range(first, end):
                kind, chosen = self.types[u], self.choices[:, at]
                time_s += costs.time_s[kind, chosen]
                memory += costs.state_bytes[kind, chosen]
                memory += np.ceil(costs.kept_bytes[kind, chosen] * self.in_flight).astype(np.int64)
                if u + 1 < end:
                    following = costs.layouts[self.choices[:, at + 1]]
                    time_s += costs.reshard_s[kind, costs.layouts[chosen], following]
                if u == first > 0:
                    time_s += costs.border_s[kind, chosen]
                if u + 1 == end < len(self.types):
                    time_s += costs.border_s[kind, chosen]
                at += 1
        return time_s, memory + costs.working_bytes[self.choices].max(axis=1)

    @cached_property
    def is_within_host(self) -> NDArray[np.bool_]:
        """[N]: whether the host has enough memory for each choice."""
        if self.costs.host_bytes is None:
            return np.ones(len(self.choices), dtype=np.bool_)
        held = np.concatenate([self.types[first:end] for first, end in self.chunks])
        used = self.costs.host_bytes[held, self.choices].sum(axis=1)
        if self.costs.host_kept_bytes is not None:
            kept = self.costs.host_kept_bytes[held, self.choices] * self.in_flight
            used = used + np.ceil(kept).astype(np.int64).sum(axis=1)
        return np.asarray(used <= self.host_capacity_bytes)

    @property
    def fastest_s(self) -> float:
        """The least time of all choices that fit; infinite if none does."""
        time_s, memory = self.priced
        return float(np.where((memory <= self.capacity_bytes) & self.is_within_host, time_s, np.inf).min())


def random_stage(seed: int, *, layers: int = 5, strategies: int = 5, has_host: bool = False) -> RandomStage:
    """Return a stage in which more time mostly needs less memory, and buffers and changes of layout matter.

    A third of the stages have two chunks. With `has_host`, half of the strategies use memory of a host that mostly has
    too little for all layers, and in half of the stages some of it for each micro-batch in flight.
    """
    generator = np.random.default_rng(seed)
    kinds = int(generator.integers(1, layers + 1))
    types = np.sort(generator.integers(0, kinds, layers))
    types = np.unique(types, return_inverse=True)[1]
    chunks: Chunks = ((0, 2), (3, 5)) if seed % 3 == 0 else (((0, 5), (0, 4), (1, 4), (1, 5))[seed % 4],)
    costs = random_costs(generator, int(types.max()) + 1, strategies)
    stage = RandomStage(types, costs, chunks, float(generator.choice([1, 1.5, 3])), 0)
    time_s, memory = stage.priced
    room = generator.uniform(-0.03, 1) * (memory[time_s.argmin()] - memory.min())
    whole = RandomStage(types, costs, chunks, stage.in_flight, int(memory.min() + room))
    if not has_host:
        return whole
    offloads = generator.permuted(np.arange(strategies) % 2)
    host_bytes = offloads * generator.integers(50, 400, costs.time_s.shape)
    host_capacity_bytes = int(generator.uniform(0, 400 * layers * 0.6))
    kept = offloads * generator.integers(0, 60, costs.time_s.shape) if seed % 2 else None
    costs = replace(costs, host_bytes=host_bytes, host_kept_bytes=kept)
    return replace(whole, costs=costs, host_capacity_bytes=host_capacity_bytes)


def random_costs(generator: np.random.Generator, kinds: int, strategies: int) -> StageCosts:
    shape, layouts = (kinds, strategies), int(generator.integers(1, 4))
    return StageCosts(
        layouts=generator.integers(0, layouts, strategies),
        time_s=np.sort(generator.uniform(1, 3, shape), axis=1),
        state_bytes=np.sort(generator.integers(10, 1000, shape), axis=1)[:, ::-1],
        kept_bytes=generator.integers(0, 200, shape),
        working_bytes=generator.choice([0, 100, 700], strategies),
        reshard_s=generator.uniform(0, 0.4, (kinds, layouts, layouts)) * (1 - np.eye(layouts)),
        border_s=generator.uniform(0, 0.3, shape),
    )
