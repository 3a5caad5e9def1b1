"""From a ParallelPlan to a model whose gradients and parameters are spread as the plan says.

Data parallelism (DDP) and FSDP2, full or hybrid, per layer. The other dimensions are refused by name, never ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan, Recompute, Schedule, Stage
from scheduler.worker.model import Block, Gpt


@dataclass(frozen=True, slots=True)
class DataLayout:
    """The part of a plan that this worker runs: `replicas` ranks, and for each block its shards and recomputation.

    `shards` is the number of ranks over which a block's parameters are split: 1 is a whole copy on each rank.
    """

    replicas: int
    micro_batches: int
    micro_batch_size: int
    shards: tuple[int, ...]
    recompute: tuple[Recompute, ...]
    fully_sharded: tuple[bool, ...]


def data_plan(*, replicas: int, global_batch: int) -> ParallelPlan:
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


def data_layout(plan: ParallelPlan, *, world_size: int, blocks: int) -> DataLayout:
    """
    Raises:
        ValueError: the plan is for another number of ranks, or asks for what this worker does not do.
    """
    if plan.world_size != world_size:
        raise ValueError(f"the plan is for {plan.world_size} ranks, this generation has {world_size}")
    if len(plan.stages) > 1:
        raise _beyond(f"pp={len(plan.stages)}")
    strategies = plan.stages[0].strategies
    for strategy in strategies:
        _check_dimensions(strategy)
    replicas = strategies[0].dp
    if plan.micro_batch_size % replicas:
        raise ValueError(
            f"micro_batch_size is {plan.micro_batch_size}, it must be a multiple of the {replicas} data-parallel ranks"
        )
    by_block = _by_block(strategies, blocks)
    return DataLayout(
        replicas=replicas,
        micro_batches=plan.micro_batches,
        micro_batch_size=plan.micro_batch_size,
        shards=tuple(_shards(strategy) for strategy in by_block),
        recompute=tuple(strategy.recompute for strategy in by_block),
        fully_sharded=tuple(strategy.zero == 3 for strategy in by_block),
    )


def parallelise(model: Gpt, layout: DataLayout, *, device: str) -> nn.Module:
    """The model on `device`, wrapped: DDP where no block is sharded, else FSDP2 block by block.

    Collective over all ranks of the default process group.
    """
    model.to(device)
    for block, recompute in zip(model.blocks, layout.recompute, strict=True):
        assert isinstance(block, Block)
        block.recompute = recompute
    if not any(layout.fully_sharded):
        return DistributedDataParallel(model) if layout.replicas > 1 else model
    kind = device.partition(":")[0]
    meshes = {shards: _mesh(kind, layout.replicas, shards) for shards in sorted(set(layout.shards))}
    for block, shards in zip(model.blocks, layout.shards, strict=True):
        fully_shard(block, mesh=meshes[shards])
    # What lies before and behind the blocks is spread as the widest of them.
    fully_shard(model, mesh=meshes[max(layout.shards)])
    return model


@contextmanager
def gradient_sync(model: nn.Module, *, wanted: bool) -> Iterator[None]:
    """Gradients are averaged over the ranks inside only where wanted: once a step, in its last micro-batch."""
    if isinstance(model, DistributedDataParallel) and not wanted:
        with model.no_sync():
            yield
        return
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(wanted)
    yield


def _check_dimensions(strategy: LayerStrategy) -> None:
    for name in ("tp", "ulysses", "ring", "ep"):
        if getattr(strategy, name) > 1:
            raise _beyond(f"{name}={getattr(strategy, name)}")
    if strategy.offload:
        raise _beyond("offload")
    if strategy.zero not in (0, 3):
        raise ValueError(f"this worker runs zero 0 (DDP) and zero 3 (FSDP); the plan asks for zero={strategy.zero}")
    if strategy.zero == 3 and strategy.dp % _shards(strategy):
        raise ValueError(f"shard_group is {strategy.shard_group}, it must divide the {strategy.dp} data-parallel ranks")


def _beyond(wanted: str) -> ValueError:
    return ValueError(f"this worker trains data and FSDP dimensions; the plan asks for {wanted}")


def _shards(strategy: LayerStrategy) -> int:
    """A shard group of 1 beside zero 3 is the field left at its default: all replicas share."""
    if strategy.zero == 0:
        return 1
    return strategy.shard_group if strategy.shard_group > 1 else strategy.dp


def _by_block(strategies: tuple[LayerStrategy, ...], blocks: int) -> list[LayerStrategy]:
    """The strategy of each block. Plans count blocks alone, or the embedding and the head as layers too."""
    layers = [strategy for strategy in strategies for _ in range(strategy.layers)]
    if len(layers) == blocks:
        return layers
    if len(layers) == blocks + 2:
        return layers[1:-1]
    if len(strategies) == 1:
        return [strategies[0]] * blocks
    raise ValueError(
        f"the plan has {len(layers)} layers, this model has {blocks} blocks (or {blocks + 2} with its ends)"
    )


def _mesh(kind: str, replicas: int, shards: int) -> DeviceMesh:
    if shards == replicas:
        return init_device_mesh(kind, (replicas,), mesh_dim_names=("shard",))
    return init_device_mesh(kind, (replicas // shards, shards), mesh_dim_names=("replicate", "shard"))
