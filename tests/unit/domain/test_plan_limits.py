"""Plan limits: their canonical form, what they forbid, and names of dimensions."""

from __future__ import annotations

from functools import reduce

import pytest

from scheduler.domain.codec import decode, encode
from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan, Recompute, Schedule, ScheduleName, Stage
from scheduler.domain.plan_limits import NO_LIMITS, PlanDimension, PlanLimits, parse_dimension_name

D = PlanDimension


def _plan(*runs: LayerStrategy, stages: int = 1, micro_batches: int = 4) -> ParallelPlan:
    layers = sum(run.layers for run in runs)
    held = tuple(
        Stage(layers * number, layers * (number + 1) - 1, "a100-80g", runs[0].gpus, runs) for number in range(stages)
    )
    return ParallelPlan(Schedule(), micro_batches, 8, 1.0, 1.0, 0, held)


PLAIN = LayerStrategy(4, dp=2)


@pytest.mark.parametrize(
    ("limits", "plan"),
    [
        (PlanLimits(excluded=(D.DATA,)), _plan(PLAIN)),
        (PlanLimits(excluded=(D.DDP,)), _plan(PLAIN)),
        (PlanLimits(excluded=(D.ZERO2,)), _plan(LayerStrategy(4, dp=2, zero=2, shard_group=2))),
        (PlanLimits(excluded=(D.FSDP,)), _plan(LayerStrategy(4, dp=2, zero=3, shard_group=2))),
        (PlanLimits(excluded=(D.HYBRID_SHARD,)), _plan(LayerStrategy(4, dp=4, zero=3, shard_group=2))),
        (PlanLimits(excluded=(D.SEQUENCE_SHARDING,)), _plan(LayerStrategy(4, tp=2, sequence_sharding=True))),
        (PlanLimits(excluded=(D.RECOMPUTE,)), _plan(LayerStrategy(4, recompute=Recompute.FULL))),
        (PlanLimits(excluded=(D.ONE_F_ONE_B,)), _plan(PLAIN, stages=2)),
        (PlanLimits(exclusive=((D.DATA, D.PIPELINE),)), _plan(PLAIN, stages=2)),
        (PlanLimits(exclusive=((D.TENSOR, D.ULYSSES),)), _plan(LayerStrategy(4, tp=2, ulysses=2))),
        (PlanLimits(degrees_max=((D.DATA, 1),)), _plan(PLAIN)),
        (PlanLimits(degrees_max=((D.PIPELINE, 2),)), _plan(PLAIN, stages=4)),
        (PlanLimits(micro_batches_min=8), _plan(PLAIN)),
        (PlanLimits(micro_batches_max=2), _plan(PLAIN)),
        (PlanLimits(replica_samples_max=3), _plan(PLAIN)),
        (PlanLimits(fills_pipeline=True), _plan(PLAIN, stages=8)),
        (PlanLimits(has_whole_rounds=True), _plan(PLAIN, stages=3)),
        (PlanLimits(is_uniform=True), _plan(LayerStrategy(2, tp=2), LayerStrategy(2, dp=2))),
    ],
)
def test_a_plan_beyond_a_limit_is_found(limits: PlanLimits, plan: ParallelPlan) -> None:
    assert limits.find_violation(plan)
    assert not NO_LIMITS.find_violation(plan)


def test_a_plan_within_all_limits_breaks_none() -> None:
    limits = PlanLimits(
        excluded=(D.FSDP, D.OFFLOAD),
        exclusive=((D.DATA, D.TENSOR),),
        degrees_max=((D.DATA, 2), (D.PIPELINE, 2)),
        micro_batches_max=4,
        replica_samples_max=4,
        has_whole_rounds=True,
        is_uniform=True,
        has_equal_stages=True,
    )
    assert not limits.find_violation(_plan(PLAIN, stages=2))


