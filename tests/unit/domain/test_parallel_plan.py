"""JSON form and validation of parallel plans."""

from __future__ import annotations

import json
from typing import Any

import pytest

from scheduler.domain.parallel_plan import (
    LayerStrategy,
    ParallelPlan,
    Recompute,
    Schedule,
    ScheduleName,
    Stage,
    plan_from_json,
    plan_to_json,
)

PLAN = ParallelPlan(
    schedule=Schedule(ScheduleName.INTERLEAVED, 2),
    micro_batches=8,
    micro_batch_size=4,
    iteration_time_s=1.5,
    samples_per_s=21.3,
    peak_bytes_per_gpu=70 * 10**9,
    stages=(
        Stage(0, 7, "a100-80g", 4, (LayerStrategy(8, tp=2, dp=2, zero=3, shard_group=2, sequence_sharding=True),)),
        Stage(8, 15, "a100-80g", 4, (LayerStrategy(4, tp=4), LayerStrategy(4, dp=4, recompute=Recompute.FULL))),
        Stage(16, 23, "a100-80g", 4, (LayerStrategy(8, dp=4),)),
        Stage(24, 31, "a100-80g", 4, (LayerStrategy(8, dp=4),)),
    ),
)


def test_plan_round_trips_through_json() -> None:
    assert plan_from_json(json.loads(json.dumps(plan_to_json(PLAN)))) == PLAN


def test_sizes_are_derived_from_the_stages() -> None:
    assert (PLAN.world_size, PLAN.global_batch) == (8, 32)
    assert PLAN.summarize() == "pp2x2 · tp2 dp2 fsdp · 8 micro-batches"


@pytest.mark.parametrize("field", ["schedule", "stages", "micro_batches", "iteration_time_s"])
def test_missing_field_is_named(field: str) -> None:
    document = plan_to_json(PLAN)
    del document[field]
    with pytest.raises(ValueError, match=f"plan: field '{field}' is missing"):
        plan_from_json(document)


def test_unknown_field_or_value_is_named() -> None:
    unknown: dict[str, Any] = json.loads(json.dumps(plan_to_json(PLAN)))
    unknown["stages"][0]["color"] = "red"
    with pytest.raises(ValueError, match="color"):
        plan_from_json(unknown)
    schedule: dict[str, Any] = json.loads(json.dumps(plan_to_json(PLAN)))
    schedule["schedule"]["name"] = "zigzag"
    with pytest.raises(ValueError, match="zigzag"):
        plan_from_json(schedule)


def test_strategy_must_use_all_gpus_of_its_stage() -> None:
    with pytest.raises(ValueError, match=r"0-3 has 4 GPUs.* 2$"):
        ParallelPlan(Schedule(), 1, 1, 1.0, 1.0, 0, (Stage(0, 3, "a", 4, (LayerStrategy(4, tp=2),)),))


def test_plan_without_stages_is_rejected() -> None:
    with pytest.raises(ValueError, match="at least one stage"):
        ParallelPlan(Schedule(), 1, 1, 1.0, 1.0, 0, ())
