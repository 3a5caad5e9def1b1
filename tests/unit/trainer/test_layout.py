"""Layouts of parallel plans: rank order, stages, samples, and plans that do not fit."""

from dataclasses import replace

import pytest

from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan, Schedule, ScheduleName, Stage
from scheduler.trainer.layout import (
    Layout,
    RankCoordinates,
    build_layout,
    count_shards,
    locate_rank,
    make_data_parallel_plan,
)

ONE_F_ONE_B = Schedule()


def plan_of(
    *stages: tuple[LayerStrategy, ...],
    schedule: Schedule = ONE_F_ONE_B,
    micro_batches: int = 1,
    micro_batch_size: int = 12,
) -> ParallelPlan:
    built, first = list[Stage](), 0
    for strategies in stages:
        layers = sum(strategy.layers for strategy in strategies)
        built.append(Stage(first, first + layers - 1, "cpu", strategies[0].gpus, strategies))
        first += layers
    return ParallelPlan(schedule, micro_batches, micro_batch_size, 1.0, 1.0, 1, tuple(built))


def layout_of(*strategies: LayerStrategy, blocks: int = 4) -> Layout:
    plan = plan_of(strategies)
    return build_layout(plan, world_size=plan.world_size, block_count=blocks)


def test_rank_order_is_tensor_then_ulysses_then_ring_then_data() -> None:
    strategy = LayerStrategy(1, tp=2, ulysses=2, ring=2, dp=2)
    coordinates = [locate_rank(strategy, rank) for rank in range(16)]
    assert len(set(coordinates)) == 16
    assert coordinates[1] == RankCoordinates(dp=0, ring=0, ulysses=0, tp=1)
    assert coordinates[2] == RankCoordinates(dp=0, ring=0, ulysses=1, tp=0)
    assert coordinates[4] == RankCoordinates(dp=0, ring=1, ulysses=0, tp=0)
    assert coordinates[8] == RankCoordinates(dp=1, ring=0, ulysses=0, tp=0)
    assert [coordinates[rank].context_index(strategy) for rank in (0, 2, 4, 6, 8)] == [0, 1, 2, 3, 0]


def test_data_parallel_ranks_share_the_samples() -> None:
    layout = layout_of(LayerStrategy(4, dp=3, tp=2))
    parts = [layout.sample_range(layout.first_strategy, rank) for rank in range(6)]
    assert parts[0] == parts[1] == range(4), "tensor-parallel ranks have the same samples"
    assert sorted(sample for part in parts for sample in part) == sorted(2 * list(range(12)))


def test_embedding_and_head_follow_their_neighbors_unless_the_plan_counts_them() -> None:
    wide, narrow = LayerStrategy(2, dp=2, zero=3), LayerStrategy(2, dp=2)
    without_ends = layout_of(wide, narrow, blocks=4)
    assert [strategy.zero for strategy in without_ends.strategies] == [3, 3, 3, 0, 0, 0]
    with_ends = layout_of(replace(wide, layers=1), replace(narrow, layers=5), blocks=4)
    assert [strategy.zero for strategy in with_ends.strategies] == [3, 0, 0, 0, 0, 0]


def test_stages_take_consecutive_layers_and_rotate_over_the_groups() -> None:
    stage = LayerStrategy(1, dp=2)
    plan = plan_of((stage,), (stage,), (stage,), (stage,), schedule=Schedule(ScheduleName.INTERLEAVED, 2))
    layout = build_layout(plan, world_size=4, block_count=4)
    assert layout.stages == (range(2), range(2, 3), range(3, 4), range(4, 6))
    assert [layout.stages_on_rank(rank) for rank in range(4)] == [(0, 2), (0, 2), (1, 3), (1, 3)]


