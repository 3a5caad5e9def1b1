"""What an export says is what the plan has: 500 random plans, read back by readers of their own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan
from scheduler.plan_export.framework import list_layer_strategies, list_stage_lengths
from scheduler.plan_export.frameworks import FRAMEWORKS
from tests.builders_plan_export import draw_plan
from tests.unit.plan_export.readers import READERS

PLANS = 500


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_random_plans_read_back_with_the_same_degrees(name: str) -> None:
    rng, framework = random.Random(f"plans/{name}"), FRAMEWORKS[name]
    for _ in range(-(-PLANS // len(FRAMEWORKS))):
        plan = draw_plan(rng, framework)
        said = READERS[name](framework.export(plan), plan.world_size)
        differences = list(_list_differences(said, plan))
        assert not differences, (plan, said)


def _list_differences(said: dict[str, Any], plan: ParallelPlan) -> Iterator[tuple[str, Any, Any]]:
    layers, chunks = list_layer_strategies(plan), plan.schedule.interleave
    said_layers = said.pop("layers", [said] * len(layers))
    lengths = said.pop("lengths", None)
    if lengths is not None:
        yield from _compare("lengths", lengths, list_stage_lengths(plan))
    if (length := said.pop("length", None)) is not None:
        yield from _compare("length", {length}, set(list_stage_lengths(plan)))
    facts = {
        "pp": plan.pipeline_devices,
        "micro_batches": plan.micro_batches,
        "global_batch": plan.global_batch,
        "interleave": chunks,
        "interleaved": chunks > 1,
        "samples": plan.micro_batch_size // layers[0].dp,
    }
    for field, value in facts.items():
        if field in said:
            yield from _compare(field, said[field], value)
    for own, other in zip(layers, said_layers, strict=True):
        yield from _compare_layers(own, other)


def _compare_layers(own: LayerStrategy, said: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for field in ("tp", "dp", "ulysses", "ring", "ep", "offload", "offload_parameters", "recompute"):
        if field in said:
            yield from _compare(field, said[field], getattr(own, field))
    if said.get("sequence_sharding") is not None:
        yield from _compare("sequence_sharding", said["sequence_sharding"], own.sequence_sharding)
    replicas = own.dp * own.ulysses * own.ring
    if replicas > 1:  # one replica has nothing to shard
        yield from _compare("zero", said["zero"], own.zero)
    if "shard_group" in said and own.zero:
        yield from _compare("shard_group", said["shard_group"], own.shard_group)


def _compare(field: str, found: Any, expected: Any) -> Iterator[tuple[str, Any, Any]]:
    if found != expected:
        yield field, found, expected
