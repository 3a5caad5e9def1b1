"""Reasons why there is no plan, and the smallest change that would help."""

from __future__ import annotations

import re
from dataclasses import replace

from scheduler.domain.gpu_sets import GpuGroup, GpuShape
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.solver.infeasible import explain_infeasible_batch, explain_infeasible_memory
from scheduler.solver.profiles.catalog import load_gpu, load_model
from scheduler.solver.request import Infeasibility, SolveRequest
from scheduler.solver.search.pipelines import enumerate_pipelines
from scheduler.solver.search.plan_search import solve_plan
from scheduler.solver.search.stage_oracle import OracleCache


def _request(model: str, gpu: str, gpus: int, memory_bytes: int = 0) -> SolveRequest:
    return SolveRequest(load_model(model), (load_gpu(gpu),), GpuShape.packed(gpu, gpus, 8), 64, memory_bytes)


def test_memory_reason_reports_the_leanest_plan_and_a_feasible_change() -> None:
    request = _request("llama-2-7b", "a100-80g", 2, 16 * 10**9)
    reason = explain_infeasible_memory(request, enumerate_pipelines(request, OracleCache())).reason
    found = re.match(r"needs ([\d.]+) GB of 16.0 GB per GPU of a100-80g at tp=\d", reason)
    assert found is not None, reason
    needed = float(found[1])
    assert f"it would fit in {needed} GB per GPU, or on " in reason
    assert isinstance(solve_plan(replace(request, memory_bytes_max=round(needed * 1e9))), ParallelPlan)
    more = re.search(r"or on (\d+)x(\d+) a100-80g", reason)
    assert more is not None, reason
    enough = _request("llama-2-7b", "a100-80g", int(more[1]) * int(more[2]), 16 * 10**9)
    assert isinstance(solve_plan(enough), ParallelPlan)


def test_reported_memory_is_sufficient_to_its_last_digit() -> None:
    for model, gpus in (("llama-2-13b", 8), ("vit-huge", 1)):
        request = _request(model, "a100-80g", gpus, 2_100_000_000)
        found = solve_plan(request)
        assert isinstance(found, Infeasibility)
        needed = re.search(r"it would fit in ([\d.]+) GB", found.reason)
        assert needed is not None, found.reason
        assert isinstance(solve_plan(replace(request, memory_bytes_max=round(float(needed[1]) * 1e9))), ParallelPlan)


def test_batch_reason_reports_a_feasible_batch() -> None:
    reason = explain_infeasible_batch(_request("tiny-gpt", "cpu", 7)).reason
    assert "a global batch of 64 cannot be split evenly over 7 GPUs" in reason
    assert reason.endswith("a global batch of 63 is possible")


def test_search_reports_a_feasible_batch() -> None:
    request = _request("tiny-gpt", "cpu", 7)
    found = solve_plan(request)
    assert isinstance(found, Infeasibility)
    assert found.constraint == "batch"
    advised = int(found.reason.removesuffix(" is possible").split()[-1])
    assert isinstance(solve_plan(replace(request, global_batch=advised)), ParallelPlan)


def test_limit_below_the_reserve_is_infeasible() -> None:
    found = solve_plan(_request("gpt2", "a100-80g", 2, 10**9))
    assert isinstance(found, Infeasibility)
    assert found.constraint == "memory"


def test_memory_reason_of_two_models_names_the_one_that_lacks_most() -> None:
    shape = GpuShape((GpuGroup("a100-80g", 1, 1), GpuGroup("t4", 1, 1)))
    hardware = tuple(load_gpu(group.gpu) for group in shape.groups)
    found = solve_plan(SolveRequest(load_model("llama-2-70b"), hardware, shape, 8))
    assert isinstance(found, Infeasibility)
    assert found.constraint == "memory"
    assert re.match(r"needs [\d.]+ GB of [\d.]+ GB per GPU of (a100-80g|t4) at tp=1, pp=2, ", found.reason)


def test_layers_larger_than_any_memory_are_infeasible() -> None:
    model = load_model("nano-gpt")
    layer = replace(model.layers[0], activation_bytes_per_sample=2**43, boundary_bytes_per_sample=2**43)
    model = replace(model, layers=(layer,))
    request = replace(_request("nano-gpt", "cpu", 8), model=model, global_batch=720_720)
    found = solve_plan(request)
    assert isinstance(found, Infeasibility)
    assert found.constraint == "memory"
