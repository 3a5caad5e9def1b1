"""Best-first branch and bound over pipelines, each refined step by step.

The proof is a chain of lower bounds. Each bound is tighter and costs more than the one before:

1. All layers at their fastest, and perfectly even stages (PipelineSearch.bound_s at first).
2. On one GPU model, the best partition without memory limits. On several, the layers that each device can hold within
   memory, first with one micro-batch in flight and then with those of its position (pipeline_bounds).
3. The best partition if every stage takes its Lagrangian bound (stage_bounds, partition).
4. The same if the stages of this partition take their proven time (stage_search).

A heap orders pipelines by their bound. The search refines the one with the lowest bound by one step and puts it
back. It ends when the lowest bound in the heap reaches the best plan found, because no remaining pipeline can then
hold a faster plan. No clock is involved: the search is limited by the number of labels, and reports the gap that it has
proven.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import inf

import numpy as np

from scheduler.solver.instance import Floats, Instance, Ints, Solution
from scheduler.solver.search.partition import Partition, StageTimes, compute_quick_bound_s, find_best_partition
from scheduler.solver.search.pipeline_bounds import PipelineOutline
from scheduler.solver.search.stage_oracle import LayerRuns, StageOracle
from scheduler.solver.search.stage_problem import StageSolution
from scheduler.solver.search.stage_search import IMPROVEMENT_FACTOR

MAX_LABELS = 20_000_000
"""Default budget of work, in labels of the stage search. It takes seconds on one core; usual searches need less."""

_ROUNDING = 1e-11
"""Gaps up to this are rounding errors: stages, pipelines and the loop each count only gains above 1e-12."""


@dataclass(slots=True)
class _Budget:
    """Limits of one step: the work that it may do, and the time that its plans must beat."""

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
        """Only plans faster than this are of use."""
        return self.target_s * self.improvement_factor

    def solve_device(self, oracle: StageOracle, chunks: LayerRuns, in_flight: float) -> StageSolution:
        """Return the solution of a device that holds these runs of layers."""
        labels, solved = oracle.labels, oracle.solved
        solution = oracle.solve(chunks, in_flight, tolerance=self.tolerance, labels_max=self.left)
        self.spent += oracle.labels - labels
        self.left -= oracle.labels - labels
        self.solved += oracle.solved - solved
        return solution


class PipelineSearch:
    """Search of one pipeline with a fixed number of micro-batches. It holds a lower bound, which `refine` raises.

    The bounds become tighter with each step, as the module describes. Stage times start as lower bounds. `refine` takes
    the best partition under the times known so far, and solves the stages that it uses. When every stage of the best
    partition is proven, no other partition can be faster by more than the tolerance, because it costs at least as much
    under its bounds already. Only stages of some best partition are ever solved, and equal stages only once.

    Args:
        build: creates the instance when it is needed; for most pipelines `bound_s` alone decides.
    """

    def __init__(self, outline: PipelineOutline, build: Callable[[], Instance]) -> None:
        self.closed = False
        self.cost_s = inf
        self.solution: Solution | None = None
        self.bound_s = outline.compute_balanced_bound_s()
        self._build = build
        self._outline = outline
        self._oracles = outline.oracles
        self._steps = 0
        is_mixed = len(outline.oracles) > 1
        self._quick_bounds: tuple[Callable[[], float], ...] = (
            (outline.compute_capacity_bound_s, outline.compute_length_bound_s)
            if is_mixed
            else (self._compute_unlimited_bound_s,)
        )

    @classmethod
    def from_instance(cls, instance: Instance) -> PipelineSearch:
        """Create the search of an instance that shares its oracles with no other."""
        hosts = instance.host_capacity_bytes or (0,) * len(instance.costs)
        oracles = tuple(
            StageOracle(
                instance.types,
                costs,
                capacity_bytes=capacity,
                host_capacity_bytes=host,
                in_flight_max=max(instance.in_flight),
            )
            for costs, capacity, host in zip(instance.costs, instance.capacity_bytes, hosts, strict=True)
        )
        outline = PipelineOutline(
            oracles, instance.counts, instance.in_flight, instance.objective, has_fixed_cuts=bool(instance.borders)
        )
        return cls(outline, lambda: instance)

    @cached_property
    def instance(self) -> Instance:
        return self._build()

    def refine(self, *, target_s: float, tolerance: float, labels_max: int) -> int:
        """Do one step: raise `bound_s`, find a plan, or close the search. Return the labels spent.

        Plans that take `target_s` or longer are ignored. A step ends as soon as it can find no better plan.
        """
        budget = _Budget(target_s, tolerance, labels_max)
        if self._outline.has_fixed_cuts:
            self._refine_fixed(budget)
        else:
            self._refine_free(budget)
        # A step that solved no stage would not solve one next time either.
        self.closed = self.closed or (self._steps > len(self._quick_bounds) and not budget.solved)
        self._steps += 1
        return budget.spent

    def _refine_free(self, budget: _Budget) -> None:
        if self._steps < len(self._quick_bounds):
            self.bound_s = max(self.bound_s, self._quick_bounds[self._steps]())
            self.closed = self.bound_s >= budget.useful_s
            return
        best, bound_s = find_best_partition(
            self._collect_stage_times(),
            self.instance.objective,
            useful_s=budget.useful_s,
            target_s=budget.target_s,
        )
        self.bound_s = max(self.bound_s, bound_s)
        self.closed = best is None or self.bound_s >= budget.useful_s
        if best is None or self.closed or self._steps == len(self._quick_bounds):
            return  # There is no useful plan, or another pipeline may now have a lower bound.
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

    def _compute_unlimited_bound_s(self) -> float:
        unlimited = self._collect_stage_times(lambda oracle, _: oracle.unlimited_s)
        return compute_quick_bound_s(unlimited, self.instance.objective)

    def _recheck_partition(self, before: Partition, budget: _Budget) -> None:
        """Close the search unless another partition than the one just solved is now the best."""
        again, bound_s = find_best_partition(
            self._collect_stage_times(),
            self.instance.objective,
            useful_s=budget.useful_s,
            target_s=budget.target_s,
        )
        self.bound_s = max(self.bound_s, bound_s)
        self.closed = again is None or self.bound_s >= min(self.cost_s * budget.improvement_factor, budget.useful_s)
        if not self.closed and again is not None and (again.order, again.borders) == (before.order, before.borders):
            # Its stages are proven, so the sums agree apart from rounding.
            self.closed = budget.left > 0 and self.cost_s < inf

    def _refine_fixed(self, budget: _Budget) -> None:
        """Refine an instance whose cuts are fixed, so that only strategies are open."""
        instance = self.instance
        order = tuple(group for group, count in enumerate(instance.counts) for _ in range(count))
        chunks = list(pairwise(instance.borders))
        held = [tuple(chunks[device :: instance.devices]) for device in range(instance.devices)]
        links_s = self._compute_link_loads_s(order, instance.borders)
        known_s = [self._oracles[group].compute_unlimited_s(runs) for group, runs in zip(order, held, strict=True)]
        if self._steps and self._compute_cost_s(known_s, links_s) < budget.useful_s:
            known_s = [
                self._oracles[group].compute_bound_s(runs, in_flight)
                for group, runs, in_flight in zip(order, held, instance.in_flight, strict=True)
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
            infinite = np.full((len(known_s), 1), np.inf)  # Window -1 has no layers.
            stages_s.append(np.concatenate([known_s, infinite], axis=1)[positions, self._windows])
        return StageTimes(np.stack(stages_s, axis=1), self._hand_over_s, self.instance.counts)

    @cached_property
    def _windows(self) -> Ints:
        """[P, D, D]: the window of each candidate stage, as in StageTimes."""
        ids, (devices, depth) = self._oracles[0].windows.ids, self._extent
        if self.instance.stage_layers:
            numbers = np.arange(len(ids))
            ids = np.where(numbers - numbers[:, None] == self.instance.stage_layers, ids, -1)
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
        """Numbers P and D of StageTimes."""
        return self.instance.devices, self.instance.layers - self.instance.devices + 1

    def _record_plan(self, order: tuple[int, ...], borders: tuple[int, ...], solutions: list[StageSolution]) -> None:
        """Keep the partition as the pipeline's plan if it fits and is the fastest so far."""
        cost_s = self._compute_cost_s(
            [solution.time_s for solution in solutions], self._compute_link_loads_s(order, borders)
        )
        if cost_s < self.cost_s:
            self.cost_s = cost_s
            self.solution = Solution(order, borders, self._merge_choices(borders, solutions))

    def _merge_choices(self, borders: tuple[int, ...], solutions: list[StageSolution]) -> tuple[int, ...]:
        """Return the strategy of each layer from the choices of the devices."""
        choices = [iter(solution.choice) for solution in solutions]
        chunks = pairwise(borders)
        return tuple(
            next(choices[number % len(choices)])
            for number, (first, end) in enumerate(chunks)
            for _ in range(first, end)
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


@dataclass(frozen=True, slots=True)
class BestFirstResult:
    """Result of a best-first search: the pipeline with the fastest plan, a lower bound, and the labels spent.

    `best` is None if no plan was found. No plan is faster than `bound_s`.
    """

    best: PipelineSearch | None
    bound_s: float
    labels: int

    @property
    def gap(self) -> float:
        """The proven gap: no plan is faster than the best one by more than this ratio."""
        if self.best is None:
            return 0.0
        gap = 1.0 - self.bound_s / self.best.cost_s
        return gap if gap > _ROUNDING else 0.0


def search_best_first(
    searches: Sequence[PipelineSearch],
    *,
    tolerance: float = 0.0,
    labels_max: int = MAX_LABELS,
    useful_s: float = inf,
) -> BestFirstResult:
    """Return the fastest plan of all pipelines, proven within `tolerance` unless `labels_max` runs out first.

    Results and bounds of an earlier call with a looser tolerance remain valid. Plans that take `useful_s` or longer are
    not searched, so that nothing may be found, and the bound holds up to `useful_s`.
    """
    heap = [(search.bound_s, number) for number, search in enumerate(searches)]
    heapq.heapify(heap)
    best = min((search for search in searches if search.cost_s < inf), key=lambda search: search.cost_s, default=None)
    improvement_factor, labels, closed_bound_s = min(IMPROVEMENT_FACTOR, 1.0 - tolerance), 0, inf
    while heap and labels < labels_max:
        target_s = useful_s if best is None else min(best.cost_s, useful_s)
        if heap[0][0] >= target_s * improvement_factor:
            break
        number = heapq.heappop(heap)[1]
        search = searches[number]
        labels += search.refine(target_s=target_s, tolerance=tolerance, labels_max=labels_max - labels)
        if search.cost_s < target_s:
            best = search
        if search.closed:
            closed_bound_s = min(closed_bound_s, search.bound_s)
        else:
            heapq.heappush(heap, (search.bound_s, number))
    remaining_s = [heap[0][0]] if heap else []
    bound_s = min([inf if best is None else best.cost_s, closed_bound_s, *remaining_s])
    return BestFirstResult(best, bound_s, labels)
