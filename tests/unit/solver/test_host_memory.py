"""Plans that keep state on the host, within its memory."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan, Recompute, Schedule, Stage
from scheduler.solver.evaluate import evaluate
from scheduler.solver.inspection import inspect_plan
from scheduler.solver.plan_pricing import price_plan
from scheduler.solver.profiles.catalog import load_gpu, load_model, parse_model
from scheduler.solver.profiles.hardware_profile import STREAMED_DIMENSIONS
from scheduler.solver.profiles.model_profile import TrainingOptimizer
from scheduler.solver.profiles.profile_document import ProfileError
from scheduler.solver.request import Infeasibility, SolveRequest
from scheduler.solver.search.plan_search import solve_plan

STREAMED_BYTES = {"adamw": 18, "sgd": 14, "plain-sgd": 10, "adafactor": 10.01}
"""Bytes per parameter: 16-bit weights, fp32 gradients, fp32 master weights, and the moments."""

BYTES_PER_PARAMETER = 14
"""Of AdamW with 16-bit weights: fp16 gradients, fp32 master weights, two fp32 moments."""


def on_v100(layers: int, hidden: int, *, host_gb: float, gpus: int = 8) -> SolveRequest:
    configuration = {"n_layer": layers, "n_embd": hidden, "n_head": hidden // 128, "vocab_size": 50257}
    model = parse_model(json.dumps({"model_type": "gpt2", "n_positions": 1024, **configuration}), 1024)
    hardware = replace(load_gpu("v100-32g"), host_memory_bytes=round(host_gb * 1e9))
    return SolveRequest(model, (hardware,), GpuShape.packed("v100-32g", gpus, 8), global_batch=16)


def test_36e9_parameters_on_8_gpus_do_not_fit_into_240_gb_of_host_memory() -> None:
    request = on_v100(79, 6144, host_gb=240 / 8)
    found = solve_plan(request)
    assert isinstance(found, Infeasibility)
    assert found.constraint == "memory"
    needed_gb, given_gb = map(float, re.findall(r"([0-9.]+) GB", found.reason)[:2])
    assert given_gb == 30.0
    assert needed_gb == pytest.approx(request.model.parameters * BYTES_PER_PARAMETER / 8 / 1e9, rel=0.01)


def test_what_is_offloaded_is_told_and_fits_in_exactly_as_much() -> None:
    request = on_v100(79, 6144, host_gb=0)
    plan = solve_plan(request, tolerance=0.01)
    assert isinstance(plan, ParallelPlan)
    device = inspect_plan(plan, request).devices[0]
    assert device.host_bytes_max is None
    assert device.host_bytes == pytest.approx(request.model.parameters * BYTES_PER_PARAMETER / 8, rel=0.01)
    enough = replace(request, hardware=(replace(request.hardware[0], host_memory_bytes=device.host_bytes),))
    again = solve_plan(enough, tolerance=0.01)
    assert isinstance(again, ParallelPlan)
    assert again.iteration_time_s == pytest.approx(plan.iteration_time_s, rel=0.01)


def test_less_host_memory_makes_a_plan_slower_before_it_makes_it_impossible() -> None:
    times_s = []
    for host_gb in (0, 6, 4):
        request = on_v100(8, 8192, host_gb=host_gb, gpus=4)
        plan = solve_plan(request, tolerance=0.01)
        assert isinstance(plan, ParallelPlan)
        if host_gb:
            assert max(device.host_bytes for device in inspect_plan(plan, request).devices) <= host_gb * 1e9
        times_s.append(plan.iteration_time_s)
    assert times_s == sorted(times_s)
    assert times_s[-1] > times_s[0]


def test_a_plan_that_offloads_more_than_the_host_has_cannot_run() -> None:
    plan = solve_plan(on_v100(79, 6144, host_gb=0), tolerance=0.01)
    assert isinstance(plan, ParallelPlan)
    priced = price_plan(plan, on_v100(79, 6144, host_gb=60))
    assert not priced.fits
    assert re.findall(r"([0-9.]+) GB", priced.violation) == ["63.2", "60.0"]


def test_host_memory_below_0_is_refused() -> None:
    with pytest.raises(ProfileError, match="host_memory_bytes"):
        on_v100(8, 1024, host_gb=-1)


def on_a100(host_gb: float, *, optimizer: str = "adamw", batch: int = 32) -> SolveRequest:
    """A GPT of 1.008e12 parameters (ZeRO-Infinity, arXiv 2104.07857, table 1) on 32 GPUs with 40 GB."""
    configuration = {"n_layer": 128, "n_embd": 25600, "n_head": 200, "vocab_size": 50257}
    model = parse_model(json.dumps({"model_type": "gpt2", "n_positions": 1024, **configuration}), 1024)
    model = replace(model, optimizer=TrainingOptimizer(optimizer))
    hardware = load_gpu("a100-40g").with_host_memory(round(host_gb * 1e9))
    return SolveRequest(model, (hardware,), GpuShape.packed("a100-40g", 32, 8), global_batch=batch)


@pytest.mark.parametrize(("optimizer", "host_gb"), [("adamw", 600), ("adafactor", 330)])
def test_1e12_parameters_are_planned_on_32_gpus_of_40_gb(optimizer: str, host_gb: float) -> None:
    request = on_a100(host_gb, optimizer=optimizer)
    plan = solve_plan(request, tolerance=0.01)
    assert isinstance(plan, ParallelPlan)
    runs = [run for stage in plan.stages for run in stage.strategies]
    assert all(run.offload for run in runs if run.offload_parameters)
    streamed = sum(run.layers for run in runs if run.offload_parameters)
    assert streamed > 100
    device = max(inspect_plan(plan, request).devices, key=lambda device: device.host_bytes)
    assert device.host_bytes <= host_gb * 1e9
    of_layers = request.model.parameters * STREAMED_BYTES[optimizer] / 32
    assert device.host_bytes == pytest.approx(of_layers, rel=0.1)


def test_1e12_parameters_are_refused_with_the_memory_of_the_host_that_binds() -> None:
    found = solve_plan(on_a100(1500 / 8))
    assert isinstance(found, Infeasibility)
    assert found.constraint == "memory"
    needed_gb, given_gb = map(float, re.findall(r"([0-9.]+) GB", found.reason)[:2])
    assert given_gb == 187.5
    assert needed_gb == pytest.approx(1.008e12 * STREAMED_BYTES["adamw"] / 32 / 1e9, rel=0.001)


def test_without_the_opt_in_of_a_profile_nothing_is_streamed() -> None:
    request = on_a100(600)
    assert not load_gpu("a100-40g").dimensions.intersection(STREAMED_DIMENSIONS)
    found = solve_plan(request.without_streaming())
    assert isinstance(found, Infeasibility)
    assert found.constraint == "memory"


@pytest.mark.parametrize("optimizer", STREAMED_BYTES)
def test_streamed_layers_hold_nothing_on_the_gpu_and_all_state_on_the_host(optimizer: str) -> None:
    model = replace(load_model("gpt2"), optimizer=TrainingOptimizer(optimizer))
    gpu = load_gpu("a100-40g").with_host_memory(10**12)
    request = SolveRequest(model, (gpu,), GpuShape.packed("a100-40g", 4, 4), global_batch=8)
    streamed = LayerStrategy(
        12, dp=4, zero=3, shard_group=4, recompute=Recompute.FULL, offload=True, offload_parameters=True
    )
    moved = replace(streamed, offload_activations=True)
    kept, offloaded, inputs = (
        evaluate(_build_plan(each), request)
        for each in (replace(streamed, offload=False, offload_parameters=False), streamed, moved)
    )
    whole = model.parameters * STREAMED_BYTES[optimizer] / 4
    assert offloaded.stages[0].host_bytes == pytest.approx(whole, rel=0.001)
    # Four bytes of weights and four of gradients on the GPU of an FSDP plan, and the moments.
    on_gpu = kept.stages[0].memory_bytes - offloaded.stages[0].memory_bytes
    moments = STREAMED_BYTES[optimizer] - 10
    assert on_gpu == pytest.approx((8 + moments) * model.parameters / 4 * (1 + gpu.reserve_ratio), rel=0.001)
    boundary = 2 * 1024 * 768  # bytes of a sample
    assert inputs.stages[0].host_bytes - offloaded.stages[0].host_bytes == 12 * boundary
    assert kept.iteration_time_s < offloaded.iteration_time_s < inputs.iteration_time_s


def _build_plan(strategy: LayerStrategy) -> ParallelPlan:
    return ParallelPlan(Schedule(), 2, 4, 0.0, 0.0, 0, (Stage(0, 11, "a100-40g", 4, (strategy,)),))
