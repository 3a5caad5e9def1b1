"""The exact search: the plan of least iteration time over pipelines, micro-batches, cuts and strategies jointly.

The objective stands in `instance.Objective`, the proof in `best_first`, what is searched over in `pipelines` and
`costs.spreads`.

SearchOutcome: a search's answer, and how the solution of a pipeline becomes a plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from math import inf

from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan, Stage
from scheduler.solver.evaluate import evaluate
from scheduler.solver.infeasible import explain_infeasible_batch, explain_infeasible_memory, explain_infeasible_shape
from scheduler.solver.instance import Solution
from scheduler.solver.request import Infeasibility, SolveRequest
from scheduler.solver.search.pipeline_search import MAX_LABELS, BestFirstResult, search_best_first
from scheduler.solver.search.pipelines import Pipeline, enumerate_pipelines
from scheduler.solver.search.stage_oracle import OracleCache

_TOLERANCE_FACTOR = 1.0 - 1e-9
"""A little less than the tolerance is searched for, so that rounding does not carry the gap beyond it."""


_INTERMEDIATE_TOLERANCES = (0.01, 0.001)
"""Tolerances that are proven on the way to a tighter one."""


def solve_plan(request: SolveRequest) -> ParallelPlan | Infeasibility:
    """The fastest plan for `request`, proven, or why there is none."""
    return search_plan(request).result


def search_plan(
    request: SolveRequest,
    *,
    tolerance: float = 0.0,
    labels_max: int = MAX_LABELS,
    runners_up: int = 0,
    oracle_cache: OracleCache | None = None,
) -> SearchOutcome:
    """The fastest plan for `request`; equal requests give equal answers.

    A shape of two GPU models may be served best by one of them alone; the outcome then says so.

    Args:
        tolerance: stop as soon as no plan can be faster by more than this ratio. The plan's `optimality_gap` is the
            gap that was proven, which may be smaller, and is larger only where `labels_max` ran out.
        labels_max: the budget of work of one search; a shape of two GPU models takes three, runners-up their own.
        runners_up: how many plans of pipelines with other stage widths to find and prove as well.
        bench: shares work with other searches of the same model.
    """
    oracle_cache = oracle_cache or OracleCache()
    tolerance *= _TOLERANCE_FACTOR
    if len(request.groups) > 2:
        return SearchOutcome(explain_infeasible_shape(request), SearchStats(0, 0))
    whole = _search_full_shape(request, tolerance, labels_max, runners_up, oracle_cache)
    if len(request.groups) == 1:
        return whole
    return _compare_with_single_models(request, whole, tolerance, labels_max, oracle_cache)


def _search_full_shape(
    request: SolveRequest, tolerance: float, labels_max: int, runners_up: int, oracle_cache: OracleCache
) -> SearchOutcome:
    """Over the plans that use all GPUs."""
    every = list(enumerate_pipelines(request, oracle_cache))
    if not every:
        return SearchOutcome(explain_infeasible_batch(request), SearchStats(0, 0))
    found, best = _find_best_pipeline(every, tolerance, labels_max)
    report = SearchStats(sum(pipeline.candidates for pipeline in every), found.labels)
    if best is None and found.bound_s < inf:
        reason = f"no plan was found within the budget of {labels_max} labels; a larger budget may find one"
        return SearchOutcome(Infeasibility(reason, "budget"), report, found.bound_s)
    if best is None:
        return SearchOutcome(explain_infeasible_memory(request, every), report)
    plan = build_plan(request, best, found.gap)
    bound_s = plan.iteration_time_s * (1.0 - found.gap)
    return SearchOutcome(plan, report, bound_s, tuple(_find_runners_up(request, every, best, runners_up, tolerance)))


def _find_best_pipeline(
    pipelines: list[Pipeline], tolerance: float, labels_max: int
) -> tuple[BestFirstResult, Pipeline | None]:
    """Looser tolerances first: where the budget runs out, the gap is at most the last one that was proven."""
    found, labels = BestFirstResult(None, inf, 0), 0
    for within in (*(looser for looser in _INTERMEDIATE_TOLERANCES if looser > tolerance), tolerance):
        found = search_best_first(
            [pipeline.search for pipeline in pipelines], tolerance=within, labels_max=max(labels_max - labels, 0)
        )
        labels += found.labels
    found = replace(found, labels=labels)
    return found, next((pipeline for pipeline in pipelines if pipeline.search is found.best), None)


def _find_runners_up(
    request: SolveRequest, pipelines: list[Pipeline], best: Pipeline, count: int, tolerance: float
) -> Iterator[ParallelPlan]:
    """The best plans of pipelines whose stages are wider or narrower than those before."""
    for _ in range(count):
        pipelines = [pipeline for pipeline in pipelines if pipeline.widths != best.widths]
        found, after = _find_best_pipeline(pipelines, tolerance, MAX_LABELS)
        if after is None:
            return
        best = after
        yield build_plan(request, best, found.gap)


def _compare_with_single_models(
    request: SolveRequest, outcome: SearchOutcome, tolerance: float, labels_max: int, oracle_cache: OracleCache
) -> SearchOutcome:
    """`whole`, or the plan of one GPU model alone where that is as fast."""
    chosen, bound_s = outcome, outcome.bound_s
    mixed = outcome.result if isinstance(outcome.result, ParallelPlan) else None
    together = mixed and f"the best plan found for all of {request.shape} {mixed.iteration_time_s:.4g} s"
    lacking = "there is no plan" if outcome.bound_s == inf else "no plan was found within the budget"
    slower = together or f"for all of {request.shape} {lacking}"
    for group in request.groups:
        alone = request.restrict_to_gpu(group.hardware.gpu)
        own = _search_full_shape(alone, tolerance, labels_max, 0, oracle_cache)
        bound_s = min(bound_s, own.bound_s)
        if isinstance(own.result, ParallelPlan) and own.result.iteration_time_s <= _get_time_s(chosen):
            taken = f"{alone.shape} alone takes {own.result.iteration_time_s:.4g} s a step"
            remark = f"mixing does not pay: {taken}, {slower}"
            chosen = replace(own, runners_up=outcome.runners_up, remark=remark, full_shape_plan=mixed)
    if isinstance(chosen.result, Infeasibility):
        return chosen
    gap = max(chosen.result.optimality_gap, 1.0 - bound_s / chosen.result.iteration_time_s)
    return replace(chosen, result=replace(chosen.result, optimality_gap=gap), bound_s=bound_s)


def _get_time_s(outcome: SearchOutcome) -> float:
    return outcome.result.iteration_time_s if isinstance(outcome.result, ParallelPlan) else inf


@dataclass(frozen=True, slots=True)
class SearchStats:
    """How much was looked at: `candidates` are triples (pipeline, micro-batches, layer strategy)."""

    candidates: int
    labels: int


@dataclass(frozen=True, slots=True)
class SearchOutcome:
    """The answer, and what it took.

    `bound_s` is a time that no plan can beat. `runners_up` are the best plans of other pipelines, fastest first.
    `remark` says where the plan leaves GPUs out; `whole` is then the best plan that uses all of them, if there is one.
    """

    result: ParallelPlan | Infeasibility
    stats: SearchStats
    bound_s: float = inf
    runners_up: tuple[ParallelPlan, ...] = ()
    remark: str = ""
    full_shape_plan: ParallelPlan | None = None


def build_plan(request: SolveRequest, pipeline: Pipeline, gap: float) -> ParallelPlan:
    """The best plan that the search of `pipeline` has found, with the predictions of the independent evaluator."""
    solution = pipeline.search.solution
    assert solution is not None, "only a search that found a plan is asked for it"
    return build_evaluated_plan(request, pipeline, solution, pipeline.search.cost_s, gap)


def build_evaluated_plan(
    request: SolveRequest, pipeline: Pipeline, solution: Solution, cost_s: float, gap: float
) -> ParallelPlan:
    """The plan that `solution` of the pipeline's instance stands for; `cost_s` is its price, which the evaluator has to
    confirm."""
    batch = request.global_batch
    draft = ParallelPlan(
        schedule=pipeline.config.schedule,
        micro_batches=pipeline.config.micro_batches,
        micro_batch_size=batch // pipeline.config.micro_batches,
        iteration_time_s=cost_s,
        samples_per_s=batch / cost_s,
        peak_bytes_per_gpu=0,
        stages=_build_stages(pipeline, solution),
        optimality_gap=gap,
    )
    judged = evaluate(draft, request)
    overhead_s = max(team.group.hardware.iteration_overhead_s for team in pipeline.groups)
    assert judged.fits, "the search returned a plan beyond the memory limit"
    apart_s = abs(judged.iteration_time_s - overhead_s - cost_s)
    assert apart_s <= 1e-9 * judged.iteration_time_s, "the evaluator disagrees"
    return replace(
        draft,
        iteration_time_s=judged.iteration_time_s,
        samples_per_s=batch / judged.iteration_time_s,
        peak_bytes_per_gpu=judged.peak_bytes_per_gpu,
    )


def _build_stages(pipeline: Pipeline, solution: Solution) -> tuple[Stage, ...]:
    stages = []
    for number, (first, end) in enumerate(pairwise(solution.borders)):
        team = pipeline.groups[solution.order[number % pipeline.devices]]
        chosen = [team.costed.build_strategy(choice) for choice in solution.choice[first:end]]
        stages.append(Stage(first, end - 1, team.group.hardware.gpu, team.setting.gpus, _merge_layer_runs(chosen)))
    return tuple(stages)


def _merge_layer_runs(chosen: list[LayerStrategy]) -> tuple[LayerStrategy, ...]:
    """Neighbouring layers of one strategy as one run."""
    return tuple(replace(strategy, layers=len(list(run))) for strategy, run in groupby(chosen))
