"""Time of one layer under every candidate strategy, per micro-batch, forward and backward together.

Arrays are [T, N] for T layer types and N candidates, or [T, B] for B distinct sets of parallel degrees.

The time of a pass is the sum of three times: matrix products at a share of the peak rate, their operands and the
element-wise kernels at memory bandwidth, and the attention core. A matrix product loses efficiency as its rows or its
width shrink, because operands then weigh more relative to flops. A pass takes at least the time of its kernel launches.

Work that a stage does once per iteration counts 1/c per micro-batch, c being the number of micro-batches. This is the
optimizer step, and the gradient reduction unless the backward pass hides it. On one stage this is exact. On several
stages, the pipeline's bubble stretches this work like all other work of the stage. This keeps the objective in UniAP's
form.
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
from scheduler.solver.profiles.training_software import (
    FP8_OPERAND_TRAFFIC,
    KERNEL_SPEEDS,
    REFERENCE_HEAD_WIDTH,
    SOFTMAX_SHARES,
)

_FUSED_BACKWARD_FACTOR = 2.5
"""The backward pass of a fused attention core has five products; the forward pass has two (arXiv 2307.08691, section
3.1)."""

_PLAIN_BACKWARD_FACTOR = 2.0
"""Gradients with respect to inputs and to weights: two products for each product of the forward pass."""

ALIGNED_COLUMNS = 8
"""Tensor cores work best if the sizes of a matrix are multiples of 16 bytes, that is 8 values of 16 bits (NVIDIA,
Matrix Multiplication Background User's Guide, section "Tensor Core Requirements")."""

RECOMPUTED_PRODUCT_SHARE = 0.365
"""Share of the products' time that selective recompute repeats with fused attention. It keeps the outputs of every
second product and of the attention core, and recomputes the rest (torchtitan, arXiv 2410.06511, section 2.2). By
flops these are the key, output and up projections of Llama-3-8B's seven products."""

_SCORE_TRAFFIC = 13 / 5
"""Bytes moved over bytes kept (5) of a stored attention score: product 2, softmax 2 + 2, dropout 2 + 2 + 1, product
2. This part of the traffic belongs to the attention core."""

_REPLICATED_TRAFFIC = 5.5
"""Traffic as a multiple of the boundary, per tensor-parallel message: a norm reads and writes it (2); bias, dropout
and residual read two values and write one and a mask (3.5). Every tensor rank does this for all rows unless the
sequence is sharded."""


_HOST_ADDITION_SHARE = 10 / 30
"""Time to add a 16-bit gradient to an fp32 one on the host, as a share of Adam's time there, by bytes moved. The
addition reads 2 + 4 and writes 4. Adam reads gradient, master weight and moments (16), and writes master weight,
moments and a 16-bit weight (14)."""

_OPTIMIZER_BYTES_PER_PARAMETER = 12
"""The optimizer reads gradient and master weight, and writes weights: 12 bytes in bf16 (2 + 4 read, 2 + 4 written) and
in fp32 (4 + 4 read, 4 written). It also reads and writes its moments."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerTimes:
    """Seconds by cause, [T, N].

    `data_s` is the part that computation does not hide. `other_s` is the optimizer step, and what streaming
    from the host adds.
    """

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
    """Return the times of each layer type under each candidate."""
    table, index = build_layer_table(kinds), candidates.degree_index
    compute = compute_pass_times(kinds, table, candidates.degrees, setting.hardware)
    sent = compute_message_times(table, candidates.degrees, compute.attention_s, setting)
    forward_s, backward_s = ring_forward_s, ring_backward_s = _compute_passes_s(
        table, candidates, compute, setting.hardware
    )
    if sent.ring_s.any():
        ring_forward_s, ring_backward_s = _compute_passes_s(
            table, candidates, _add_ring_exchange(table, compute, sent), setting.hardware
        )
    attached_s = compute.attached_s[:, index]
    back = table.backward
    if table.overlaps_tensor.any():
        passes_s = (ring_forward_s, ring_backward_s)
        early_tensor_s, tensor_s = _hide_tensor_messages(
            table, candidates, compute, setting.hardware, passes_s=passes_s, sent_s=sent.tensor_s
        )
    else:
        early_tensor_s, tensor_s = None, _compute_repeated_s(sent.tensor_s, table, candidates)
    tensor_s = tensor_s + sent.attached_s[:, index]
    ulysses_s = _compute_repeated_s(sent.ulysses_s, table, candidates)
    beside_s = attached_s + tensor_s + ulysses_s
    early_share = np.where(np.maximum(back, table.attached_trained) > 0, 1 / 3, 1.0)
    early_s = beside_s * early_share
    if early_tensor_s is not None:
        early_s = (beside_s - tensor_s) * early_share + early_tensor_s
    data = _compute_state_traffic(
        table, candidates, compute_reduction_times(table, candidates, setting), setting.hardware
    )
    windows_s = (ring_forward_s + early_s, ring_backward_s + (beside_s - early_s))
    data_s = _compute_exposed_s(data, windows_s, candidates, setting.hardware.overlap_coefficient)
    other_s = _compute_optimizer_step_s(table, candidates, setting)
    if candidates.streamed.any() or candidates.inputs_offload.any():
        both = _add_host_traffic(data, table, candidates, setting.hardware)
        both_s = _compute_exposed_s(both, windows_s, candidates, setting.hardware.overlap_coefficient)
        other_s = other_s + (both_s - data_s)
    return LayerTimes(
        compute_s=forward_s + backward_s + attached_s,
        tensor_s=tensor_s,
        sequence_s=ulysses_s + (ring_forward_s - forward_s) + (ring_backward_s - backward_s),
        expert_s=_compute_expert_s(table, candidates, sent.expert_s, data, setting.hardware),
        data_s=data_s,
        other_s=other_s,
    )


def _compute_passes_s(
    table: LayerTable, candidates: StrategyCandidates, compute: PassTimes, hardware: HardwareProfile
) -> tuple[Floats, Floats]:
    """Return forward and backward times including recompute; neither is shorter than its kernel launches."""
    index, back, launch_s = candidates.degree_index, table.backward, hardware.launch_s
    full, selective = 1.0 * (candidates.recompute == 2), 1.0 * (candidates.recompute == 1)
    backward_s = compute.backward_s[:, index] + full * (back * compute.forward_s)[:, index]
    if selective.any():
        backward_s += selective * (back * compute.selective_s)[:, index]
    if launch_s > 0:
        halves = full + np.where(table.selective_bytes > 0, 0.0, 0.5) * selective
        backward_s = np.maximum(backward_s, launch_s * (back * halves + back + table.trained))
    forward_s = np.maximum(compute.forward_s, table.computed * launch_s) + compute.cache_s
    return forward_s[:, index], backward_s


def _add_ring_exchange(table: LayerTable, compute: PassTimes, sent: MessageTimes) -> PassTimes:
    """Return the pass times with ring attention's exchange.

    Full recompute repeats it, and launches of a small layer hide it.
    """
    return replace(
        compute,
        forward_s=compute.forward_s + table.computed * sent.ring_s,
        backward_s=compute.backward_s + table.backward * sent.ring_back_s,
    )


def _hide_tensor_messages(
    table: LayerTable,
    candidates: StrategyCandidates,
    compute: PassTimes,
    hardware: HardwareProfile,
    *,
    passes_s: tuple[Floats, Floats],
    sent_s: Floats,
) -> tuple[Floats, Floats]:
    """Return [T, N] twice: the part of tensor-parallel messages that products do not hide, in the forward pass and in
    both.

    A message is sent in one piece per rank. The first piece overlaps with nothing, the others with the products of the
    pass. Messages are sent whole where that is faster.
    """
    index, tp = candidates.degree_index, candidates.degrees.tp[candidates.degree_index]
    attention_s, again = compute.attention_s[:, index], 1.0 * (candidates.recompute == 2)
    beside_s = (
        passes_s[0] - attention_s,
        passes_s[1] - compute.attention_back_s[:, index] - again * table.backward * attention_s,
    )
    is_cut = (table.overlaps_tensor > 0) & (candidates.degrees.sharded[index] > 0)
    exposed_s = []
    for products_s, repeats in zip(beside_s, (table.computed, table.backward * (1 + again)), strict=True):
        message_s = repeats * sent_s[:, index]
        pieces_s = message_s * (1 - 1 / tp)
        together_s = compute_overlapped_s(products_s, pieces_s, hardware.overlap_coefficient)
        cut_s = np.minimum(together_s - products_s, pieces_s) + message_s / tp
        exposed_s.append(np.where(is_cut, cut_s, message_s))
    return exposed_s[0], exposed_s[0] + exposed_s[1]


def _compute_repeated_s(pass_s: Floats, table: LayerTable, candidates: StrategyCandidates) -> Floats:
    """Return [T, N]: the time of both passes, as far as the layer has them, that each take `pass_s`, [T, B].

    Full recompute repeats the forward pass.
    """
    again_s: Floats = (candidates.recompute == 2) * (table.backward * pass_s)[:, candidates.degree_index]
    return ((table.computed + table.backward) * pass_s)[:, candidates.degree_index] + again_s


def _compute_expert_s(
    table: LayerTable, candidates: StrategyCandidates, forward_s: Floats, data: _StateTraffic, hardware: HardwareProfile
) -> Floats:
    """Return the time of dispatch and combine.

    Without priority, those of the backward pass wait for concurrent gradients.
    """
    if not forward_s.any():
        return np.zeros((len(forward_s), len(candidates.degree_index)))
    total_s = _compute_repeated_s(forward_s, table, candidates)
    if hardware.expert_priority:
        return total_s
    beside_s = data.backward_s + data.once_s / candidates.micro_batches
    return total_s + np.minimum((table.backward * forward_s)[:, candidates.degree_index], beside_s)


@dataclass(frozen=True, slots=True, eq=False)
class _StateTraffic:
    """Seconds of moving weights and gradients: `once_s` per iteration, all others per micro-batch.

    `forward_s`, `backward_s` and `once_s` overlap with a pass (the last one with the last backward pass); `exposed_s`
    overlaps with nothing.
    """

    forward_s: Floats
    backward_s: Floats
    once_s: Floats
    exposed_s: Floats


def _compute_state_traffic(
    table: LayerTable, candidates: StrategyCandidates, moved: ReductionTimes, hardware: HardwareProfile
) -> _StateTraffic:
    """Return the traffic of weights and gradients by ZeRO stage.

    ZeRO-3 gathers weights before each pass and reduce-scatters gradients in each backward pass; ZeRO-2 does only the
    latter. The others reduce once per iteration: ZeRO-0 all gradients, ZeRO-1 into shards. ZeRO-1 and ZeRO-2 gather the
    new weights; a hybrid shard reduces across nodes. ZeRO-3 always overlaps with the passes, the others as far as the
    profile says.
    """
    index, share = candidates.degree_index, hardware.gradient_overlap
    # Multiplying by columns of 0 and 1 is much faster than selecting with numpy.where.
    zero0, zero1, zero2, zero3 = (1.0 * (candidates.zero == stage) for stage in range(4))
    gather_s, reduce_s = moved.gather_s[:, index], zero0 * moved.reduce_s[:, index]
    scatter_s = moved.scatter_s[:, index]
    if candidates.hybrid.any():
        gather_s += candidates.hybrid * (moved.node_gather_s[:, index] - gather_s)
        scatter_s += candidates.hybrid * (moved.node_scatter_s[:, index] - scatter_s)
        reduce_s += candidates.hybrid * moved.across_s[:, index]
    # A cached layer needs its weights only if it has a trained head.
    forward_s = zero3 * gather_s * np.maximum(table.computed, table.trained_head_parameters > 0)
    reduce_s += zero1 * scatter_s
    once = 1.0 / candidates.micro_batches
    after_s = (zero1 + zero2) * scatter_s + moved.tied_s[:, index]
    return _StateTraffic(
        forward_s=forward_s,
        backward_s=table.backward * forward_s + (zero3 + share * zero2) * scatter_s,
        once_s=share * reduce_s,
        exposed_s=(1 - share) * (zero2 * scatter_s + once * reduce_s) + once * after_s,
    )


def _add_host_traffic(
    data: _StateTraffic, table: LayerTable, candidates: StrategyCandidates, hardware: HardwareProfile
) -> _StateTraffic:
    """Return the traffic with that of the host link, in each micro-batch.

    Streamed parameters pass the link before each pass, and gradients after each backward pass, which sums them up on
    the host (ZeRO-Infinity, arXiv 2104.07857, sections 4.1 and 6.2; PyTorch FSDP2, `CPUOffloadPolicy`). They overlap
    with the passes like the collectives of ZeRO-3. They do not overlap with these collectives, since a worker that
    prefetches one unit copies it and then gathers it. Inputs of layers are copied on the stream that computes, as by
    PyTorch's `save_on_cpu`, so nothing overlaps with them.
    """
    value_bytes, link = hardware.precision.value_bytes, hardware.host_bandwidth_bytes_per_s
    fetch_s = candidates.streamed * count_held_parameters(table, candidates) * value_bytes / link
    forward_s = fetch_s * np.maximum(table.computed, table.trained_head_parameters > 0)
    sum_s = _HOST_ADDITION_SHARE * hardware.host_optimizer_s_per_parameter * (candidates.micro_batches > 1)
    send_s = candidates.streamed * sum(count_owned_parameters(table, candidates)) * (value_bytes / link + sum_s)
    inputs_s = candidates.inputs_offload * compute_input_bytes(table, candidates) / link
    return replace(
        data,
        forward_s=data.forward_s + forward_s,
        backward_s=data.backward_s + table.backward * forward_s + send_s,
        exposed_s=data.exposed_s + 2 * inputs_s,
    )


def _compute_exposed_s(
    data: _StateTraffic, windows_s: tuple[Floats, Floats], candidates: StrategyCandidates, coefficient: float
) -> Floats:
    """Return the time that traffic adds to the two passes of a micro-batch.

    The last backward pass also hides `once_s`.
    """
    forward_s, backward_s = windows_s
    usual_s = compute_overlapped_s(backward_s, data.backward_s, coefficient)
    last_s = compute_overlapped_s(backward_s, data.backward_s + data.once_s, coefficient)
    once = 1.0 / candidates.micro_batches
    both_s = compute_overlapped_s(forward_s, data.forward_s, coefficient) + (1 - once) * usual_s + once * last_s
    return np.maximum(both_s - forward_s - backward_s, 0.0) + data.exposed_s


def _compute_optimizer_step_s(table: LayerTable, candidates: StrategyCandidates, setting: StageSetting) -> Floats:
    """Return 1/c of the optimizer step.

    With offload, gradients move to the host and new weights come back. Streamed gradients are there already, and
    streamed weights stay there.
    """
    hardware = setting.hardware
    dense, experts = count_owned_parameters(table, candidates)
    owned = dense + experts
    bandwidth = hardware.memory_bandwidth_bytes_per_s
    step_s = (_OPTIMIZER_BYTES_PER_PARAMETER + 2 * table.dense_moment_bytes) / bandwidth * dense
    step_s = step_s + (_OPTIMIZER_BYTES_PER_PARAMETER + 2 * table.expert_moment_bytes) / bandwidth * experts
    if candidates.offload.any():
        moved_s = 2 * hardware.precision.value_bytes / hardware.host_bandwidth_bytes_per_s
        host_s = ((1 - candidates.streamed) * moved_s + hardware.host_optimizer_s_per_parameter) * owned
        step_s = np.where(candidates.offload == 1, host_s, step_s)
    return np.asarray(step_s / candidates.micro_batches)


def count_owned_parameters(table: LayerTable, candidates: StrategyCandidates) -> tuple[Floats, Floats]:
    """Return the numbers of trained weights whose optimizer state one GPU owns, outside of experts and in them."""
    tp, ep = candidates.degrees.tp[candidates.degree_index], candidates.degrees.ep[candidates.degree_index]
    experts: Floats = table.trained * table.expert_parameters / (tp * ep * np.maximum(candidates.shard_group // ep, 1))
    dense = table.trained * table.dense_parameters + table.trained_head_parameters
    return dense / (tp * candidates.shard_group), experts


def count_held_parameters(table: LayerTable, candidates: StrategyCandidates) -> Floats:
    """Return the number of weights, trained or frozen, that one GPU holds if they are sharded over its group."""
    tp, ep = candidates.degrees.tp[candidates.degree_index], candidates.degrees.ep[candidates.degree_index]
    experts: Floats = table.expert_parameters / (tp * ep * np.maximum(candidates.shard_group // ep, 1))
    return table.dense_parameters / (tp * candidates.shard_group) + experts


def compute_input_bytes(table: LayerTable, candidates: StrategyCandidates) -> Floats:
    """Return [T, N]: the bytes of one micro-batch's input of a layer on one GPU; 0 without a backward pass."""
    degrees, index = candidates.degrees, candidates.degree_index
    rows = degrees.samples / degrees.context / np.where(degrees.sharded, degrees.tp, 1)
    return (table.backward * table.boundary_bytes * rows)[:, index]


@dataclass(frozen=True, slots=True, eq=False)
class PassTimes:
    """Seconds of computing [T, B], of one micro-batch on one GPU.

    `forward_s` includes `attention_s`, and `backward_s` includes `attention_back_s`. `attached_s`, the work of
    embedding and head in both passes, is additional.
    `selective_s` is the part that selective recompute repeats. `cache_s` is the time to read or write cached outputs.
    """

    forward_s: Floats
    backward_s: Floats
    attention_s: Floats
    attention_back_s: Floats
    selective_s: Floats
    attached_s: Floats
    cache_s: Floats


def compute_pass_times(
    kinds: tuple[Layer, ...], table: LayerTable, degrees: ParallelDegrees, hardware: HardwareProfile
) -> PassTimes:
    """Return the times of one forward and one backward pass.

    A frozen layer computes at most the gradients of its input. A cached layer computes nothing. Every tensor-parallel
    rank reads the last one's output from host memory, and nothing overlaps with that.
    """
    rate = hardware.peak_flops_per_s * hardware.efficiency * np.where(table.fp8_products, hardware.fp8_speedup, 1.0)
    samples = degrees.samples / degrees.context
    samples_per_rank = samples / degrees.tp
    flops = table.flops + np.where(degrees.ep > 1, table.get_expert_imbalance(hardware) - 1, 0.0) * table.expert_flops
    products_s = (
        flops * samples_per_rank / rate
        + _compute_operand_bytes(table, degrees, hardware) / hardware.memory_bandwidth_bytes_per_s
    )
    scores = np.minimum(_SCORE_TRAFFIC * table.selective_bytes, table.traffic_bytes)
    elements = _compute_element_bytes(table, table.traffic_bytes - scores, degrees)
    elements_s = elements / hardware.memory_bandwidth_bytes_per_s
    attention_s = samples_per_rank * _compute_attention_s(table, scores, hardware)
    forward_s = products_s + elements_s + attention_s
    operators_s = RECOMPUTED_PRODUCT_SHARE * products_s + elements_s
    for row, kind in enumerate(kinds):
        if kind.measured_s:
            forward_s[row] = _get_measured_s(kind, degrees)
            attention_s[row] = forward_s[row] * kind.attention_flops / (kind.attention_flops + kind.flops)
            operators_s[row] = RECOMPUTED_PRODUCT_SHARE * (forward_s[row] - attention_s[row])
    stored = table.selective_bytes > 0
    both = table.backward + table.trained
    back_factor = table.backward * np.where(stored, _PLAIN_BACKWARD_FACTOR, _FUSED_BACKWARD_FACTOR)
    attention_back_s = back_factor * attention_s
    backward_s = both * (forward_s - attention_s) + attention_back_s
    selective_s = np.where(stored, attention_s, operators_s)
    # Devices without a host link compute in the memory of the host.
    host_bandwidth = hardware.host_bandwidth_bytes_per_s or hardware.memory_bandwidth_bytes_per_s
    cache_s = table.cached_bytes * samples / host_bandwidth
    forward_s, attention_s = table.computed * forward_s, table.computed * attention_s
    attached_s = _compute_attached_s(table, degrees, hardware)
    return PassTimes(forward_s, backward_s, attention_s, attention_back_s, selective_s, attached_s, cache_s)


def _compute_operand_bytes(table: LayerTable, degrees: ParallelDegrees, hardware: HardwareProfile) -> Floats:
    """Return the bytes that matrix products read and write: weights, read once, and inputs and outputs.

    Tensor parallelism splits the values between the two products of a pair.

    A pair of products under tensor parallelism splits its inner dimension.
    """
    value_bytes = hardware.precision.value_bytes
    rows = degrees.samples / degrees.context
    weights = value_bytes * (table.dense_parameters + table.expert_parameters / degrees.ep) / degrees.tp
    between = (table.activation_bytes - table.selective_bytes) * rows / degrees.tp
    operands = weights + between + 2 * table.tensor_messages * table.boundary_bytes * rows
    return np.where(table.fp8_products, FP8_OPERAND_TRAFFIC, 1.0) * operands


def _compute_element_bytes(table: LayerTable, traffic_bytes: Floats, degrees: ParallelDegrees) -> Floats:
    rows = degrees.samples / degrees.context
    whole = np.minimum(traffic_bytes, _REPLICATED_TRAFFIC * table.tensor_messages * table.boundary_bytes)
    return rows * (whole / np.where(degrees.sharded, degrees.tp, 1) + (traffic_bytes - whole) / degrees.tp)


def _compute_attention_s(table: LayerTable, scores: Floats, hardware: HardwareProfile) -> Floats:
    """Return [T, 1]: the time of one sample's attention core, fused or with scores that pass through memory."""
    fused = np.minimum(
        (hardware.attention_efficiency or hardware.efficiency) * _compute_kernel_speed(table, hardware), 1
    )
    efficiency = np.where(table.selective_bytes > 0, hardware.efficiency, fused)
    products_s = table.attention_flops / (hardware.peak_flops_per_s * efficiency)
    return products_s + scores / hardware.memory_bandwidth_bytes_per_s


def _compute_kernel_speed(table: LayerTable, hardware: HardwareProfile) -> Floats:
    """Return [T, 1]: the speed of each layer's fused attention kernel, in multiples of the profile's.

    Narrow heads have more exponentials per product.
    """
    generation = np.minimum(table.attention_kernel, hardware.attention_generation).astype(np.int64)
    share = np.array(SOFTMAX_SHARES)[generation]
    narrow = np.where(table.head_width > 0, REFERENCE_HEAD_WIDTH / np.maximum(table.head_width, 1), 1.0)
    return np.asarray(np.array(KERNEL_SPEEDS)[generation] / (1 - share + share * narrow))


def _get_measured_s(kind: Layer, degrees: ParallelDegrees) -> Floats:
    """Return [B]: the measured forward time, which replaces the analytic one; attention gets its share by flops."""
    sample_s = dict(kind.measured_s)
    return np.array([sample_s[degree] for degree in degrees.tp.tolist()]) * degrees.samples / degrees.context


def _compute_attached_s(table: LayerTable, degrees: ParallelDegrees, hardware: HardwareProfile) -> Floats:
    """Return the time of embedding, head and loss in both passes, with the vocabulary split over the tensor ranks.

    In front of a frozen layer they compute no gradient of inputs, and a frozen embedding computes no gradient at all.
    """
    rows = degrees.samples / degrees.context
    pass_count = 1 + table.backward + table.attached_trained
    rate = hardware.peak_flops_per_s * hardware.efficiency
    operands = hardware.precision.value_bytes * table.product_parameters / degrees.tp
    operands = operands + np.where(table.product_parameters > 0, table.boundary_bytes, 0.0) * rows
    products_s = table.attached_flops * rows / degrees.tp / rate + operands / hardware.memory_bandwidth_bytes_per_s
    # A vocabulary that does not divide evenly is padded to aligned columns, as Megatron-LM does.
    unaligned = (table.columns % degrees.tp == 0) & (table.columns // degrees.tp % ALIGNED_COLUMNS > 0)
    moved_s = table.attached_traffic_bytes * rows / degrees.tp / hardware.memory_bandwidth_bytes_per_s
    return pass_count * products_s * np.where(unaligned, hardware.unaligned_slowdown, 1.0) + moved_s
