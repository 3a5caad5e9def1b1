"""The layout of a parallel plan: which layers each rank holds, and which part of their inputs. Needs no torch.

Ranks are numbered as the plan's dimensions nest. Inside a pipeline group tensor parallelism varies fastest, then
Ulysses, then ring, then data parallelism. The groups follow one another.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan, Recompute, Schedule, ScheduleName, Stage


@dataclass(frozen=True, slots=True)
class RankCoordinates:
    """A rank's index in each dimension of a layer's strategy."""

    dp: int
    ring: int
    ulysses: int
    tp: int

    def context_index(self, strategy: LayerStrategy) -> int:
        """Return the index among the ranks that share a sequence."""
        return self.ring * strategy.ulysses + self.ulysses


def locate_rank(strategy: LayerStrategy, rank: int) -> RankCoordinates:
    """Return the coordinates of a rank, numbered within its pipeline group."""
    rest, tp = divmod(rank, strategy.tp)
    rest, ulysses = divmod(rest, strategy.ulysses)
    dp, ring = divmod(rest, strategy.ring)
    return RankCoordinates(dp, ring, ulysses, tp)


@dataclass(frozen=True)
class Layout:
    """A plan that fits a model and a number of ranks.

    Attributes:
        group_sizes: number of ranks of each pipeline group.
        stages: the layers of each stage. Stage k runs on group k modulo the number of groups.
        strategies: one per layer: the embedding, each block, and the head.
    """

    schedule: Schedule
    micro_batches: int
    micro_batch_size: int
    group_sizes: tuple[int, ...]
    stages: tuple[range, ...]
    strategies: tuple[LayerStrategy, ...]

    @property
    def group_count(self) -> int:
        return len(self.group_sizes)

    @cached_property
    def _group_ends(self) -> tuple[int, ...]:
        return tuple(accumulate(self.group_sizes))

    @property
    def world_size(self) -> int:
        return self._group_ends[-1]

    @property
    def global_batch(self) -> int:
        return self.micro_batches * self.micro_batch_size

    @property
    def first_strategy(self) -> LayerStrategy:
        return self.strategies[0]

    @property
    def last_strategy(self) -> LayerStrategy:
        return self.strategies[-1]

    @property
    def uses_ddp(self) -> bool:
        """Whether every rank holds the whole model, so that DDP can run it: data and context parallelism only."""
        is_uniform = len({mesh_key(strategy) for strategy in self.strategies}) == 1
        first = self.first_strategy
        if any(strategy.offload_parameters for strategy in self.strategies):
            return False
        return is_uniform and self.group_count == 1 and first.tp == 1 and first.zero == 0 and first.ep == 1

    def group_of(self, rank: int) -> int:
        """Return the pipeline group of a rank."""
        return bisect_right(self._group_ends, rank)

    def ranks_in_group(self, group: int) -> range:
        return range(self._group_ends[group] - self.group_sizes[group], self._group_ends[group])

    def rank_in_group(self, rank: int) -> int:
        return rank - self.ranks_in_group(self.group_of(rank)).start

    def stages_on_rank(self, rank: int) -> tuple[int, ...]:
        """Return the stages that run on the pipeline group of a rank."""
        return tuple(range(self.group_of(rank), len(self.stages), self.group_count))

    def sample_range(self, strategy: LayerStrategy, rank: int) -> range:
        """Return the samples of a micro-batch that a rank, numbered within its group, works on."""
        share = self.micro_batch_size // strategy.dp
        dp = locate_rank(strategy, rank).dp
        return range(dp * share, (dp + 1) * share)


def make_data_parallel_plan(*, replicas: int, global_batch: int) -> ParallelPlan:
    """Return the plan for a run without one: data parallelism in one micro-batch."""
    stage = Stage(0, 0, "unknown", replicas, (LayerStrategy(layers=1, dp=replicas),))
    return ParallelPlan(
        schedule=Schedule(),
        micro_batches=1,
        micro_batch_size=global_batch,
        iteration_time_s=0.0,
        samples_per_s=0.0,
        peak_bytes_per_gpu=0,
        stages=(stage,),
    )


def build_layout(plan: ParallelPlan, *, world_size: int, block_count: int) -> Layout:
    """Return the layout of a model with `block_count` blocks between an embedding and a head.

    Raises:
        ValueError: the plan is for another number of ranks or another model, or needs an unsupported feature; the
            message names the field and the accepted values.
    """
    if plan.world_size != world_size:
        raise ValueError(f"The plan is for {plan.world_size} ranks, but this generation has {world_size}.")
    stages, strategies = _expand_layers(plan, block_count)
    for strategy in strategies:
        _validate_strategy(strategy, plan)
    _validate_schedule(plan)
    return Layout(
        schedule=plan.schedule,
        micro_batches=plan.micro_batches,
        micro_batch_size=plan.micro_batch_size,
        group_sizes=tuple(stage.gpus for stage in plan.stages[: plan.pipeline_devices]),
        stages=stages,
        strategies=strategies,
    )


def count_data_replicas(strategy: LayerStrategy) -> int:
    """Return how many data-parallel and context-parallel ranks hold a layer's parameters."""
    return strategy.dp * strategy.ulysses * strategy.ring


