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
    made, begin = list[Stage](), 0
    for strategies in stages:
        layers = sum(strategy.layers for strategy in strategies)
        made.append(Stage(begin, begin + layers - 1, "cpu", strategies[0].gpus, strategies))
        begin += layers
    return ParallelPlan(schedule, micro_batches, micro_batch_size, 1.0, 1.0, 1, tuple(made))


def layout_of(*strategies: LayerStrategy, blocks: int = 4) -> Layout:
    plan = plan_of(strategies)
    return build_layout(plan, world_size=plan.world_size, block_count=blocks)


def test_tensor_parallel_ranks_are_neighbours_and_data_parallel_ones_farthest_apart() -> None:
    strategy = LayerStrategy(1, tp=2, ulysses=2, ring=2, dp=2)
    places = [locate_rank(strategy, rank) for rank in range(16)]
    assert len(set(places)) == 16
    assert places[1] == RankCoordinates(dp=0, ring=0, ulysses=0, tp=1)
    assert places[2] == RankCoordinates(dp=0, ring=0, ulysses=1, tp=0)
    assert places[4] == RankCoordinates(dp=0, ring=1, ulysses=0, tp=0)
    assert places[8] == RankCoordinates(dp=1, ring=0, ulysses=0, tp=0)
    assert [places[rank].context_index(strategy) for rank in (0, 2, 4, 6, 8)] == [0, 1, 2, 3, 0]


def test_the_ranks_of_a_step_take_each_sample_once() -> None:
    made = layout_of(LayerStrategy(4, dp=3, tp=2))
    parts = [made.sample_range(made.first_strategy, rank) for rank in range(6)]
    assert parts[0] == parts[1] == range(4), "tensor-parallel ranks work on the same samples"
    assert sorted(sample for part in parts for sample in part) == sorted(2 * list(range(12)))


def test_the_ends_of_the_model_follow_their_neighbours_or_count_as_layers_themselves() -> None:
    wide, narrow = LayerStrategy(2, dp=2, zero=3), LayerStrategy(2, dp=2)
    follows = layout_of(wide, narrow, blocks=4)
    assert [strategy.zero for strategy in follows.strategies] == [3, 3, 3, 0, 0, 0]
    counted = layout_of(replace(wide, layers=1), replace(narrow, layers=5), blocks=4)
    assert [strategy.zero for strategy in counted.strategies] == [3, 0, 0, 0, 0, 0]


def test_stages_take_their_layers_in_turn_and_go_round_the_groups() -> None:
    stage = LayerStrategy(1, dp=2)
    chunks = plan_of((stage,), (stage,), (stage,), (stage,), schedule=Schedule(ScheduleName.INTERLEAVED, 2))
    made = build_layout(chunks, world_size=4, block_count=4)
    assert made.stages == (range(2), range(2, 3), range(3, 4), range(4, 6))
    assert [made.stages_on_rank(rank) for rank in range(4)] == [(0, 2), (0, 2), (1, 3), (1, 3)]


def test_groups_of_unlike_width_follow_one_another() -> None:
    plan = plan_of((LayerStrategy(1, tp=2),), (LayerStrategy(2),), (LayerStrategy(1, dp=3),))
    made = build_layout(plan, world_size=6, block_count=4)
    assert [made.ranks_in_group(group) for group in range(made.group_count)] == [range(2), range(2, 3), range(3, 6)]
    assert [made.stages_on_rank(rank) for rank in range(6)] == [(0,), (0,), (1,), (2,), (2,), (2,)]
    assert [made.rank_in_group(rank) for rank in range(6)] == [0, 1, 0, 0, 1, 2]


def test_a_shard_group_splits_the_replicas_and_the_default_takes_them_all() -> None:
    assert count_shards(LayerStrategy(1, dp=4, zero=3, shard_group=2)) == 2
    assert count_shards(LayerStrategy(1, dp=4, ring=2, zero=3)) == 8
    assert count_shards(LayerStrategy(1, dp=4)) == 1


@pytest.mark.parametrize(
    ("strategy", "plain"),
    [
        (LayerStrategy(4, dp=2), True),
        (LayerStrategy(4, dp=2, ulysses=2), True),
        (LayerStrategy(4, tp=2), False),
        (LayerStrategy(4, dp=2, zero=3), False),
        (LayerStrategy(4, dp=2, ep=2), False),
    ],
)
def test_only_data_and_context_parallelism_leave_every_rank_the_whole_model(
    strategy: LayerStrategy, plain: bool
) -> None:
    assert layout_of(strategy).uses_ddp is plain


def test_a_run_that_nobody_planned_is_data_parallel_in_one_micro_batch() -> None:
    plan = make_data_parallel_plan(replicas=3, global_batch=12)
    made = build_layout(plan, world_size=3, block_count=4)
    assert (made.global_batch, made.micro_batches, len(made.strategies)) == (12, 1, 6)
    assert made.uses_ddp


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (plan_of((LayerStrategy(4, dp=2),)), "the plan is for 2 ranks, this generation has 4"),
        (plan_of((LayerStrategy(5, dp=4),)), r"the plan has 5 layers, this model has 4 blocks \(or 6 with its ends\)"),
        (
            plan_of((LayerStrategy(4, dp=4),), micro_batch_size=6),
            "micro_batch_size is 6, it must be a multiple",
        ),
        (plan_of((LayerStrategy(4, dp=4, zero=3, shard_group=3),)), "shard_group is 3, it must divide the 4"),
        (plan_of((LayerStrategy(4, dp=4, zero=4),)), "zero is 4, it must be 0"),
        (plan_of((LayerStrategy(4, dp=4, ep=3),)), "ep is 3, it must divide the 4"),
        (plan_of((LayerStrategy(4, dp=4, sequence_sharding=True),)), "sequence_sharding is true, it needs tp above 1"),
        (
            plan_of(
                *((LayerStrategy(1, dp=width),) for width in (3, 1, 3, 1)),
                schedule=Schedule(ScheduleName.INTERLEAVED, 2),
                micro_batches=2,
            ),
            "the plan's stages have 3, 1, 3, 1 GPUs, in an interleaved pipeline all must have as many",
        ),
        (
            plan_of((LayerStrategy(2, dp=2),), (LayerStrategy(2, dp=2),), schedule=Schedule(ScheduleName.GPIPE, 2)),
            "the plan is for 2 ranks",
        ),
        (
            plan_of(
                *([(LayerStrategy(1, dp=2),)] * 4), schedule=Schedule(ScheduleName.INTERLEAVED, 2), micro_batches=5
            ),
            "micro_batches is 5, it must be a multiple of 2, the rounds of interleaved 1F1B over 2 groups",
        ),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_with_what_would(plan: ParallelPlan, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_layout(plan, world_size=4, block_count=4)
