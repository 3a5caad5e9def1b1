"""From a ParallelPlan to what each rank does: which layers it holds, and which part of their inputs.

No torch in here. Ranks are numbered as the plan's dimensions nest: inside a pipeline group tensor parallel is fastest,
then Ulysses, then ring, and data parallel slowest; the groups follow one another.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan, Schedule, ScheduleName, Stage


@dataclass(frozen=True, slots=True)
class RankCoordinates:
    """One rank's index in each dimension of a layer's strategy."""

    dp: int
    ring: int
    ulysses: int
    tp: int

    def context_index(self, strategy: LayerStrategy) -> int:
        """Its index among the ranks that share a sequence."""
        return self.ring * strategy.ulysses + self.ulysses


def locate_rank(strategy: LayerStrategy, rank: int) -> RankCoordinates:
    """Where the rank with number `rank` of its pipeline group stands."""
    rest, tp = divmod(rank, strategy.tp)
    rest, ulysses = divmod(rest, strategy.ulysses)
    dp, ring = divmod(rest, strategy.ring)
    return RankCoordinates(dp, ring, ulysses, tp)


@dataclass(frozen=True)
class Layout:
    """A plan that fits a model and a number of ranks.

    `layers` holds one strategy for the embedding, for each block, and for the head; stage k holds the layers
    `stages[k]` and runs on group k modulo their number. `widths` are the ranks of each group.
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
        """Every rank holds the whole model: nothing but data and context parallelism, as DDP does it."""
        alike = len({mesh_key(strategy) for strategy in self.strategies}) == 1
        one = self.first_strategy
        return alike and self.group_count == 1 and one.tp == 1 and one.zero == 0 and one.ep == 1

    def group_of(self, rank: int) -> int:
        """The group of the rank with number `rank` of all."""
        return bisect_right(self._group_ends, rank)

    def ranks_in_group(self, group: int) -> range:
        return range(self._group_ends[group] - self.group_sizes[group], self._group_ends[group])

    def rank_in_group(self, rank: int) -> int:
        return rank - self.ranks_in_group(self.group_of(rank)).start

    def stages_on_rank(self, rank: int) -> tuple[int, ...]:
        """The stages that run on the group of the rank with number `rank` of all."""
        return tuple(range(self.group_of(rank), len(self.stages), self.group_count))

    def sample_range(self, strategy: LayerStrategy, rank: int) -> range:
        """Which samples of a micro-batch a rank of a group works on."""
        share = self.micro_batch_size // strategy.dp
        dp = locate_rank(strategy, rank).dp
        return range(dp * share, (dp + 1) * share)


def make_data_parallel_plan(*, replicas: int, global_batch: int) -> ParallelPlan:
    """The plan of a run that nobody planned: plain data parallelism in one micro-batch."""
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
    """The layout of a model of `blocks` blocks between an embedding and a head.

    Raises:
        ValueError: the plan is for another number of ranks or another model, or asks for what this worker does not do;
            the message names the field and what is allowed.
    """
    if plan.world_size != world_size:
        raise ValueError(f"the plan is for {plan.world_size} ranks, this generation has {world_size}")
    stages, layers = _expand_layers(plan, block_count)
    for strategy in layers:
        _validate_strategy(strategy, plan)
    _validate_schedule(plan)
    widths = tuple(stage.gpus for stage in plan.stages[: plan.pipeline_devices])
    return Layout(plan.schedule, plan.micro_batches, plan.micro_batch_size, widths, stages, layers)


def count_data_replicas(strategy: LayerStrategy) -> int:
    """Ranks that hold one layer's parameters besides tensor parallelism: data parallel and context ranks."""
    return strategy.dp * strategy.ulysses * strategy.ring


def count_shards(strategy: LayerStrategy) -> int:
    """Ranks over which those parameters are split. A shard group of 1 beside ZeRO is the field left at its default: all
    replicas share."""
    if strategy.zero == 0:
        return 1
    return strategy.shard_group if strategy.shard_group > 1 else count_data_replicas(strategy)


def mesh_key(strategy: LayerStrategy) -> tuple[int, ...]:
    """What decides who shares parameters and who exchanges what: layers that are equal in it need the same groups."""
    one = strategy
    return (one.tp, one.dp, one.ulysses, one.ring, one.ep, one.zero, one.shard_group)


def _expand_layers(plan: ParallelPlan, blocks: int) -> tuple[tuple[range, ...], tuple[LayerStrategy, ...]]:
    """Layers of each stage, and the strategy of each layer, with embedding and head. Plans count blocks alone, or those
    two as layers too; a plan of one single layer means all of them."""
    by_stage = [list(_expand_stage(stage)) for stage in plan.stages]
    counted = sum(map(len, by_stage))
    if counted == 1:
        by_stage = [by_stage[0] * (blocks + 2)]
    elif counted == blocks:
        by_stage[0].insert(0, by_stage[0][0])
        by_stage[-1].append(by_stage[-1][-1])
    elif counted != blocks + 2:
        raise ValueError(
            f"the plan has {counted} layers, this model has {blocks} blocks (or {blocks + 2} with its ends)"
        )
    stages, begin = list[range](), 0
    for strategies in by_stage:
        stages.append(range(begin, begin + len(strategies)))
        begin += len(strategies)
    return tuple(stages), tuple(strategy for strategies in by_stage for strategy in strategies)


def _expand_stage(stage: Stage) -> Iterator[LayerStrategy]:
    for run in stage.strategies:
        yield from [replace(run, layers=1)] * run.layers


def _validate_strategy(strategy: LayerStrategy, plan: ParallelPlan) -> None:
    if plan.micro_batch_size % strategy.dp:
        raise ValueError(
            f"micro_batch_size is {plan.micro_batch_size}, "
            f"it must be a multiple of the {strategy.dp} data-parallel ranks"
        )
    if strategy.zero not in range(4):
        raise ValueError(f"zero is {strategy.zero}, it must be 0 (DDP), 1 or 2 (ZeRO) or 3 (FSDP)")
    replicas = count_data_replicas(strategy)
    if strategy.zero and replicas % count_shards(strategy):
        raise ValueError(f"shard_group is {strategy.shard_group}, it must divide the {replicas} data-parallel ranks")
    if replicas % strategy.ep:
        raise ValueError(f"ep is {strategy.ep}, it must divide the {replicas} data-parallel ranks")
    if strategy.sequence_sharding and strategy.tp == 1:
        raise ValueError("sequence_sharding is true, it needs tp above 1")


def _validate_schedule(plan: ParallelPlan) -> None:
    chunks = plan.schedule.interleave
    if len(plan.stages) != plan.pipeline_devices * chunks:
        raise ValueError(f"the plan has {len(plan.stages)} stages, it must be a multiple of interleave {chunks}")
    if (chunks > 1) != (plan.schedule.name is ScheduleName.INTERLEAVED):
        raise ValueError(f"interleave is {chunks} beside the schedule {plan.schedule.name}")
    if chunks > 1 and len({stage.gpus for stage in plan.stages}) > 1:
        widths = ", ".join(str(stage.gpus) for stage in plan.stages)
        raise ValueError(f"the plan's stages have {widths} GPUs, in an interleaved pipeline all must have as many")
    rounds = max(1, plan.micro_batches // plan.pipeline_devices)
    if chunks > 1 and plan.micro_batches % rounds:
        raise ValueError(
            f"micro_batches is {plan.micro_batches}, it must be a multiple of {rounds}, "
            f"the rounds of interleaved 1F1B over {plan.pipeline_devices} groups"
        )
