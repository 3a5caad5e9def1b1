"""The ranks of a layout as meshes: who shares a layer's parameters, who sums its gradients, who exchanges what.

Every distinct strategy of a plan has meshes of its own over all ranks. All ranks build them in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from scheduler.domain.parallel_plan import LayerStrategy
from scheduler.worker.layout import Layout, data_replicas, shards


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
    """`pipeline`: the ranks with this rank's number in the groups, in their order; `group`: this rank's own group."""

    layers: tuple[LayerMesh, ...]
    pipeline: dist.ProcessGroup
    group: dist.ProcessGroup


def build_meshes(layout: Layout, *, device: str) -> Meshes:
    """Collective over all ranks of the default process group."""
    kind = device.partition(":")[0]
    across = init_device_mesh(kind, (layout.groups, layout.group_ranks), mesh_dim_names=("pipeline", "group"))
    known: dict[tuple[int, ...], LayerMesh] = {}
    layers = []
    for strategy in layout.layers:
        one = strategy
        key = (one.tp, one.dp, one.ulysses, one.ring, one.ep, one.zero, one.shard_group)
        if key not in known:
            known[key] = _layer_mesh(layout, strategy, kind)
        layers.append(known[key])
    return Meshes(tuple(layers), across.get_group("pipeline"), across.get_group("group"))


def _layer_mesh(layout: Layout, strategy: LayerStrategy, kind: str) -> LayerMesh:
    split, replicas = shards(strategy), data_replicas(strategy)
    data = _mesh(kind, layout, pp=layout.groups, replicate=replicas // split, shard=split, tp=strategy.tp)
    places = _mesh(
        kind, layout, pp=layout.groups, dp=strategy.dp, ring=strategy.ring, ulysses=strategy.ulysses, tp=strategy.tp
    )
    # Experts that are spread over some replicas have the others for copies or shards.
    apart = max(1, split // strategy.ep)
    experts = _mesh(
        kind,
        layout,
        pp=layout.groups,
        replicate=replicas // strategy.ep // apart,
        shard=apart,
        ep=strategy.ep,
        tp=strategy.tp,
    )
    return LayerMesh(
        data=data["replicate", "shard"],
        tensor=data["tp"],
        ulysses=places.get_group("ulysses"),
        ring=places.get_group("ring"),
        expert_data=experts["replicate", "shard"],
        expert=experts["ep", "tp"],
    )


def _mesh(kind: str, layout: Layout, **dimensions: int) -> DeviceMesh:
    return init_device_mesh(kind, tuple(dimensions.values()), mesh_dim_names=tuple(dimensions))
