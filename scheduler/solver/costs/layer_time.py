"""Computing time of layers, for all types and spreads at once: arrays [T, B], of one micro-batch on one GPU.

A pass takes the sum of three: matrix products at a share of the peak rate, their operands and the element-wise kernels
at the memory's bandwidth, and the attention core. So a product loses efficiency as its rows or its width shrink: then
operands weigh more beside flops. No pass is faster than the host launches its kernels.

Time of one layer under every candidate strategy: arrays [T, N], per micro-batch, forward and backward together.

What a stage does once per iteration (its gradient reduction as far as backward does not hide it, its optimizer step)
counts 1/c of it per micro-batch, c being the number of micro-batches. On one stage this is exact. On several it
stretches that work by the pipeline's bubble like all other work of the stage, and leaves the objective in UniAP's form.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from scheduler.solver.costs.collectives import StageSetting, compute_overlapped_s
from scheduler.solver.costs.communication_time import (
    MessageTimes,
    ReductionTimes,
    compute_message_times,
    compute_reduction_times,
)
from scheduler.solver.costs.layer_chain import Layer, LayerTable, build_layer_table
from scheduler.solver.costs.strategy_space import ParallelDegrees, StrategyCandidates
from scheduler.solver.instance import Floats
from scheduler.solver.profiles.hardware_profile import HardwareProfile

_FUSED_BACKWARD = 2.5
"""The backward pass of a fused attention core has five products for the forward pass's two (arXiv 2307.08691,
section 3.1)."""

_PLAIN_BACKWARD = 2.0
"""Gradients with respect to inputs and to weights: two products for each one of the forward pass."""

ALIGNED_COLUMNS = 8
"""Tensor cores work best where the sizes of a matrix are multiples of 16 bytes: 8 values in 16 bits (NVIDIA, Matrix
Multiplication Background User's Guide, section "Tensor Core Requirements")."""

RECOMPUTED_PRODUCT_SHARE = 0.365
"""Share of the products' time that selective recompute repeats where attention is fused: it keeps the outputs of every
second product and of the attention core, and computes the rest again (torchtitan, arXiv 2410.06511, section 2.2). By
flops, of Llama-3-8B's seven products: key, output and up projection."""

_SCORE_TRAFFIC = 13 / 5
"""Bytes moved over bytes kept (5) of a stored attention score: product 2, softmax 2 + 2, dropout 2 + 2 + 1, product 2.
That part of the traffic belongs to the attention core."""

_REPLICATED_TRAFFIC = 5.5
"""Times the boundary, for each tensor-parallel message: a norm reads and writes it (2), bias, dropout and residual read
two and write one and a mask (3.5). Every tensor rank does this for all rows unless the sequence is sharded."""


@dataclass(frozen=True, slots=True, eq=False)
class PassTimes:
    """Seconds of computing; `forward_s` includes `attention_s`, the attached work of both passes comes on top.
    `selective_s` is what selective recompute repeats."""

    forward_s: Floats
    backward_s: Floats
    attention_s: Floats
    selective_s: Floats
    attached_s: Floats


def compute_pass_times(
    kinds: tuple[Layer, ...], table: LayerTable, spread: ParallelDegrees, hardware: HardwareProfile
) -> PassTimes:
    """One forward and one backward pass; a frozen layer computes gradients of its input alone, or none at all."""
    rate = hardware.peak_flops_per_s * hardware.efficiency
    samples = spread.samples / spread.context
    own = samples / spread.tp
    flops = table.flops + np.where(spread.ep > 1, hardware.expert_imbalance - 1, 0.0) * table.expert_flops
    products_s = (
        flops * own / rate + _compute_operand_bytes(table, spread, hardware) / hardware.memory_bandwidth_bytes_per_s
    )
    scores = np.minimum(_SCORE_TRAFFIC * table.selective_bytes, table.traffic_bytes)
    elements = _compute_element_bytes(table, table.traffic_bytes - scores, spread)
    elements_s = elements / hardware.memory_bandwidth_bytes_per_s
    attention_s = own * _compute_attention_s(table, scores, hardware)
    forward_s = products_s + elements_s + attention_s
    operators_s = RECOMPUTED_PRODUCT_SHARE * products_s + elements_s
    for row, kind in enumerate(kinds):
        if kind.measured_s:
            forward_s[row] = _get_measured_s(kind, spread)
            attention_s[row] = forward_s[row] * kind.attention_flops / (kind.attention_flops + kind.flops)
            operators_s[row] = RECOMPUTED_PRODUCT_SHARE * (forward_s[row] - attention_s[row])
    stored = table.selective_bytes > 0
    both = table.backward + table.trained
    backward_s = both * (forward_s - attention_s)
    backward_s = backward_s + table.backward * np.where(stored, _PLAIN_BACKWARD, _FUSED_BACKWARD) * attention_s
    selective_s = np.where(stored, attention_s, operators_s)
    return PassTimes(forward_s, backward_s, attention_s, selective_s, _compute_attached_s(table, spread, hardware))


def _compute_operand_bytes(table: LayerTable, spread: ParallelDegrees, hardware: HardwareProfile) -> Floats:
    """Weights once, and what products read and write: whole at both ends of a split pair, split in between."""
    value_bytes = hardware.precision.value_bytes
    rows = spread.samples / spread.context
    weights = value_bytes * (table.dense_parameters + table.expert_parameters / spread.ep) / spread.tp
    between = (table.activation_bytes - table.selective_bytes) * rows / spread.tp
    return weights + between + 2 * table.tensor_messages * table.boundary_bytes * rows


def _compute_element_bytes(table: LayerTable, traffic_bytes: Floats, spread: ParallelDegrees) -> Floats:
    rows = spread.samples / spread.context
    whole = np.minimum(traffic_bytes, _REPLICATED_TRAFFIC * table.tensor_messages * table.boundary_bytes)
    return rows * (whole / np.where(spread.sharded, spread.tp, 1) + (traffic_bytes - whole) / spread.tp)


def _compute_attention_s(table: LayerTable, scores: Floats, hardware: HardwareProfile) -> Floats:
    """[T, 1], of one sample: fused, or with scores that pass through memory."""
    fused = hardware.attention_efficiency or hardware.efficiency
    efficiency = np.where(table.selective_bytes > 0, hardware.efficiency, fused)
    products_s = table.attention_flops / (hardware.peak_flops_per_s * efficiency)
    return products_s + scores / hardware.memory_bandwidth_bytes_per_s


def _get_measured_s(kind: Layer, spread: ParallelDegrees) -> Floats:
    """[B]: the measured forward time, in place of the analytic one; attention gets its share by flops."""
    sample_s = dict(kind.measured_s)
    return np.array([sample_s[degree] for degree in spread.tp.tolist()]) * spread.samples / spread.context


def _compute_attached_s(table: LayerTable, spread: ParallelDegrees, hardware: HardwareProfile) -> Floats:
    """Embedding, head and loss, forward and backward; the vocabulary is split over the tensor ranks.

    In front of a frozen layer they have no gradient of inputs to compute, and a frozen embedding none at all.
    """
    rows = spread.samples / spread.context
    passes_ = 1 + table.backward + table.attached_trained
    rate = hardware.peak_flops_per_s * hardware.efficiency
    operands = hardware.precision.value_bytes * table.product_parameters / spread.tp
    operands = operands + np.where(table.product_parameters > 0, table.boundary_bytes, 0.0) * rows
    products_s = table.attached_flops * rows / spread.tp / rate + operands / hardware.memory_bandwidth_bytes_per_s
    # A vocabulary that does not divide evenly is padded to aligned columns (as by Megatron-LM).
    unaligned = (table.columns % spread.tp == 0) & (table.columns // spread.tp % ALIGNED_COLUMNS > 0)
    moved_s = table.attached_traffic_bytes * rows / spread.tp / hardware.memory_bandwidth_bytes_per_s
    return passes_ * products_s * np.where(unaligned, hardware.unaligned_slowdown, 1.0) + moved_s


_OPTIMIZER_BYTES_PER_PARAMETER = 28
"""AdamW reads gradient, moments and master weight, and writes moments and weights: 28 bytes in bf16 (2 + 12 read,
2 + 12 written) and in fp32 (4 + 12 read, 4 + 8 written)."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerTimes:
    """Seconds by cause, [T, N]; `data_s` is what computing does not hide, `other_s` the optimizer step."""

    compute_s: Floats
    tensor_s: Floats
    sequence_s: Floats
    expert_s: Floats
    data_s: Floats
    other_s: Floats

    @property
    def total_s(self) -> Floats:
        return self.compute_s + self.tensor_s + self.sequence_s + self.expert_s + self.data_s + self.other_s


def compute_layer_times(kinds: tuple[Layer, ...], candidates: StrategyCandidates, setting: StageSetting) -> LayerTimes:
    """Each of `kinds` under each candidate."""
    table, spread = build_layer_table(kinds), candidates.spread
    compute = compute_pass_times(kinds, table, candidates.spreads, setting.hardware)
    sent = compute_message_times(table, candidates.spreads, compute.attention_s, setting)
    forward_s, backward_s = ring_forward_s, ring_backward_s = _compute_passes_s(
        table, candidates, compute, setting.hardware
    )
    if sent.ring_s.any():
        ring_forward_s, ring_backward_s = _compute_passes_s(
            table, candidates, _add_ring_exchange(table, compute, sent), setting.hardware
        )
    attached_s = compute.attached_s[:, spread]
    back = table.backward
    tensor_s = _compute_repeated_s(sent.tensor_s, 1 + back, candidates) + sent.attached_s[:, spread]
    ulysses_s = _compute_repeated_s(sent.ulysses_s, 1 + back, candidates)
    beside_s = attached_s + tensor_s + ulysses_s
    early_s = beside_s * np.where(np.maximum(back, table.attached_trained) > 0, 1 / 3, 1.0)
    data = _compute_state_traffic(
        table, candidates, compute_reduction_times(table, candidates, setting), setting.hardware
    )
    windows_s = (ring_forward_s + early_s, ring_backward_s + (beside_s - early_s))
    return LayerTimes(
        compute_s=forward_s + backward_s + attached_s,
        tensor_s=tensor_s,
        sequence_s=ulysses_s + (ring_forward_s - forward_s) + (ring_backward_s - backward_s),
        expert_s=_compute_expert_s(table, candidates, sent.expert_s, data, setting.hardware),
        data_s=_compute_exposed_s(data, windows_s, candidates, setting.hardware.overlap_coefficient),
        other_s=_compute_optimizer_step_s(table, candidates, setting),
    )


def _compute_passes_s(
    table: LayerTable, chosen: StrategyCandidates, compute: PassTimes, hardware: HardwareProfile
) -> tuple[Floats, Floats]:
    """Forward and backward computing with what recompute repeats; neither is faster than its launches."""
    spread, back, launch_s = chosen.spread, table.backward, hardware.launch_s
    full, selective = 1.0 * (chosen.recompute == 2), 1.0 * (chosen.recompute == 1)
    backward_s = compute.backward_s[:, spread] + full * (back * compute.forward_s)[:, spread]
    if selective.any():
        backward_s += selective * (back * compute.selective_s)[:, spread]
    if launch_s > 0:
        halves = full + np.where(table.selective_bytes > 0, 0.0, 0.5) * selective
        backward_s = np.maximum(backward_s, launch_s * (back * halves + back + table.trained))
    return np.maximum(compute.forward_s, launch_s)[:, spread], backward_s


def _add_ring_exchange(table: LayerTable, compute: PassTimes, sent: MessageTimes) -> PassTimes:
    """With the exchange of ring attention, which full recompute repeats and the launches of a small layer hide."""
    return replace(
        compute,
        forward_s=compute.forward_s + sent.ring_s,
        backward_s=compute.backward_s + table.backward * sent.ring_back_s,
    )


def _compute_repeated_s(forward_s: Floats, passes_: Floats, chosen: StrategyCandidates) -> Floats:
    """[T, N] from the [T, B] of one forward pass: over `passes_` passes, and again where full recompute repeats it."""
    again_s: Floats = (chosen.recompute == 2) * ((passes_ - 1) * forward_s)[:, chosen.spread]
    return (passes_ * forward_s)[:, chosen.spread] + again_s


def _compute_expert_s(
    table: LayerTable, chosen: StrategyCandidates, forward_s: Floats, data: _StateTraffic, hardware: HardwareProfile
) -> Floats:
    """Dispatch and combine; without priority those of the backward pass wait while gradients pass beside it."""
    if not forward_s.any():
        return np.zeros((len(forward_s), len(chosen.spread)))
    total_s = _compute_repeated_s(forward_s, 1 + table.backward, chosen)
    if hardware.expert_priority:
        return total_s
    beside_s = data.backward_s + data.once_s / chosen.micro_batches
    return total_s + np.minimum((table.backward * forward_s)[:, chosen.spread], beside_s)


@dataclass(frozen=True, slots=True, eq=False)
class _StateTraffic:
    """Seconds of moving weights and gradients: `once_s` of an iteration, the others of each micro-batch.

    forward_s, backward_s, once_s run beside a pass (the last one beside the last backward pass); `exposed_s` beside
    nothing.
    """

    forward_s: Floats
    backward_s: Floats
    once_s: Floats
    exposed_s: Floats


def _compute_state_traffic(
    table: LayerTable, chosen: StrategyCandidates, moved: ReductionTimes, hardware: HardwareProfile
) -> _StateTraffic:
    """ZeRO-3 gathers before each pass and scatters gradients in each backward pass, ZeRO-2 the latter alone. Once per
    iteration the others reduce: ZeRO-0 all gradients, ZeRO-1 into shards; ZeRO-1 and 2 gather the new weights; a hybrid
    shard reduces across nodes. ZeRO-3 always runs beside the passes, the others as far as the profile says."""
    spread, share = chosen.spread, hardware.gradient_overlap
    # Columns of 0 and 1; multiplying by them is far quicker than choosing with numpy.where.
    zero, one, two, three = (1.0 * (chosen.zero == stage) for stage in range(4))
    gather_s, reduce_s = moved.gather_s[:, spread], zero * moved.reduce_s[:, spread]
    scatter_s = moved.scatter_s[:, spread]
    if chosen.hybrid.any():
        gather_s += chosen.hybrid * (moved.node_gather_s[:, spread] - gather_s)
        scatter_s += chosen.hybrid * (moved.node_scatter_s[:, spread] - scatter_s)
        reduce_s += chosen.hybrid * moved.across_s[:, spread]
    forward_s = three * gather_s
    reduce_s += one * scatter_s
    once = 1.0 / chosen.micro_batches
    after_s = (one + two) * scatter_s + moved.tied_s[:, spread]
    return _StateTraffic(
        forward_s=forward_s,
        backward_s=table.backward * forward_s + (three + share * two) * scatter_s,
        once_s=share * reduce_s,
        exposed_s=(1 - share) * (two * scatter_s + once * reduce_s) + once * after_s,
    )


def _compute_exposed_s(
    data: _StateTraffic, windows_s: tuple[Floats, Floats], chosen: StrategyCandidates, coefficient: float
) -> Floats:
    """What all of it adds to the two passes of a micro-batch; the last backward pass also hides what is done once."""
    forward_s, backward_s = windows_s
    usual_s = compute_overlapped_s(backward_s, data.backward_s, coefficient)
    last_s = compute_overlapped_s(backward_s, data.backward_s + data.once_s, coefficient)
    once = 1.0 / chosen.micro_batches
    both_s = compute_overlapped_s(forward_s, data.forward_s, coefficient) + (1 - once) * usual_s + once * last_s
    return np.maximum(both_s - forward_s - backward_s, 0.0) + data.exposed_s


def _compute_optimizer_step_s(table: LayerTable, chosen: StrategyCandidates, setting: StageSetting) -> Floats:
    """The optimizer step, 1/c of it; with offload, gradients go to the host and new weights come back."""
    hardware = setting.hardware
    held = _count_owned_parameters(table, chosen)
    step_s = _OPTIMIZER_BYTES_PER_PARAMETER / hardware.memory_bandwidth_bytes_per_s * held
    if chosen.offload.any():
        moved_s = 2 * hardware.precision.value_bytes / hardware.host_bandwidth_bytes_per_s
        host_s = (moved_s + hardware.host_optimizer_s_per_parameter) * held
        step_s = np.where(chosen.offload == 1, host_s, step_s)
    return np.asarray(step_s / chosen.micro_batches)


def _count_owned_parameters(table: LayerTable, chosen: StrategyCandidates) -> Floats:
    """Weights whose optimizer state one GPU owns: those that are trained."""
    tp, ep = chosen.spreads.tp[chosen.spread], chosen.spreads.ep[chosen.spread]
    experts: Floats = table.trained * table.expert_parameters / (tp * ep * np.maximum(chosen.shard_group // ep, 1))
    dense = table.trained * table.dense_parameters + table.trained_head_parameters
    return dense / (tp * chosen.shard_group) + experts
