"""The simplest plan: the fewest different strategies of layers among plans that are nearly as fast as the fastest.

Plans with one strategy are searched exactly, and so are those with two on GPUs of one model. If neither kind is fast
enough, the fastest plan itself is the answer, and `strategies_min` says what has been proven.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.solver.instance import Floats, Ints
from scheduler.solver.plan_rules import as_single_layer
from scheduler.solver.request import SolveRequest
from scheduler.solver.search.pipeline_search import MAX_LABELS, search_best_first
from scheduler.solver.search.pipelines import Pipeline, enumerate_pipelines, select_strategies
from scheduler.solver.search.plan_search import build_plan
from scheduler.solver.search.stage_bounds import compute_candidate_prices, find_undominated
from scheduler.solver.search.stage_oracle import OracleCache

PAIRS_MAX = 4000
"""Pairs of strategies that are searched, most promising first. With more of them, nothing is proven about pairs."""

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class SimplestPlan:
    """A plan with `strategies` different strategies. No plan that is fast enough has fewer than `strategies_min`."""

    plan: ParallelPlan
    strategies: int
    strategies_min: int


def count_strategies(plan: ParallelPlan) -> int:
    """Return the number of different strategies of a plan's layers."""
    return len({as_single_layer(run) for stage in plan.stages for run in stage.strategies})


def find_simplest_plan(
    request: SolveRequest,
    fastest: ParallelPlan,
    *,
    ratio: float,
    labels_max: int = MAX_LABELS,
    oracle_cache: OracleCache | None = None,
) -> SimplestPlan:
    """Return the fastest of the simplest plans whose step is longer than that of `fastest` by at most `ratio`.

    Args:
        fastest: the answer to `request`.
        labels_max: budget of work of each of the searches.
    """
    used, oracle_cache = count_strategies(fastest), oracle_cache or OracleCache()
    request = request.for_plans_like(fastest)
    if used == 1:
        return SimplestPlan(fastest, 1, 1)
    limit_s = (1.0 + ratio) * fastest.iteration_time_s * (1.0 + _ROUNDING)
    uniform, is_proven = _find_uniform_plan(request, fastest, limit_s, labels_max, oracle_cache)
    if uniform is not None:
        return SimplestPlan(uniform, 1, 1)
    if used == 2 or not is_proven or len(request.groups) > 1:
        return SimplestPlan(fastest, used, 2 if is_proven else 1)
    paired, is_proven = _find_paired_plan(request, fastest, limit_s, labels_max, oracle_cache)
    if paired is not None:
        return SimplestPlan(paired, count_strategies(paired), 2)
    return SimplestPlan(fastest, used, 3 if is_proven else 2)


def _find_uniform_plan(
    request: SolveRequest, fastest: ParallelPlan, limit_s: float, labels_max: int, oracle_cache: OracleCache
) -> tuple[ParallelPlan | None, bool]:
    """Return the fastest plan with one strategy below `limit_s`, and whether its absence is proven.

    Of several GPU models, some of them alone are searched as well.
    """
    plans, is_proven = list[ParallelPlan](), True
    for part in (request, *request.list_parts()):
        uniform = replace(part, limits=replace(part.limits, is_uniform=True))
        useful_s = limit_s - _get_overhead_s(part)
        pipelines = list(enumerate_pipelines(uniform, oracle_cache, useful_s=useful_s))
        plan, is_complete = _search_below(part, fastest, pipelines, useful_s, labels_max)
        is_proven &= is_complete
        if plan is not None:
            plans.append(plan)
    return min(plans, key=lambda plan: plan.iteration_time_s, default=None), is_proven


def _find_paired_plan(
    request: SolveRequest, fastest: ParallelPlan, limit_s: float, labels_max: int, oracle_cache: OracleCache
) -> tuple[ParallelPlan | None, bool]:
    """Return the fastest plan with two strategies below `limit_s`, and whether its absence is proven."""
    useful_s = limit_s - _get_overhead_s(request)
    promising = [
        (bound_s, number, pipeline, numbers)
        for number, pipeline in enumerate(enumerate_pipelines(request, oracle_cache))
        if pipeline.search.bound_s < useful_s
        for bound_s, numbers in _list_promising_pairs(pipeline, useful_s)
    ]
    promising.sort(key=lambda entry: entry[:2])
    pipelines = [
        select_strategies(pipeline, (numbers,), oracle_cache) for _, _, pipeline, numbers in promising[:PAIRS_MAX]
    ]
    plan, is_complete = _search_below(request, fastest, pipelines, useful_s, labels_max)
    return plan, is_complete and len(promising) <= PAIRS_MAX


def _list_promising_pairs(pipeline: Pipeline, useful_s: float) -> Iterator[tuple[float, Ints]]:
    """Yield (bound, numbers of two strategies) for the pairs whose bound is below `useful_s`.

    For every price of a byte, the layers at their cheaper strategy, less the price of all memory, take no longer than
    the stages of any plan that fits. The largest load is at least the mean.
    """
    costs = pipeline.groups[0].costed.costs
    useful = find_undominated(costs, in_flight_max=pipeline.config.micro_batches)
    time_s, memory = costs.time_s[:, useful], costs.compute_memory_bytes(1.0)[:, useful]
    counts = np.bincount(pipeline.layers.types, minlength=len(time_s))
    capacity_bytes = pipeline.devices * pipeline.groups[0].group.capacity_bytes
    sums_s = np.zeros((len(useful), len(useful)))
    for price in compute_candidate_prices(time_s, memory).tolist():
        sums_s = np.maximum(sums_s, _sum_cheaper(time_s + price * memory, counts) - price * capacity_bytes)
    objective = pipeline.config.objective
    bounds_s = objective.sum_weight * sums_s + objective.max_weight * sums_s / pipeline.devices
    bounds_s[_sum_cheaper(memory.astype(np.float64), counts) > capacity_bytes] = np.inf
    for one, two in np.argwhere(np.triu(bounds_s < useful_s, k=1)).tolist():
        yield float(bounds_s[one, two]), useful[[one, two]]


def _sum_cheaper(values: Floats, counts: Ints) -> Floats:
    """Return [U, U]: over all layers, the sum of the smaller value [T, U] of two strategies."""
    return np.asarray(sum(count * np.minimum.outer(row, row) for count, row in zip(counts, values, strict=True)))


def _search_below(
    request: SolveRequest, fastest: ParallelPlan, pipelines: Sequence[Pipeline], useful_s: float, labels_max: int
) -> tuple[ParallelPlan | None, bool]:
    """Return the fastest plan of the pipelines below `useful_s`, and whether the search was complete."""
    found = search_best_first([pipeline.search for pipeline in pipelines], labels_max=labels_max, useful_s=useful_s)
    best = next((pipeline for pipeline in pipelines if pipeline.search is found.best), None)
    if best is None or best.search.cost_s > useful_s:
        return None, found.labels < labels_max
    plan = build_plan(request, best, 0.0)
    least_s = fastest.iteration_time_s * (1.0 - fastest.optimality_gap)
    return replace(plan, optimality_gap=max(0.0, 1.0 - least_s / plan.iteration_time_s)), True


def _get_overhead_s(request: SolveRequest) -> float:
    return max(hardware.iteration_overhead_s for hardware in request.hardware)
