"""The search on real profiles: properties of its plans, infeasible requests, and the proven gap."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from scheduler.domain.gpu_sets import GpuGroup, GpuShape
from scheduler.domain.parallel_plan import ParallelPlan, Recompute
from scheduler.solver.evaluate import evaluate
from scheduler.solver.profiles.catalog import load_gpu, load_model
from scheduler.solver.request import Infeasibility, SolveRequest
from scheduler.solver.search.plan_search import search_plan, solve_plan

GB = 10**9
TOLERANCE = 1e-3


def _request(
    model: str = "llama-2-7b", *, gpu: str = "a100-80g", gpus: int = 8, batch: int = 64, memory_gb: int = 0
) -> SolveRequest:
    shape = GpuShape.packed(gpu, gpus, 8)
    return SolveRequest(load_model(model), (load_gpu(gpu),), shape, batch, memory_gb * GB)


def _mixed(model: str, *groups: GpuGroup, batch: int) -> SolveRequest:
    return SolveRequest(load_model(model), tuple(load_gpu(one.gpu) for one in groups), GpuShape(groups), batch)


def _plan(request: SolveRequest) -> ParallelPlan:
    found = search_plan(request, tolerance=TOLERANCE).result
    assert isinstance(found, ParallelPlan), found
    judged = evaluate(found, request)
    assert judged.fits
    assert judged.iteration_time_s == found.iteration_time_s
    assert found.optimality_gap <= TOLERANCE
    assert found.world_size == request.gpus
    assert found.global_batch == request.global_batch
    return found


@pytest.mark.parametrize("sequence_length", [2048, 4096])
def test_llama_on_eight_gpus_reaches_a_plausible_utilization(sequence_length: int) -> None:
    request = replace(_request(), model=load_model("llama-2-7b", sequence_length))
    assert 0.35 < evaluate(_plan(request), request).model_flops_utilization < 0.75


def test_tight_memory_costs_time_and_mixes_strategies() -> None:
    plans = [_plan(_request(memory_gb=memory_gb)) for memory_gb in (12, 18, 32, 80)]
    times_s = [plan.iteration_time_s for plan in plans]
    assert all(less > more for less, more in pairwise(times_s))
    assert any(len(stage.strategies) > 1 for plan in plans for stage in plan.stages)
    assert {run.recompute for stage in plans[0].stages for run in stage.strategies} > {Recompute.NONE}


def test_pipeline_crosses_a_slow_network() -> None:
    slow = replace(load_gpu("a100-80g"), inter_bandwidth_bytes_per_s=1e9)
    request = replace(_request(gpus=64), hardware=(slow,))
    assert _plan(request).pipeline_devices >= 8


def test_uneven_nodes_keep_tensor_parallelism_inside_the_smallest() -> None:
    shape = GpuShape((GpuGroup("a100-80g", 1, 2), GpuGroup("a100-80g", 2, 1)))
    plan = _plan(replace(_request(), shape=shape))
    assert {strategy.tp for stage in plan.stages for strategy in stage.strategies} == {1}


def test_a_cpu_plan_is_data_parallel_in_one_stage() -> None:
    plan = _plan(SolveRequest(load_model("tiny-gpt"), (load_gpu("cpu"),), GpuShape.packed("cpu", 3, 2), 12))
    assert len(plan.stages) == 1
    assert {(strategy.tp, strategy.dp) for strategy in plan.stages[0].strategies} == {(1, 3)}


def test_two_gpu_models_share_the_layers_by_their_speed() -> None:
    request = _mixed("llama-2-13b", GpuGroup("h100-80g", 1, 8), GpuGroup("a100-80g", 1, 8), batch=64)
    outcome = search_plan(request, tolerance=5e-3)
    assert isinstance(outcome.result, ParallelPlan)
    assert evaluate(outcome.result, request).fits
    assert outcome.remark == ""
    layers = dict.fromkeys(("h100-80g", "a100-80g"), 0)
    for stage in outcome.result.stages:
        layers[stage.gpu] += stage.last_layer - stage.first_layer + 1
    assert layers["h100-80g"] > layers["a100-80g"] > 0


def test_three_gpu_models_share_the_layers_by_their_speed() -> None:
    groups = (GpuGroup("h100-80g", 1, 8), GpuGroup("a100-80g", 1, 8), GpuGroup("v100-32g", 1, 8))
    plan = _plan(_mixed("llama-2-13b", *groups, batch=64))
    layers = Counter[str]()
    for stage in plan.stages:
        layers[stage.gpu] += stage.last_layer - stage.first_layer + 1
    assert layers["h100-80g"] > layers["a100-80g"] > layers["v100-32g"] > 0
    for left_out in groups:
        fewer = _mixed("llama-2-13b", *(group for group in groups if group is not left_out), batch=64)
        part = search_plan(fewer, tolerance=TOLERANCE).result
        assert isinstance(part, ParallelPlan)
        assert part.iteration_time_s > plan.iteration_time_s


def test_two_of_three_gpu_models_are_chosen_with_a_remark() -> None:
    request = _mixed(
        "llama-2-7b", GpuGroup("h100-80g", 1, 8), GpuGroup("a100-80g", 1, 8), GpuGroup("t4", 1, 1), batch=64
    )
    outcome = search_plan(request, tolerance=5e-3)
    assert isinstance(outcome.result, ParallelPlan)
    assert {stage.gpu for stage in outcome.result.stages} == {"h100-80g", "a100-80g"}
    assert outcome.remark.startswith("1x8 h100-80g + 1x8 a100-80g alone takes ")
    assert outcome.full_shape_plan is not None
    assert outcome.full_shape_plan.world_size == 17


def test_faster_gpu_model_alone_is_chosen_with_a_remark() -> None:
    request = _mixed("llama-2-7b", GpuGroup("h100-80g", 1, 8), GpuGroup("t4", 1, 4), batch=64)
    outcome = search_plan(request, tolerance=5e-3)
    assert isinstance(outcome.result, ParallelPlan)
    assert evaluate(outcome.result, request).fits
    assert {stage.gpu for stage in outcome.result.stages} == {"h100-80g"}
    assert outcome.remark.startswith("1x8 h100-80g alone takes ")
    assert "the best plan found for all of 1x8 h100-80g + 1x4 t4 " in outcome.remark
    assert outcome.full_shape_plan is not None
    assert outcome.full_shape_plan.world_size == 12
    assert outcome.full_shape_plan.iteration_time_s >= outcome.result.iteration_time_s


def test_runners_up_have_other_stage_widths() -> None:
    request = _request(memory_gb=32)
    outcome = search_plan(request, tolerance=TOLERANCE, runners_up=3)
    assert isinstance(outcome.result, ParallelPlan)
    plans = [outcome.result, *outcome.runners_up]
    assert len({plan.stages[0].gpus for plan in plans}) == len(plans) == 4
    assert all(one.iteration_time_s <= two.iteration_time_s * (1 + TOLERANCE) for one, two in pairwise(plans))
    assert all(evaluate(plan, request).fits for plan in plans)


def test_memory_infeasibility_reports_the_leanest_plan() -> None:
    found = solve_plan(_request(gpus=1, memory_gb=20))
    assert isinstance(found, Infeasibility)
    assert found.constraint == "memory"
    assert " GB of 20.0 GB per GPU of a100-80g at tp=1, pp=1, recompute=full" in found.reason


def test_search_stats_count_candidates_and_labels() -> None:
    report = search_plan(_request(memory_gb=24), tolerance=TOLERANCE).stats
    assert report.candidates > 1000
    assert report.labels > 0


def test_exhausted_budget_reports_the_remaining_gap() -> None:
    request = _request(memory_gb=24)
    best_s = _plan(request).iteration_time_s
    found = search_plan(request, labels_max=1).result
    assert isinstance(found, ParallelPlan)
    assert evaluate(found, request).fits
    assert found.optimality_gap > 0
    assert found.iteration_time_s * (1 - found.optimality_gap) <= best_s


def test_empty_budget_is_not_reported_as_memory() -> None:
    found = search_plan(_request(), labels_max=0).result
    assert isinstance(found, Infeasibility)
    assert found.constraint == "budget"
    assert found.reason == "no plan was found within the budget of 0 labels; a larger budget may find one"


def test_tolerance_ends_the_search_earlier() -> None:
    request = _request(memory_gb=24)
    exact, rough = search_plan(request), search_plan(request, tolerance=0.05)
    assert isinstance(exact.result, ParallelPlan)
    assert isinstance(rough.result, ParallelPlan)
    assert exact.result.optimality_gap == 0.0
    assert rough.stats.labels <= exact.stats.labels
    assert rough.result.optimality_gap <= 0.05
    assert rough.result.iteration_time_s * 0.95 <= exact.result.iteration_time_s
