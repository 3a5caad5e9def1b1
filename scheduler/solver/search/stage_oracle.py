"""StageOracle: what is known about the stages of one kind of device, and how to learn more.

It depends on the chain, the GPUs, the width of a stage and the number of micro-batches, but on neither the pipeline
degree nor the position. So all pipelines of a curve that have such a device share one oracle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from math import inf

import numpy as np

from scheduler.solver.instance import Floats, Ints, StageCosts
from scheduler.solver.search.dominance import undominated
from scheduler.solver.search.priced_paths import Relaxation
from scheduler.solver.search.stage_bounds import candidate_prices, lower_bounds, stage_lower_bounds
from scheduler.solver.search.stage_problem import StageProblem, StageSolution, stage_problem
from scheduler.solver.search.stage_search import CLOSER_THAN, solve_stage
from scheduler.solver.search.windows import windows_of

Chunks = tuple[tuple[int, int], ...]
"""Runs of layers that one device holds: (a, b) for the layers a to b-1."""


class StageOracle:
    """Times of stages by window: lower bounds at first, raised to proven times where they are asked for."""

    def __init__(self, types: Ints, costs: StageCosts, *, capacity_bytes: int, in_flight_max: float) -> None:
        self.windows = windows_of(tuple(types.tolist()), len(costs.time_s))
        self.labels = 0
        self.solved = 0
        self._all_costs = costs
        self._capacity_bytes = capacity_bytes
        self._in_flight_max = in_flight_max
        self._times_s: dict[float, Floats] = {}
        self._solutions: dict[tuple[float, Chunks], StageSolution] = {}
        self._free: dict[Chunks, StageSolution] = {}
        self._known_prices: dict[float, Floats] = {}

    @cached_property
    def _useful(self) -> Ints:
        return undominated(self._all_costs, in_flight_max=self._in_flight_max)

    @cached_property
    def _costs(self) -> StageCosts:
        return self._all_costs.only(self._useful)

    @cached_property
    def fastest_s(self) -> Floats:
        """[L] of each layer at its fastest, whatever it needs."""
        fastest: Floats = self._all_costs.time_s.min(axis=1)[self.windows.types]
        return fastest

    @cached_property
    def unlimited_s(self) -> Floats:
        """[U] times of all windows if memory had no end and changes of layout took no time."""
        return np.asarray(self.windows.counts @ self._all_costs.time_s.min(axis=1))

    def unlimited_time_s(self, chunks: Chunks) -> float:
        """The same for a device that holds these runs of layers."""
        return sum(float(self.unlimited_s[self.windows.ids[span]]) for span in chunks)

    def times_s(self, in_flight: float) -> Floats:
        """[U] a time that no stage of each window can beat; proven ones replace it as they become known."""
        known = self._times_s.get(in_flight)
        if known is None:
            known = stage_lower_bounds(
                self.windows,
                self._costs,
                in_flight=in_flight,
                capacity_bytes=self._capacity_bytes,
                prices=self._prices(in_flight),
            )
            self._times_s[in_flight] = known
        return known

    def time_s(self, span: tuple[int, int], in_flight: float) -> float:
        """The entry of `times_s` for the layers a to b-1."""
        return float(self.times_s(in_flight)[self.windows.ids[span]])

    def bound_s(self, chunks: Chunks, in_flight: float) -> float:
        """A time that no device holding these runs of layers can beat."""
        held = np.concatenate([self.windows.types[first:end] for first, end in chunks])
        counts = np.bincount(held, minlength=self.windows.counts.shape[1]).astype(np.float64)
        bounds = lower_bounds(
            counts[None],
            self._costs,
            length=len(held),
            in_flight=in_flight,
            capacity_bytes=self._capacity_bytes,
            prices=self._prices(in_flight),
        )
        return float(bounds[0])

    def solve(self, chunks: Chunks, in_flight: float, *, tolerance: float, labels_max: int) -> StageSolution:
        """The best strategies of a device that holds these runs of layers, proven within `tolerance` while the budget
        of labels lasts. Of a single run, `times_s` learns the proven time."""
        if len(chunks) == 1:
            first, end = self.windows.spans[self.windows.ids[chunks[0]]].tolist()
            chunks = ((first, end),)  # Equal windows are solved once.
        known = self._solutions.get((in_flight, chunks))
        if known is None or known.bound_s < known.time_s * min(CLOSER_THAN, 1.0 - tolerance):
            known = _sharper(known, self._solved(chunks, in_flight, tolerance, labels_max))
            self.labels += known.labels
            self.solved += 1
            self._solutions[in_flight, chunks] = known
        if len(chunks) == 1:
            times_s, window = self.times_s(in_flight), self.windows.ids[chunks[0]]
            times_s[window] = max(times_s[window], known.bound_s)
        return known

    def _solved(self, chunks: Chunks, in_flight: float, tolerance: float, labels_max: int) -> StageSolution:
        free = self._unlimited(chunks)
        problem = self._problem(chunks, in_flight)
        if problem.weigh(np.array([free.choice]))[1][0] <= self._capacity_bytes:
            found = free
        else:
            found = solve_stage(problem, tolerance=tolerance, labels_max=labels_max)
        return replace(found, choice=tuple(self._useful[list(found.choice)].tolist()))

    def _problem(self, chunks: Chunks, in_flight: float) -> StageProblem:
        return stage_problem(
            self._costs,
            self.windows.types,
            chunks,
            in_flight=in_flight,
            capacity_bytes=self._capacity_bytes,
            prices=self._prices(in_flight),
        )

    def _prices(self, in_flight: float) -> Floats:
        known = self._known_prices.get(in_flight)
        if known is None:
            known = candidate_prices(self._costs.time_s, self._costs.memory_bytes(in_flight))
            self._known_prices[in_flight] = known
        return known

    def _unlimited(self, chunks: Chunks) -> StageSolution:
        """The best strategies if memory had no end; often they fit."""
        known = self._free.get(chunks)
        if known is None:
            problem = self._problem(chunks, 1.0)
            relaxation = Relaxation.of(problem, np.arange(self._costs.strategies), 0)
            choice = relaxation.shortest(np.zeros(1))[1]
            time_s = float(problem.weigh(choice)[0][0])
            known = StageSolution(time_s, time_s, tuple(choice[0].tolist()))
            self._free[chunks] = known
        return known


def _sharper(before: StageSolution | None, after: StageSolution) -> StageSolution:
    """A search whose budget ran out may know less than one with a looser tolerance did."""
    if before is None:
        return after
    best = after if after.time_s <= before.time_s else before
    return replace(best, bound_s=max(before.bound_s, after.bound_s), labels=after.labels)


def slowest_s(fastest_s: Sequence[Floats], counts: Sequence[int]) -> float:
    """A load that the fullest device cannot stay below, layers being split at will between the devices.

    `fastest_s` holds one array [L] a group. For two groups any weight w gives a bound (weak duality of the split):
    the first group's devices count w, the others 1 - w, and each layer goes where it weighs least.
    """
    if len(counts) == 1:
        return float(fastest_s[0].sum()) / counts[0]
    one, two = fastest_s
    balance = float(two.sum() / (one.sum() + two.sum()))
    best = -inf
    for weight in (balance, 0.5 * balance, 0.5 + 0.5 * balance):
        split_s = np.minimum(weight * one, (1 - weight) * two).sum()
        best = max(best, float(split_s / (weight * counts[0] + (1 - weight) * counts[1])))
    return best
