"""Solving what `plan` was asked: the answers as plain JSON values, with the time that they took."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from scheduler.cli.plan_question import Question
from scheduler.domain.gpu_shape import GpuShape
from scheduler.domain.parallel_plan import ParallelPlan, plan_to_json
from scheduler.domain.scaling_curve import ScalingCurve
from scheduler.solver.inspection import answer_to_json
from scheduler.solver.request import Infeasible, SolveRequest
from scheduler.solver.search.outcome import SearchOutcome
from scheduler.solver.search.search import search
from scheduler.solver.search.workbench import Workbench

Json = dict[str, Any]


def solved(request: SolveRequest, *, tolerance: float, alternatives: int) -> Json:
    """The plan in the contract's form with its inspection, or `infeasible` and `constraint`.

    `search_time_s` is that of the search for the plan alone, without the one for its runners-up.
    """
    bench = Workbench()
    outcome, took = _search(request, tolerance, bench)
    plan = outcome.result
    if isinstance(plan, Infeasible):
        return {**infeasible_to_json(plan), **took}
    if alternatives:
        runners_up = search(request, tolerance=tolerance, runners_up=alternatives, bench=bench).runners_up
        outcome = replace(outcome, runners_up=runners_up)
    return {**answer_to_json(outcome, plan, request), **took}


def solved_curve(question: Question, *, tolerance: float) -> list[Json]:
    """A point a shape: its plan, or why there is none; `better_gpus` where fewer GPUs are at least as fast."""
    bench, plans, points = Workbench(), dict[GpuShape, ParallelPlan](), dict[GpuShape, Json]()
    for shape in question.shapes:
        outcome, took = _search(question.request(shape), tolerance, bench)
        head = {"gpus": shape.gpus, "shape": str(shape)}
        if isinstance(outcome.result, Infeasible):
            points[shape] = {**head, **infeasible_to_json(outcome.result), **took}
        else:
            plans[shape] = outcome.result
            points[shape] = {**head, **plan_to_json(outcome.result), **took}
    curve = ScalingCurve(plans)
    for shape in plans:
        better = curve.better_part(shape)
        points[shape]["better_gpus"] = better.gpus if better else None
    return list(points.values())


def infeasible_to_json(why: Infeasible) -> Json:
    return {"infeasible": why.reason, "constraint": why.constraint}


def _search(request: SolveRequest, tolerance: float, bench: Workbench) -> tuple[SearchOutcome, Json]:
    started_s = time.perf_counter()
    outcome = search(request, tolerance=tolerance, bench=bench)
    return outcome, {"search_time_s": time.perf_counter() - started_s, "candidates": outcome.report.candidates}
