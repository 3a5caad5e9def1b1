"""What is measured on a device, the most valuable first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan, Recompute
from scheduler.profiling.tasks import (
    AttentionTask,
    BandwidthTask,
    CollectiveTask,
    GemmTask,
    GptShape,
    HostLinkTask,
    LaunchTask,
    OptimizerTask,
    StepTask,
    Task,
)
from scheduler.solver.calibration.measured_runs import build_even_plan

PLAN_GPU = "device"
"""Name of the GPU in plans of tasks. The derived profile may have any name."""

_MEBI = 1 << 20


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of measurements that suit a kind of device.

    Attributes:
        gemms: (rows, outputs, inputs) of products; `attentions`: (samples, heads, tokens, width).
        messages: bytes of collectives.
        probes: (hidden, heads, vocabulary, sequence, micro-batch) of probe steps, each with `probe_layers` layers.
        model: of the validation; `sequences` and `micro_batches` (samples of a replica) are those it runs with.
        accumulated: numbers of micro-batches of a step.
    """

    gemms: tuple[tuple[int, int, int], ...]
    attentions: tuple[tuple[int, int, int, int], ...]
    bandwidth_bytes: tuple[int, ...]
    optimizer_parameters: int
    messages: tuple[int, ...]
    probes: tuple[tuple[int, int, int, int, int], ...]
    probe_layers: tuple[int, int]
    model: GptShape
    sequences: tuple[int, ...]
    micro_batch_tokens: tuple[int, ...]
    accumulated: tuple[int, ...]


ACCELERATOR = Scale(
    gemms=(
        *((8192, 6144, 2048), (8192, 2048, 8192), (2048, 8192, 2048), (8192, 50304, 2048), (4096, 4096, 4096)),
        *((16384, 12288, 4096), (1024, 3072, 1024), (8192, 3072, 1024), (512, 4096, 4096)),
    ),
    attentions=(
        *((8, 16, 1024, 128), (4, 16, 2048, 128), (2, 16, 4096, 128), (8, 16, 1024, 64), (1, 32, 8192, 128)),
        (1, 16, 1024, 128),
    ),
    bandwidth_bytes=(512 * _MEBI, 64 * _MEBI),
    optimizer_parameters=64 * _MEBI,
    messages=(64 << 10, _MEBI, 16 * _MEBI, 256 * _MEBI),
    probes=(
        *((2048, 16, 1024, 2048, 1), (2048, 16, 1024, 2048, 4), (2048, 16, 1024, 1024, 8), (2048, 16, 1024, 4096, 2)),
        *((2048, 16, 50304, 2048, 2), (1024, 16, 1024, 1024, 1), (1024, 16, 1024, 2048, 8), (4096, 32, 1024, 2048, 2)),
        *((2048, 16, 50304, 2048, 8), (2048, 16, 1024, 1024, 2), (2048, 16, 1024, 4096, 4)),
    ),
    probe_layers=(2, 4),
    model=GptShape(layers=16, hidden=2048, heads=16, vocabulary=50304, sequence=2048),
    sequences=(2048, 1024, 4096),
    micro_batch_tokens=(4096, 8192, 16384),
    accumulated=(2, 4),
)
PROCESSOR = Scale(
    gemms=((512, 768, 256), (512, 256, 1024), (256, 1024, 256), (512, 512, 512), (1024, 512, 512)),
    attentions=((4, 8, 128, 32), (2, 8, 256, 32), (8, 4, 128, 32)),
    bandwidth_bytes=(64 * _MEBI, 16 * _MEBI),
    optimizer_parameters=4 * _MEBI,
    messages=(4 << 10, 64 << 10, _MEBI, 8 * _MEBI),
    probes=((256, 8, 256, 128, 2), (256, 8, 256, 128, 4), (128, 4, 256, 128, 4), (256, 8, 256, 256, 2)),
    probe_layers=(1, 2),
    model=GptShape(layers=4, hidden=256, heads=8, vocabulary=256, sequence=128),
    sequences=(128,),
    micro_batch_tokens=(256,),
    accumulated=(2, 4),
)
"""Sizes at which four ranks on two cores take minutes."""

TINY = Scale(
    gemms=((64, 96, 32), (64, 32, 128)),
    attentions=((2, 2, 32, 16),),
    bandwidth_bytes=(_MEBI,),
    optimizer_parameters=1 << 14,
    messages=(1 << 10, 16 << 10),
    probes=((32, 2, 64, 32, 1), (32, 2, 64, 32, 2)),
    probe_layers=(1, 2),
    model=GptShape(layers=2, hidden=32, heads=2, vocabulary=64, sequence=32),
    sequences=(32,),
    micro_batch_tokens=(64,),
    accumulated=(2,),
)
"""For tests of the machinery: its figures mean nothing."""

SCALES = {"accelerator": ACCELERATOR, "processor": PROCESSOR, "tiny": TINY}


def list_kernel_tasks(scale: Scale, *, has_host_link: bool) -> list[Task]:
    """Return the tasks of single kernels."""
    tasks: list[Task] = [GemmTask(*each) for each in scale.gemms]
    tasks += [AttentionTask(*each) for each in scale.attentions]
    tasks += [BandwidthTask(each) for each in scale.bandwidth_bytes]
    tasks += [LaunchTask(), OptimizerTask(scale.optimizer_parameters)]
    if has_host_link:
        tasks.append(HostLinkTask(scale.bandwidth_bytes[-1]))
    return tasks


