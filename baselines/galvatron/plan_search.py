"""The best plan under Galvatron's cost model: pipelines are searched in order of their bound."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf

import numpy as np

from baselines.galvatron.cost_model import (
    GalvatronEvaluation,
    GalvatronPlan,
    compute_embedding_mb,
    compute_embedding_time,
    compute_layer_mb,
    compute_layer_time,
    compute_pipeline_s,
    evaluate_plan,
)
from baselines.galvatron.profiles import GalvatronCase
from baselines.galvatron.strategy_space import (
    PipelineSetting,
    Strategy,
    enumerate_settings,
    enumerate_strategy_sets,
    split_evenly,
)
from scheduler.solver.instance import Floats, Ints, Objective
from scheduler.solver.search.partition import StageTimes, compute_smallest_bottleneck_s, find_best_partition
from scheduler.solver.search.stage_bounds import compute_candidate_prices
from scheduler.solver.search.stage_problem import StageProblem, StageSolution
from scheduler.solver.search.stage_search import IMPROVEMENT_FACTOR, solve_stage

MAX_LABELS = 2_000_000
_MAX_CHOICES = 50_000
_MB = 2**20
_ROUNDING = 1e-12


_Choice = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GalvatronOutcome:
    """The plan and its evaluation. Both are None if nothing fits; `least_mb` is then the smallest limit with a plan.

    No plan has a judged time below (1 - `optimality_gap`) times that of `plan`. `candidates` are triples (pipeline,
    embedding's strategy, layer's strategy).
    """

    plan: GalvatronPlan | None
    evaluation: GalvatronEvaluation | None
    optimality_gap: float = 0.0
    least_mb: float = inf
    candidates: int = 0


def search_plan(case: GalvatronCase, memory_limit_mb: int, *, restricted: bool = False) -> GalvatronOutcome:
    """Search the least judged time (see GalvatronEvaluation) within `memory_limit_mb` of memory on each GPU.

    Args:
        restricted: search only Galvatron's own space: even stages, powers of two up to 8.

    Raises:
        ProfileError: a degree that Galvatron itself would use is not profiled.
    """
    best_s = floor_s = inf
    pipelines = list(_enumerate_pipelines(case, memory_limit_mb, restricted=restricted))
    best = GalvatronOutcome(None, None, candidates=sum(pipeline.strategy_count for pipeline in pipelines))
    queue = [(pipeline.bound_s, number, pipeline) for number, pipeline in enumerate(pipelines)]
    heapq.heapify(queue)
    while queue and queue[0][0] < best_s * IMPROVEMENT_FACTOR:
        _, number, pipeline = heapq.heappop(queue)
        plan = pipeline.refine()
        if plan is None:
            heapq.heappush(queue, (pipeline.bound_s, number, pipeline))
            continue
        floor_s = min(floor_s, pipeline.bound_s)
        evaluation = evaluate_plan(plan, case)
        if evaluation.judged_s < best_s:
            best, best_s = replace(best, plan=plan, evaluation=evaluation), evaluation.judged_s
    if best.plan is None:
        return replace(
            best, least_mb=memory_limit_mb + min((pipeline.shortfall_mb for pipeline in pipelines), default=inf)
        )
    return best if floor_s >= best_s * IMPROVEMENT_FACTOR else replace(best, optimality_gap=1 - floor_s / best_s)


def _enumerate_pipelines(case: GalvatronCase, cap_mb: int, *, restricted: bool) -> Iterator[PipelineSearch]:
    for setting in enumerate_settings(case, restricted=restricted):
        for buffer_degree, strategies in enumerate_strategy_sets(setting, restricted=restricted):
            table = StrategyTable(setting, strategies)
            for embedding in (strategy for strategy in strategies if not strategy.recompute):
                yield PipelineSearch(table, embedding, buffer_degree, cap_mb, even=True)
                if setting.stages > 1 and not restricted:
                    yield PipelineSearch(table, embedding, buffer_degree, cap_mb, even=False)


class PipelineSearch:
    """Search of one pipeline: only the cut and the layers' strategies are open.

    `bound_s` never exceeds the judged time of its plans.

    If `even`, the cut is Galvatron's own, judged by its final time; otherwise it is the best of all cuts, judged by the
    bottleneck form. With one stage of compute A and reduction E, and o the embedding's compute, the time is c A +
    max(0, E - o). This is the largest of c A + w (E - o) over 0 <= w <= 1, and each w gives a bound. With more stages,
    the reduction that nothing hides is left out of the bound.
    """

    def __init__(
        self, table: StrategyTable, embedding: Strategy, buffer_degree: int | None, cap_mb: int, *, even: bool
    ) -> None:
        setting, stages = table.setting, range(table.setting.stages)
        self._table, self._embedding, self._buffer_degree, self._even = table, embedding, buffer_degree, even
        self._other_s = [compute_embedding_time(embedding, setting, stage).compute_s for stage in stages]
        self._rooms_mb = [cap_mb - compute_embedding_mb(embedding, setting, stage, buffer_degree) for stage in stages]
        self._times_s = np.array([self._compute_bounds_s(stage) for stage in stages])
        self._choices: dict[tuple[int, int], _Choice] = {}
        self._update_cut()

    def refine(self) -> GalvatronPlan | None:
        """Return the plan of the best cut if its stages are proven; otherwise raise the bound and return None.

        Layers are identical and changes of split are free in Galvatron's final time, so layers of equal strategy are
        put together.
        """
        open_stages = [key for key in enumerate(self._cut) if key not in self._choices]
        for key in open_stages:
            bound_s, self._choices[key] = self._solve_single_stage() if len(self._cut) == 1 else self._solve_stage(*key)
            self._times_s[key] = max(self._times_s[key], bound_s)
        if open_stages:
            self._update_cut()
            return None
        chosen = ([self._table.strategies[at] for at in self._choices[key]] for key in enumerate(self._cut))
        stages = tuple(tuple(sorted(stage, key=lambda one: (one.split, one))) for stage in chosen)
        return GalvatronPlan(stages, self._embedding, self._table.setting.micro_batches, self._buffer_degree)

    @property
    def strategy_count(self) -> int:
        return len(self._table.strategies)

    @property
    def shortfall_mb(self) -> float:
        """By how much the memory limit must grow for some cut to fit; negative if it can shrink."""
        need_mb = self._table.counts * self._table.memory_mb.min(axis=1)[:, None] - np.array(self._rooms_mb)[:, None]
        return compute_smallest_bottleneck_s(_build_stage_times(need_mb.astype(np.float64)))

    def _update_cut(self) -> None:
        """Find the best cut, as far as the stages' times are known."""
        setting, objective = self._table.setting, Objective(self._table.setting.micro_batches)
        self._cut = split_evenly(setting.case.model.layers, setting.stages)
        if self._even:
            stages_s = [float(self._times_s[key]) for key in enumerate(self._cut)]
            self.bound_s = compute_pipeline_s(stages_s, setting.micro_batches) if max(stages_s) < inf else inf
        else:
            found, self.bound_s = find_best_partition(_build_stage_times(self._times_s), objective)
            if found is not None:
                self._cut = tuple(end - first for first, end in pairwise(found.borders))

    def _compute_bounds_s(self, stage: int) -> Floats:
        """Return [L+1] by number of layers, embedding and head included."""
        room_mb, other_s = self._rooms_mb[stage], self._other_s[stage]
        bounds_s = self._table.compute_bounds_s(stage, room_mb, 0.0)
        if len(self._rooms_mb) == 1:
            weight = 1 / self._table.setting.micro_batches
            bounds_s = np.maximum(bounds_s, self._table.compute_bounds_s(stage, room_mb, weight) - weight * other_s)
        return bounds_s + other_s

    def _solve_stage(self, stage: int, layers: int) -> tuple[float, _Choice]:
        found = self._table.solve_stage(stage, layers, self._rooms_mb[stage], 0.0)
        return found.bound_s + self._other_s[stage], found.choice

    def _solve_single_stage(self) -> tuple[float, _Choice]:
        """Return (bound, choice) of the only stage, as time per micro-batch.

        Weight 1 is exact if the reduction outlasts the embedding in the best choice under it; weight 0 is exact if the
        embedding hides it. Otherwise the optimum of the dual is near the weight at which these two choices tie.
        """
        table, other_s, share = self._table, self._other_s[0], 1 / self._table.setting.micro_batches
        tried: list[tuple[float, float, float, _Choice]] = []  # (compute, excess, bound) and choice.
        for weight in (1.0, 0.0, inf):
            if weight == inf:
                weight = (tried[0][0] - tried[1][0]) / share / (tried[1][1] - tried[0][1])
            found = table.solve_stage(0, self._cut[0], self._rooms_mb[0], weight * share)
            chosen = list(found.choice)
            compute_s = float(table.compute_s[chosen].sum()) + other_s
            excess_s = float(table.reduction_s[chosen].sum()) - other_s
            tried.append((compute_s, excess_s, found.bound_s + other_s * (1 - weight * share), found.choice))
            if (weight == 1.0 and excess_s >= 0) or (weight == 0.0 and excess_s <= 0):
                return tried[-1][2:]
        best_s, best = min((compute_s + share * max(0.0, excess_s), choice) for compute_s, excess_s, _, choice in tried)
        better = table.solve_single_stage(self._rooms_mb[0], weight=weight, hidden_s=other_s, limit_s=best_s - other_s)
        return (
            (max(bound_s for _, _, bound_s, _ in tried), best)
            if better is None
            else (better[0] + other_s, better[1] or best)
        )


