"""Plans that offload optimizer state, within the memory of the host."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.solver.inspection import inspect_plan
from scheduler.solver.plan_pricing import price_plan
from scheduler.solver.profiles.catalog import load_gpu, parse_model
from scheduler.solver.profiles.profile_document import ProfileError
from scheduler.solver.request import Infeasibility, SolveRequest
from scheduler.solver.search.plan_search import solve_plan

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
