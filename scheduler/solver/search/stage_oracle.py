"""Step times of the stages of one kind of device: bounds at first, exact times on demand.

An oracle depends on the chain, the GPUs, the width of a stage and the number of micro-batches, but on neither the
number of stages nor the position. So all pipelines of a curve with such a device share one oracle.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from functools import cached_property

import numpy as np

from scheduler.solver.costs.collectives import StageSetting
from scheduler.solver.costs.layer_chain import LayerChain
from scheduler.solver.costs.pipeline_costs import CostedStrategies
from scheduler.solver.instance import Floats, Ints, StageCosts
from scheduler.solver.search.stage_bounds import (
    WindowEnds,
    build_windows,
    compute_candidate_prices,
    compute_lower_bounds,
    compute_stage_lower_bounds,
    find_undominated,
)
from scheduler.solver.search.stage_problem import LagrangianRelaxation, StageProblem, StageSolution, build_stage_problem
from scheduler.solver.search.stage_search import IMPROVEMENT_FACTOR, solve_stage

LayerRuns = tuple[tuple[int, int], ...]
"""Runs of layers that one device holds: (a, b) for the layers a to b-1."""


class StageOracle:
    """Times of stages by window: lower bounds at first, replaced by proven times as stages are solved."""

    def __init__(
        self,
        types: Ints,
        costs: StageCosts,
        *,
        capacity_bytes: int,
        in_flight_max: float,
        host_capacity_bytes: int = 0,
    ) -> None:
        self.windows = build_windows(tuple(types.tolist()), len(costs.time_s))
        self.labels = 0
        self.solved = 0
        self._all_costs = costs
        self._capacity_bytes = capacity_bytes
        self._host_capacity_bytes = host_capacity_bytes
        self._in_flight_max = in_flight_max
        self._times_s: dict[float, Floats] = {}
        self._solutions: dict[tuple[float, LayerRuns], StageSolution] = {}
        self._free: dict[LayerRuns, StageSolution] = {}
        self._known_prices: dict[float, Floats] = {}
        self._length_bounds_s: dict[float, Floats] = {}
        self._capacity_bounds_s: Floats | None = None

    @cached_property
    def _useful(self) -> Ints:
        return find_undominated(self._all_costs, in_flight_max=self._in_flight_max)

    @cached_property
    def _costs(self) -> StageCosts:
        return self._all_costs.select_strategies(self._useful)

    @cached_property
    def fastest_s(self) -> Floats:
        """[L]: time of each layer at its fastest, regardless of memory."""
        fastest: Floats = self._all_costs.time_s.min(axis=1)[self.windows.types]
        return fastest

    @cached_property
    def unlimited_s(self) -> Floats:
        """[U]: times of all windows with unlimited memory and free changes of layout."""
        return np.asarray(self.windows.counts @ self._all_costs.time_s.min(axis=1))

    def compute_unlimited_s(self, chunks: LayerRuns) -> float:
        """Return the same for a device that holds these runs of layers."""
        return sum(float(self.unlimited_s[self.windows.ids[span]]) for span in chunks)

    def get_bounds_s(self, in_flight: float) -> Floats:
        """Return [U]: a lower bound of the time of each window.

        Proven times replace bounds as they become known.
        """
        known = self._times_s.get(in_flight)
        if known is None:
            known = compute_stage_lower_bounds(
                self.windows,
                self._costs,
                in_flight=in_flight,
                capacity_bytes=self._capacity_bytes,
                prices=self._get_prices(in_flight),
                host_capacity_bytes=self._host_capacity_bytes,
            )
            self._times_s[in_flight] = known
        return known

    def get_length_bounds_s(self, in_flight: float) -> Floats:
        """Return [4, L]: a lower bound of the time of windows of n + 1 layers or more, by `WindowEnds`."""
        known = self._length_bounds_s.get(in_flight)
        if known is None:
            known = self.windows.find_least_by_length(self.get_bounds_s(in_flight))
            self._length_bounds_s[in_flight] = known
        return known

    def get_capacity_bounds_s(self) -> Floats:
        """Return [L]: a lower bound of the time of n + 1 layers or more, on any device but an only one."""
        if self._capacity_bounds_s is None:
            self._capacity_bounds_s = self.get_length_bounds_s(1.0)[: WindowEnds.BOTH].min(axis=0)
        return self._capacity_bounds_s

    def get_bound_s(self, span: tuple[int, int], in_flight: float) -> float:
        """Return the bound of the layers a to b-1."""
        return float(self.get_bounds_s(in_flight)[self.windows.ids[span]])

    def compute_bound_s(self, chunks: LayerRuns, in_flight: float) -> float:
        """Return a time that no device with these runs of layers can beat."""
        held = np.concatenate([self.windows.types[first:end] for first, end in chunks])
        counts = np.bincount(held, minlength=self.windows.counts.shape[1]).astype(np.float64)
        bounds = compute_lower_bounds(
            counts[None],
            self._costs,
            length=len(held),
            in_flight=in_flight,
            capacity_bytes=self._capacity_bytes,
            prices=self._get_prices(in_flight),
            host_capacity_bytes=self._host_capacity_bytes,
        )
        return float(bounds[0])

    def solve(self, chunks: LayerRuns, in_flight: float, *, tolerance: float, labels_max: int) -> StageSolution:
        """Return the best strategies of a device with these runs of layers.

        They are proven within `tolerance` unless the budget of labels runs out. The proven time of a single run
        replaces its bound.
        """
        if len(chunks) == 1:
            first, end = self.windows.spans[self.windows.ids[chunks[0]]].tolist()
            chunks = ((first, end),)  # Solve equal windows only once.
        known = self._solutions.get((in_flight, chunks))
        if known is None or known.bound_s < known.time_s * min(IMPROVEMENT_FACTOR, 1.0 - tolerance):
            known = _merge_solutions(known, self._solve_exactly(chunks, in_flight, tolerance, labels_max))
            self.labels += known.labels
            self.solved += 1
            self._solutions[in_flight, chunks] = known
        if len(chunks) == 1:
            times_s, window = self.get_bounds_s(in_flight), self.windows.ids[chunks[0]]
            times_s[window] = max(times_s[window], known.bound_s)
        return known

    def _solve_exactly(self, chunks: LayerRuns, in_flight: float, tolerance: float, labels_max: int) -> StageSolution:
        unlimited = self._solve_unlimited(chunks)
        problem = self._build_problem(chunks, in_flight)
        if problem.fits(np.array(unlimited.choice)):
            solution = unlimited
        else:
            solution = solve_stage(problem, tolerance=tolerance, labels_max=labels_max)
        return replace(solution, choice=tuple(self._useful[list(solution.choice)].tolist()))

    def _build_problem(self, chunks: LayerRuns, in_flight: float) -> StageProblem:
        return build_stage_problem(
            self._costs,
            self.windows.types,
            chunks,
            in_flight=in_flight,
            capacity_bytes=self._capacity_bytes,
            host_capacity_bytes=self._host_capacity_bytes,
            prices=self._get_prices(in_flight),
        )

    def _get_prices(self, in_flight: float) -> Floats:
        known = self._known_prices.get(in_flight)
        if known is None:
            known = compute_candidate_prices(self._costs.time_s, self._costs.compute_memory_bytes(in_flight))
            self._known_prices[in_flight] = known
        return known

    def _solve_unlimited(self, chunks: LayerRuns) -> StageSolution:
        """Return the best strategies with unlimited memory; often they fit."""
        known = self._free.get(chunks)
        if known is None:
            problem = self._build_problem(chunks, 1.0)
            relaxation = LagrangianRelaxation.for_capacity(problem, np.arange(self._costs.strategies), 0)
            choice = relaxation.find_shortest_paths(np.zeros(1))[1]
            time_s = float(problem.evaluate_choices(choice)[0][0])
            known = StageSolution(time_s, time_s, tuple(choice[0].tolist()))
            self._free[chunks] = known
        return known


def _merge_solutions(before: StageSolution | None, after: StageSolution) -> StageSolution:
    """Combine two results: a search whose budget ran out may know less than an earlier one with a looser tolerance."""
    if before is None:
        return after
    best = after if after.time_s <= before.time_s else before
    return replace(best, bound_s=max(before.bound_s, after.bound_s), labels=after.labels)


class OracleCache:
    """Oracles shared by the searches of one curve, so that a stage is solved once for all pipelines.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self._oracles: dict[tuple[LayerChain, StageSetting, int, int, Hashable], StageOracle] = {}
        self._settings: dict[StageSetting, StageSetting] = {}

    def intern_setting(self, setting: StageSetting) -> StageSetting:
        """Return the first equal setting: identical keys are found without comparing profiles, which is slow."""
        return self._settings.setdefault(setting, setting)

    def get_oracle(
        self,
        layers: LayerChain,
        setting: StageSetting,
        costed: CostedStrategies,
        *,
        micro_batches: int,
        capacity_bytes: int,
        host_capacity_bytes: int = 0,
        restriction: Hashable = None,
    ) -> StageOracle:
        """Return the oracle of a stage with `setting`, and these capacities of a GPU and of the host for it.

        `restriction` says which of the setting's strategies `costed` has.
        """
        key = layers, setting, micro_batches, capacity_bytes, restriction
        if key not in self._oracles:
            self._oracles[key] = StageOracle(
                layers.types,
                costed.costs,
                capacity_bytes=capacity_bytes,
                host_capacity_bytes=host_capacity_bytes,
                in_flight_max=micro_batches,
            )
        return self._oracles[key]
