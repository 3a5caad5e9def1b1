"""Memory of layers on one GPU under every candidate strategy, [T, N]. Results are whole bytes, rounded up, so that sums
are exact.
"""

from __future__ import annotations

import numpy as np

from scheduler.solver.costs.collectives import StageSetting
from scheduler.solver.costs.layer_chain import Layer, LayerTable, build_layer_table
from scheduler.solver.costs.strategy_space import StrategyCandidates
from scheduler.solver.instance import Floats, Ints
from scheduler.solver.profiles.hardware_profile import HardwareProfile

_GATHERED_UNITS = 2
"""FSDP holds the unit that computes and the next one, which it prefetches."""

_NEVER_FITS_BYTES = 2.0**43
"""No GPU has more (profile_document.LARGEST_COUNT). Larger figures are cut to this, so that sums cannot overflow."""

_RECOMPUTED_ACTIVATION_SHARE = 0.6
"""Share of the activations that selective recompute does not keep where attention is fused. Of Llama-3-8B's layer it
keeps 34% by count (norm's input, query, value, attention, gate and down projection): 0.6 leaves room for the rest."""


def compute_state_bytes(kinds: tuple[Layer, ...], chosen: StrategyCandidates, setting: StageSetting) -> Ints:
    """Weights, gradients and optimizer state, for the whole of training (ZeRO, arXiv 1910.02054, section 5)."""
    table, group = build_layer_table(kinds), chosen.shard_group
    tp, ep = chosen.spreads.tp[chosen.spread], chosen.spreads.ep[chosen.spread]
    head = table.trained_head_parameters
    total = (table.dense_parameters - head) / tp * _compute_bytes_per_parameter(table.trained, chosen, group, setting)
    if head.any():
        total = total + head / tp * _compute_bytes_per_parameter(np.ones_like(head), chosen, group, setting)
    if table.expert_parameters.any():
        shards = np.maximum(group // ep, 1)
        total = total + table.expert_parameters / (tp * ep) * _compute_bytes_per_parameter(
            table.trained, chosen, shards, setting
        )
    return _round_up_bytes(total)


def compute_activation_bytes(kinds: tuple[Layer, ...], chosen: StrategyCandidates, setting: StageSetting) -> Ints:
    """Activations that one micro-batch keeps until its backward pass (Korthikanti et al., arXiv 2205.05198).

    Full recompute keeps the layer's input alone. A layer without a backward pass keeps nothing; a trained head behind
    it keeps its own.
    """
    table, spread, own = build_layer_table(kinds), chosen.spread, chosen.spreads
    sharded = np.where(own.sharded, own.tp, 1)
    everything = (_compute_layer_activations(table, chosen) + table.attached_bytes / own.tp)[:, spread]
    kept = np.where(
        chosen.recompute == 2, (table.boundary_bytes / sharded + table.attached_bytes / own.tp)[:, spread], everything
    )
    if (chosen.recompute == 1).any():
        kept = kept - np.where(chosen.recompute == 1, _compute_recomputed_bytes(table, chosen)[:, spread], 0.0)
    head = np.where(table.trained_head_parameters > 0, 1 - table.backward, 0.0) * table.attached_bytes / own.tp
    return _round_up_bytes((table.backward * kept + head[:, spread]) * (own.samples / own.context)[spread])


def compute_buffer_bytes(kinds: tuple[Layer, ...], chosen: StrategyCandidates, setting: StageSetting) -> Ints:
    """[N]: the buffer that a stage needs beside the above if any of its layers follows the strategy.

    FSDP gathers two units at a time and holds one unsharded gradient and its fp32 copy where it is trained; recompute
    holds one layer's activations again where there is a backward pass; messages have buffers. It is sized for the
    largest of `kinds`, and a stage needs the largest of its strategies'.
    """
    table, spread, own = build_layer_table(kinds), chosen.spread, chosen.spreads
    precision = setting.hardware.precision
    rows = own.samples / own.context
    units = np.maximum(table.unit_parameters - table.expert_parameters, 0) / own.tp
    units = units + table.expert_parameters / (own.tp * own.ep)
    trained = np.where(table.trained, units, table.trained_head_parameters / own.tp)
    unit_bytes = _GATHERED_UNITS * precision.value_bytes * units
    unit_bytes = unit_bytes + (precision.value_bytes + precision.gradient_bytes) * trained
    size = _compute_message_buffers(table, chosen, setting.hardware)[:, spread] + np.where(
        chosen.zero == 3, unit_bytes[:, spread], 0.0
    )
    again = table.backward * rows
    size = size + np.where(chosen.recompute == 2, (again * _compute_layer_activations(table, chosen))[:, spread], 0.0)
    if (chosen.recompute == 1).any():
        size = size + np.where(
            chosen.recompute == 1, (again * _compute_recomputed_bytes(table, chosen))[:, spread], 0.0
        )
    return _round_up_bytes(size.max(axis=0))


def _compute_bytes_per_parameter(
    trained: Floats, chosen: StrategyCandidates, group: Ints, setting: StageSetting
) -> Floats:
    """Of a weight that tensor and expert parallelism leave to a GPU; a frozen one has neither gradient nor state."""
    precision, zero = setting.hardware.precision, chosen.zero
    weight = np.where(zero == 3, precision.value_bytes / group, precision.value_bytes)
    gradient = precision.gradient_bytes / np.where(zero >= 2, group, 1)
    on_gpu = np.where(chosen.offload == 1, 0.0, precision.optimizer_bytes)
    optimizer = on_gpu / np.where(zero >= 1, group, 1)
    # Under ZeRO-3 the fp32 master is the weight, unless it is on the host.
    master = np.where((zero == 3) & (chosen.offload == 0), precision.fsdp_bytes / group, weight + gradient + optimizer)
    return np.asarray(np.where(trained, master, weight))


def _compute_layer_activations(table: LayerTable, chosen: StrategyCandidates) -> Floats:
    """[T, B]: all that a layer keeps of one sample's tokens; `sharded` splits what every tensor rank holds."""
    own = chosen.spreads
    return table.replicated_bytes / np.where(own.sharded, own.tp, 1) + table.activation_bytes / own.tp


def _compute_recomputed_bytes(table: LayerTable, chosen: StrategyCandidates) -> Floats:
    """[T, B]: what selective recompute does not keep: stored attention scores, or else a share of all."""
    scores = table.selective_bytes / chosen.spreads.tp
    return np.where(
        table.selective_bytes > 0, scores, _RECOMPUTED_ACTIVATION_SHARE * _compute_layer_activations(table, chosen)
    )


def _compute_message_buffers(table: LayerTable, chosen: StrategyCandidates, hardware: HardwareProfile) -> Floats:
    """[T, B]: what messages pass through: a whole boundary for tensor parallelism, received queries, keys, values and
    output for Ulysses, two blocks of keys and values for ring attention, dispatch and combine for experts."""
    own = chosen.spreads
    rows_bytes = table.boundary_bytes * (own.samples / own.context)
    attends = np.where(table.attention_flops > 0, 1.0, 0.0)
    ulysses = np.where(own.ulysses > 1, 2 + 2 * table.key_value_share, 0.0) * attends
    ring = np.where(own.ring > 1, 4 * table.key_value_share, 0.0) * attends
    experts = np.where(own.ep > 1, 2 * hardware.expert_imbalance * table.experts_per_token, 0.0)
    shares: Floats = (ulysses + ring + experts) / own.tp + (own.tp > 1)
    return rows_bytes * shares


def _round_up_bytes(size: Floats) -> Ints:
    return np.ceil(np.minimum(size, _NEVER_FITS_BYTES)).astype(np.int64)
