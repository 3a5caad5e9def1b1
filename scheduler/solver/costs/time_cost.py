"""Time of one layer, of the change between two layouts, and of the hand-over between two stages.

All times are per micro-batch, forward and backward together. What a stage does once per iteration (its gradient
reduction as far as backward does not hide it, its optimizer step) counts 1/c of it per micro-batch, c being the
number of micro-batches. On one stage this is exact. On several it stretches that work by the pipeline's bubble
like all other work of the stage, and leaves the objective in UniAP's form (METHODS: sum + (c - 1) x max).
"""

from __future__ import annotations

from math import gcd

from scheduler.domain.parallel_plan import LayerStrategy, Recompute
from scheduler.solver.costs.chain import Layer
from scheduler.solver.costs.collectives import all_gather_s, all_reduce_s, reduce_scatter_s, send_s
from scheduler.solver.costs.setting import Setting

_BACKWARD_TO_FORWARD = 2
"""Gradients with respect to inputs and to weights: two products for each one of the forward pass."""

_OPTIMIZER_BYTES_PER_PARAMETER = 28
"""AdamW reads gradient, moments and master weight, and writes moments and weights: 28 bytes in bf16 (2 + 12 read,
2 + 12 written) and in fp32 (4 + 12 read, 4 + 8 written)."""


def layer_time_s(layer: Layer, strategy: LayerStrategy, setting: Setting) -> float:
    """One layer, one micro-batch, forward and backward, with its share of the iteration's own work."""
    forward_s, backward_s = _passes_s(layer, strategy, setting)
    weights_bytes = layer.parameters / strategy.tp * setting.hardware.precision.value_bytes
    link = setting.topology.data_link(stage_gpus=setting.stage_gpus, tp=strategy.tp)
    once_s = _optimizer_s(layer, strategy, setting)
    if strategy.zero == 3:
        gather_s = all_gather_s(weights_bytes, strategy.dp, link)
        scatter_s = reduce_scatter_s(weights_bytes, strategy.dp, link)
        forward_s = _overlapped_s(forward_s, gather_s, setting)
        backward_s = _overlapped_s(backward_s, gather_s + scatter_s, setting)
    else:
        reduce_s = all_reduce_s(weights_bytes, strategy.dp, link)
        once_s += _overlapped_s(backward_s, reduce_s, setting) - backward_s
    return forward_s + backward_s + once_s / setting.micro_batches


def reshard_time_s(layer: Layer, *, before: LayerStrategy, after: LayerStrategy, setting: Setting) -> float:
    """Between two layers of one stage: the output of `layer` moves from one layout to another.

    Going to the higher tensor degree gathers samples, going back takes a slice, and the backward pass does the
    reverse; so there is one all-gather in all. Layouts of equal degrees need none.
    """
    if before.tp == after.tp:
        return 0.0
    size_bytes = layer.boundary_bytes * setting.micro_batch_size / min(before.dp, after.dp)
    ranks = max(before.tp, after.tp) // gcd(before.tp, after.tp)
    return all_gather_s(size_bytes, ranks, setting.topology.intra)


def border_time_s(layer: Layer, strategy: LayerStrategy, setting: Setting) -> float:
    """At a stage's border: the tensor-parallel ranks gather what the hand-over brought in equal shares.

    Forward at the stage's first layer, backward at its last.
    """
    size_bytes = layer.boundary_bytes * setting.micro_batch_size / strategy.dp
    return all_gather_s(size_bytes, strategy.tp, setting.topology.intra)


def hand_over_time_s(layer: Layer, *, cut: int, setting: Setting) -> float:
    """From stage `cut` (from 0), whose last layer is `layer`, to the next one: activation forward, gradient back.

    Every GPU sends an equal share of the micro-batch to its counterpart (the scatter of Megatron's scatter-gather,
    SC'21, section 4.1), so the time does not depend on the strategies of either side.
    """
    share_bytes = layer.boundary_bytes * setting.micro_batch_size / setting.stage_gpus
    link = setting.topology.hand_over_link(cut=cut, stage_gpus=setting.stage_gpus)
    return 2 * send_s(share_bytes, link)


def _passes_s(layer: Layer, strategy: LayerStrategy, setting: Setting) -> tuple[float, float]:
    """Forward and backward, tensor-parallel messages included, data-parallel ones not."""
    samples = setting.micro_batch_size // strategy.dp
    sample_s = samples / strategy.tp / setting.hardware.flops_per_s
    own_s, attached_s = layer.flops * sample_s, layer.attached_flops * sample_s
    message_s = all_reduce_s(samples * layer.boundary_bytes, strategy.tp, setting.topology.intra)
    tensor_s = layer.tensor_messages * message_s
    forward_s = own_s + attached_s + tensor_s
    backward_s = _BACKWARD_TO_FORWARD * (own_s + attached_s) + tensor_s
    if strategy.recompute is Recompute.FULL:
        backward_s += own_s + tensor_s
    return forward_s, backward_s


def _overlapped_s(compute_s: float, communicate_s: float, setting: Setting) -> float:
    """Both at once, each slowed by the coefficient until the shorter one is done (Merak; Galvatron)."""
    slowed_s = (setting.hardware.overlap_coefficient - 1) * min(compute_s, communicate_s)
    return max(compute_s, communicate_s) + slowed_s


def _optimizer_s(layer: Layer, strategy: LayerStrategy, setting: Setting) -> float:
    shards = strategy.dp if strategy.zero == 3 else 1
    held = layer.parameters / (strategy.tp * shards)
    return held * _OPTIMIZER_BYTES_PER_PARAMETER / setting.hardware.memory_bandwidth_bytes_per_s
