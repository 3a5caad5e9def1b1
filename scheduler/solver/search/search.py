"""The exact search: the plan of least iteration time over pipelines, micro-batches, cuts and strategies jointly.

The objective stands in `instance.Objective`, the proof in `best_first`, what is searched over in `pipelines` and
`costs.spreads`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf

from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.solver.infeasible import batch_infeasible, memory_infeasible, shape_infeasible
from scheduler.solver.request import Infeasible, SolveRequest
from scheduler.solver.search.best_first import LABELS_MAX, Found, best_first
from scheduler.solver.search.outcome import SearchOutcome, SearchReport, plan_of
from scheduler.solver.search.pipelines import Pipeline, pipelines
from scheduler.solver.search.workbench import Workbench

_WITHIN = 1.0 - 1e-9
"""A little less than the tolerance is searched for, so that rounding does not carry the gap beyond it."""


_LOOSER = (0.01, 0.001)
"""Tolerances that are proven on the way to a tighter one."""


def solve(request: SolveRequest) -> ParallelPlan | Infeasible:
    """The fastest plan for `request`, proven, or why there is none."""
    return search(request).result


def search(
    request: SolveRequest,
    *,
    tolerance: float = 0.0,
    labels_max: int = LABELS_MAX,
    runners_up: int = 0,
    bench: Workbench | None = None,
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
    bench = bench or Workbench()
    tolerance *= _WITHIN
    if len(request.groups) > 2:
        return SearchOutcome(shape_infeasible(request), SearchReport(0, 0))
    whole = _search(request, tolerance, labels_max, runners_up, bench)
    if len(request.groups) == 1:
        return whole
    return _better_alone(request, whole, tolerance, labels_max, bench)


def _search(
    request: SolveRequest, tolerance: float, labels_max: int, runners_up: int, bench: Workbench
) -> SearchOutcome:
    """Over the plans that use all GPUs."""
    every = list(pipelines(request, bench))
    if not every:
        return SearchOutcome(batch_infeasible(request), SearchReport(0, 0))
    found, best = _best(every, tolerance, labels_max)
    report = SearchReport(sum(pipeline.candidates for pipeline in every), found.labels)
    if best is None and found.bound_s < inf:
        reason = f"no plan was found within the budget of {labels_max} labels; a larger budget may find one"
        return SearchOutcome(Infeasible(reason, "budget"), report, found.bound_s)
    if best is None:
        return SearchOutcome(memory_infeasible(request, every), report)
    plan = plan_of(request, best, found.gap)
    bound_s = plan.iteration_time_s * (1.0 - found.gap)
    return SearchOutcome(plan, report, bound_s, tuple(_runners_up(request, every, best, runners_up, tolerance)))


def _best(every: list[Pipeline], tolerance: float, labels_max: int) -> tuple[Found, Pipeline | None]:
    """Looser tolerances first: where the budget runs out, the gap is at most the last one that was proven."""
    found, labels = Found(None, inf, 0), 0
    for within in (*(looser for looser in _LOOSER if looser > tolerance), tolerance):
        found = best_first(
            [pipeline.search for pipeline in every], tolerance=within, labels_max=max(labels_max - labels, 0)
        )
        labels += found.labels
    found = replace(found, labels=labels)
    return found, next((pipeline for pipeline in every if pipeline.search is found.best), None)


def _runners_up(
    request: SolveRequest, every: list[Pipeline], best: Pipeline, count: int, tolerance: float
) -> Iterator[ParallelPlan]:
    """The best plans of pipelines whose stages are wider or narrower than those before."""
    for _ in range(count):
        every = [pipeline for pipeline in every if pipeline.widths != best.widths]
        found, after = _best(every, tolerance, LABELS_MAX)
        if after is None:
            return
        best = after
        yield plan_of(request, best, found.gap)


def _better_alone(
    request: SolveRequest, whole: SearchOutcome, tolerance: float, labels_max: int, bench: Workbench
) -> SearchOutcome:
    """`whole`, or the plan of one GPU model alone where that is as fast."""
    chosen, bound_s = whole, whole.bound_s
    mixed = whole.result if isinstance(whole.result, ParallelPlan) else None
    together = mixed and f"the best plan found for all of {request.shape} {mixed.iteration_time_s:.4g} s"
    lacking = "there is no plan" if whole.bound_s == inf else "no plan was found within the budget"
    slower = together or f"for all of {request.shape} {lacking}"
    for group in request.groups:
        alone = request.alone(group.hardware.gpu)
        own = _search(alone, tolerance, labels_max, 0, bench)
        bound_s = min(bound_s, own.bound_s)
        if isinstance(own.result, ParallelPlan) and own.result.iteration_time_s <= _time_s(chosen):
            taken = f"{alone.shape} alone takes {own.result.iteration_time_s:.4g} s a step"
            remark = f"mixing does not pay: {taken}, {slower}"
            chosen = replace(own, runners_up=whole.runners_up, remark=remark, whole=mixed)
    if isinstance(chosen.result, Infeasible):
        return chosen
    gap = max(chosen.result.optimality_gap, 1.0 - bound_s / chosen.result.iteration_time_s)
    return replace(chosen, result=replace(chosen.result, optimality_gap=gap), bound_s=bound_s)


def _time_s(outcome: SearchOutcome) -> float:
    return outcome.result.iteration_time_s if isinstance(outcome.result, ParallelPlan) else inf
