from dataclasses import replace

import pytest
import torch

from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan, Recompute, Schedule, Stage
from scheduler.worker.mesh import data_layout, data_plan, parallelise
from scheduler.worker.model import SIZES, build_gpt


def _plan(*strategies: LayerStrategy, micro_batches: int = 1, micro_batch_size: int = 12) -> ParallelPlan:
    gpus = strategies[0].gpus
    return ParallelPlan(
        schedule=Schedule(),
        micro_batches=micro_batches,
        micro_batch_size=micro_batch_size,
        iteration_time_s=1.0,
        samples_per_s=1.0,
        peak_bytes_per_gpu=1,
        stages=(Stage(0, sum(strategy.layers for strategy in strategies) - 1, "cpu", gpus, strategies),),
    )


def test_plain_data_parallelism_keeps_whole_copies() -> None:
    layout = data_layout(_plan(LayerStrategy(4, dp=3), micro_batches=2), world_size=3, blocks=4)
    assert (layout.replicas, layout.micro_batches, layout.micro_batch_size) == (3, 2, 12)
    assert layout.shards == (1, 1, 1, 1)
    assert not any(layout.fully_sharded)


def test_a_shard_group_splits_the_replicas_and_the_default_takes_them_all() -> None:
    hybrid = data_layout(_plan(LayerStrategy(4, dp=4, zero=3, shard_group=2)), world_size=4, blocks=4)
    full = data_layout(_plan(LayerStrategy(4, dp=4, zero=3)), world_size=4, blocks=4)
    assert (set(hybrid.shards), set(full.shards)) == ({2}, {4})


def test_layers_may_differ_and_the_ends_of_the_model_may_count_as_layers() -> None:
    plan = _plan(
        LayerStrategy(3, dp=2, zero=3, shard_group=2, recompute=Recompute.FULL), LayerStrategy(3, dp=2, zero=0)
    )
    layout = data_layout(plan, world_size=2, blocks=4)
    assert layout.shards == (2, 2, 1, 1)
    assert layout.fully_sharded == (True, True, False, False)
    assert layout.recompute == (Recompute.FULL, Recompute.FULL, Recompute.NONE, Recompute.NONE)


def test_one_strategy_fits_a_model_of_any_depth_and_several_do_not() -> None:
    assert len(data_layout(_plan(LayerStrategy(30, dp=2)), world_size=2, blocks=4).shards) == 4
    with pytest.raises(ValueError, match="the plan has 5 layers, this model has 4 blocks"):
        data_layout(_plan(LayerStrategy(2, dp=2), LayerStrategy(3, dp=2, zero=3)), world_size=2, blocks=4)


@pytest.mark.parametrize(
    ("strategy", "wanted"),
    [
        (LayerStrategy(4, tp=2), "tp=2"),
        (LayerStrategy(4, ulysses=2), "ulysses=2"),
        (LayerStrategy(4, ring=2), "ring=2"),
        (LayerStrategy(4, dp=2, ep=2), "ep=2"),
        (LayerStrategy(4, dp=2, offload=True), "offload"),
    ],
)
def test_other_dimensions_are_refused_by_name(strategy: LayerStrategy, wanted: str) -> None:
    with pytest.raises(ValueError, match=f"trains data and FSDP dimensions; the plan asks for {wanted}$"):
        data_layout(_plan(strategy), world_size=2, blocks=4)


def test_a_pipeline_is_refused() -> None:
    plan = _plan(LayerStrategy(4, dp=1))
    with pytest.raises(ValueError, match=r"the plan asks for pp=2$"):
        data_layout(replace(plan, stages=plan.stages * 2), world_size=2, blocks=4)


def test_a_plan_for_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="the plan is for 2 ranks, this generation has 3"):
        data_layout(_plan(LayerStrategy(4, dp=2)), world_size=3, blocks=4)


@pytest.mark.parametrize(
    ("strategy", "micro_batch_size", "message"),
    [
        (LayerStrategy(4, dp=4), 6, "micro_batch_size is 6, it must be a multiple of the 4 data-parallel ranks"),
        (LayerStrategy(4, dp=4, zero=3, shard_group=3), 12, "shard_group is 3, it must divide the 4"),
        (LayerStrategy(4, dp=4, zero=2), 12, "the plan asks for zero=2"),
    ],
)
def test_what_does_not_divide_is_refused(strategy: LayerStrategy, micro_batch_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        data_layout(_plan(strategy, micro_batch_size=micro_batch_size), world_size=4, blocks=4)


def test_a_run_that_nobody_planned_is_data_parallel_in_one_micro_batch() -> None:
    plan = data_plan(replicas=3, global_batch=12)
    assert (plan.world_size, plan.global_batch, plan.micro_batches) == (3, 12, 1)
    assert data_layout(plan, world_size=3, blocks=4).replicas == 3


def test_one_rank_needs_no_wrapper_and_gets_its_recomputation() -> None:
    model = build_gpt(SIZES["nano-gpt"], seed=0, dtype=torch.float32)
    layout = data_layout(_plan(LayerStrategy(2, dp=1, recompute=Recompute.FULL)), world_size=1, blocks=2)
    assert parallelise(model, layout, device="cpu") is model
    assert [block.recompute for block in model.blocks] == [Recompute.FULL] * 2
