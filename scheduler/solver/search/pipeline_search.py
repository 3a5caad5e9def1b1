"""PairSearch: the best plan of one pipeline degree and number of micro-batches, refined step by step.

Best first: the one loop that every exact search here runs, over pairs in order of their lower bound.

The proof is a chain of lower bounds, each looser and cheaper than the next:

1. pair (pipeline, micro-batches): all layers at their fastest, perfectly even stages        (pair_search)
2. pair: the best partition when every stage takes only its Lagrangian bound                 (stage_bounds, partition)
3. pair: the same when the stages that this partition uses take their proven time            (stage_search)

Pairs wait in a heap by their bound. The one with the least bound is refined by one step and goes back; the search ends
when the least bound in the heap has reached the best plan found. No pair that is left can then hold a faster plan.
There is no clock in here: the search stops by the number of labels it makes, and then reports the gap it has proven.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import inf

import numpy as np

from scheduler.solver.instance import Floats, Instance, Ints, Objective, Solution
from scheduler.solver.search.partition import Partition, StageTimes, compute_quick_bound_s, find_best_partition
from scheduler.solver.search.stage_oracle import LayerRuns, StageOracle, compute_bottleneck_bound_s
from scheduler.solver.search.stage_problem import StageSolution
from scheduler.solver.search.stage_search import IMPROVEMENT_FACTOR


@dataclass(slots=True)
class _Budget:
    """Work that one step may do, and how good its plans have to be."""

    target_s: float
    tolerance: float
    left: int
    spent: int = 0
    solved: int = 0

    @property
    def improvement_factor(self) -> float:
        return min(IMPROVEMENT_FACTOR, 1.0 - self.tolerance)

    @property
    def useful_s(self) -> float:
        """Plans from here on need not be found."""
        return self.target_s * self.improvement_factor

    def solve_device(self, oracle: StageOracle, chunks: LayerRuns, in_flight: float) -> StageSolution:
        """The solution of a device that holds these runs of layers."""
        labels, solved = oracle.labels, oracle.solved
        solution = oracle.solve(chunks, in_flight, tolerance=self.tolerance, labels_max=self.left)
        self.spent += oracle.labels - labels
        self.left -= oracle.labels - labels
        self.solved += oracle.solved - solved
        return solution


class PipelineSearch:
    """Holds a lower bound for the pair, and raises it when asked to.

    Its looks get sharper: at the layers alone, at stages without a memory limit, at stages within memory. Stage times
    start as lower bounds. `refine` takes the best partition under the times known so far, and solves the
    stages it uses. As soon as every stage of the best partition is proven, no partition of the pair can be faster than
    that one by more than the tolerance: any other costs at least as much already under its bounds. Only stages that
    some best partition uses are ever solved, and equal stages only once.

    `build` makes the instance when the pair's turn comes; most pairs are settled by `bound_s` alone.
    """

    def __init__(self, build: Callable[[], Instance], oracles: tuple[StageOracle, ...], bound_s: float) -> None:
        self.closed = False
        self.cost_s = inf
        self.solution: Solution | None = None
        self.bound_s = bound_s
        self._build = build
        self._oracles = oracles
        self._steps = 0

    @classmethod
    def from_instance(cls, instance: Instance) -> PipelineSearch:
        """For an instance that shares its oracles with no other."""
        oracles = tuple(
            StageOracle(instance.types, costs, capacity_bytes=capacity, in_flight_max=max(instance.in_flight))
            for costs, capacity in zip(instance.costs, instance.capacity_bytes, strict=True)
        )
        return cls(lambda: instance, oracles, compute_balanced_bound_s(oracles, instance.counts, instance.objective))

    @cached_property
    def instance(self) -> Instance:
        return self._build()

    def refine(self, *, target_s: float, tolerance: float, labels_max: int) -> int:
        """One step: raises `bound_s`, or finds a plan, or closes the pair. Returns the labels spent.

        Plans of `target_s` and above are of no use; a step ends as soon as it can only find such.
        """
        budget = _Budget(target_s, tolerance, labels_max)
        if self.instance.borders:
            self._refine_fixed(budget)
        else:
            self._refine_free(budget)
        # A look that learned nothing would learn nothing again: the pair keeps the bound it has.
        self.closed = self.closed or (self._steps > 1 and not budget.solved)
        self._steps += 1
        return budget.spent

    def _refine_free(self, budget: _Budget) -> None:
        if not self._steps:
            unlimited = self._collect_stage_times(lambda oracle, _: oracle.unlimited_s)
            self.bound_s = max(self.bound_s, compute_quick_bound_s(unlimited, self.instance.objective))
            self.closed = self.bound_s >= budget.useful_s
            return
        best, bound_s = find_best_partition(
            self._collect_stage_times(), self.instance.objective, useful_s=budget.useful_s
        )
        self.bound_s = max(self.bound_s, bound_s)
        self.closed = best is None or self.bound_s >= budget.useful_s
        if best is None or self.closed or self._steps == 1:
            return  # Nothing to be had, or another pair may be more promising now.
        oracles = [self._oracles[group] for group in best.order]
        spans = list(pairwise(best.borders))
        places = list(zip(oracles, self.instance.in_flight, spans, strict=True))
        known_s = [oracle.get_bound_s(span, in_flight) for oracle, in_flight, span in places]
        links_s = self._compute_link_loads_s(best.order, best.borders)
        solutions: dict[int, StageSolution] = {}
        for position in sorted(range(len(places)), key=lambda at: -known_s[at]):
            oracle, in_flight, span = places[position]
            solutions[position] = budget.solve_device(oracle, (span,), in_flight)
            known_s[position] = solutions[position].bound_s
            if self._compute_cost_s(known_s, links_s) >= budget.useful_s:
                break
        if len(solutions) == len(places):
            self._record_plan(best.order, best.borders, [solutions[position] for position in range(len(places))])
        self._recheck_partition(best, budget)

    def _recheck_partition(self, before: Partition, budget: _Budget) -> None:
        """Whether another partition than the one just solved is the best now."""
        again, bound_s = find_best_partition(
            self._collect_stage_times(), self.instance.objective, useful_s=budget.useful_s
        )
        self.bound_s = max(self.bound_s, bound_s)
        self.closed = again is None or self.bound_s >= min(self.cost_s * budget.improvement_factor, budget.useful_s)
        if not self.closed and again is not None and (again.order, again.borders) == (before.order, before.borders):
            # Its stages are proven, and the sums agree but for rounding.
            self.closed = budget.left > 0 and self.cost_s < inf

    def _refine_fixed(self, budget: _Budget) -> None:
        """Each device's layers are known; only their strategies are open."""
        instance = self.instance
        order = tuple(group for group, count in enumerate(instance.counts) for _ in range(count))
        chunks = list(pairwise(instance.borders))
        held = [tuple(chunks[device :: instance.devices]) for device in range(instance.devices)]
        links_s = self._compute_link_loads_s(order, instance.borders)
        known_s = [self._oracles[group].compute_unlimited_s(own) for group, own in zip(order, held, strict=True)]
        if self._steps and self._compute_cost_s(known_s, links_s) < budget.useful_s:
            known_s = [
                self._oracles[group].compute_bound_s(own, in_flight)
                for group, own, in_flight in zip(order, held, instance.in_flight, strict=True)
            ]
        solutions = []
        for device in range(instance.devices if self._steps > 1 else 0):
            if self._compute_cost_s(known_s, links_s) >= budget.useful_s:
                break
            solution = budget.solve_device(self._oracles[order[device]], held[device], instance.in_flight[device])
            known_s[device] = solution.bound_s
            solutions.append(solution)
        self.bound_s = max(self.bound_s, self._compute_cost_s(known_s, links_s))
        if len(solutions) == instance.devices:
            self._record_plan(order, instance.borders, solutions)
        self.closed = self.bound_s >= min(self.cost_s * budget.improvement_factor, budget.useful_s)

    def _compute_cost_s(self, devices_s: list[float], links_s: list[float]) -> float:
        return self._evaluate_objective_s(sum(devices_s) + sum(links_s), max([*devices_s, *links_s]))

    def _collect_stage_times(
        self, times_s: Callable[[StageOracle, float], Floats] = StageOracle.get_bounds_s
    ) -> StageTimes:
        positions = np.arange(self.instance.devices)[:, None, None]
        stages_s = []
        for oracle in self._oracles:
            known_s = np.stack([times_s(oracle, in_flight) for in_flight in self.instance.in_flight])
            never = np.full((len(known_s), 1), np.inf)  # Window -1: no layer at all.
            stages_s.append(np.concatenate([known_s, never], axis=1)[positions, self._windows])
        return StageTimes(np.stack(stages_s, axis=1), self._hand_over_s, self.instance.counts)

    @cached_property
    def _windows(self) -> Ints:
        """[P, D, D] the window of each candidate stage, as StageTimes has them."""
        ids, (devices, depth) = self._oracles[0].windows.ids, self._extent
        return np.stack([ids[at : at + depth, at + 1 : at + 1 + depth] for at in range(devices)])

    @cached_property
    def _hand_over_s(self) -> Floats:
        devices, depth = self._extent
        groups = len(self.instance.counts)
        rows = [
            row[:, :, cut + 1 : cut + 1 + depth] for cut, row in enumerate(self.instance.hand_over_s[: devices - 1])
        ]
        return np.stack(rows) if rows else np.zeros((0, groups, groups, depth))

    @property
    def _extent(self) -> tuple[int, int]:
        """P and D."""
        return self.instance.devices, self.instance.layers - self.instance.devices + 1

    def _record_plan(self, order: tuple[int, ...], borders: tuple[int, ...], solutions: list[StageSolution]) -> None:
        """Keeps the partition as the pair's plan if it fits and is the fastest so far."""
        cost_s = self._compute_cost_s(
            [solution.time_s for solution in solutions], self._compute_link_loads_s(order, borders)
        )
        if cost_s < self.cost_s:
            self.cost_s = cost_s
            self.solution = Solution(order, borders, self._merge_choices(borders, solutions))

    def _merge_choices(self, borders: tuple[int, ...], solutions: list[StageSolution]) -> tuple[int, ...]:
        """By layer, from the devices' own orders."""
        own = [iter(solution.choice) for solution in solutions]
        chunks = pairwise(borders)
        return tuple(
            next(own[number % len(own)]) for number, (first, end) in enumerate(chunks) for _ in range(first, end)
        )

    def _compute_link_loads_s(self, order: tuple[int, ...], borders: tuple[int, ...]) -> list[float]:
        loads_s = [0.0] * len(self.instance.hand_over_s)
        for number, border in enumerate(borders[1:-1]):
            sender, receiver = number % len(order), (number + 1) % len(order)
            table: Floats = self.instance.hand_over_s[sender, order[sender], order[receiver]]
            loads_s[sender] += float(table[border])
        return loads_s

    def _evaluate_objective_s(self, sum_s: float, largest_s: float) -> float:
        return self.instance.objective.compute_time_s(sum_s, largest_s)


