"""Galvatron's cost model, and the evaluation of a given plan under it.

Source: Galvatron-BMW (Wang et al., TKDE 2024) as Hetu-Galvatron computes it, with its own factors; checked against its
recorded tables and plans. Times are seconds per micro-batch, memory is in MB.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from baselines.galvatron.profiles import ClusterProfile, EmbeddingMemory, GalvatronCase
from baselines.galvatron.strategy_space import PipelineSetting, Strategy, split_evenly
from scheduler.solver.instance import Objective
from scheduler.solver.profiles.profile_document import ProfileError

_BACKWARD_PER_FORWARD = 2.0
_STATES_PER_PARAMETER = 4
_EXTRA_SHARE = 0.003
_FP32_GRADIENTS = 5 / 4
_TENSOR_MESSAGES = 6
_ULYSSES_MESSAGES = 4
_CONTEXT_MB = 1024


class TimeCost(NamedTuple):
    """Seconds of one micro-batch: without gradient reduction, and with it (only the last micro-batch)."""

    compute_s: float
    synced_s: float


def compute_layer_time(strategy: Strategy, setting: PipelineSetting) -> TimeCost:
    """Return the time of forward, backward and communication of one layer.

    Nothing hides the forward pass, tensor or Ulysses messages (half as many again with recompute), ZeRO-3's gathering,
    and the layer's share of the hand-overs between stages. Only the reduction of gradients overlaps, with the backward
    pass: both slow down by the overlap coefficient while they share the GPU, and the rest of the longer one runs at
    full speed.
    """
    model, cluster, samples = setting.case.model, setting.case.cluster, setting.local_batch(strategy)
    forward = model.layer_forward_ms.evaluate(samples / strategy.split)
    backward = _BACKWARD_PER_FORWARD * forward + (forward if strategy.recompute else 0.0)
    handed_mb = setting.stages * 2 * samples * model.boundary_mb
    alone = forward + handed_mb * cluster.hand_over_ms_per_mb(setting.stages) / model.layers
    if strategy.split > 1:
        messages = _TENSOR_MESSAGES if strategy.tensor > 1 else _ULYSSES_MESSAGES
        latency = _compute_message_ms(strategy, samples * model.boundary_mb, cluster)
        alone += latency * messages * (1.5 if strategy.recompute else 1.0)
    reduced_mb = (strategy.replicas - 1) * (model.parameter_mb / strategy.tensor / strategy.replicas)
    reduction = reduced_mb * cluster.all_reduce_ms_per_mb(strategy.replicas, strided=strategy.tensor > 1)
    if strategy.zero == 3:
        alone += reduction / 2
    # Without a data-parallel group the reduction is free, even if Ulysses replicates the parameters.
    charged = reduction if strategy.data > 1 else 0.0
    together = max(backward, charged) + (cluster.overlap - 1) * min(backward, charged)
    return TimeCost((alone + backward) / 1000, (alone + together) / 1000)


def compute_layer_mb(strategy: Strategy, setting: PipelineSetting, stage: int) -> int:
    """Return the model states and activations of one layer at the peak of 1F1B in `stage` (from 0).

    Rounded up as in Galvatron.
    """
    model = setting.case.model
    samples = setting.local_batch(strategy) * setting.in_flight(stage)
    states = _STATES_PER_PARAMETER * (model.parameter_mb / strategy.tensor) * _compute_states_share(strategy, setting)
    if strategy.recompute:
        return math.ceil(states + model.recompute_mb * samples / strategy.split)
    return math.ceil(states + model.activation_mb[strategy.split] * samples)


def compute_embedding_time(strategy: Strategy, setting: PipelineSetting, stage: int) -> TimeCost:
    """Return the time of embedding and head in `stage` (from 0).

    A single stage has both; otherwise the first and the last stage have half of the time each.

    Computation slows down by the overlap coefficient while communication lasts; communication never slows down.
    """
    model, cluster, memory = setting.case.model, setting.case.cluster, _get_embedding_memory(setting, stage)
    if memory is None:
        return TimeCost(0.0, 0.0)
    replicas, samples = strategy.replicas, setting.local_batch(strategy)
    forward = model.embedding_forward_ms.evaluate(samples / strategy.split) / min(setting.stages, 2)
    latency = cluster.all_reduce_ms_per_mb(replicas, strided=strategy.tensor > 1)
    # Galvatron charges half an all-reduce of the bf16 gradients for reducing, and the same for gathering.
    reduction = memory.states_mb[strategy.tensor] / 4 / 2 * (latency * (replicas - 1) / replicas) / 2
    gather = reduction if strategy.zero == 3 else 0.0

    def compute_overlapped(compute: float, communication: float) -> float:
        return max(communication, compute + communication * (1 - 1 / cluster.overlap))

    alone, backward = compute_overlapped(forward, gather), _BACKWARD_PER_FORWARD * forward
    if strategy.tensor > 1:
        alone += _compute_message_ms(strategy, samples * model.boundary_mb, cluster) * (2 if setting.stages == 1 else 1)
    synced = compute_overlapped(backward, gather + reduction)
    return TimeCost((alone + compute_overlapped(backward, gather)) / 1000, (alone + synced) / 1000)


def compute_embedding_mb(strategy: Strategy, setting: PipelineSetting, stage: int, buffer_degree: int | None) -> int:
    """Return all memory of `stage` except its layers, with the buffer rounded down as in Galvatron.

    This is embedding and head, the CUDA context, and the gathering buffer that all tensor-parallel layers share, for
    groups up to `buffer_degree` (None: no buffer).
    """
    memory, total, gathered = _get_embedding_memory(setting, stage), float(_CONTEXT_MB), 0.0
    if memory is not None:
        samples = setting.local_batch(strategy) * setting.in_flight(stage)
        states = memory.states_mb[strategy.tensor] * _compute_states_share(strategy, setting)
        total += states + memory.activation_mb[strategy.split] * samples
    if buffer_degree is not None:
        gathered = setting.micro_batch_size / (setting.stage_gpus // buffer_degree) * setting.case.model.boundary_mb
    return math.ceil(total) + int(gathered)


def compute_transition_s(former: Strategy, latter: Strategy, setting: PipelineSetting) -> float:
    """Return the time from one split of a sample to another: an all-gather over the larger one.

    No other change costs anything.

    The unit is Galvatron's own. Its dynamic program charges a hundred times this, its final time nothing.
    """
    if former.split == latter.split:
        return 0.0
    greater = max(former.split, latter.split)
    message_mb = setting.micro_batch_size / (setting.stage_gpus // greater) * setting.case.model.boundary_mb
    latency = setting.case.cluster.all_reduce_ms_per_mb(greater, strided=False)
    return (greater - 1) / greater * message_mb * latency * 2**20 / 1e9


def _compute_states_share(strategy: Strategy, setting: PipelineSetting) -> float:
    """Return the share of the bf16 model states that one GPU holds.

    The whole is 4 x parameters. The share is above 1 if ZeRO-2 keeps fp32 gradients.
    """
    if strategy.zero == 0:
        return 1.0
    share = 1 / strategy.replicas + _EXTRA_SHARE
    one_pass, zero2 = setting.micro_batches == 1, strategy.zero == 2
    if one_pass or not setting.case.async_reduce:
        factor = 1.0 if one_pass else _FP32_GRADIENTS
        return (7 / 8 * share + 1 / 8 if zero2 else share) * factor
    return 6 / 8 * share + 2 / 8 if zero2 else 7 / 8 * share + 1 / 8


def _compute_message_ms(strategy: Strategy, message_mb: float, cluster: ClusterProfile) -> float:
    """Return the time of one all-gather (tensor) or all-to-all (Ulysses) among the GPUs that share a sample."""
    table = cluster.all_gather if strategy.tensor > 1 else cluster.all_to_all
    return table[strategy.split].get_latency_ms(message_mb)


def _get_embedding_memory(setting: PipelineSetting, stage: int) -> EmbeddingMemory | None:
    model = setting.case.model
    if setting.stages == 1:
        return model.alone
    return {0: model.first, setting.stages - 1: model.last}.get(stage)


@dataclass(frozen=True, slots=True)
class GalvatronPlan:
    """A strategy for each layer of each stage, one for embedding and head, and the shared gathering buffer.

    Stages may be uneven. `buffer_degree` is the largest tensor degree that the buffer serves, or None without a buffer.
    """

    stages: tuple[tuple[Strategy, ...], ...]
    embedding: Strategy
    micro_batches: int
    buffer_degree: int | None

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(map(len, self.stages))


@dataclass(frozen=True, slots=True)
class GalvatronEvaluation:
    """Time and memory of a plan.

    Attributes:
        iteration_s: Galvatron's final time.
        bottleneck_s: the same with the slowest stage setting the pace; never less.
        judged_s: `iteration_s` for Galvatron's own even cut, `bottleneck_s` for any other. Galvatron's final time
            counts middle stages only once, however slow they are, and is far too low for uneven cuts.
        unhidden_reduction_s: part of both times.
        transition_s: per micro-batch; part of neither, because Galvatron's final time lets layers change their split
            for free.
        stages_s: time of each stage's micro-batch. `memory_mb`: on each of its GPUs.
    """

    iteration_s: float
    bottleneck_s: float
    judged_s: float
    unhidden_reduction_s: float
    transition_s: float
    stages_s: tuple[float, ...]
    memory_mb: tuple[int, ...]


def evaluate_plan(plan: GalvatronPlan, case: GalvatronCase) -> GalvatronEvaluation:
    """Return time and memory of `plan`.

    Raises:
        ProfileError: the plan does not cover the model's layers, does not fill the cluster, or needs a degree that was
            not profiled.
    """
    _check_plan(plan, case)
    setting = PipelineSetting(case, len(plan.stages), plan.micro_batches)
    times = {strategy: compute_layer_time(strategy, setting) for stage in plan.stages for strategy in set(stage)}
    stages_s, reductions_s = [], []
    for number, stage in enumerate(plan.stages):
        embedding = compute_embedding_time(plan.embedding, setting, number)
        stages_s.append(sum(times[strategy].compute_s for strategy in stage) + embedding.compute_s)
        reductions_s.append(sum(times[strategy].synced_s for strategy in stage))
    # Galvatron never counts the reduction of embedding and head.
    over_s = (synced_s - so_far for synced_s, so_far in zip(reductions_s, accumulate(stages_s), strict=True))
    unhidden_s = max(0.0, *over_s)
    iteration_s = compute_pipeline_s(stages_s, plan.micro_batches) + unhidden_s
    bottleneck_s = Objective(plan.micro_batches).compute_time_s(sum(stages_s), max(stages_s)) + unhidden_s
    even = plan.sizes == split_evenly(case.model.layers, setting.stages)
    return GalvatronEvaluation(
        iteration_s=iteration_s,
        bottleneck_s=bottleneck_s,
        judged_s=iteration_s if even else bottleneck_s,
        unhidden_reduction_s=unhidden_s,
        transition_s=sum(compute_transition_s(*pair, setting) for stage in plan.stages for pair in pairwise(stage)),
        stages_s=tuple(stages_s),
        memory_mb=tuple(_compute_stage_mb(plan, setting, stage) for stage in range(setting.stages)),
    )


def compute_pipeline_s(stages_s: Sequence[float], micro_batches: int) -> float:
    """Return Galvatron's time of `micro_batches` through stages of times A, before the unhidden reduction.

    S is the sum of A.

    It is the longer of two pipelines, led by the last and by the first stage: S + (c - 1) A_last, and max(w A_first, S
    - A_first) + A_first max(0, c + 1 - p) with w = min(p, c) - 1. It never falls as a time grows.
    """
    count, total_s, first_s = len(stages_s), sum(stages_s), stages_s[0]
    led_by_last_s = total_s + (micro_batches - 1) * stages_s[-1]
    warm_up_s = max((min(count, micro_batches) - 1) * first_s, total_s - first_s)
    return max(led_by_last_s, warm_up_s + first_s * max(0, micro_batches + 1 - count))


def _check_plan(plan: GalvatronPlan, case: GalvatronCase) -> None:
    if not plan.stages or min(plan.sizes) < 1 or sum(plan.sizes) != case.model.layers:
        allowed = f"it must be one or more each, {case.model.layers} in all"
        raise ProfileError(f"plan: layers by stage is {list(plan.sizes)}; {allowed}")
    if plan.embedding.recompute:
        raise ProfileError(f"plan: embedding is {plan.embedding.label(len(plan.stages))}; it must be without recompute")
    tensor, degree = (
        max(one.tensor for stage in (*plan.stages, [plan.embedding]) for one in stage),
        plan.buffer_degree or 1,
    )
    if tensor > degree or case.cluster.gpus // len(plan.stages) % degree:
        allowed = f"it must divide the GPUs of a stage and be at least {tensor}, the largest tensor degree"
        raise ProfileError(f"plan: buffer degree is {plan.buffer_degree}; {allowed}")


def _compute_stage_mb(plan: GalvatronPlan, setting: PipelineSetting, stage: int) -> int:
    layers = sum(compute_layer_mb(strategy, setting, stage) for strategy in plan.stages[stage])
    return layers + compute_embedding_mb(plan.embedding, setting, stage, plan.buffer_degree)
