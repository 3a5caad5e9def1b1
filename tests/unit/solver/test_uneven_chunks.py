"""Interleaved pipelines in which embedding and head count as layers."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.parallel_plan import ParallelPlan, ScheduleName
from scheduler.domain.plan_limits import PlanLimits
from scheduler.solver.profiles.catalog import load_gpu, load_model
from scheduler.solver.request import SolveRequest
from scheduler.solver.search.plan_search import solve_plan

REQUEST = SolveRequest(
    load_model("llama-3.1-405b"), (load_gpu("h100-80g"),), GpuShape.packed("h100-80g", 512, 8), global_batch=512
)


def test_126_layers_are_interleaved_with_one_layer_less_at_both_ends() -> None:
    plan = solve_plan(REQUEST, tolerance=0.01)
    assert isinstance(plan, ParallelPlan)
    assert plan.schedule.name is ScheduleName.INTERLEAVED
    first, *inner, last = (stage.last_layer - stage.first_layer + 1 for stage in plan.stages)
    assert {first + 1, *inner, last + 1} == {128 // len(plan.stages)}
    assert all(one.last_layer + 1 == two.first_layer for one, two in pairwise(plan.stages))


@pytest.mark.parametrize("limits", [PlanLimits(has_equal_chunks=True), PlanLimits(has_equal_stages=True)])
def test_equal_chunks_are_slower_there(limits: PlanLimits) -> None:
    free, equal = (solve_plan(request, tolerance=0.01) for request in (REQUEST, replace(REQUEST, limits=limits)))
    assert isinstance(free, ParallelPlan)
    assert isinstance(equal, ParallelPlan)
    assert not limits.find_violation(equal)
    assert equal.iteration_time_s > free.iteration_time_s
