"""Time of moving weights and gradients between replicas, for all types and spreads at once: arrays [T, B]."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scheduler.solver.costs.candidates import Candidates
from scheduler.solver.costs.collectives import Groups, all_gather_s, all_reduce_s, send_s
from scheduler.solver.costs.layer_table import LayerTable
from scheduler.solver.costs.setting import Setting
from scheduler.solver.instance import Floats, Ints


@dataclass(frozen=True, slots=True, eq=False)
class Reductions:
    """Seconds for one layer's weights, experts included.

    Attributes:
        gather_s: all weights, from shards over all replicas. `scatter_s`: gradients of those that are trained.
        node_gather_s, node_scatter_s: the same over the replicas of a node.
        reduce_s: all-reduce of all gradients; `across_s` of one node's shard of them with the other nodes.
        tied_s: summing the gradients of tied weights, of which first and last stage hold a copy each.
    """

    gather_s: Floats
    node_gather_s: Floats
    scatter_s: Floats
    node_scatter_s: Floats
    reduce_s: Floats
    across_s: Floats
    tied_s: Floats


def reductions(table: LayerTable, chosen: Candidates, setting: Setting) -> Reductions:
    """Replicas are neighbours at a distance of tp; those of one expert lie ep times as far apart."""
    spread = chosen.spreads
    every = _moved(table.dense_parameters, spread.replicas, spread.tp, chosen, setting)
    if table.expert_parameters.any():
        own = _moved(
            table.expert_parameters / spread.ep, spread.replicas // spread.ep, spread.tp * spread.ep, chosen, setting
        )
        every = [one + two for one, two in zip(every, own, strict=True)]
    scatter_s, node_scatter_s, reduce_s, across_s = _gradients(every, table, chosen, setting)
    gather_s, node_gather_s, *_ = every
    tied_s = _tied_s(table, spread.tp, setting)
    return Reductions(gather_s, node_gather_s, scatter_s, node_scatter_s, reduce_s, across_s, tied_s)


def _gradients(every: list[Floats], table: LayerTable, chosen: Candidates, setting: Setting) -> list[Floats]:
    """The part of `every` (gather, node_gather, reduce and across of all weights) that moves gradients: nothing of a
    frozen layer but the head's, which is trained."""
    own = [table.trained * all_s for all_s in every]
    head = table.trained_head_parameters
    if not head.any():
        return own
    moved = _moved(head, chosen.spreads.replicas, chosen.spreads.tp, chosen, setting)
    return [own_s + np.where(head > 0, head_s, 0.0) for own_s, head_s in zip(own, moved, strict=True)]


def _moved(parameters: Floats, replicas: Ints, stride: Ints, chosen: Candidates, setting: Setting) -> list[Floats]:
    """gather, node_gather, reduce and across of weights that `replicas` hold, `stride` apart."""
    size_bytes = parameters * setting.hardware.precision.value_bytes / chosen.spreads.tp
    every = Groups.of(replicas, stride, setting, spanning=True)
    gather_s, reduce_s = all_gather_s(size_bytes, every), all_reduce_s(size_bytes, every)
    if not chosen.hybrid.any():
        return [gather_s, gather_s, reduce_s, np.zeros_like(reduce_s)]
    in_node = np.maximum(setting.node_gpus // stride, 1)
    node = Groups.of(in_node, stride, setting)
    across = Groups.of(np.maximum(replicas // in_node, 1), stride * in_node, setting, spanning=True)
    return [gather_s, all_gather_s(size_bytes, node), reduce_s, all_reduce_s(size_bytes / in_node, across)]


def _tied_s(table: LayerTable, tp: Ints, setting: Setting) -> Floats:
    """An all-reduce over two GPUs: each sends its gradients to the other."""
    size_bytes = table.tied_parameters * setting.hardware.precision.value_bytes / tp
    sent_s = send_s(size_bytes, 1 - table.tied_inside, setting.hardware, setting.node_gpus)
    return np.where(size_bytes > 0, sent_s, 0.0)
