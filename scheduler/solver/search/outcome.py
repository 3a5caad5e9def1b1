"""SearchOutcome: a search's answer, and how the solution of a pipeline becomes a plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from math import inf

from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan, Stage
from scheduler.solver.evaluate import evaluate
from scheduler.solver.instance import Solution
from scheduler.solver.request import Infeasible, SolveRequest
from scheduler.solver.search.pipelines import Pipeline


@dataclass(frozen=True, slots=True)
class SearchReport:
    """How much was looked at: `candidates` are triples (pipeline, micro-batches, layer strategy)."""

    candidates: int
    labels: int


@dataclass(frozen=True, slots=True)
class SearchOutcome:
    """The answer, and what it took.

    `bound_s` is a time that no plan can beat. `runners_up` are the best plans of other pipelines, fastest first.
    `remark` says where the plan leaves GPUs out; `whole` is then the best plan that uses all of them, if there is one.
    """

    result: ParallelPlan | Infeasible
    report: SearchReport
    bound_s: float = inf
    runners_up: tuple[ParallelPlan, ...] = ()
    remark: str = ""
    whole: ParallelPlan | None = None


def plan_of(request: SolveRequest, pipeline: Pipeline, gap: float) -> ParallelPlan:
    """The best plan that the search of `pipeline` has found, with the predictions of the independent evaluator."""
    solution = pipeline.search.solution
    assert solution is not None, "only a search that found a plan is asked for it"
    return judged_plan(request, pipeline, solution, pipeline.search.cost_s, gap)


def judged_plan(
    request: SolveRequest, pipeline: Pipeline, solution: Solution, cost_s: float, gap: float
) -> ParallelPlan:
    """The plan that `solution` of the pipeline's instance stands for; `cost_s` is its price, which the evaluator has to
    confirm."""
    batch = request.global_batch
    draft = ParallelPlan(
        schedule=pipeline.frame.schedule,
        micro_batches=pipeline.frame.micro_batches,
        micro_batch_size=batch // pipeline.frame.micro_batches,
        iteration_time_s=cost_s,
        samples_per_s=batch / cost_s,
        peak_bytes_per_gpu=0,
        stages=_stages(pipeline, solution),
        optimality_gap=gap,
    )
    judged = evaluate(draft, request)
    overhead_s = max(team.group.hardware.iteration_overhead_s for team in pipeline.teams)
    assert judged.fits, "the search returned a plan beyond the memory limit"
    apart_s = abs(judged.iteration_time_s - overhead_s - cost_s)
    assert apart_s <= 1e-9 * judged.iteration_time_s, "the evaluator disagrees"
    return replace(
        draft,
        iteration_time_s=judged.iteration_time_s,
        samples_per_s=batch / judged.iteration_time_s,
        peak_bytes_per_gpu=judged.peak_bytes_per_gpu,
    )


def _stages(pipeline: Pipeline, solution: Solution) -> tuple[Stage, ...]:
    stages = []
    for number, (first, end) in enumerate(pairwise(solution.borders)):
        team = pipeline.teams[solution.order[number % pipeline.devices]]
        chosen = [team.costed.strategy(choice) for choice in solution.choice[first:end]]
        stages.append(Stage(first, end - 1, team.group.hardware.gpu, team.setting.gpus, _runs(chosen)))
    return tuple(stages)


def _runs(chosen: list[LayerStrategy]) -> tuple[LayerStrategy, ...]:
    """Neighbouring layers of one strategy as one run."""
    return tuple(replace(strategy, layers=len(list(run))) for strategy, run in groupby(chosen))
