"""Communication time of layers on one GPU, for all layer types and degrees at once: arrays [T, B]."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from math import gcd

import numpy as np

from scheduler.solver.costs.collectives import (
    ProcessGroups,
    StageSetting,
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    compute_overlapped_s,
    send_s,
)
from scheduler.solver.costs.layer_chain import LayerTable
from scheduler.solver.costs.strategy_space import ParallelDegrees, StrategyCandidates
from scheduler.solver.instance import Floats, Ints

Layout = tuple[int, bool]
"""Layout of the tensor between two layers: the tensor degree, and whether the sequence is sharded over it.

Splitting samples or tokens over replicas does not matter: a replica holds an equal part of the micro-batch's rows.
"""


@dataclass(frozen=True, slots=True, eq=False)
class MessageTimes:
    """Seconds of the activation messages of one micro-batch that computation does not hide.

    `tensor_s`, `ulysses_s` and `expert_s` are for one forward pass; the backward pass, if there is one, takes as long.
    `ring_s` and `ring_back_s` are the times that ring attention adds to the passes. `attached_s` is for embedding
    and head, in both passes.
    """

    tensor_s: Floats
    ulysses_s: Floats
    ring_s: Floats
    ring_back_s: Floats
    expert_s: Floats
    attached_s: Floats


def compute_message_times(
    table: LayerTable, degrees: ParallelDegrees, attention_s: Floats, setting: StageSetting
) -> MessageTimes:
    """Return the times of the activation messages of one micro-batch.

    These are tensor-parallel all-reduces, Ulysses all-to-alls, ring exchanges, and expert dispatch and combine.

    With a sharded sequence, an all-reduce becomes a reduce-scatter and an all-gather, which take as long within a node.
    """
    one = np.ones_like(degrees.tp)
    rows_bytes = table.boundary_bytes * (degrees.samples / degrees.context)
    message_s = all_reduce_s(rows_bytes, ProcessGroups.for_ranks(degrees.tp, one, setting))
    exchange_s = _compute_ring_s(table, rows_bytes / degrees.tp, degrees, setting)
    hidden = setting.hardware.overlap_coefficient
    return MessageTimes(
        tensor_s=table.tensor_messages * message_s,
        ulysses_s=_compute_ulysses_s(table, rows_bytes / degrees.tp, degrees, setting),
        ring_s=compute_overlapped_s(attention_s, exchange_s, hidden) - attention_s,
        ring_back_s=compute_overlapped_s(2 * attention_s, 2 * exchange_s, hidden) - 2 * attention_s,
        expert_s=_compute_dispatch_s(table, rows_bytes, degrees, setting),
        attached_s=table.attached_messages * message_s,
    )


def _compute_ulysses_s(
    table: LayerTable, share_bytes: Floats, degrees: ParallelDegrees, setting: StageSetting
) -> Floats:
    """Return the time of the four all-to-alls of Ulysses attention.

    Queries, keys and values change from split tokens to split heads, and the output changes back (DeepSpeed-Ulysses,
    arXiv 2309.14509, section 3.2).
    """
    groups = ProcessGroups.for_ranks(degrees.ulysses, degrees.tp, setting)
    if not (degrees.ulysses > 1).any():
        return np.zeros(share_bytes.shape)
    attends = np.where(table.attention_flops > 0, 1.0, 0.0)
    ends_s = 2 * all_to_all_s(share_bytes * attends, groups)
    return ends_s + 2 * all_to_all_s(share_bytes * attends * table.key_value_share, groups)


def _compute_ring_s(table: LayerTable, share_bytes: Floats, degrees: ParallelDegrees, setting: StageSetting) -> Floats:
    """Return the time in which keys and values travel around the ring (ring - 1 hops).

    Attention works on the current block meanwhile. The backward pass sends their gradients along (USP, arXiv
    2405.07719, section 3).
    """
    if not (degrees.ring > 1).any():
        return np.zeros(share_bytes.shape)
    groups = ProcessGroups.for_ranks(degrees.ring, degrees.tp * degrees.ulysses, setting)
    block_bytes = 2 * share_bytes * table.key_value_share * np.where(table.attention_flops > 0, 1.0, 0.0)
    hop_s = send_s(block_bytes, groups.nodes > 1, setting.hardware, setting.node_gpus_min)
    return np.where(block_bytes > 0, (degrees.ring - 1) * hop_s, 0.0)


def _compute_dispatch_s(
    table: LayerTable, rows_bytes: Floats, degrees: ParallelDegrees, setting: StageSetting
) -> Floats:
    """Return the time of dispatch and combine.

    Each token's row goes to its experts and back (GShard, arXiv 2006.16668). The fullest rank receives
    `expert_imbalance` times the mean.
    """
    if not (degrees.ep > 1).any():
        return np.zeros(rows_bytes.shape)
    share_bytes = rows_bytes * table.experts_per_token * np.where(table.experts > 0, 1.0, 0.0) / degrees.tp
    moved = share_bytes * table.get_expert_imbalance(setting.hardware)
    return 2 * all_to_all_s(moved, ProcessGroups.for_ranks(degrees.ep, degrees.tp, setting))


@dataclass(frozen=True, slots=True, eq=False)
class ReductionTimes:
    """Seconds of moving one layer's weights and gradients between replicas, experts included.

    Attributes:
        gather_s: all-gather of all weights from shards over all replicas.
        scatter_s: reduce-scatter of the gradients of trained weights.
        node_gather_s, node_scatter_s: the same over the replicas of a node.
        reduce_s: all-reduce of all gradients; `across_s` is that of one node's shard with the other nodes.
        tied_s: sum of the gradients of tied weights, of which first and last stage hold a copy each.
    """

    gather_s: Floats
    node_gather_s: Floats
    scatter_s: Floats
    node_scatter_s: Floats
    reduce_s: Floats
    across_s: Floats
    tied_s: Floats


def compute_reduction_times(table: LayerTable, candidates: StrategyCandidates, setting: StageSetting) -> ReductionTimes:
    """Replicas are neighbors at a distance of tp; those of one expert are ep times as far apart."""
    degrees = candidates.degrees
    dense_times = _compute_replica_times(table.dense_parameters, degrees.replicas, degrees.tp, candidates, setting)
    if table.expert_parameters.any():
        expert_times = _compute_replica_times(
            table.expert_parameters / degrees.ep,
            degrees.replicas // degrees.ep,
            degrees.tp * degrees.ep,
            candidates,
            setting,
        )
        dense_times = [one + two for one, two in zip(dense_times, expert_times, strict=True)]
    scatter_s, node_scatter_s, reduce_s, across_s = _select_gradient_times(dense_times, table, candidates, setting)
    gather_s, node_gather_s, *_ = dense_times
    tied_s = _compute_tied_s(table, degrees.tp, setting)
    return ReductionTimes(gather_s, node_gather_s, scatter_s, node_scatter_s, reduce_s, across_s, tied_s)


def _select_gradient_times(
    all_times: list[Floats], table: LayerTable, candidates: StrategyCandidates, setting: StageSetting
) -> list[Floats]:
    """Return the part of `all_times` that moves gradients.

    A frozen layer has no gradients except those of the head, which is always trained.

    Args:
        all_times: gather, node_gather, reduce and across times of all weights.
    """
    trained_times = [table.trained * all_s for all_s in all_times]
    head = table.trained_head_parameters
    if not head.any():
        return trained_times
    moved = _compute_replica_times(head, candidates.degrees.replicas, candidates.degrees.tp, candidates, setting)
    return [trained_s + np.where(head > 0, head_s, 0.0) for trained_s, head_s in zip(trained_times, moved, strict=True)]


def _compute_replica_times(
    parameters: Floats, replicas: Ints, stride: Ints, candidates: StrategyCandidates, setting: StageSetting
) -> list[Floats]:
    """Return gather, node_gather, reduce and across times of weights that `replicas` ranks hold, `stride` apart."""
    size_bytes = parameters * setting.hardware.precision.value_bytes / candidates.degrees.tp
    every = ProcessGroups.for_ranks(replicas, stride, setting, spanning=True)
    gather_s, reduce_s = all_gather_s(size_bytes, every), all_reduce_s(size_bytes, every)
    if not candidates.hybrid.any():
        return [gather_s, gather_s, reduce_s, np.zeros_like(reduce_s)]
    in_node = np.maximum(setting.node_gpus // stride, 1)
    node = ProcessGroups.for_ranks(in_node, stride, setting)
    across = ProcessGroups.for_ranks(np.maximum(replicas // in_node, 1), stride * in_node, setting, spanning=True)
    return [gather_s, all_gather_s(size_bytes, node), reduce_s, all_reduce_s(size_bytes / in_node, across)]


def _compute_tied_s(table: LayerTable, tp: Ints, setting: StageSetting) -> Floats:
    """Return the time of an all-reduce over two GPUs, each of which sends its gradients to the other."""
    size_bytes = table.tied_parameters * setting.hardware.precision.value_bytes / tp
    sent_s = send_s(size_bytes, 1 - table.tied_inside, setting.hardware, setting.node_gpus)
    return np.where(size_bytes > 0, sent_s, 0.0)


def list_layouts(degrees: ParallelDegrees) -> tuple[tuple[Layout, ...], Ints]:
    """Return the distinct layouts, and the index of each candidate's layout; both in ascending order of degree."""
    keys, numbers = np.unique(degrees.tp * 2 + degrees.sharded, return_inverse=True)
    return tuple((int(key) // 2, bool(key % 2)) for key in keys), numbers.astype(np.int64)


def compute_border_s(table: LayerTable, degrees: ParallelDegrees, setting: StageSetting) -> Floats:
    """Return [T, B]: the time in which tensor ranks gather the hand-over at a stage's border.

    The hand-over arrives in equal shares. They are gathered forward at the first layer and backward at the last layer,
    but not if the sequence is sharded. A last layer without a backward pass is charged too, as is a change of layout in
    both directions: both are upper bounds.
    """
    rows_bytes = table.boundary_bytes * (degrees.samples / degrees.context)
    gather_s = all_gather_s(rows_bytes, ProcessGroups.for_ranks(degrees.tp, np.ones_like(degrees.tp), setting))
    return np.where(degrees.sharded, 0.0, gather_s)


def compute_reshard_s(table: LayerTable, layouts: tuple[Layout, ...], batches: Ints, setting: StageSetting) -> Floats:
    """Return [C, T, K, K]: the time to change from a layer's layout to the next layer's.

    `batches` [C] are micro-batch sizes in samples.

    C are the micro-batch sizes, `batches` in samples.

    Forward and backward together, in the smallest group that holds both degrees. Samples are gathered towards the
    higher degree, and the way back takes a slice: one all-gather in total. If both layouts split the rows over all
    GPUs, an all-to-all in each direction can be faster.
    """
    size_bytes = batches[:, None] * table.boundary_bytes.ravel()
    count = len(layouts)
    result = np.zeros((*size_bytes.shape, count, count))
    for (left, one), (right, two) in combinations(enumerate(layouts), 2):
        change_s = _compute_change_s(size_bytes, one, two, setting)
        result[:, :, left, right] = result[:, :, right, left] = change_s
    return result


def _compute_change_s(size_bytes: Floats, one: Layout, two: Layout, setting: StageSetting) -> Floats:
    (low, _), (high, _) = pair = sorted([one, two])
    if low == high:
        return _compute_gather_s(size_bytes, high, high, setting)
    ranks = high // gcd(low, high)
    whole_s = _compute_gather_s(size_bytes, ranks, high, setting)
    split = [sharded or degree == 1 for degree, sharded in pair]
    if all(split):
        exchange_s = 2 * all_to_all_s(size_bytes / setting.gpus, _build_group(ranks, setting))
        return np.minimum(whole_s, exchange_s)
    for degree, sharded in pair:
        whole_s = whole_s + (_compute_gather_s(size_bytes, degree, degree, setting) if sharded else 0.0)
    return whole_s


def _compute_gather_s(size_bytes: Floats, ranks: int, degree: int, setting: StageSetting) -> Floats:
    """Return the time in which `ranks` neighbors gather the values of one rank under an unsharded tensor degree."""
    return all_gather_s(size_bytes * degree / setting.gpus, _build_group(ranks, setting))


def _build_group(ranks: int, setting: StageSetting) -> ProcessGroups:
    return ProcessGroups.for_ranks(np.array([ranks]), np.array([1]), setting)