def count_shards(strategy: LayerStrategy) -> int:
    """Return over how many of these ranks the parameters are sharded.

    With ZeRO, a shard group of 1 is the field's default and means all replicas.
    """
    if strategy.zero == 0:
        return 1
    return strategy.shard_group if strategy.shard_group > 1 else count_data_replicas(strategy)


def mesh_key(strategy: LayerStrategy) -> tuple[int, ...]:
    """Return the fields that determine process groups. Layers with equal keys share their meshes."""
    return (
        strategy.tp,
        strategy.dp,
        strategy.ulysses,
        strategy.ring,
        strategy.ep,
        strategy.zero,
        strategy.shard_group,
    )


def _expand_layers(plan: ParallelPlan, blocks: int) -> tuple[tuple[range, ...], tuple[LayerStrategy, ...]]:
    """Return the layers of each stage and the strategy of each layer, with embedding and head.

    A plan may count the blocks, or the blocks with embedding and head. A plan with one layer applies it to all.
    """
    by_stage = [list(_expand_stage(stage)) for stage in plan.stages]
    layer_count = sum(map(len, by_stage))
    if layer_count == 1:
        by_stage = [by_stage[0] * (blocks + 2)]
    elif layer_count == blocks:
        by_stage[0].insert(0, by_stage[0][0])
        by_stage[-1].append(by_stage[-1][-1])
    elif layer_count != blocks + 2:
        raise ValueError(
            f"The plan has {layer_count} layers, but the model has {blocks} blocks "
            f"({blocks + 2} layers with embedding and head)."
        )
    stages, first = list[range](), 0
    for strategies in by_stage:
        stages.append(range(first, first + len(strategies)))
        first += len(strategies)
    return tuple(stages), tuple(strategy for strategies in by_stage for strategy in strategies)


def _expand_stage(stage: Stage) -> Iterator[LayerStrategy]:
    for run in stage.strategies:
        yield from [replace(run, layers=1)] * run.layers


def _validate_strategy(strategy: LayerStrategy, plan: ParallelPlan) -> None:
    if plan.micro_batch_size % strategy.dp:
        raise ValueError(
            f"`micro_batch_size` is {plan.micro_batch_size}. It must be a multiple of `dp`, which is {strategy.dp}."
        )
    if strategy.zero not in range(4):
        raise ValueError(f"`zero` is {strategy.zero}. Accepted values: 0 (DDP), 1 or 2 (ZeRO), 3 (FSDP).")
    replicas = count_data_replicas(strategy)
    if strategy.zero and replicas % count_shards(strategy):
        raise ValueError(f"`shard_group` is {strategy.shard_group}. It must divide the {replicas} data-parallel ranks.")
    if replicas % strategy.ep:
        raise ValueError(f"`ep` is {strategy.ep}. It must divide the {replicas} data-parallel ranks.")
    if strategy.sequence_sharding and strategy.tp == 1:
        raise ValueError("`sequence_sharding` is true, but `tp` is 1. It needs `tp` of 2 or more.")
    if strategy.offload_parameters and not strategy.offload:
        raise ValueError("`offload_parameters` is true, but `offload` is false. Set `offload` to true as well.")
    if strategy.offload_parameters and replicas > 1 and (strategy.zero, count_shards(strategy)) != (3, replicas):
        raise ValueError(
            f"`offload_parameters` is true, but `zero` is {strategy.zero} over {count_shards(strategy)} ranks. "
            f"It needs `zero` of 3 over all {replicas} data-parallel ranks."
        )
    if strategy.offload_activations and strategy.recompute is not Recompute.FULL:
        raise ValueError(
            f"`offload_activations` is true, but `recompute` is {strategy.recompute}. It needs `recompute` of full."
        )


def _validate_schedule(plan: ParallelPlan) -> None:
    chunks = plan.schedule.interleave
    if len(plan.stages) != plan.pipeline_devices * chunks:
        raise ValueError(f"The plan has {len(plan.stages)} stages. It must have a multiple of `interleave`, {chunks}.")
    if (chunks > 1) != (plan.schedule.name is ScheduleName.INTERLEAVED):
        raise ValueError(
            f"`interleave` is {chunks}, but the schedule is {plan.schedule.name}. "
            f"Only {ScheduleName.INTERLEAVED} needs an `interleave` above 1."
        )
    if chunks > 1 and len({stage.gpus for stage in plan.stages}) > 1:
        sizes = ", ".join(str(stage.gpus) for stage in plan.stages)
        raise ValueError(f"The stages have {sizes} GPUs. Stages of an interleaved pipeline must have equally many.")
    rounds = max(1, plan.micro_batches // plan.pipeline_devices)
    if chunks > 1 and plan.micro_batches % rounds:
        raise ValueError(
            f"`micro_batches` is {plan.micro_batches}. It must be a multiple of {rounds}, "
            f"the rounds of interleaved 1F1B over {plan.pipeline_devices} groups."
        )
