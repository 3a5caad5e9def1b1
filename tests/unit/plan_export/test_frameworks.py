"""What frameworks refuse, and that the search under their limits finds only plans that they can express."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from scheduler.domain.framework_limits import FRAMEWORK_LIMITS
from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan, Recompute
from scheduler.domain.scaling_curve import CurveRequest
from scheduler.plan_export.framework import PlanNotExpressibleError
from scheduler.plan_export.frameworks import FRAMEWORKS, find_framework
from scheduler.solver.curve import solve_point
from tests.builders_plan_export import build_plan, draw_plan

ZERO_2 = LayerStrategy(1, dp=4, zero=2, shard_group=4)
FSDP = LayerStrategy(1, dp=4, zero=3, shard_group=4)
INPUTS_ON_HOST = replace(FSDP, recompute=Recompute.FULL, offload_activations=True)


def test_every_framework_has_limits_and_every_limit_a_framework() -> None:
    assert {name: framework.limits for name, framework in FRAMEWORKS.items()} == FRAMEWORK_LIMITS
    assert all(framework.has_args or framework.has_file for framework in FRAMEWORKS.values())


def test_an_unknown_framework_is_refused_with_what_is_accepted() -> None:
    with pytest.raises(ValueError, match=r"'megatron'.*megatron-lm.*deepspeed.*did you mean 'megatron-lm'"):
        find_framework("megatron")


@pytest.mark.parametrize(
    ("name", "plan", "reason"),
    [
        ("megatron-lm", build_plan(4, strategy=ZERO_2), "zero2"),
        ("megatron-lm", build_plan(2, 4, others=(LayerStrategy(1, recompute=Recompute.FULL),)), "different strategies"),
        ("deepspeed", build_plan(2, 2), "pipeline"),
        ("deepspeed", build_plan(4, strategy=LayerStrategy(1, tp=2, dp=2, zero=3, shard_group=2)), "tensor"),
        ("torchtitan", build_plan(2, 3), r"\[2, 3\]"),
        ("torchtitan", build_plan(2, 2, micro_batches=1), "micro_batches is 1"),
        ("torchtitan", build_plan(4, strategy=LayerStrategy(1, ulysses=2)), "ulysses"),
        ("accelerate", build_plan(4, strategy=LayerStrategy(1, dp=2, zero=1, shard_group=2)), "zero1"),
        ("accelerate", build_plan(4, strategy=LayerStrategy(1, tp=2, dp=2)), "ddp"),
        ("galvatron", build_plan(2, 2, strategy=LayerStrategy(1, ring=2, zero=2, shard_group=2)), "ring"),
        ("colossalai", build_plan(2, 2, strategy=ZERO_2), "zero2"),
        ("colossalai", build_plan(4, strategy=FSDP), "fsdp"),
        ("colossalai", build_plan(1, 2, 2, 1, interleave=2), r"\[1, 2\]"),
        ("llama-factory", build_plan(4, strategy=LayerStrategy(1, tp=2)), "tensor"),
        ("deepspeed", build_plan(4, strategy=INPUTS_ON_HOST), "offload_activations"),
        *(
            (name, build_plan(4, strategy=replace(FSDP, offload=True, offload_parameters=True)), "offload|fsdp")
            for name in ("megatron-lm", "torchtitan", "accelerate", "galvatron", "colossalai")
        ),
    ],
)
def test_a_plan_that_a_framework_cannot_express_is_refused_with_the_reason(
    name: str, plan: ParallelPlan, reason: str
) -> None:
    with pytest.raises(PlanNotExpressibleError, match=f"{FRAMEWORKS[name].title} cannot express .*{reason}"):
        FRAMEWORKS[name].export(plan)


def test_unequal_chunks_of_an_interleaved_pipeline_are_a_layout_of_megatron() -> None:
    args = FRAMEWORKS["megatron-lm"].export(build_plan(1, 2, 2, 1, interleave=2)).args
    assert args[args.index("--pipeline-model-parallel-layout") + 1] == "Et*1|t*2|t*2|t*1L"
    assert "--num-layers-per-virtual-pipeline-stage" not in args


def test_a_plan_on_gpus_of_several_models_is_refused() -> None:
    plan = build_plan(2, 2)
    mixed = replace(plan, stages=(plan.stages[0], replace(plan.stages[1], gpu="h100-80g")))
    with pytest.raises(PlanNotExpressibleError, match="a100-80g, h100-80g"):
        FRAMEWORKS["megatron-lm"].export(mixed)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_search_under_the_limits_finds_a_plan_that_the_framework_can_express(name: str) -> None:
    request = CurveRequest("nano-gpt", "", 16, 0, limits=FRAMEWORK_LIMITS[name])
    found = solve_point(request, GpuShape.packed("a100-80g", 4, 8))
    assert isinstance(found, ParallelPlan)
    assert FRAMEWORKS[name].find_problem(found) == ""
    FRAMEWORKS[name].export(found)


def test_equal_plans_have_equal_exports() -> None:
    for name, framework in FRAMEWORKS.items():
        plan = draw_plan(random.Random(name), framework)
        assert framework.export(plan) == framework.export(replace(plan, iteration_time_s=2.0))