def test_groups_of_different_sizes_follow_one_another() -> None:
    plan = plan_of((LayerStrategy(1, tp=2),), (LayerStrategy(2),), (LayerStrategy(1, dp=3),))
    layout = build_layout(plan, world_size=6, block_count=4)
    assert [layout.ranks_in_group(group) for group in range(layout.group_count)] == [range(2), range(2, 3), range(3, 6)]
    assert [layout.stages_on_rank(rank) for rank in range(6)] == [(0,), (0,), (1,), (2,), (2,), (2,)]
    assert [layout.rank_in_group(rank) for rank in range(6)] == [0, 1, 0, 0, 1, 2]


def test_shard_group_limits_the_shards_and_defaults_to_all_replicas() -> None:
    assert count_shards(LayerStrategy(1, dp=4, zero=3, shard_group=2)) == 2
    assert count_shards(LayerStrategy(1, dp=4, ring=2, zero=3)) == 8
    assert count_shards(LayerStrategy(1, dp=4)) == 1


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (LayerStrategy(4, dp=2), True),
        (LayerStrategy(4, dp=2, ulysses=2), True),
        (LayerStrategy(4, tp=2), False),
        (LayerStrategy(4, dp=2, zero=3), False),
        (LayerStrategy(4, dp=2, ep=2), False),
    ],
)
def test_ddp_is_used_for_data_and_context_parallelism_only(strategy: LayerStrategy, expected: bool) -> None:
    assert layout_of(strategy).uses_ddp is expected


def test_default_plan_is_data_parallel_in_one_micro_batch() -> None:
    plan = make_data_parallel_plan(replicas=3, global_batch=12)
    layout = build_layout(plan, world_size=3, block_count=4)
    assert (layout.global_batch, layout.micro_batches, len(layout.strategies)) == (12, 1, 6)
    assert layout.uses_ddp


@pytest.mark.parametrize(
    ("plan", "problem"),
    [
        (plan_of((LayerStrategy(4, dp=2),)), "2 ranks.* 4"),
        (plan_of((LayerStrategy(5, dp=4),)), "5 layers.* 4 blocks.*6"),
        (
            plan_of((LayerStrategy(4, dp=4),), micro_batch_size=6),
            "`micro_batch_size` is 6.* 4",
        ),
        (plan_of((LayerStrategy(4, dp=4, zero=3, shard_group=3),)), "`shard_group` is 3.* 4"),
        (plan_of((LayerStrategy(4, dp=4, zero=4),)), "`zero` is 4"),
        (plan_of((LayerStrategy(4, dp=4, ep=3),)), "`ep` is 3.* 4"),
        (plan_of((LayerStrategy(4, dp=4, sequence_sharding=True),)), "`sequence_sharding` is true.*`tp` is 1"),
        (
            plan_of(
                *((LayerStrategy(1, dp=gpus),) for gpus in (3, 1, 3, 1)),
                schedule=Schedule(ScheduleName.INTERLEAVED, 2),
                micro_batches=2,
            ),
            "3, 1, 3, 1 GPUs",
        ),
        (
            plan_of((LayerStrategy(2, dp=2),), (LayerStrategy(2, dp=2),), schedule=Schedule(ScheduleName.GPIPE, 2)),
            "2 ranks",
        ),
        (
            plan_of(
                *([(LayerStrategy(1, dp=2),)] * 4), schedule=Schedule(ScheduleName.INTERLEAVED, 2), micro_batches=5
            ),
            "`micro_batches` is 5.*multiple of 2",
        ),
        (plan_of((LayerStrategy(4, dp=4, offload_parameters=True),)), "`offload_parameters` is true.*`offload` is f"),
        (
            plan_of((LayerStrategy(4, dp=4, zero=2, shard_group=4, offload=True, offload_parameters=True),)),
            "`offload_parameters` is true.*`zero` is 2 over 4",
        ),
        (plan_of((LayerStrategy(4, dp=4, offload_activations=True),)), "`offload_activations` is true.*is none"),
    ],
)
def test_plan_that_does_not_fit_is_rejected_with_field_and_value(plan: ParallelPlan, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        build_layout(plan, world_size=4, block_count=4)
