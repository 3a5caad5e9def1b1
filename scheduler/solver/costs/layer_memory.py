"""Memory of layers on one GPU under every candidate strategy, [T, N].

Values are whole bytes (rounded up), so that sums are exact.
"""

from __future__ import annotations

import numpy as np

from scheduler.solver.costs.collectives import StageSetting
from scheduler.solver.costs.layer_chain import Layer, LayerTable, build_layer_table
from scheduler.solver.costs.layer_time import compute_input_bytes, count_held_parameters, count_owned_parameters
from scheduler.solver.costs.strategy_space import StrategyCandidates
from scheduler.solver.instance import Floats, Ints
from scheduler.solver.profiles.hardware_profile import HardwareProfile

_GATHERED_UNITS = 2
"""FSDP holds the unit that computes and the next one, which it prefetches."""

_NEVER_FITS_BYTES = 2.0**43
"""No GPU has more (profile_document.MAX_COUNT). Larger values are cut to this, so that sums cannot overflow."""

_RECOMPUTED_ACTIVATION_SHARE = 0.6
"""Share of the activations that selective recompute does not keep with fused attention. It keeps 34% of Llama-3-8B's
layer (norm's input, query, value, attention, gate and down projection); 0.6 leaves a margin for the rest."""


def compute_state_bytes(kinds: tuple[Layer, ...], candidates: StrategyCandidates, setting: StageSetting) -> Ints:
    """Return the bytes of weights, gradients and optimizer state (ZeRO, arXiv 1910.02054, section 5)."""
    table, group = build_layer_table(kinds), candidates.shard_group
    tp, ep = candidates.degrees.tp[candidates.degree_index], candidates.degrees.ep[candidates.degree_index]
    head = table.trained_head_parameters
    dense = _compute_bytes_per_parameter(table.trained, table.dense_moment_bytes, candidates, group, setting)
    total = (table.dense_parameters - head) / tp * dense
    if head.any():
        always = np.ones_like(head)
        of_head = _compute_bytes_per_parameter(always, table.dense_moment_bytes, candidates, group, setting)
        total = total + head / tp * of_head
    if table.expert_parameters.any():
        shards = np.maximum(group // ep, 1)
        total = total + table.expert_parameters / (tp * ep) * _compute_bytes_per_parameter(
            table.trained, table.expert_moment_bytes, candidates, shards, setting
        )
    return _round_up_bytes(total)


def compute_host_bytes(kinds: tuple[Layer, ...], candidates: StrategyCandidates, setting: StageSetting) -> Ints | None:
    """Return the bytes of state that offload keeps in host memory per GPU, None if no candidate uses the host.

    The host holds the gradients as they are sent, the master weights and the optimizer's moments (ZeRO-Offload, arXiv
    2101.06840, section 4.1). With streamed parameters it also holds the weights as they are sent, and accumulates
    gradients in fp32 (ZeRO-Infinity, arXiv 2104.07857, section 3).
    """
    if not (candidates.offload.any() or candidates.inputs_offload.any()):
        return None
    precision, table = setting.hardware.precision, build_layer_table(kinds)
    dense, experts = count_owned_parameters(table, candidates)
    gradient_bytes = np.where(candidates.streamed == 1, precision.gradient_bytes, precision.value_bytes)
    always = gradient_bytes + precision.master_bytes
    held = dense * (always + table.dense_moment_bytes) + experts * (always + table.expert_moment_bytes)
    held = np.where(candidates.offload == 1, held, 0.0)
    if candidates.streamed.any():
        held = held + candidates.streamed * precision.value_bytes * count_held_parameters(table, candidates)
    return _round_up_bytes(held)


def compute_host_activation_bytes(kinds: tuple[Layer, ...], candidates: StrategyCandidates) -> Ints | None:
    """Return the bytes of layer inputs that one micro-batch keeps in host memory per GPU until its backward pass.

    None if no candidate does so (ZeRO-Infinity, arXiv 2104.07857, section 5.1.2).
    """
    if not candidates.inputs_offload.any():
        return None
    return _round_up_bytes(candidates.inputs_offload * compute_input_bytes(build_layer_table(kinds), candidates))


def compute_activation_bytes(kinds: tuple[Layer, ...], candidates: StrategyCandidates, setting: StageSetting) -> Ints:
    """Return the activations that one micro-batch keeps until its backward pass (Korthikanti et al., arXiv 2205.05198).

    Full recompute keeps only the layer's input, on the GPU or on the host. A layer without a backward pass keeps
    nothing, apart from the activations of a trained head behind it.
    """
    table, index, degrees = build_layer_table(kinds), candidates.degree_index, candidates.degrees
    sharded = np.where(degrees.sharded, degrees.tp, 1)
    everything = (_compute_layer_activations(table, candidates) + table.attached_bytes / degrees.tp)[:, index]
    kept = np.where(
        candidates.recompute == 2,
        (table.boundary_bytes / sharded + table.attached_bytes / degrees.tp)[:, index],
        everything,
    )
    if (candidates.recompute == 1).any():
        kept = kept - np.where(candidates.recompute == 1, _compute_recomputed_bytes(table, candidates)[:, index], 0.0)
    head = np.where(table.trained_head_parameters > 0, 1 - table.backward, 0.0) * table.attached_bytes / degrees.tp
    held = (table.backward * kept + head[:, index]) * (degrees.samples / degrees.context)[index]
    if candidates.inputs_offload.any():
        held = held - candidates.inputs_offload * compute_input_bytes(table, candidates)
    return _round_up_bytes(held)


def compute_buffer_bytes(kinds: tuple[Layer, ...], candidates: StrategyCandidates, setting: StageSetting) -> Ints:
    """Return [N]: the buffer that a stage needs in addition if any of its layers follows the strategy.

    FSDP gathers two units at a time, and holds one unsharded gradient and its fp32 copy if the unit is trained.
    Streamed parameters need the same. Recompute holds one layer's activations again if there is a backward pass, and
    the inputs of two layers if they come from the host: one in use, one on its way. Messages need buffers. The buffer
    is sized for the largest of `kinds`, and a stage needs the largest buffer of its strategies.
    """
    table, index, degrees = build_layer_table(kinds), candidates.degree_index, candidates.degrees
    precision = setting.hardware.precision
    rows = degrees.samples / degrees.context
    units = np.maximum(table.unit_parameters - table.expert_parameters, 0) / degrees.tp
    units = units + table.expert_parameters / (degrees.tp * degrees.ep)
    trained = np.where(table.trained, units, table.trained_head_parameters / degrees.tp)
    unit_bytes = _GATHERED_UNITS * precision.value_bytes * units
    unit_bytes = unit_bytes + (precision.value_bytes + precision.gradient_bytes) * trained
    size = _compute_message_buffers(table, candidates, setting.hardware)[:, index] + np.where(
        (candidates.zero == 3) | (candidates.streamed == 1), unit_bytes[:, index], 0.0
    )
    again = table.backward * rows
    size = size + np.where(
        candidates.recompute == 2, (again * _compute_layer_activations(table, candidates))[:, index], 0.0
    )
    if (candidates.recompute == 1).any():
        size = size + np.where(
            candidates.recompute == 1, (again * _compute_recomputed_bytes(table, candidates))[:, index], 0.0
        )
    if candidates.inputs_offload.any():
        size = size + 2 * candidates.inputs_offload * compute_input_bytes(table, candidates)
    return _round_up_bytes(size.max(axis=0))


def _compute_bytes_per_parameter(
    trained: Floats, moment_bytes: Floats, candidates: StrategyCandidates, group: Ints, setting: StageSetting
) -> Floats:
    """Return the bytes of state on a GPU per weight that tensor and expert parallelism leave to it.

    A frozen weight has no gradient and no optimizer state: no moments and no master weight. Streamed weights and their
    gradients are on the host.
    """
    precision, zero = setting.hardware.precision, candidates.zero
    weight = np.where(zero == 3, precision.value_bytes / group, precision.value_bytes)
    gradient = precision.gradient_bytes / np.where(zero >= 2, group, 1)
    on_gpu = np.where(candidates.offload == 1, 0.0, precision.master_bytes + moment_bytes)
    optimizer = on_gpu / np.where(zero >= 1, group, 1)
    # Under ZeRO-3 the fp32 master is the weight itself, unless it is on the host.
    master = np.where(
        (zero == 3) & (candidates.offload == 0),
        (precision.fsdp_bytes + moment_bytes) / group,
        weight + gradient + optimizer,
    )
    return np.asarray((1 - candidates.streamed) * np.where(trained, master, weight))


def _compute_layer_activations(table: LayerTable, candidates: StrategyCandidates) -> Floats:
    """Return [T, B]: all activations of one sample that a layer keeps.

    Sequence sharding splits the activations that tensor ranks replicate.
    """
    degrees = candidates.degrees
    return table.replicated_bytes / np.where(degrees.sharded, degrees.tp, 1) + table.activation_bytes / degrees.tp


def _compute_recomputed_bytes(table: LayerTable, candidates: StrategyCandidates) -> Floats:
    """Return [T, B]: the activations that selective recompute does not keep.

    These are the stored attention scores, or else a share of all activations.
    """
    scores = table.selective_bytes / candidates.degrees.tp
    return np.where(
        table.selective_bytes > 0, scores, _RECOMPUTED_ACTIVATION_SHARE * _compute_layer_activations(table, candidates)
    )


def _compute_message_buffers(table: LayerTable, candidates: StrategyCandidates, hardware: HardwareProfile) -> Floats:
    """Return [T, B]: the buffers of messages.

    Tensor parallelism needs a whole boundary; Ulysses the received queries, keys, values and output; ring attention two
    blocks of keys and values; expert parallelism dispatch and combine.
    """
    degrees = candidates.degrees
    rows_bytes = table.boundary_bytes * (degrees.samples / degrees.context)
    attends = np.where(table.attention_flops > 0, 1.0, 0.0)
    ulysses = np.where(degrees.ulysses > 1, 2 + 2 * table.key_value_share, 0.0) * attends
    ring = np.where(degrees.ring > 1, 4 * table.key_value_share, 0.0) * attends
    experts = np.where(degrees.ep > 1, 2 * table.get_expert_imbalance(hardware) * table.experts_per_token, 0.0)
    shares: Floats = (ulysses + ring + experts) / degrees.tp + (degrees.tp > 1)
    return rows_bytes * shares


def _round_up_bytes(size: Floats) -> Ints:
    return np.ceil(np.minimum(size, _NEVER_FITS_BYTES)).astype(np.int64)
