"""Solves plan queries and instance files, and returns the solutions as JSON.

Only instance files and the MILP use `baselines.milp`, so it is imported on demand.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from cli.exit_codes import CommandError
from cli.inputs import input_errors_from, raise_input_error, read_text
from cli.planning.request import PlanQuery, Solver, SolverOptions
from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.parallel_plan import ParallelPlan, plan_to_json
from scheduler.domain.scaling_curve import ScalingCurve
from scheduler.solver.fewer_gpus import search_offered_gpus
from scheduler.solver.infeasible import explain_infeasible_batch, explain_infeasible_memory, explain_infeasible_shape
from scheduler.solver.inspection import search_outcome_to_json, simplest_plan_to_json
from scheduler.solver.instance import Instance, Solution, evaluate_solution
from scheduler.solver.request import Infeasibility, SolveRequest
from scheduler.solver.search.pipeline_search import PipelineSearch, search_best_first
from scheduler.solver.search.pipelines import Pipeline, enumerate_pipelines
from scheduler.solver.search.plan_search import (
    GPU_MODELS_MAX,
    SearchOutcome,
    SearchStats,
    build_evaluated_plan,
    search_plan,
)
from scheduler.solver.search.simple_plan import find_simplest_plan
from scheduler.solver.search.stage_oracle import OracleCache

Json = dict[str, Any]


def solve_plan(
    request: SolveRequest, *, tolerance: float, alternatives: int, simplicity: float
) -> tuple[Json, GpuShape]:
    """Return the best plan as JSON with its inspection, or `infeasible` and `constraint`, and the GPUs that it uses.

    They are fewer than requested if the batch cannot be split over all of them, or if more are no faster. `simplest` is
    the plan with the fewest different strategies that is at most `simplicity` slower. `search_time_s` covers the search
    for the best plan, not the searches for runners-up and the simplest plan.
    """
    oracle_cache, started_s = OracleCache(), time.perf_counter()
    outcome, used = search_offered_gpus(request, tolerance=tolerance, oracle_cache=oracle_cache)
    took, plan = _describe_search(outcome, started_s), outcome.result
    if isinstance(plan, Infeasibility):
        return {**infeasible_to_json(plan), **took}, used.shape
    if alternatives:
        others = search_plan(used, tolerance=tolerance, runners_up=alternatives, oracle_cache=oracle_cache)
        outcome = replace(outcome, runners_up=others.runners_up)
    simplest = find_simplest_plan(used, plan, ratio=simplicity, oracle_cache=oracle_cache)
    document = search_outcome_to_json(outcome, plan, used)
    return {**document, "simplest": simplest_plan_to_json(simplest, plan), **took}, used.shape


def solve_curve(query: PlanQuery, *, tolerance: float) -> list[Json]:
    """Return one point per shape: its plan or the reason why none is feasible.

    `better_gpus` is a smaller number of GPUs that is at least as fast, or None.
    """
    oracle_cache, plans, points = OracleCache(), dict[GpuShape, ParallelPlan](), dict[GpuShape, Json]()
    for shape in query.shapes:
        outcome, took = _run_timed_search(query.build_request(shape), tolerance, oracle_cache)
        head = {"gpus": shape.gpus, "shape": str(shape)}
        if isinstance(outcome.result, Infeasibility):
            points[shape] = {**head, **infeasible_to_json(outcome.result), **took}
        else:
            plans[shape] = outcome.result
            points[shape] = {**head, **plan_to_json(outcome.result), **took}
    curve = ScalingCurve(plans)
    for shape in plans:
        better = curve.faster_subset(shape)
        points[shape]["better_gpus"] = better.gpus if better else None
    return list(points.values())


def infeasible_to_json(infeasible: Infeasibility) -> Json:
    return {"infeasible": infeasible.reason, "constraint": infeasible.constraint}


def _run_timed_search(request: SolveRequest, tolerance: float, oracle_cache: OracleCache) -> tuple[SearchOutcome, Json]:
    started_s = time.perf_counter()
    outcome = search_plan(request, tolerance=tolerance, oracle_cache=oracle_cache)
    return outcome, _describe_search(outcome, started_s)


def _describe_search(outcome: SearchOutcome, started_s: float) -> Json:
    return {"search_time_s": time.perf_counter() - started_s, "candidates": outcome.stats.candidates}


@dataclass(frozen=True, slots=True)
class _InstanceResult:
    """The best solution over all instances. No solution of any instance is faster than `bound_s` seconds."""

    solution: Solution | None
    instance_index: int
    objective_s: float
    bound_s: float
    proven: bool
    status: str

    @property
    def optimality_gap(self) -> float:
        return 0.0 if self.solution is None else max(0.0, 1.0 - self.bound_s / self.objective_s)


def write_instances(request: SolveRequest, file: str) -> int:
    """Write all instances of the request to `file` and return their number. Raises InputError if it cannot.

    Plans that stream state from the host are left out.
    """
    instances = [pipeline.search.instance for _, pipeline in _enumerate_pipelines(request.without_streaming())]
    try:
        from baselines.milp.instance_document import format_instances

        Path(file).write_text(format_instances(instances), encoding="utf-8")
    except OSError as error:
        raise_input_error(f"--dump {file}: cannot be written: {error.strerror or error}")
    return len(instances)


def solve_instances_file(file: str, solver_options: SolverOptions) -> Json:
    """Return the best solution of all instances in a file: objective, proven bound and decision variables."""
    from baselines.milp.instance_document import parse_instances

    with input_errors_from(f"--load {file}"):
        instances = parse_instances(read_text(file), Path(file).name)
    if not instances:
        raise_input_error(f"--load {file}: `instances` is empty. It must contain at least one instance.")
    started_s = time.perf_counter()
    answer = _solve_instances(instances, solver_options)
    details = {
        **_result_to_json(answer, solver_options, len(instances)),
        "search_time_s": time.perf_counter() - started_s,
    }
    if answer.solution is None:
        return {**infeasible_to_json(_explain_no_solution(answer, solver_options)), **details}
    instance, solution = instances[answer.instance_index], answer.solution
    priced = evaluate_solution(instance, solution)
    assert priced.fits, "a solver returned a solution beyond the memory limit"
    return {
        **details,
        "micro_batches": instance.micro_batches,
        "interleave": instance.interleave,
        "order": list(solution.order),
        "borders": list(solution.borders),
        "choice": list(solution.choice),
        "devices_s": list(priced.devices_s),
        "links_s": list(priced.links_s),
        "memory_bytes": list(priced.memory_bytes),
        "capacity_bytes": [instance.capacity_bytes[group] for group in solution.order],
    }


def solve_with_milp(request: SolveRequest, solver_options: SolverOptions) -> Json:
    """Return the plan found by the MILP, like `solve_plan`. Objective and bound omit the fixed overhead of a step.

    As in `search_plan`, plans that stream state from the host are searched only if nothing else fits.
    """
    if request.may_stream:
        found = solve_with_milp(request.without_streaming(), solver_options)
        if found.get("constraint") != "memory":
            return found
    started_s = time.perf_counter()
    pipelines = _enumerate_pipelines(request)
    report = SearchStats(sum(pipeline.candidates for _, pipeline in pipelines), 0)
    if not pipelines:
        nothing = (
            explain_infeasible_shape(request, GPU_MODELS_MAX)
            if len(request.groups) > GPU_MODELS_MAX
            else explain_infeasible_batch(request)
        )
        return {**infeasible_to_json(nothing), "search_time_s": 0.0, "candidates": 0}
    answer = _solve_instances([pipeline.search.instance for _, pipeline in pipelines], solver_options)
    took = {"search_time_s": time.perf_counter() - started_s, "candidates": report.candidates}
    details = {**_result_to_json(answer, solver_options, len(pipelines)), **took}
    if answer.solution is None:
        whole = [pipeline for pipeline_request, pipeline in pipelines if pipeline_request is request]
        nothing = (
            explain_infeasible_memory(request, whole) if answer.proven else _explain_no_solution(answer, solver_options)
        )
        return {**infeasible_to_json(nothing), **details}
    pipeline_request, pipeline = pipelines[answer.instance_index]
    plan = build_evaluated_plan(pipeline_request, pipeline, answer.solution, answer.objective_s, answer.optimality_gap)
    remark = "" if pipeline_request is request else f"{pipeline_request.shape} alone is faster"
    return {**search_outcome_to_json(SearchOutcome(plan, report, remark=remark), plan, pipeline_request), **details}


def _enumerate_pipelines(request: SolveRequest) -> list[tuple[SolveRequest, Pipeline]]:
    """Return all pipelines of the request. With several GPU models, also those on some of them alone."""
    if len(request.groups) > GPU_MODELS_MAX:
        return []
    return [
        (pipeline_request, pipeline)
        for pipeline_request in (request, *request.list_parts())
        for pipeline in enumerate_pipelines(pipeline_request, OracleCache())
    ]


def _solve_instances(instances: Sequence[Instance], solver_options: SolverOptions) -> _InstanceResult:
    if solver_options.solver is Solver.EXACT:
        pairs = [PipelineSearch.from_instance(instance) for instance in instances]
        found = search_best_first(pairs, tolerance=solver_options.tolerance)
        if found.best is None:
            return _InstanceResult(None, 0, inf, found.bound_s, found.bound_s == inf, "no solution")
        status = "optimal" if not found.gap else "within the tolerance"
        number = next(number for number, pair in enumerate(pairs) if pair is found.best)
        return _InstanceResult(found.best.solution, number, found.best.cost_s, found.bound_s, not found.gap, status)
    try:
        from baselines.milp import solver

        ended = solver.solve_instances(instances, time_limit_s=solver_options.time_limit_s)
    except ModuleNotFoundError as missing:
        raise CommandError(str(missing)) from missing
    return _InstanceResult(ended.solution, ended.number, ended.objective_s, ended.bound_s, ended.proven, ended.status)


def _result_to_json(result: _InstanceResult, solver_options: SolverOptions, instances: int) -> Json:
    return {
        "solver": solver_options.solver.value,
        "status": result.status,
        "proven": result.proven,
        "instances": instances,
        "instance": result.instance_index,
        "objective_s": result.objective_s,
        "bound_s": result.bound_s,
        "optimality_gap": result.optimality_gap,
    }


def _explain_no_solution(result: _InstanceResult, solver_options: SolverOptions) -> Infeasibility:
    if result.proven:
        return Infeasibility("no solution fits into memory", "memory")
    if solver_options.time_limit_s < inf:
        return Infeasibility(
            f"no solution was found within {solver_options.time_limit_s:g} s; a longer --time-limit may find one",
            "time",
        )
    return Infeasibility("no solution was found within the search budget", "budget")
