"""The search on real profiles: laws that must hold, the answers without a plan, and the proven gap."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from scheduler.domain.gpu_shape import GpuGroup, GpuShape
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.solver.evaluate import evaluate
from scheduler.solver.profiles.hardware_profile import Dimension
from scheduler.solver.profiles.shipped import load_gpu, load_model
from scheduler.solver.request import Infeasible, SolveRequest
from scheduler.solver.search.search import search, solve

GB = 10**9


def _request(model: str = "llama-2-7b", *, gpus: int = 8, batch: int = 64, memory_gb: int = 0) -> SolveRequest:
    shape = GpuShape.packed("a100-80g", gpus, 8)
    return SolveRequest(load_model(model), load_gpu("a100-80g"), shape, batch, memory_gb * GB)


def _plan(request: SolveRequest) -> ParallelPlan:
    found = solve(request)
    assert isinstance(found, ParallelPlan), found
    judged = evaluate(found, request)
    assert judged.fits
    assert judged.iteration_time_s == found.iteration_time_s
    assert found.optimality_gap == 0.0
    assert found.world_size == request.gpus
    assert found.global_batch == request.global_batch
    return found


@pytest.mark.parametrize("sequence_length", [2048, 4096])
def test_llama_on_eight_gpus_reaches_a_plausible_utilization(sequence_length: int) -> None:
    request = replace(_request(), model=load_model("llama-2-7b", sequence_length))
    assert 0.35 < evaluate(_plan(request), request).model_flops_utilization < 0.60


def test_more_memory_is_never_slower() -> None:
    times_s = [_plan(_request(memory_gb=memory_gb)).iteration_time_s for memory_gb in (18, 20, 24, 32, 48, 64, 80)]
    assert all(less >= more for less, more in pairwise(times_s))
    assert times_s[0] > times_s[-1]


def test_faster_links_and_faster_gpus_are_never_slower() -> None:
    plain = replace(_request(gpus=16), memory_bytes_max=24 * GB)
    plain_s = _plan(plain).iteration_time_s
    hardware = plain.hardware
    for faster in (
        replace(hardware, inter_bandwidth_bytes_per_s=2 * hardware.inter_bandwidth_bytes_per_s),
        replace(hardware, intra_bandwidth_bytes_per_s=2 * hardware.intra_bandwidth_bytes_per_s),
        replace(hardware, peak_flops_per_s=2 * hardware.peak_flops_per_s),
        replace(hardware, inter_latency_s=hardware.inter_latency_s / 2),
    ):
        assert _plan(replace(plain, hardware=faster)).iteration_time_s <= plain_s


def test_a_wider_choice_of_strategies_is_never_slower() -> None:
    every = replace(_request(), memory_bytes_max=30 * GB)
    best_s = _plan(every).iteration_time_s
    for dimension in set(Dimension) - {Dimension.DATA}:
        narrow = replace(every.hardware, dimensions=every.hardware.dimensions - {dimension})
        found = solve(replace(every, hardware=narrow))
        assert isinstance(found, Infeasible) or found.iteration_time_s >= best_s


def test_equal_requests_get_equal_answers() -> None:
    assert search(_request(memory_gb=24)) == search(_request(memory_gb=24))


def test_a_slow_network_is_crossed_by_the_pipeline_and_tight_memory_mixes_strategies() -> None:
    slow = replace(load_gpu("a100-80g"), inter_bandwidth_bytes_per_s=1e9)
    across = _plan(replace(_request(gpus=64), hardware=slow))
    assert len(across.stages) == 8
    tight = _plan(_request(memory_gb=24))
    assert len(tight.stages[0].strategies) == 2


def test_uneven_nodes_keep_tensor_parallelism_inside_the_smallest() -> None:
    shape = GpuShape((GpuGroup("a100-80g", 1, 2), GpuGroup("a100-80g", 2, 1)))
    plan = _plan(replace(_request(), shape=shape))
    assert {strategy.tp for stage in plan.stages for strategy in stage.strategies} == {1}


def test_a_cpu_plan_is_data_parallel_in_one_stage() -> None:
    cpu = SolveRequest(load_model("tiny-gpt"), load_gpu("cpu"), GpuShape.packed("cpu", 3, 2), 12)
    plan = _plan(cpu)
    assert len(plan.stages) == 1
    assert {(strategy.tp, strategy.dp) for strategy in plan.stages[0].strategies} == {(1, 3)}


def test_too_little_memory_names_what_the_leanest_plan_needs() -> None:
    found = solve(_request(gpus=1, memory_gb=80))
    assert isinstance(found, Infeasible)
    assert found.constraint == "memory"
    assert found.reason.startswith("needs 113.3 GB of 80.0 GB per GPU at tp=1, pp=1, recompute=full")


def test_the_leanest_plan_of_the_message_fits_as_soon_as_the_limit_allows_it() -> None:
    found = solve(_request(memory_gb=12))
    assert isinstance(found, Infeasible)
    needed_gb = float(found.reason.split()[1])
    assert isinstance(solve(replace(_request(), memory_bytes_max=round((needed_gb + 0.1) * GB))), ParallelPlan)


def test_a_limit_below_the_reserve_is_infeasible() -> None:
    found = solve(_request(memory_gb=1))
    assert isinstance(found, Infeasible)
    assert found.constraint == "memory"


def test_a_batch_that_cannot_be_split_says_so() -> None:
    cpu = SolveRequest(load_model("tiny-gpt"), load_gpu("cpu"), GpuShape.packed("cpu", 3, 3), 16)
    found = solve(cpu)
    assert isinstance(found, Infeasible)
    assert found.constraint == "batch"
    assert "a global batch of 16 cannot be split evenly over 3 GPUs of cpu" in found.reason


def test_mixed_gpu_models_are_not_solved_yet() -> None:
    mixed = GpuShape((GpuGroup("a100-80g", 1, 8), GpuGroup("h100-80g", 1, 8)))
    found = solve(replace(_request(), shape=mixed))
    assert isinstance(found, Infeasible)
    assert found.constraint == "shape"
    assert found.reason.startswith("mixed GPU models are not solved yet")


def test_the_report_counts_candidates_and_labels() -> None:
    report = search(_request(memory_gb=24)).report
    assert report.candidates == 184
    assert report.labels > 0


def test_a_spent_budget_reports_the_gap_that_is_left() -> None:
    request = _request(memory_gb=24)
    best_s = _plan(request).iteration_time_s
    found = search(request, labels_max=1).result
    assert isinstance(found, ParallelPlan)
    assert evaluate(found, request).fits
    assert found.optimality_gap > 0
    assert found.iteration_time_s * (1 - found.optimality_gap) <= best_s <= found.iteration_time_s


def test_no_budget_at_all_is_not_called_infeasible_memory() -> None:
    found = search(_request(), labels_max=0).result
    assert isinstance(found, Infeasible)
    assert found.constraint == "budget"


def test_a_tolerance_ends_the_search_earlier_and_is_kept() -> None:
    request = _request(memory_gb=24)
    exact, rough = search(request), search(request, tolerance=0.05)
    assert isinstance(exact.result, ParallelPlan)
    assert isinstance(rough.result, ParallelPlan)
    assert rough.report.labels <= exact.report.labels
    assert rough.result.optimality_gap <= 0.05
    assert rough.result.iteration_time_s * 0.95 <= exact.result.iteration_time_s
