"""Exact search for the fastest plan, jointly over pipelines, micro-batches, cuts and strategies.

`instance.Objective` states the objective, `pipeline_search` the proof, and `pipelines` and `costs.strategy_space` what
is searched.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from math import inf

from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan, Stage
from scheduler.domain.plan_limits import NO_LIMITS
from scheduler.solver.evaluate import Evaluation, evaluate
from scheduler.solver.infeasible import (
    explain_infeasible_batch,
    explain_infeasible_limits,
    explain_infeasible_memory,
    explain_infeasible_shape,
)
from scheduler.solver.instance import Solution
from scheduler.solver.request import Infeasibility, SolveRequest
from scheduler.solver.search.pipeline_search import MAX_LABELS, BestFirstResult, search_best_first
from scheduler.solver.search.pipelines import Pipeline, enumerate_pipelines
from scheduler.solver.search.stage_oracle import OracleCache

_TOLERANCE_FACTOR = 1.0 - 1e-9
"""The search uses slightly less than the tolerance, so that rounding does not carry the gap beyond it."""


_INTERMEDIATE_TOLERANCES = (0.01, 0.001)
"""Tolerances that are proven on the way to a tighter one."""

_TIES_FACTOR = 1.0 + 1e-9
"""Plans of some GPU models that are as fast as the best one are searched as well, because they use fewer GPUs."""

GPU_MODELS_MAX = 4
"""Most GPU models of a shape. Each further one doubles the subsets that are searched, and multiplies the pipelines."""

_ANY_PLAN_TOLERANCE = 0.9
"""Tolerance of a search that only has to find out whether there is a plan."""


@dataclass(frozen=True, slots=True)
class SearchStats:
    """Amount of work: `candidates` are triples (pipeline, micro-batches, layer strategy)."""

    candidates: int
    labels: int


@dataclass(frozen=True, slots=True)
class SearchOutcome:
    """Result of a search.

    `bound_s` is a time that no plan can beat. `runners_up` are the best plans of other pipelines, fastest first. If the
    plan leaves GPUs unused, `remark` says so, and `full_shape_plan` is the best plan that uses all of them, if there is
    one.
    """

    result: ParallelPlan | Infeasibility
    stats: SearchStats
    bound_s: float = inf
    runners_up: tuple[ParallelPlan, ...] = ()
    remark: str = ""
    full_shape_plan: ParallelPlan | None = None


@dataclass(frozen=True, slots=True)
class _SearchEffort:
    """How far a search goes, as in `search_plan`.

    `explains`: say why nothing fits, which can take long. Plans that take `useful_s` or longer are of no use, so that
    none may be found; the bound holds up to there.
    """

    tolerance: float
    labels_max: int
    oracle_cache: OracleCache
    runners_up: int = 0
    explains: bool = True
    useful_s: float = inf


def solve_plan(request: SolveRequest, *, tolerance: float = 0.0) -> ParallelPlan | Infeasibility:
    """Return the fastest plan for `request`, proven within `tolerance`, or the reason why there is none."""
    return search_plan(request, tolerance=tolerance).result


def search_plan(
    request: SolveRequest,
    *,
    tolerance: float = 0.0,
    labels_max: int = MAX_LABELS,
    runners_up: int = 0,
    oracle_cache: OracleCache | None = None,
) -> SearchOutcome:
    """Search the fastest plan for `request`. The result is deterministic.

    Some of the GPU models alone may serve a mixed shape best; the outcome then says so.

    Args:
        tolerance: stop as soon as no plan can be faster by more than this ratio. The plan's `optimality_gap` is the gap
            that was proven. It can be smaller, and is larger only if `labels_max` is used up.
        labels_max: budget of work of one search. A mixed shape takes one search for each subset of its GPU models;
            runners-up have their own.
        runners_up: number of plans of pipelines with other stage widths to find and prove as well.
        oracle_cache: shares work with other searches of the same model.
    """
    oracle_cache = oracle_cache or OracleCache()
    tolerance *= _TOLERANCE_FACTOR
    if len(request.groups) > GPU_MODELS_MAX:
        return SearchOutcome(explain_infeasible_shape(request, GPU_MODELS_MAX), SearchStats(0, 0))
    effort = _SearchEffort(tolerance, labels_max, oracle_cache, runners_up)
    outcome = _search_shape(request, effort)
    nothing = outcome.result
    if request.limits == NO_LIMITS or not isinstance(nothing, Infeasibility) or nothing.constraint == "budget":
        return outcome

    def is_feasible(changed: SolveRequest) -> bool:
        hasty = replace(effort, tolerance=_ANY_PLAN_TOLERANCE, runners_up=0, explains=False)
        return isinstance(_search_shape(changed, hasty).result, ParallelPlan)

    return replace(outcome, result=explain_infeasible_limits(request, nothing, is_feasible))


def _search_shape(request: SolveRequest, effort: _SearchEffort) -> SearchOutcome:
    """Search the plans that use all GPUs, or all of some models.

    Plans that use the host link in every micro-batch are slow, and double the strategies. They are searched only if
    nothing else fits.
    """
    if request.may_stream:
        outcome = _search_shape(request.without_streaming(), replace(effort, explains=False))
        if isinstance(outcome.result, ParallelPlan) or outcome.result.constraint != "memory":
            return outcome
    outcome = _search_full_shape(request, effort)
    return outcome if len(request.groups) == 1 else _compare_with_parts(request, outcome, effort)


def _search_full_shape(request: SolveRequest, effort: _SearchEffort) -> SearchOutcome:
    """Search the plans that use all GPUs, at first without regard to host memory: it is seldom what limits them."""
    if any(profile.host_memory_bytes for profile in request.hardware):
        unlimited = tuple(replace(profile, host_memory_bytes=0) for profile in request.hardware)
        free = _search_full_shape(replace(request, hardware=unlimited), effort)
        plans = (free.result, *free.runners_up)
        if all(isinstance(plan, Infeasibility) or evaluate(plan, request).fits for plan in plans):
            return free
    pipelines = list(enumerate_pipelines(request, effort.oracle_cache))
    if not pipelines:
        return SearchOutcome(explain_infeasible_batch(request), SearchStats(0, 0))
    overhead_s = max(profile.iteration_overhead_s for profile in request.hardware)
    result, best = _find_best_pipeline(pipelines, effort.tolerance, effort.labels_max, effort.useful_s - overhead_s)
    stats = SearchStats(sum(pipeline.candidates for pipeline in pipelines), result.labels)
    if best is None and result.bound_s < inf:
        reason = f"no plan was found within the budget of {effort.labels_max} labels; a larger budget may find one"
        return SearchOutcome(Infeasibility(reason, "budget"), stats, result.bound_s + overhead_s)
    if best is None:
        unexplained = Infeasibility("needs more memory", "memory")
        return SearchOutcome(explain_infeasible_memory(request, pipelines) if effort.explains else unexplained, stats)
    plan = build_plan(request, best, result.gap)
    bound_s = plan.iteration_time_s * (1.0 - result.gap)
    runners_up = _find_runners_up(request, pipelines, best, effort.runners_up, effort.tolerance)
    return SearchOutcome(plan, stats, bound_s, tuple(runners_up))


def _find_best_pipeline(
    pipelines: list[Pipeline], tolerance: float, labels_max: int, useful_s: float = inf
) -> tuple[BestFirstResult, Pipeline | None]:
    """Prove looser tolerances first: if the budget is used up, the gap is at most the last one that was proven."""
    found, labels = BestFirstResult(None, inf, 0), 0
    for tolerance_step in (*(looser for looser in _INTERMEDIATE_TOLERANCES if looser > tolerance), tolerance):
        found = search_best_first(
            [pipeline.search for pipeline in pipelines],
            tolerance=tolerance_step,
            labels_max=max(labels_max - labels, 0),
            useful_s=useful_s,
        )
        labels += found.labels
    found = replace(found, labels=labels)
    return found, next((pipeline for pipeline in pipelines if pipeline.search is found.best), None)


def _find_runners_up(
    request: SolveRequest, pipelines: list[Pipeline], best: Pipeline, count: int, tolerance: float
) -> Iterator[ParallelPlan]:
    """Yield the best plans of pipelines whose stages are wider or narrower than those before."""
    for _ in range(count):
        pipelines = [pipeline for pipeline in pipelines if pipeline.widths != best.widths]
        found, after = _find_best_pipeline(pipelines, tolerance, MAX_LABELS)
        if after is None:
            return
        best = after
        yield build_plan(request, best, found.gap)


def _compare_with_parts(request: SolveRequest, outcome: SearchOutcome, effort: _SearchEffort) -> SearchOutcome:
    """Return `outcome`, or the plan of some GPU models alone if that is at least as fast."""
    best, bound_s = outcome, outcome.bound_s
    mixed = outcome.result if isinstance(outcome.result, ParallelPlan) else None
    together = mixed and f"the best plan found for all of {request.shape} takes {mixed.iteration_time_s:.4g} s"
    lacking = "there is no plan" if outcome.bound_s == inf else "no plan was found within the budget"
    slower = together or f"for all of {request.shape} {lacking}"
    for part in request.list_parts():
        useful_s = _get_time_s(best) * _TIES_FACTOR
        alone = _search_full_shape(part, replace(effort, runners_up=0, useful_s=useful_s))
        bound_s = min(bound_s, alone.bound_s)
        if isinstance(alone.result, ParallelPlan) and _get_rank(alone) < _get_rank(best):
            step_s = alone.result.iteration_time_s
            remark = f"{part.shape} alone takes {step_s:.4g} s per step; {slower}"
            best = replace(alone, runners_up=outcome.runners_up, remark=remark, full_shape_plan=mixed)
    if isinstance(best.result, Infeasibility):
        return best
    gap = max(best.result.optimality_gap, 1.0 - bound_s / best.result.iteration_time_s)
    return replace(best, result=replace(best.result, optimality_gap=gap), bound_s=bound_s)


def _get_time_s(outcome: SearchOutcome) -> float:
    return outcome.result.iteration_time_s if isinstance(outcome.result, ParallelPlan) else inf


def _get_rank(outcome: SearchOutcome) -> tuple[float, int]:
    """Return what makes a plan better: less time, and of equal times fewer GPUs."""
    return _get_time_s(outcome), outcome.result.world_size if isinstance(outcome.result, ParallelPlan) else 0


def build_plan(request: SolveRequest, pipeline: Pipeline, gap: float) -> ParallelPlan:
    """Return the best plan that the search of `pipeline` has found.

    Its predictions are those of the independent evaluation.
    """
    solution = pipeline.search.solution
    assert solution is not None, "the search has not found a plan"
    return build_evaluated_plan(request, pipeline, solution, pipeline.search.cost_s, gap)


def build_evaluated_plan(
    request: SolveRequest, pipeline: Pipeline, solution: Solution, cost_s: float, gap: float
) -> ParallelPlan:
    """Return the plan for `solution` of the pipeline's instance.

    The evaluation must confirm `cost_s`, the solution's cost.
    """
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
    evaluation = evaluate(draft, request)
    overhead_s = max(member.group.hardware.iteration_overhead_s for member in pipeline.groups)
    assert evaluation.fits, "the search returned a plan that exceeds the memory limit"
    difference_s = abs(evaluation.iteration_time_s - overhead_s - cost_s)
    assert difference_s <= 1e-9 * evaluation.iteration_time_s, "search and evaluation disagree on the iteration time"
    return replace(
        draft,
        iteration_time_s=evaluation.iteration_time_s,
        samples_per_s=batch / evaluation.iteration_time_s,
        peak_bytes_per_gpu=evaluation.peak_bytes_per_gpu,
        terms=evaluation.terms,
        profile_time_s=evaluation.iteration_time_s,
        peak_bytes_by_model=_find_peaks(draft, evaluation) if draft.is_mixed else (),
    )


def _find_peaks(plan: ParallelPlan, evaluation: Evaluation) -> tuple[tuple[str, int], ...]:
    """Return the peak memory on each GPU model, sorted by model."""
    peaks: dict[str, int] = {}
    for stage, device in zip(plan.stages, evaluation.stages, strict=False):  # stages repeat devices if interleaved
        peaks[stage.gpu] = max(peaks.get(stage.gpu, 0), device.memory_bytes)
    return tuple(sorted(peaks.items()))


def _build_stages(pipeline: Pipeline, solution: Solution) -> tuple[Stage, ...]:
    stages = []
    for number, (first, end) in enumerate(pairwise(solution.borders)):
        member = pipeline.groups[solution.order[number % pipeline.devices]]
        chosen = [member.costed.build_strategy(choice) for choice in solution.choice[first:end]]
        stages.append(Stage(first, end - 1, member.group.hardware.gpu, member.setting.gpus, _merge_layer_runs(chosen)))
    return tuple(stages)


def _merge_layer_runs(chosen: list[LayerStrategy]) -> tuple[LayerStrategy, ...]:
    """Return neighboring layers of one strategy as one run."""
    return tuple(replace(strategy, layers=len(list(run))) for strategy, run in groupby(chosen))
