"""The nearest plan within limits: the fewest changes, then the fastest."""

from __future__ import annotations

import pytest

from scheduler.domain.framework_limits import FRAMEWORK_LIMITS
from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan, Recompute
from scheduler.domain.plan_limits import PlanDimension, PlanLimits
from scheduler.solver.nearest_plan import find_nearest_plan
from scheduler.solver.profiles.catalog import load_gpu, load_model
from scheduler.solver.request import SolveRequest
from tests.builders_plan_export import build_plan

FSDP = LayerStrategy(1, dp=4, zero=3, shard_group=4)


def _find(plan: ParallelPlan, limits: PlanLimits) -> ParallelPlan | None:
    shape = GpuShape.packed("a100-80g", plan.world_size, 8)
    request = SolveRequest(load_model("gpt2"), (load_gpu("a100-80g"),), shape, plan.global_batch, limits=limits)
    found = find_nearest_plan(plan, request)
    assert found is None or limits.find_violation(found) == ""
    return found


def test_a_plan_within_the_limits_is_its_own_nearest() -> None:
    plan = build_plan(12, strategy=FSDP)
    found = _find(plan, FRAMEWORK_LIMITS["deepspeed"])
    assert found is not None
    assert found.is_equivalent_to(plan)


def test_only_what_the_limits_exclude_changes() -> None:
    found = _find(build_plan(12, strategy=FSDP), FRAMEWORK_LIMITS["megatron-lm"])
    assert found is not None
    strategy = found.stages[0].strategies[0]
    assert (strategy.dp, strategy.tp, found.pipeline_devices) == (4, 1, 1)
    assert strategy.zero in (0, 1)


def test_a_pipeline_becomes_data_parallelism_where_the_framework_has_none() -> None:
    plan = build_plan(6, 6, strategy=LayerStrategy(1, dp=2), samples=2)
    found = _find(plan, FRAMEWORK_LIMITS["deepspeed"])
    assert found is not None
    assert (found.pipeline_devices, found.stages[0].strategies[0].dp) == (1, 4)


@pytest.mark.parametrize(("lengths", "expected"), [((5, 7), [6, 6]), ((4, 8), [6, 6])])
def test_uneven_stages_become_equal(lengths: tuple[int, int], expected: list[int]) -> None:
    found = _find(build_plan(*lengths), FRAMEWORK_LIMITS["torchtitan"])
    assert found is not None
    assert [stage.last_layer - stage.first_layer + 1 for stage in found.stages] == expected


def test_unlike_layers_take_one_of_their_strategies() -> None:
    plan = build_plan(12, others=(LayerStrategy(1, recompute=Recompute.FULL),))
    found = _find(plan, FRAMEWORK_LIMITS["llama-factory"])
    assert found is not None
    assert [run.recompute for run in found.stages[0].strategies] == [Recompute.NONE]


def test_there_may_be_none() -> None:
    assert _find(build_plan(12, strategy=FSDP), PlanLimits(excluded=(PlanDimension.DATA,))) is None
