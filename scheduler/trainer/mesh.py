"""Device meshes and process groups of a layout.

Each distinct strategy within a pipeline group has its own meshes. All ranks build all meshes in the same order, and
keep those that they belong to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from scheduler.domain.parallel_plan import LayerStrategy, ScheduleName
from scheduler.trainer.layout import Layout, count_data_replicas, count_shards, mesh_key


@dataclass(frozen=True, slots=True)
class LayerMeshes:
    """The meshes of one strategy that contain this rank.

    Attributes:
        data: ("replicate", "shard"): ranks with equal copies of a layer's shards, and ranks that share one copy.
        tensor: the tensor-parallel ranks.
        expert_data: as `data`, for the parameters of experts.
        expert: ("ep", "tp"): ranks that hold different experts, and ranks that share each expert.
    """

    data: DeviceMesh
    tensor: DeviceMesh
    ulysses: dist.ProcessGroup
    ring: dist.ProcessGroup
    expert_data: DeviceMesh
    expert: DeviceMesh


@dataclass(frozen=True, slots=True)
class Meshes:
    """All meshes and groups of this rank.

    Attributes:
        layers: meshes by layer number, for the layers of this rank's pipeline group.
        stage_group: the ranks of this rank's pipeline group.
        backward_group: all ranks, for gradients sent to the previous stage, because on GPUs messages in opposite
            directions must not wait for each other. None without a pipeline, and for the interleaved schedule.
        pipeline_group: for the interleaved schedule, the ranks with this rank's number in their groups.
    """

    layers: dict[int, LayerMeshes]
    stage_group: dist.ProcessGroup
    backward_group: dist.ProcessGroup | None
    pipeline_group: dist.ProcessGroup | None


def build_meshes(layout: Layout, *, device: str) -> Meshes:
    """Build the meshes. Collective over all ranks of the default process group."""
    device_type, own_group = device.partition(":")[0], layout.group_of(dist.get_rank())
    layers: dict[int, LayerMeshes] = {}
    groups = []
    for group in range(layout.group_count):
        ranks = layout.ranks_in_group(group)
        groups.append(_build_mesh(device_type, ranks, group=len(ranks)))
        built: dict[tuple[int, ...], _StrategyMeshes] = {}
        for number in (layer for stage in layout.stages[group :: layout.group_count] for layer in stage):
            strategy = layout.strategies[number]
            key = mesh_key(strategy)
            if key not in built:
                built[key] = _build_strategy_meshes(strategy, device_type, ranks)
            if group == own_group:
                layers[number] = _select_layer_meshes(built[key])
    is_interleaved = layout.schedule.name is ScheduleName.INTERLEAVED
    return Meshes(
        layers,
        groups[own_group].get_group(),
        backward_group=dist.new_group() if layout.group_count > 1 and not is_interleaved else None,
        pipeline_group=_build_pipeline_group(layout, device_type) if is_interleaved else None,
    )


@dataclass(frozen=True, slots=True)
class _StrategyMeshes:
    """The meshes of one strategy over all ranks of a group."""

    data: DeviceMesh
    dimensions: DeviceMesh
    experts: DeviceMesh


def _build_strategy_meshes(strategy: LayerStrategy, device_type: str, ranks: Sequence[int]) -> _StrategyMeshes:
    shards, replicas = count_shards(strategy), count_data_replicas(strategy)
    dp, ring, ulysses, ep, tp = strategy.dp, strategy.ring, strategy.ulysses, strategy.ep, strategy.tp
    # The replicas that do not hold different experts hold copies or shards of them.
    expert_shards = max(1, shards // ep)
    copies = replicas // ep // expert_shards
    return _StrategyMeshes(
        data=_build_mesh(device_type, ranks, replicate=replicas // shards, shard=shards, tp=tp),
        dimensions=_build_mesh(device_type, ranks, dp=dp, ring=ring, ulysses=ulysses, tp=tp),
        experts=_build_mesh(device_type, ranks, replicate=copies, shard=expert_shards, ep=ep, tp=tp),
    )


def _select_layer_meshes(meshes: _StrategyMeshes) -> LayerMeshes:
    return LayerMeshes(
        data=meshes.data["replicate", "shard"],
        tensor=meshes.data["tp"],
        ulysses=meshes.dimensions.get_group("ulysses"),
        ring=meshes.dimensions.get_group("ring"),
        expert_data=meshes.experts["replicate", "shard"],
        expert=meshes.experts["ep", "tp"],
    )


def _build_pipeline_group(layout: Layout, device_type: str) -> dist.ProcessGroup:
    ranks = range(layout.world_size)
    mesh = _build_mesh(device_type, ranks, pipeline=layout.group_count, rank=layout.group_sizes[0])
    return mesh.get_group("pipeline")


def _build_mesh(device_type: str, ranks: Sequence[int], **dimensions: int) -> DeviceMesh:
    assert prod(dimensions.values()) == len(ranks)
    numbers = torch.tensor(ranks).view(*dimensions.values())
    return DeviceMesh(device_type, numbers, mesh_dim_names=tuple(dimensions))
