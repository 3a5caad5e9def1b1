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
from scheduler.worker.layout import Layout, data_replicas, kind, shards


@dataclass(frozen=True, slots=True)
class LayerMesh:
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

    layers: dict[int, LayerMesh]
    group: dist.ProcessGroup
    back: dist.ProcessGroup | None
    column: dist.ProcessGroup | None


def build_meshes(layout: Layout, *, device: str) -> Meshes:
    """Collective over all ranks of the default process group."""
    device_type, own = device.partition(":")[0], layout.group_of(dist.get_rank())
    layers: dict[int, LayerMesh] = {}
    groups = []
    for group in range(layout.groups):
        ranks = layout.ranks_of(group)
        groups.append(_mesh(device_type, ranks, group=len(ranks)))
        known: dict[tuple[int, ...], _Made] = {}
        for number in (layer for stage in layout.stages[group :: layout.groups] for layer in stage):
            strategy = layout.layers[number]
            key = kind(strategy)
            if key not in known:
                known[key] = _made(strategy, device_type, ranks)
            if group == own:
                layers[number] = _around_this_rank(known[key])
    is_interleaved = layout.schedule.name is ScheduleName.INTERLEAVED
    return Meshes(
        layers,
        groups[own].get_group(),
        back=dist.new_group() if layout.groups > 1 and not is_interleaved else None,
        column=_column(layout, device_type) if is_interleaved else None,
    )


@dataclass(frozen=True, slots=True)
class _Made:
    """The three meshes of one strategy over all ranks of a group."""

    data: DeviceMesh
    places: DeviceMesh
    experts: DeviceMesh


def _made(strategy: LayerStrategy, device_type: str, ranks: Sequence[int]) -> _Made:
    split, replicas = shards(strategy), data_replicas(strategy)
    dp, ring, ulysses, ep, tp = strategy.dp, strategy.ring, strategy.ulysses, strategy.ep, strategy.tp
    # Experts that are spread over some replicas have the others for copies or shards.
    apart = max(1, split // ep)
    return _Made(
        data=_mesh(device_type, ranks, replicate=replicas // split, shard=split, tp=tp),
        places=_mesh(device_type, ranks, dp=dp, ring=ring, ulysses=ulysses, tp=tp),
        experts=_mesh(device_type, ranks, replicate=replicas // ep // apart, shard=apart, ep=ep, tp=tp),
    )


def _around_this_rank(made: _Made) -> LayerMesh:
    return LayerMesh(
        data=made.data["replicate", "shard"],
        tensor=made.data["tp"],
        ulysses=made.places.get_group("ulysses"),
        ring=made.places.get_group("ring"),
        expert_data=made.experts["replicate", "shard"],
        expert=made.experts["ep", "tp"],
    )


def _column(layout: Layout, device_type: str) -> dist.ProcessGroup:
    across = _mesh(device_type, range(layout.world_size), pipeline=layout.groups, rank=layout.widths[0])
    return across.get_group("pipeline")


def _mesh(device_type: str, ranks: Sequence[int], **dimensions: int) -> DeviceMesh:
    assert prod(dimensions.values()) == len(ranks)
    numbers = torch.tensor(ranks).view(*dimensions.values())
    return DeviceMesh(device_type, numbers, mesh_dim_names=tuple(dimensions))
