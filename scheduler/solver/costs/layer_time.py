"""Time of one layer under every candidate strategy: arrays [T, N], per micro-batch, forward and backward together.

What a stage does once per iteration (its gradient reduction as far as backward does not hide it, its optimizer step)
counts 1/c of it per micro-batch, c being the number of micro-batches. On one stage this is exact. On several it
stretches that work by the pipeline's bubble like all other work of the stage, and leaves the objective in UniAP's form.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from scheduler.solver.costs.candidates import Candidates
from scheduler.solver.costs.chain import Layer
from scheduler.solver.costs.compute_time import Passes, passes
from scheduler.solver.costs.layer_table import LayerTable, layer_table
from scheduler.solver.costs.messages import Messages, messages
from scheduler.solver.costs.overlap import overlapped_s
from scheduler.solver.costs.reduction import Reductions, reductions
from scheduler.solver.costs.setting import Setting
from scheduler.solver.instance import Floats
from scheduler.solver.profiles.hardware_profile import HardwareProfile

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


def layer_times(kinds: tuple[Layer, ...], chosen: Candidates, setting: Setting) -> LayerTimes:
    """Each of `kinds` under each candidate."""
    table, spread = layer_table(kinds), chosen.spread
    compute = passes(kinds, table, chosen.spreads, setting.hardware)
    sent = messages(table, chosen.spreads, compute.attention_s, setting)
    forward_s, backward_s = ring_forward_s, ring_backward_s = _passes_s(table, chosen, compute, setting.hardware)
    if sent.ring_s.any():
        ring_forward_s, ring_backward_s = _passes_s(table, chosen, _with_ring(table, compute, sent), setting.hardware)
    attached_s = compute.attached_s[:, spread]
    back = table.backward
    tensor_s = _passed_s(sent.tensor_s, 1 + back, chosen) + sent.attached_s[:, spread]
    ulysses_s = _passed_s(sent.ulysses_s, 1 + back, chosen)
    beside_s = attached_s + tensor_s + ulysses_s
    early_s = beside_s * np.where(np.maximum(back, table.attached_trained) > 0, 1 / 3, 1.0)
    data = _data(table, chosen, reductions(table, chosen, setting), setting.hardware)
    windows_s = (ring_forward_s + early_s, ring_backward_s + (beside_s - early_s))
    return LayerTimes(
        compute_s=forward_s + backward_s + attached_s,
        tensor_s=tensor_s,
        sequence_s=ulysses_s + (ring_forward_s - forward_s) + (ring_backward_s - backward_s),
        expert_s=_expert_s(table, chosen, sent.expert_s, data, setting.hardware),
        data_s=_unhidden_s(data, windows_s, chosen, setting.hardware.overlap_coefficient),
        other_s=_step_s(table, chosen, setting),
    )


def _passes_s(
    table: LayerTable, chosen: Candidates, compute: Passes, hardware: HardwareProfile
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


def _with_ring(table: LayerTable, compute: Passes, sent: Messages) -> Passes:
    """With the exchange of ring attention, which full recompute repeats and the launches of a small layer hide."""
    return replace(
        compute,
        forward_s=compute.forward_s + sent.ring_s,
        backward_s=compute.backward_s + table.backward * sent.ring_back_s,
    )


def _passed_s(forward_s: Floats, passes_: Floats, chosen: Candidates) -> Floats:
    """[T, N] from the [T, B] of one forward pass: over `passes_` passes, and again where full recompute repeats it."""
    again_s: Floats = (chosen.recompute == 2) * ((passes_ - 1) * forward_s)[:, chosen.spread]
    return (passes_ * forward_s)[:, chosen.spread] + again_s


def _expert_s(
    table: LayerTable, chosen: Candidates, forward_s: Floats, data: _Data, hardware: HardwareProfile
) -> Floats:
    """Dispatch and combine; without priority those of the backward pass wait while gradients pass beside it."""
    if not forward_s.any():
        return np.zeros((len(forward_s), len(chosen.spread)))
    total_s = _passed_s(forward_s, 1 + table.backward, chosen)
    if hardware.expert_priority:
        return total_s
    beside_s = data.backward_s + data.once_s / chosen.micro_batches
    return total_s + np.minimum((table.backward * forward_s)[:, chosen.spread], beside_s)


@dataclass(frozen=True, slots=True, eq=False)
class _Data:
    """Seconds of moving weights and gradients: `once_s` of an iteration, the others of each micro-batch.

    forward_s, backward_s, once_s run beside a pass (the last one beside the last backward pass); `exposed_s` beside
    nothing.
    """

    forward_s: Floats
    backward_s: Floats
    once_s: Floats
    exposed_s: Floats


def _data(table: LayerTable, chosen: Candidates, moved: Reductions, hardware: HardwareProfile) -> _Data:
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
    return _Data(
        forward_s=forward_s,
        backward_s=table.backward * forward_s + (three + share * two) * scatter_s,
        once_s=share * reduce_s,
        exposed_s=(1 - share) * (two * scatter_s + once * reduce_s) + once * after_s,
    )


def _unhidden_s(data: _Data, windows_s: tuple[Floats, Floats], chosen: Candidates, coefficient: float) -> Floats:
    """What all of it adds to the two passes of a micro-batch; the last backward pass also hides what is done once."""
    forward_s, backward_s = windows_s
    usual_s = overlapped_s(backward_s, data.backward_s, coefficient)
    last_s = overlapped_s(backward_s, data.backward_s + data.once_s, coefficient)
    once = 1.0 / chosen.micro_batches
    both_s = overlapped_s(forward_s, data.forward_s, coefficient) + (1 - once) * usual_s + once * last_s
    return np.maximum(both_s - forward_s - backward_s, 0.0) + data.exposed_s


def _step_s(table: LayerTable, chosen: Candidates, setting: Setting) -> Floats:
    """The optimizer step, 1/c of it; with offload, gradients go to the host and new weights come back."""
    hardware = setting.hardware
    held = _held_parameters(table, chosen)
    step_s = _OPTIMIZER_BYTES_PER_PARAMETER / hardware.memory_bandwidth_bytes_per_s * held
    if chosen.offload.any():
        moved_s = 2 * hardware.precision.value_bytes / hardware.host_bandwidth_bytes_per_s
        host_s = (moved_s + hardware.host_optimizer_s_per_parameter) * held
        step_s = np.where(chosen.offload == 1, host_s, step_s)
    return np.asarray(step_s / chosen.micro_batches)


def _held_parameters(table: LayerTable, chosen: Candidates) -> Floats:
    """Weights whose optimizer state one GPU owns: those that are trained."""
    tp, ep = chosen.spreads.tp[chosen.spread], chosen.spreads.ep[chosen.spread]
    experts: Floats = table.trained * table.expert_parameters / (tp * ep * np.maximum(chosen.shard_group // ep, 1))
    dense = table.trained * table.dense_parameters + table.trained_head_parameters
    return dense / (tp * chosen.shard_group) + experts
