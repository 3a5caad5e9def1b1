"""Galvatron's cost model of one layer, and of the embedding and head. Seconds per micro-batch, memory in MB.

Source: Galvatron-BMW (Wang et al., TKDE 2024) as Hetu-Galvatron computes it, with its own factors; checked against its
recorded tables and plans.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from scheduler.solver.galvatron.profile import ClusterProfile, EmbeddingMemory
from scheduler.solver.galvatron.setting import Setting, Strategy

_BACKWARD_PER_FORWARD = 2.0
_STATES_PER_PARAMETER = 4
_EXTRA_SHARE = 0.003
_FP32_GRADIENTS = 5 / 4
_TENSOR_MESSAGES = 6
_ULYSSES_MESSAGES = 4
_CONTEXT_MB = 1024


class TimeCost(NamedTuple):
    """Seconds of one micro-batch: without gradient reduction, and with it (the last micro-batch only)."""

    compute_s: float
    synced_s: float


def layer_time(strategy: Strategy, setting: Setting) -> TimeCost:
    """Forward, backward and communication of one layer.

    The parts that nothing hides: forward, tensor or Ulysses messages (half as many again with recompute), ZeRO-3's
    gathering and the layer's share of the hand-overs between stages. Only the reduction of gradients overlaps, with
    the backward pass: both slow down by the overlap coefficient while they share the GPU, and what is left of the
    longer one runs at full speed.
    """
    model, cluster, samples = setting.case.model, setting.case.cluster, setting.local_batch(strategy)
    forward = model.layer_forward_ms.at(samples / strategy.split)
    backward = _BACKWARD_PER_FORWARD * forward + (forward if strategy.recompute else 0.0)
    handed_mb = setting.stages * 2 * samples * model.boundary_mb
    alone = forward + handed_mb * cluster.hand_over_ms_per_mb(setting.stages) / model.layers
    if strategy.split > 1:
        messages = _TENSOR_MESSAGES if strategy.tensor > 1 else _ULYSSES_MESSAGES
        latency = _message_ms(strategy, samples * model.boundary_mb, cluster)
        alone += latency * messages * (1.5 if strategy.recompute else 1.0)
    reduced_mb = (strategy.replicas - 1) * (model.parameter_mb / strategy.tensor / strategy.replicas)
    reduction = reduced_mb * cluster.all_reduce_ms_per_mb(strategy.replicas, strided=strategy.tensor > 1)
    if strategy.zero == 3:
        alone += reduction / 2
    # Without a data-parallel group the reduction goes uncharged, even where Ulysses replicates the parameters.
    charged = reduction if strategy.data > 1 else 0.0
    together = max(backward, charged) + (cluster.overlap - 1) * min(backward, charged)
    return TimeCost((alone + backward) / 1000, (alone + together) / 1000)


def layer_mb(strategy: Strategy, setting: Setting, stage: int) -> int:
    """Model states and activations of one layer in `stage` (from 0), at the peak of 1F1B, rounded up as Galvatron's."""
    model = setting.case.model
    samples = setting.local_batch(strategy) * setting.in_flight(stage)
    states = _STATES_PER_PARAMETER * (model.parameter_mb / strategy.tensor) * _states_share(strategy, setting)
    if strategy.recompute:
        return math.ceil(states + model.recompute_mb * samples / strategy.split)
    return math.ceil(states + model.activation_mb[strategy.split] * samples)


def embedding_time(strategy: Strategy, setting: Setting, stage: int) -> TimeCost:
    """Embedding and head in `stage` (from 0): both in the only stage, else half the work in the first and the last.

    Computation slows down by the overlap coefficient while communication lasts; the latter never slows down.
    """
    model, cluster, memory = setting.case.model, setting.case.cluster, _embedding_memory(setting, stage)
    if memory is None:
        return TimeCost(0.0, 0.0)
    replicas, samples = strategy.replicas, setting.local_batch(strategy)
    forward = model.embedding_forward_ms.at(samples / strategy.split) / min(setting.stages, 2)
    latency = cluster.all_reduce_ms_per_mb(replicas, strided=strategy.tensor > 1)
    # Half an all-reduce of the bf16 gradients: what Galvatron charges for reducing, and for gathering, them.
    reduction = memory.states_mb[strategy.tensor] / 4 / 2 * (latency * (replicas - 1) / replicas) / 2
    gather = reduction if strategy.zero == 3 else 0.0

    def shared(compute: float, communication: float) -> float:
        return max(communication, compute + communication * (1 - 1 / cluster.overlap))

    alone, backward = shared(forward, gather), _BACKWARD_PER_FORWARD * forward
    if strategy.tensor > 1:
        alone += _message_ms(strategy, samples * model.boundary_mb, cluster) * (2 if setting.stages == 1 else 1)
    synced = shared(backward, gather + reduction)
    return TimeCost((alone + shared(backward, gather)) / 1000, (alone + synced) / 1000)


def embedding_mb(strategy: Strategy, setting: Setting, stage: int, buffer_degree: int | None) -> int:
    """All but the layers in `stage`: embedding and head, the CUDA context, and the gathering buffer that all
    tensor-parallel layers share, for groups up to `buffer_degree` (None: no buffer), rounded down as Galvatron's."""
    memory, total, gathered = _embedding_memory(setting, stage), float(_CONTEXT_MB), 0.0
    if memory is not None:
        samples = setting.local_batch(strategy) * setting.in_flight(stage)
        states = memory.states_mb[strategy.tensor] * _states_share(strategy, setting)
        total += states + memory.activation_mb[strategy.split] * samples
    if buffer_degree is not None:
        gathered = setting.micro_batch_size / (setting.stage_gpus // buffer_degree) * setting.case.model.boundary_mb
    return math.ceil(total) + int(gathered)


def transition_s(former: Strategy, latter: Strategy, setting: Setting) -> float:
    """From one split of a sample to another: an all-gather over the greater one; no other difference costs anything.

    In Galvatron's own units. Its dynamic programme charges a hundred times this, its final time nothing.
    """
    if former.split == latter.split:
        return 0.0
    greater = max(former.split, latter.split)
    message_mb = setting.micro_batch_size / (setting.stage_gpus // greater) * setting.case.model.boundary_mb
    latency = setting.case.cluster.all_reduce_ms_per_mb(greater, strided=False)
    return (greater - 1) / greater * message_mb * latency * 2**20 / 1e9


def _states_share(strategy: Strategy, setting: Setting) -> float:
    """Share of bf16 model states on one GPU, out of 4 x parameters; above 1 where ZeRO-2 keeps fp32 gradients."""
    if strategy.zero == 0:
        return 1.0
    share = 1 / strategy.replicas + _EXTRA_SHARE
    one_pass, zero2 = setting.micro_batches == 1, strategy.zero == 2
    if one_pass or not setting.case.async_reduce:
        factor = 1.0 if one_pass else _FP32_GRADIENTS
        return (7 / 8 * share + 1 / 8 if zero2 else share) * factor
    return 6 / 8 * share + 2 / 8 if zero2 else 7 / 8 * share + 1 / 8


def _message_ms(strategy: Strategy, message_mb: float, cluster: ClusterProfile) -> float:
    """One all-gather (tensor) or all-to-all (Ulysses) among the GPUs that share a sample."""
    table = cluster.all_gather if strategy.tensor > 1 else cluster.all_to_all
    return table[strategy.split].ms(message_mb)


def _embedding_memory(setting: Setting, stage: int) -> EmbeddingMemory | None:
    model = setting.case.model
    if setting.stages == 1:
        return model.alone
    return {0: model.first, setting.stages - 1: model.last}.get(stage)
