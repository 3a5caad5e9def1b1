"""Invalid requests and profiles: each error names the field and the value."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest

from scheduler.domain.gpu_sets import GpuGroup, GpuShape
from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan, Schedule, Stage
from scheduler.solver.evaluate import PlanError, evaluate
from scheduler.solver.profiles.catalog import load_gpu, load_model
from scheduler.solver.profiles.hardware_profile import Precision
from scheduler.solver.profiles.model_profile import LayerProfile, ModelProfile
from scheduler.solver.profiles.profile_document import ProfileError
from scheduler.solver.request import Infeasibility, RequestError, SolveRequest
from scheduler.solver.search.plan_search import search_plan, solve_plan

A100, H100 = load_gpu("a100-80g"), load_gpu("h100-80g")
GPT2 = load_model("gpt2")
ONE, TWO = GpuShape.packed("a100-80g", 4, 8), GpuShape((GpuGroup("a100-80g", 1, 4), GpuGroup("h100-80g", 1, 4)))
PLAIN = SolveRequest(GPT2, (A100,), ONE, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"global_batch": 0}, "global_batch is 0"),
        ({"global_batch": -8}, "global_batch is -8"),
        ({"memory_bytes_max": -1}, "memory_bytes_max is -1"),
        ({"shape": GpuShape(())}, "shape is empty"),
        ({"shape": TWO}, "hardware is a100-80g; it must have one profile per GPU model of 1x4 a100-80g + 1x4"),
        ({"hardware": (H100,)}, "hardware is h100-80g; it must have one profile per GPU model of 1x4 a100-80g"),
        ({"hardware": (A100, H100)}, "hardware is a100-80g, h100-80g; it must have one profile"),
        (
            {"shape": TWO, "hardware": (A100, replace(H100, precision=Precision.FP32))},
            "hardware has precisions bf16 (a100-80g) and fp32 (h100-80g)",
        ),
    ],
)
def test_inconsistent_request_is_rejected(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as refused:
        replace(PLAIN, **change)
    assert str(refused.value).startswith(message)


def test_gpus_with_and_without_bf16_train_together_in_fp16() -> None:
    shape = GpuShape((GpuGroup("a100-80g", 1, 4), GpuGroup("v100-32g", 1, 4)))
    mixed = replace(PLAIN, hardware=(A100, load_gpu("v100-32g")), shape=shape)
    assert (PLAIN.precision, mixed.precision) == (Precision.BF16, Precision.FP16)


def test_gpus_without_a_common_precision_are_rejected() -> None:
    only_bf16 = replace(A100, precisions=frozenset({Precision.BF16}))
    shape = GpuShape((GpuGroup("a100-80g", 1, 4), GpuGroup("v100-32g", 1, 4)))
    with pytest.raises(RequestError, match=r"precisions bf16 \(a100-80g\) and fp16 \(v100-32g\); use GPU models"):
        replace(PLAIN, hardware=(only_bf16, load_gpu("v100-32g")), shape=shape)


@pytest.mark.parametrize("value", [nan, inf, 0.0, -1.0])
@pytest.mark.parametrize(
    "field", ["intra_bandwidth_bytes_per_s", "inter_bandwidth_bytes_per_s", "peak_flops_per_s", "memory_bytes"]
)
def test_invalid_gpu_figure_is_rejected(field: str, value: float) -> None:
    with pytest.raises(ProfileError) as refused:
        replace(A100, **{field: value})  # type: ignore[arg-type]  # the mistake under test
    assert str(refused.value) == f"GPU 'a100-80g': {field} is {value}; it must be a finite number above 0"


@pytest.mark.parametrize("value", [nan, inf, 0, -1])
@pytest.mark.parametrize("field", ["layers", "flops_per_sample", "parameters", "activation_bytes_per_sample"])
def test_invalid_layer_figure_is_rejected(field: str, value: float) -> None:
    with pytest.raises(ProfileError) as refused:
        replace(GPT2.layers[0], **{field: value})  # type: ignore[arg-type]  # the mistake under test
    assert str(refused.value) == f"layer profile: {field} is {value}; it must be a finite number above 0"


def test_five_gpu_models_are_infeasible() -> None:
    gpus = ("h100-80g", "t4", "l40s", "a10g", "v100-16g")
    shape = GpuShape(tuple(GpuGroup(gpu, 1, 1) for gpu in gpus))
    outcome = search_plan(SolveRequest(GPT2, tuple(map(load_gpu, gpus)), shape, 8))
    assert isinstance(outcome.result, Infeasibility)
    assert outcome.result.constraint == "shape"
    assert "5 GPU models" in outcome.result.reason
    assert "a plan can use 4" in outcome.result.reason


def test_memory_correction_only_raises_the_peak() -> None:
    with pytest.raises(RequestError, match="memory_percent is 69"):
        replace(PLAIN, memory_percent=69)
    (plain,), (corrected,) = PLAIN.groups, replace(PLAIN, memory_percent=125).groups
    assert corrected.limit_bytes == plain.limit_bytes * 4 // 5


def _measured(*degrees: int) -> LayerProfile:
    return replace(GPT2.layers[0], layers=2, forward_s_per_sample=tuple((degree, 1e-3 / degree) for degree in degrees))


def test_measured_layers_need_degree_1_and_equal_degrees() -> None:
    with pytest.raises(ProfileError, match="forward_s_per_sample has degrees 2, 4; it must include degree 1"):
        _measured(2, 4)
    with pytest.raises(ProfileError, match=r"layers\[1\]: forward_s_per_sample has degrees 1; it must have those of"):
        replace(GPT2, layers=(_measured(1, 2), _measured(1)))
    with pytest.raises(ProfileError, match=r"layers\[1\]: forward_s_per_sample has degrees none; it must have those"):
        replace(GPT2, layers=(_measured(1, 2), GPT2.layers[0]))


def test_plans_use_only_measured_degrees() -> None:
    request = replace(PLAIN, model=replace(GPT2, layers=(_measured(1, 2),)), global_batch=1)
    found = solve_plan(request)
    assert isinstance(found, ParallelPlan)
    assert {run.tp for stage in found.stages for run in stage.strategies} <= {1, 2}
    everywhere = Stage(0, 1, "a100-80g", 4, (LayerStrategy(layers=2, tp=4, sequence_sharding=True),))
    with pytest.raises(PlanError, match="tp is 4; forward_s_per_sample has values only for 1, 2"):
        evaluate(ParallelPlan(Schedule(), 1, 1, 0.0, 0.0, 0, (everywhere,)), request)


def test_empty_model_is_rejected() -> None:
    with pytest.raises(ProfileError, match="layers is empty; it must have at least one run of layers"):
        ModelProfile("nothing", 1, ())
