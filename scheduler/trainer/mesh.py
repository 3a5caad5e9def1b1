"""The ranks of a layout as meshes: who shares a layer's parameters, who sums its gradients, who exchanges what.

Every distinct strategy of a group of ranks has meshes of its own over that group. All ranks build all meshes, in the
same order, and keep those that they are in.
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
    """The meshes of one strategy, around this rank.

    `data` has two dimensions: the ranks that hold equal copies of a layer's shards, and those that share one copy.
    `expert_data` is the same for the parameters of experts; `expert` has the ranks that hold unlike experts, and those
    that share each of them.
    """

    data: DeviceMesh
    tensor: DeviceMesh
    ulysses: dist.ProcessGroup
    ring: dist.ProcessGroup
    expert_data: DeviceMesh
    expert: DeviceMesh


@dataclass(frozen=True, slots=True)
class Meshes:
    """`layers`: by number, those of this rank's group. `group`: its ranks.

    Of a pipeline, `back` are all ranks, for gradients on their way to the stage before: on a GPU messages that cross
    must not wait for each other. If it is interleaved, `column` are the ranks with this rank's number in their groups.
    """

    layers: dict[int, LayerMeshes]
    stage_group: dist.ProcessGroup
    backward_group: dist.ProcessGroup | None
    pipeline_group: dist.ProcessGroup | None


def build_meshes(layout: Layout, *, device: str) -> Meshes:
    """Collective over all ranks of the default process group."""
    device_type, own = device.partition(":")[0], layout.group_of(dist.get_rank())
    layers: dict[int, LayerMeshes] = {}
    groups = []
    for group in range(layout.group_count):
        ranks = layout.ranks_in_group(group)
        groups.append(_build_mesh(device_type, ranks, group=len(ranks)))
        known: dict[tuple[int, ...], _StrategyMeshes] = {}
        for number in (layer for stage in layout.stages[group :: layout.group_count] for layer in stage):
            strategy = layout.strategies[number]
            key = mesh_key(strategy)
            if key not in known:
                known[key] = _build_strategy_meshes(strategy, device_type, ranks)
            if group == own:
                layers[number] = _select_layer_meshes(known[key])
    is_interleaved = layout.schedule.name is ScheduleName.INTERLEAVED
    return Meshes(
        layers,
        groups[own].get_group(),
        backward_group=dist.new_group() if layout.group_count > 1 and not is_interleaved else None,
        pipeline_group=_build_pipeline_group(layout, device_type) if is_interleaved else None,
    )


@dataclass(frozen=True, slots=True)
class _StrategyMeshes:
    """The three meshes of one strategy over all ranks of a group."""

    data: DeviceMesh
    dimensions: DeviceMesh
    experts: DeviceMesh


def _build_strategy_meshes(strategy: LayerStrategy, device_type: str, ranks: Sequence[int]) -> _StrategyMeshes:
    split, replicas = count_shards(strategy), count_data_replicas(strategy)
    dp, ring, ulysses, ep, tp = strategy.dp, strategy.ring, strategy.ulysses, strategy.ep, strategy.tp
    # Experts that are spread over some replicas have the others for copies or shards.
    apart = max(1, split // ep)
    return _StrategyMeshes(
        data=_build_mesh(device_type, ranks, replicate=replicas // split, shard=split, tp=tp),
        dimensions=_build_mesh(device_type, ranks, dp=dp, ring=ring, ulysses=ulysses, tp=tp),
        experts=_build_mesh(device_type, ranks, replicate=replicas // ep // apart, shard=apart, ep=ep, tp=tp),
    )


def _select_layer_meshes(made: _StrategyMeshes) -> LayerMeshes:
    return LayerMeshes(
        data=made.data["replicate", "shard"],
        tensor=made.data["tp"],
        ulysses=made.dimensions.get_group("ulysses"),
        ring=made.dimensions.get_group("ring"),
        expert_data=made.experts["replicate", "shard"],
        expert=made.experts["ep", "tp"],
    )


def _build_pipeline_group(layout: Layout, device_type: str) -> dist.ProcessGroup:
    across = _build_mesh(device_type, range(layout.world_size), pipeline=layout.group_count, rank=layout.group_sizes[0])
    return across.get_group("pipeline")


def _build_mesh(device_type: str, ranks: Sequence[int], **dimensions: int) -> DeviceMesh:
    assert prod(dimensions.values()) == len(ranks)
    numbers = torch.tensor(ranks).view(*dimensions.values())
    return DeviceMesh(device_type, numbers, mesh_dim_names=tuple(dimensions))
