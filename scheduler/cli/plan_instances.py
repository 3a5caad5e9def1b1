"""Requests as instances of plain arrays: written to a file, read from one, and solved by either solver."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from scheduler.cli.failure import Failed, blaming, refuse
from scheduler.cli.inputs import text_of
from scheduler.cli.plan_options import How, Solver
from scheduler.cli.plan_solving import infeasible_to_json
from scheduler.solver.infeasible import batch_infeasible, memory_infeasible, shape_infeasible
from scheduler.solver.inspection import answer_to_json
from scheduler.solver.instance import Instance, Solution, price
from scheduler.solver.instance_document import dump_instances, load_instances
from scheduler.solver.referee import milp
from scheduler.solver.request import Infeasible, SolveRequest
from scheduler.solver.search.best_first import best_first
from scheduler.solver.search.outcome import SearchOutcome, SearchReport, judged_plan
from scheduler.solver.search.pair_search import PairSearch
from scheduler.solver.search.pipelines import Pipeline, pipelines
from scheduler.solver.search.workbench import Workbench

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Answer:
    """`number` is the instance that the solution belongs to; no solution of any instance takes less than `bound_s`."""

    solution: Solution | None
    number: int
    objective_s: float
    bound_s: float
    proven: bool
    status: str

    @property
    def gap(self) -> float:
        return 0.0 if self.solution is None else max(0.0, 1.0 - self.bound_s / self.objective_s)


def write_instances(request: SolveRequest, file: str) -> int:
    """Writes all instances of the request; how many. Raises BadInput if it cannot."""
    instances = [pipeline.search.instance for _, pipeline in _pipelines(request)]
    try:
        Path(file).write_text(dump_instances(instances), encoding="utf-8")
    except OSError as wrong:
        refuse(f"--dump {file}: cannot be written: {wrong.strerror or wrong}")
    return len(instances)


def solved_file(file: str, how: How) -> Json:
    """The best solution of all instances of a file, with its objective, the proven bound and its integers."""
    with blaming(f"--load {file}"):
        instances = load_instances(text_of(file), Path(file).name)
    if not instances:
        refuse(f"--load {file}: instances is []; it must have at least one")
    started_s = time.perf_counter()
    answer = _solve(instances, how)
    told = {**_told(answer, how, len(instances)), "search_time_s": time.perf_counter() - started_s}
    if answer.solution is None:
        return {**infeasible_to_json(_nothing(answer, how)), **told}
    instance, solution = instances[answer.number], answer.solution
    priced = price(instance, solution)
    assert priced.fits, "a solver returned a solution beyond the memory limit"
    return {
        **told,
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


def solved_by_milp(request: SolveRequest, how: How) -> Json:
    """As `solved`, by the referee, with its objective and bound (both without the fixed overhead of a step)."""
    started_s = time.perf_counter()
    every = _pipelines(request)
    report = SearchReport(sum(pipeline.candidates for _, pipeline in every), 0)
    if not every:
        nothing = shape_infeasible(request) if len(request.groups) > 2 else batch_infeasible(request)
        return {**infeasible_to_json(nothing), "search_time_s": 0.0, "candidates": 0}
    answer = _solve([pipeline.search.instance for _, pipeline in every], how)
    took = {"search_time_s": time.perf_counter() - started_s, "candidates": report.candidates}
    told = {**_told(answer, how, len(every)), **took}
    if answer.solution is None:
        whole = [pipeline for asked, pipeline in every if asked is request]
        nothing = memory_infeasible(request, whole) if answer.proven else _nothing(answer, how)
        return {**infeasible_to_json(nothing), **told}
    asked, pipeline = every[answer.number]
    plan = judged_plan(asked, pipeline, answer.solution, answer.objective_s, answer.gap)
    remark = "" if asked is request else f"mixing does not pay: {asked.shape} alone is faster"
    return {**answer_to_json(SearchOutcome(plan, report, remark=remark), plan, asked), **told}


def _pipelines(request: SolveRequest) -> list[tuple[SolveRequest, Pipeline]]:
    """Of two GPU models also those of each model alone, which may be faster."""
    if len(request.groups) > 2:
        return []
    alone = [request.alone(group.hardware.gpu) for group in request.groups] if len(request.groups) == 2 else []
    return [(asked, pipeline) for asked in (request, *alone) for pipeline in pipelines(asked, Workbench())]


def _solve(instances: Sequence[Instance], how: How) -> _Answer:
    if how.solver is Solver.EXACT:
        pairs = [PairSearch.of(instance) for instance in instances]
        found = best_first(pairs, tolerance=how.tolerance)
        if found.best is None:
            return _Answer(None, 0, inf, found.bound_s, found.bound_s == inf, "no solution")
        status = "optimal" if not found.gap else "within the tolerance"
        number = next(number for number, pair in enumerate(pairs) if pair is found.best)
        return _Answer(found.best.solution, number, found.best.cost_s, found.bound_s, not found.gap, status)
    try:
        ended = milp.solve_all(instances, time_limit_s=how.time_limit_s)
    except ModuleNotFoundError as missing:
        raise Failed(str(missing)) from missing
    return _Answer(ended.solution, ended.number, ended.objective_s, ended.bound_s, ended.proven, ended.status)


def _told(answer: _Answer, how: How, instances: int) -> Json:
    return {
        "solver": how.solver.value,
        "status": answer.status,
        "proven": answer.proven,
        "instances": instances,
        "instance": answer.number,
        "objective_s": answer.objective_s,
        "bound_s": answer.bound_s,
        "optimality_gap": answer.gap,
    }


def _nothing(answer: _Answer, how: How) -> Infeasible:
    if answer.proven:
        return Infeasible("no solution of any instance fits into its memory", "memory")
    if how.time_limit_s < inf:
        return Infeasible(f"none was found within {how.time_limit_s:g} s; a longer --time-limit may find one", "time")
    return Infeasible("none was found within the budget of work", "budget")