def test_unequal_stages_break_equal_stages() -> None:
    stages = (Stage(0, 2, "a100-80g", 1, (LayerStrategy(3),)), Stage(3, 3, "a100-80g", 1, (LayerStrategy(1),)))
    plan = ParallelPlan(Schedule(), 2, 8, 1.0, 1.0, 0, stages)
    assert PlanLimits(has_equal_stages=True).find_violation(plan)


def test_interleaved_chunks_count_as_a_degree() -> None:
    stages = tuple(Stage(number, number, "a100-80g", 1, (LayerStrategy(1),)) for number in range(4))
    plan = ParallelPlan(Schedule(ScheduleName.INTERLEAVED, 2), 2, 8, 1.0, 1.0, 0, stages)
    assert PlanLimits(degrees_max=((D.INTERLEAVE, 1),)).find_violation(plan)
    assert not PlanLimits(degrees_max=((D.INTERLEAVE, 2),)).find_violation(plan)


def test_equal_limits_have_one_form_and_key() -> None:
    one = PlanLimits(excluded=(D.TENSOR, D.DATA), exclusive=((D.RING, D.FSDP),), degrees_max=((D.DATA, 4),))
    two = PlanLimits(
        excluded=(D.DATA, D.TENSOR, D.DATA), exclusive=((D.FSDP, D.RING),), degrees_max=((D.DATA, 8), (D.DATA, 4))
    )
    assert one == two
    assert one.key == two.key != NO_LIMITS.key == ""


def test_single_limits_combine_to_the_whole() -> None:
    limits = PlanLimits(
        excluded=(D.FSDP, D.RING),
        exclusive=((D.TENSOR, D.PIPELINE),),
        degrees_max=((D.TENSOR, 4),),
        micro_batches_min=2,
        micro_batches_max=8,
        replica_samples_max=2,
        fills_pipeline=True,
        has_whole_rounds=True,
        is_uniform=True,
        has_equal_stages=True,
    )
    single = [each for _, each in limits.list_single_limits()]
    assert len(single) == 11
    assert reduce(PlanLimits.combine, single, NO_LIMITS) == limits
    assert decode(PlanLimits, encode(limits)) == limits


@pytest.mark.parametrize(
    ("listed", "allowed"),
    [
        ((D.TENSOR,), {D.TENSOR, D.DDP, D.ONE_F_ONE_B}),
        ((D.FSDP,), {D.FSDP, D.DATA, D.ONE_F_ONE_B}),
        ((D.PIPELINE, D.DATA), {D.PIPELINE, D.ONE_F_ONE_B, D.DATA, D.DDP}),
        ((D.GPIPE, D.SEQUENCE_SHARDING), {D.GPIPE, D.PIPELINE, D.TENSOR, D.SEQUENCE_SHARDING, D.DDP}),
    ],
)
def test_a_listed_dimension_brings_what_it_needs(listed: tuple[D, ...], allowed: set[D]) -> None:
    assert set(D) - set(PlanLimits.allow_only(listed).excluded) == allowed


def test_names_of_dimensions() -> None:
    assert parse_dimension_name("tp") == parse_dimension_name(" Tensor ") == (D.TENSOR,)
    assert parse_dimension_name("selective-recompute") == (D.SELECTIVE_RECOMPUTE,)
    assert parse_dimension_name("zero") == (D.ZERO1, D.ZERO2)
    with pytest.raises(ValueError, match="'tensor'"):
        parse_dimension_name("tensr")


@pytest.mark.parametrize(
    "arguments",
    [
        {"degrees_max": ((D.OFFLOAD, 2),)},
        {"degrees_max": ((D.TENSOR, 0),)},
        {"micro_batches_min": 0},
        {"micro_batches_min": 4, "micro_batches_max": 2},
        {"replica_samples_max": 0},
    ],
)
def test_limits_that_contradict_themselves_are_rejected(arguments: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"must be|accepted"):
        PlanLimits(**arguments)  # type: ignore[arg-type]