def compute_balanced_bound_s(oracles: Sequence[StageOracle], counts: Sequence[int], objective: Objective) -> float:
    """Every layer at its fastest on the devices that suit it, perfectly balanced. Settles most pairs unseen."""
    fastest_s = [oracle.fastest_s for oracle in oracles]
    least_s = float(np.minimum.reduce(fastest_s).sum())
    return objective.compute_time_s(least_s, compute_bottleneck_bound_s(fastest_s, counts))


MAX_LABELS = 20_000_000
"""Default budget of work, in labels of the stage search; seconds of it on one core, so that it ends no usual search."""

_ROUNDING = 1e-11
"""Gaps up to here are rounding: stages, pairs and the loop over them each call only gains of 1e-12 faster."""


@dataclass(frozen=True, slots=True)
class BestFirstResult:
    """The fastest pair (None where nothing was found), a time that no plan can beat, and the labels made."""

    best: PipelineSearch | None
    bound_s: float
    labels: int

    @property
    def gap(self) -> float:
        """Proven: no plan is faster than the best one by more than this ratio."""
        if self.best is None:
            return 0.0
        gap = 1.0 - self.bound_s / self.best.cost_s
        return gap if gap > _ROUNDING else 0.0


def search_best_first(
    searches: Sequence[PipelineSearch], *, tolerance: float = 0.0, labels_max: int = MAX_LABELS
) -> BestFirstResult:
    """The fastest plan of all pairs, proven within `tolerance` unless `labels_max` runs out first.

    What an earlier call with a looser tolerance has found and proven of the pairs still holds.
    """
    heap = [(pair.bound_s, number) for number, pair in enumerate(searches)]
    heapq.heapify(heap)
    best = min((pair for pair in searches if pair.cost_s < inf), key=lambda pair: pair.cost_s, default=None)
    closer, labels, floor_s = min(IMPROVEMENT_FACTOR, 1.0 - tolerance), 0, inf
    while heap and labels < labels_max:
        target_s = inf if best is None else best.cost_s
        if heap[0][0] >= target_s * closer:
            break
        number = heapq.heappop(heap)[1]
        pair = searches[number]
        labels += pair.refine(target_s=target_s, tolerance=tolerance, labels_max=labels_max - labels)
        if pair.cost_s < target_s:
            best = pair
        if pair.closed:
            floor_s = min(floor_s, pair.bound_s)
        else:
            heapq.heappush(heap, (pair.bound_s, number))
    left_s = [heap[0][0]] if heap else []
    bound_s = min([inf if best is None else best.cost_s, floor_s, *left_s])
    return BestFirstResult(best, bound_s, labels)
