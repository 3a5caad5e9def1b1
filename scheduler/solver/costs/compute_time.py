"""Computing time of layers, for all types and spreads at once: arrays [T, B], of one micro-batch on one GPU.

A pass takes the sum of three: matrix products at a share of the peak rate, their operands and the element-wise kernels
at the memory's bandwidth, and the attention core. So a product loses efficiency as its rows or its width shrink: then
operands weigh more beside flops. No pass is faster than the host launches its kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scheduler.solver.costs.chain import Layer
from scheduler.solver.costs.layer_table import LayerTable
from scheduler.solver.costs.spreads import Spreads
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

OPERATORS_REPEATED = 0.365
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
class Passes:
    """Seconds of computing; `forward_s` includes `attention_s`, the attached work of both passes comes on top.
    `selective_s` is what selective recompute repeats."""

    forward_s: Floats
    backward_s: Floats
    attention_s: Floats
    selective_s: Floats
    attached_s: Floats


def passes(kinds: tuple[Layer, ...], table: LayerTable, spread: Spreads, hardware: HardwareProfile) -> Passes:
    """One forward and one backward pass; a frozen layer computes gradients of its input alone, or none at all."""
    rate = hardware.peak_flops_per_s * hardware.efficiency
    samples = spread.samples / spread.context
    own = samples / spread.tp
    flops = table.flops + np.where(spread.ep > 1, hardware.expert_imbalance - 1, 0.0) * table.expert_flops
    products_s = flops * own / rate + _operand_bytes(table, spread, hardware) / hardware.memory_bandwidth_bytes_per_s
    scores = np.minimum(_SCORE_TRAFFIC * table.selective_bytes, table.traffic_bytes)
    elements = _element_bytes(table, table.traffic_bytes - scores, spread)
    elements_s = elements / hardware.memory_bandwidth_bytes_per_s
    attention_s = own * _attention_s(table, scores, hardware)
    forward_s = products_s + elements_s + attention_s
    operators_s = OPERATORS_REPEATED * products_s + elements_s
    for row, kind in enumerate(kinds):
        if kind.measured_s:
            forward_s[row] = _measured_s(kind, spread)
            attention_s[row] = forward_s[row] * kind.attention_flops / (kind.attention_flops + kind.flops)
            operators_s[row] = OPERATORS_REPEATED * (forward_s[row] - attention_s[row])
    stored = table.selective_bytes > 0
    both = table.backward + table.trained
    backward_s = both * (forward_s - attention_s)
    backward_s = backward_s + table.backward * np.where(stored, _PLAIN_BACKWARD, _FUSED_BACKWARD) * attention_s
    selective_s = np.where(stored, attention_s, operators_s)
    return Passes(forward_s, backward_s, attention_s, selective_s, _attached_s(table, spread, hardware))


def _operand_bytes(table: LayerTable, spread: Spreads, hardware: HardwareProfile) -> Floats:
    """Weights once, and what products read and write: whole at both ends of a split pair, split in between."""
    value_bytes = hardware.precision.value_bytes
    rows = spread.samples / spread.context
    weights = value_bytes * (table.dense_parameters + table.expert_parameters / spread.ep) / spread.tp
    between = (table.activation_bytes - table.selective_bytes) * rows / spread.tp
    return weights + between + 2 * table.tensor_messages * table.boundary_bytes * rows


def _element_bytes(table: LayerTable, traffic_bytes: Floats, spread: Spreads) -> Floats:
    rows = spread.samples / spread.context
    whole = np.minimum(traffic_bytes, _REPLICATED_TRAFFIC * table.tensor_messages * table.boundary_bytes)
    return rows * (whole / np.where(spread.sharded, spread.tp, 1) + (traffic_bytes - whole) / spread.tp)


def _attention_s(table: LayerTable, scores: Floats, hardware: HardwareProfile) -> Floats:
    """[T, 1], of one sample: fused, or with scores that pass through memory."""
    fused = hardware.attention_efficiency or hardware.efficiency
    efficiency = np.where(table.selective_bytes > 0, hardware.efficiency, fused)
    products_s = table.attention_flops / (hardware.peak_flops_per_s * efficiency)
    return products_s + scores / hardware.memory_bandwidth_bytes_per_s


def _measured_s(kind: Layer, spread: Spreads) -> Floats:
    """[B]: the measured forward time, in place of the analytic one; attention gets its share by flops."""
    sample_s = dict(kind.measured_s)
    return np.array([sample_s[degree] for degree in spread.tp.tolist()]) * spread.samples / spread.context


def _attached_s(table: LayerTable, spread: Spreads, hardware: HardwareProfile) -> Floats:
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
