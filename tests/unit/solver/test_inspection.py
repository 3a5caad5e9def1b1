"""Inspection: how a plan's step is spent, and what limits each of its stages."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from scheduler.domain.gpu_sets import GpuGroup, GpuShape
from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan, Schedule, Stage, plan_from_json
from scheduler.solver.evaluate import evaluate
from scheduler.solver.inspection import Bound, compute_step_range_s, inspect_plan, search_outcome_to_json
from scheduler.solver.profiles.catalog import load_gpu, load_model
from scheduler.solver.request import SolveRequest
from scheduler.solver.search.plan_search import search_plan

PARTS = ("compute_s", "tensor_s", "sequence_s", "expert_s", "data_s", "other_s", "idle_s")


def request_on(shape: GpuShape, *, memory_bytes: int = 0, batch: int = 16) -> SolveRequest:
    hardware = tuple(load_gpu(gpu) for gpu in dict.fromkeys(group.gpu for group in shape.groups))
    return SolveRequest(load_model("gpt2"), hardware, shape, batch, memory_bytes)


def pipeline(cut: int, *, micro_batches: int) -> ParallelPlan:
    """Return a plan of gpt2 on two A100, the first with the layers below `cut`."""
    spans = ((0, cut - 1), (cut, 11))
    stages = tuple(
        Stage(first, last, "a100-80g", 1, (LayerStrategy(layers=last - first + 1),)) for first, last in spans
    )
    draft = ParallelPlan(Schedule(), micro_batches, 16 // micro_batches, 1.0, 1.0, 0, stages)
    return replace(draft, iteration_time_s=evaluate(draft, PAIR).iteration_time_s)


PAIR = request_on(GpuShape.packed("a100-80g", 2, 8))


@pytest.mark.parametrize("cut", [2, 6, 11])
@pytest.mark.parametrize("micro_batches", [1, 4, 16])
def test_the_parts_of_each_device_add_up_to_the_step(cut: int, micro_batches: int) -> None:
    plan = pipeline(cut, micro_batches=micro_batches)
    for device in inspect_plan(plan, PAIR).devices:
        assert sum(getattr(device, part) for part in PARTS) == pytest.approx(plan.iteration_time_s)


def test_the_bubble_shrinks_with_more_micro_batches_and_grows_with_unlike_stages() -> None:
    few, many, uneven = (
        inspect_plan(plan, PAIR).bubble_ratio
        for plan in (pipeline(6, micro_batches=2), pipeline(6, micro_batches=8), pipeline(11, micro_batches=8))
    )
    assert 0 < many < few < 0.5
    assert many < uneven
    alone = request_on(GpuShape.packed("a100-80g", 1, 8))
    assert inspect_plan(solve(alone), alone).bubble_ratio == pytest.approx(0, abs=1e-9)


def solve(request: SolveRequest) -> ParallelPlan:
    result = search_plan(request).result
    assert isinstance(result, ParallelPlan)
    return result


def test_idle_stage_is_bound_by_the_bubble() -> None:
    long, short = inspect_plan(pipeline(11, micro_batches=8), PAIR).devices
    assert (long.bound, short.bound) == (Bound.COMPUTE, Bound.BUBBLE)


def test_communication_is_named_by_its_largest_kind() -> None:
    shape = GpuShape((GpuGroup("cpu", 4, 1),))
    request = request_on(shape, batch=4)
    slow = replace(request.hardware[0], inter_bandwidth_bytes_per_s=1e5, intra_bandwidth_bytes_per_s=1e5)
    request = replace(request, hardware=(slow,))
    stage = Stage(0, 11, "cpu", 4, (LayerStrategy(layers=12, dp=4),))
    plan = ParallelPlan(Schedule(), 1, 4, 1.0, 4.0, 0, (stage,))
    assert [device.bound for device in inspect_plan(plan, request).devices] == [Bound.DATA]


def test_full_memory_is_flagged() -> None:
    roomy = solve(PAIR)
    assert not inspect_plan(roomy, PAIR).devices[0].memory_near_limit
    tight = replace(PAIR, memory_bytes_max=roomy.peak_bytes_per_gpu)
    device = inspect_plan(roomy, tight).devices[0]
    assert device.memory_near_limit
    assert device.memory_bytes_max == roomy.peak_bytes_per_gpu


def test_memory_by_purpose_adds_up_to_the_peak() -> None:
    adam = inspect_plan(pipeline(6, micro_batches=4), PAIR).devices
    for device in adam:
        parts = asdict(device.memory_parts)
        assert sum(parts.values()) == device.memory_bytes
        assert min(parts.values()) >= 0
    first = adam[0].memory_parts
    assert first.optimizer == pytest.approx(3 * first.gradients)  # fp32 master weight and two moments


def test_json_has_plan_inspection_and_runners_up() -> None:
    outcome = search_plan(PAIR, runners_up=2)
    assert isinstance(outcome.result, ParallelPlan)
    document = json.loads(json.dumps(search_outcome_to_json(outcome, outcome.result, PAIR)))
    assert plan_from_json(document) == outcome.result
    assert document["runners_up"]
    for other in document["runners_up"]:
        assert other["iteration_time_s"] == pytest.approx((1 + other["slower_ratio"]) * document["iteration_time_s"])
    assert (document["remark"], document["whole"]) == ("", None)


def test_json_of_a_partly_used_shape_has_the_full_shape_plan() -> None:
    request = request_on(GpuShape((GpuGroup("h100-80g", 1, 2), GpuGroup("l40s", 1, 1))), batch=2)
    outcome = search_plan(request)
    assert isinstance(outcome.result, ParallelPlan)
    document = search_outcome_to_json(outcome, outcome.result, request)
    assert document["remark"].startswith("1x2 h100-80g alone")
    assert {stage["gpu"] for stage in document["stages"]} == {"h100-80g"}
    assert document["whole"]["slower_ratio"] > 0


def test_a_plan_on_gpus_with_and_without_bf16_says_that_the_job_must_train_in_fp16() -> None:
    mixed = request_on(GpuShape((GpuGroup("a100-80g", 1, 1), GpuGroup("v100-32g", 1, 1))))
    stages = tuple(
        Stage(first, first + 5, gpu, 1, (LayerStrategy(layers=6),)) for first, gpu in ((0, "a100-80g"), (6, "v100-32g"))
    )
    plan = replace(pipeline(6, micro_batches=4), stages=stages)
    plan = replace(plan, iteration_time_s=evaluate(plan, mixed).iteration_time_s)
    outcome = search_plan(PAIR)
    assert "fp16" in search_outcome_to_json(replace(outcome, remark=""), plan, mixed)["remark"]
    same = pipeline(6, micro_batches=4)
    assert search_outcome_to_json(replace(outcome, remark=""), same, PAIR)["remark"] == ""


@pytest.mark.parametrize(("error", "expected"), [(0.25, (0.8, 4 / 3)), (0.0, None)])
def test_the_range_of_a_step_is_that_of_the_profiles_error(error: float, expected: tuple[float, float] | None) -> None:
    request = replace(PAIR, hardware=(replace(PAIR.hardware[0], prediction_error=error),))
    plan = replace(pipeline(6, micro_batches=4), iteration_time_s=1.0)
    assert compute_step_range_s(plan, request) == (None if expected is None else pytest.approx(expected))