def _build_stage_times(by_count: Floats) -> StageTimes:
    """Return times (or sizes) [P, L+1] by number of layers as those of every candidate stage."""
    depth = by_count.shape[1] - len(by_count)
    lengths = np.arange(depth)[None, :] - np.arange(depth)[:, None] + 1
    stages = np.where(lengths > 0, by_count[:, np.maximum(lengths, 0)], inf)
    return StageTimes(stages[:, None], np.zeros((len(by_count) - 1, 1, 1, depth)), (len(by_count),))


class StrategyTable:
    """Times and memory of a layer by strategy. Solves stages of such layers, each question once.

    Reduction counts `weight` times: a stage of n layers takes sum(compute + weight * reduction).
    """

    def __init__(self, setting: PipelineSetting, strategies: list[Strategy]) -> None:
        times = [compute_layer_time(strategy, setting) for strategy in strategies]
        self.setting, self.strategies = setting, strategies
        self.counts = np.arange(setting.case.model.layers + 1)
        self.compute_s = np.array([time.compute_s for time in times])
        self.reduction_s = np.array([time.synced_s for time in times]) - self.compute_s
        self.memory_mb = np.array(
            [[compute_layer_mb(strategy, setting, i) for strategy in strategies] for i in range(setting.stages)]
        )
        self._solved: dict[tuple[int, int, int, float], StageSolution] = {}

    def compute_bounds_s(self, stage: int, capacity_mb: int, weight: float) -> Floats:
        """Return [L+1]: a time that no stage of n layers can beat, by weak duality; infinite if none fits."""
        memory, step_s = self.memory_mb[stage], self.compute_s + weight * self.reduction_s
        prices = compute_candidate_prices(step_s[None], memory[None])
        priced_s = (step_s + prices[:, None] * memory).min(axis=1)
        bounds_s = (self.counts[:, None] * priced_s - prices * capacity_mb).max(axis=1)
        return np.where(self.counts * memory.min() <= capacity_mb, bounds_s, np.inf)

    def solve_stage(self, stage: int, layers: int, capacity_mb: int, weight: float) -> StageSolution:
        key = stage, layers, capacity_mb, weight
        if key not in self._solved:
            step_s = self.compute_s + weight * self.reduction_s
            problem = build_identical_layers_problem(step_s, self.memory_mb[stage], layers, capacity_mb)
            self._solved[key] = solve_stage(problem, labels_max=MAX_LABELS)
        return self._solved[key]

    def solve_single_stage(
        self, capacity_mb: int, *, weight: float, hidden_s: float, limit_s: float
    ) -> tuple[float, tuple[int, ...]] | None:
        """Return (time, choice) of all layers in the only stage, per micro-batch.

        No choice means that none is below `limit_s`; None means that there are too many to try. Only the reduction
        beyond `hidden_s` counts, once for all micro-batches.

        Against the bound at a price of memory and a `weight` of reduction, each layer adds its regret. So only choices
        whose regrets sum to less than limit - bound are tried: counts of strategies, those of most regret first.
        """
        layers, share, memory = len(self.counts) - 1, 1 / self.setting.micro_batches, self.memory_mb[0]
        step_s = self.compute_s + weight * share * self.reduction_s
        prices = compute_candidate_prices(step_s[None], memory[None])
        bounds_s = layers * (step_s + prices[:, None] * memory).min(axis=1) - prices * capacity_mb
        priced_s = step_s + prices[bounds_s.argmax()] * memory
        regret_s, left_s = priced_s - priced_s.min(), limit_s - bounds_s.max() + weight * share * hidden_s
        left_s = max(0.0, left_s) + _ROUNDING * limit_s
        *others, last = np.argsort(-regret_s, kind="stable").tolist()
        found = np.zeros((1, len(memory)), dtype=np.int64)
        for strategy in others:
            tried = np.arange(1 + min(layers, int(left_s / max(regret_s[strategy], left_s / layers))))
            if len(found) * len(tried) > _MAX_CHOICES:
                return None
            found = np.repeat(found, len(tried), axis=0)
            found[:, strategy] = np.tile(tried, len(found) // len(tried))
            left = layers - found.sum(axis=1)
            fits = found @ memory + left * memory.min() <= capacity_mb
            found = found[fits & (left >= 0) & (found @ regret_s <= left_s)]
        found[:, last] = layers - found.sum(axis=1)
        found = found[found @ memory <= capacity_mb]
        times_s = found @ self.compute_s + share * np.maximum(0.0, found @ self.reduction_s - hidden_s)
        if not (times_s < limit_s).any():
            return limit_s, ()
        return float(times_s.min()), tuple(np.repeat(np.arange(len(memory)), found[times_s.argmin()]).tolist())


def build_identical_layers_problem(
    time_s: Floats, memory_mb: Ints, layers: int, capacity_mb: int, transition_s: Floats | None = None
) -> StageProblem:
    """Return the problem of `layers` equal layers with time_s [S], memory_mb [S] and transition_s [S, S] (None: free).

    Strategies with equal transitions from and to all others share a layout.
    """
    count = len(time_s)
    between = np.zeros((count, count)) if transition_s is None else transition_s
    _, first, layouts = np.unique(np.hstack([between, between.T]), axis=0, return_index=True, return_inverse=True)
    memory, reshard_s = memory_mb * _MB, between[first[:, None], first]
    return StageProblem(
        step_s=np.tile(time_s, (layers, 1)),
        memory_bytes=np.tile(memory, (layers, 1)),
        working_bytes=np.zeros(count, dtype=np.int64),
        layouts=layouts.reshape(-1),
        reshard_s=np.broadcast_to(reshard_s, (layers - 1, *reshard_s.shape)),
        prices=compute_candidate_prices(time_s[None], memory[None]),
        capacity_bytes=capacity_mb * _MB,
    )