def list_collective_tasks(scale: Scale, ranks: int) -> list[Task]:
    """Return the collectives of each group size that divides the ranks."""
    groups = [size for size in range(2, ranks + 1) if ranks % size == 0]
    collectives = ("all_reduce", "all_to_all", "all_gather", "reduce_scatter")
    tasks: list[Task] = [CollectiveTask(*each) for each in product(collectives, groups, scale.messages)]
    return tasks + [CollectiveTask("send", 2, size) for size in scale.messages if groups]


def list_probe_tasks(scale: Scale, ranks: int) -> list[Task]:
    """Return short models, each with two numbers of layers, so that a layer's share is known."""
    tasks: list[Task] = []
    for hidden, heads, vocabulary, sequence, micro_batch in scale.probes:
        for layers, recompute in product(reversed(scale.probe_layers), (Recompute.NONE, Recompute.FULL)):
            if recompute is Recompute.FULL and layers == scale.probe_layers[0]:
                continue
            shape = GptShape(layers, hidden, heads, vocabulary, sequence)
            strategy = LayerStrategy(layers=1, dp=ranks, recompute=recompute)
            tasks.append(_build_step("probe", shape, strategy, micro_batch=micro_batch, micro_batches=2))
    return tasks + (_list_rank_probes(scale, ranks) if ranks > 1 else [])


def _list_rank_probes(scale: Scale, ranks: int) -> list[Task]:
    """Return steps of the first probe under other plans than plain data parallelism.

    Of plans of tensor parallelism alone, both numbers of layers are measured.
    """
    hidden, heads, vocabulary, sequence, micro_batch = scale.probes[0]
    few, many = (GptShape(layers, hidden, heads, vocabulary, sequence) for layers in scale.probe_layers)
    tasks: list[Task] = []
    for strategy, pipeline in _list_strategies(ranks, heads, many.layers):
        batch = max(1, micro_batch * ranks // strategy.dp // pipeline)
        if strategy.dp == ranks and not strategy.zero:
            continue
        for micro_batches in (1, 4):
            tasks.append(_build_step("probe", many, strategy, pipeline, micro_batch=batch, micro_batches=micro_batches))
        if pipeline == 1 and not strategy.zero:
            tasks.append(_build_step("probe", few, strategy, micro_batch=batch, micro_batches=1))
    return tasks


def list_validation_tasks(scale: Scale, ranks: int) -> list[StepTask]:
    """Return steps of the model under all kinds of plans of these ranks that it can be split by."""
    tasks = []
    model = scale.model
    for tokens, sequence, accumulated in product(scale.micro_batch_tokens, scale.sequences, scale.accumulated):
        shape = GptShape(model.layers, model.hidden, model.heads, model.vocabulary, sequence)
        for strategy, pipeline in _list_strategies(ranks, model.heads, model.layers):
            micro_batch = max(1, tokens // sequence * ranks // strategy.dp // pipeline)
            for recompute in (Recompute.NONE, Recompute.FULL):
                chosen = replace(strategy, recompute=recompute)
                tasks.append(
                    _build_step(
                        "validation", shape, chosen, pipeline, micro_batch=micro_batch, micro_batches=accumulated
                    )
                )
    return tasks


def spread_out(tasks: Sequence[StepTask], count: int) -> list[StepTask]:
    """Return at most `count` of the tasks, evenly spread over the list, in an order that covers it early."""
    kept = [tasks[number * len(tasks) // count] for number in range(count)] if len(tasks) > count else list(tasks)
    stride = next((step for step in (5, 7, 11, 13) if len(kept) % step), 1)
    return [kept[number * stride % len(kept)] for number in range(len(kept))]


def _list_strategies(ranks: int, heads: int, layers: int) -> Iterator[tuple[LayerStrategy, int]]:
    """Yield strategies and pipeline depths that use all ranks."""
    divisors = [size for size in range(1, ranks + 1) if ranks % size == 0]
    for pipeline, tensor in product(divisors, divisors):
        replicas, rest = divmod(ranks, pipeline * tensor)
        if rest or pipeline > layers or heads % tensor:
            continue
        yield LayerStrategy(layers=1, tp=tensor, dp=replicas), pipeline
        if replicas > 1:
            for zero in (1, 3):
                yield LayerStrategy(layers=1, tp=tensor, dp=replicas, zero=zero, shard_group=replicas), pipeline
        if tensor > 1:
            yield LayerStrategy(layers=1, tp=tensor, dp=replicas, sequence_sharding=True), pipeline


def _build_step(
    purpose: str,
    shape: GptShape,
    strategy: LayerStrategy,
    pipeline: int = 1,
    *,
    micro_batch: int,
    micro_batches: int,
) -> StepTask:
    plan: ParallelPlan = build_even_plan(
        strategy,
        layers=shape.layers,
        gpu=PLAN_GPU,
        pipeline=pipeline,
        interleave=1,
        micro_batches=micro_batches,
        samples_per_replica=micro_batch,
    )
    return StepTask(purpose, shape, plan)
