"""Costs of sequences of unlike lengths for a model on GPUs of one model, from Ebbtide's cost model and profiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd

from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan, Schedule, Stage
from scheduler.solver.evaluate import StageEvaluation, evaluate
from scheduler.solver.lengths.sequence_costs import SequenceCosts
from scheduler.solver.profiles.hardware_profile import HardwareProfile
from scheduler.solver.profiles.model_profile import ModelProfile
from scheduler.solver.request import DeviceGroup, SolveRequest

SHORT_SHARE = 16
"""The time of weights and gradients is that of samples of this fraction of the context, which hide little of it."""

FITTED_TOKENS_MIN = 8192
"""Shortest context to which costs are fitted. A GPU computes short sequences together, as long matrices."""


@dataclass(frozen=True, slots=True)
class DerivedCosts:
    """Costs of data parallelism over all GPUs of a group, with Ulysses groups and without recomputation.

    Attributes:
        step_s: seconds of every step, apart from its sequences and micro-batches.
        fixed_bytes: memory of one GPU without activations.
        token_bytes: activations of one token.
    """

    sequences: SequenceCosts
    step_s: float
    fixed_bytes: float
    token_bytes: float


def derive_costs(
    load_model: Callable[[int], ModelProfile], group: DeviceGroup, *, context: int, zero: int
) -> DerivedCosts:
    """Return the costs with replicated weights (`zero` 0) or with ZeRO-3 over all GPUs (`zero` 3).

    Compute time is fitted to `context` and half of it, so few short sequences are slightly too cheap, because their
    matrix products are thinner. ZeRO-3 gathers weights and sums gradients in every micro-batch, otherwise gradients are
    summed once per step. Their time is that of short samples, an upper bound.

    Args:
        load_model: returns the model at a number of tokens.
        context: tokens of the longest sequence. Costs are fitted to at least FITTED_TOKENS_MIN, at the next multiple
            that all degrees divide.

    Raises:
        ValueError: the model is not available at several lengths, its weights do not fit, or the profile of the GPU
            does not support Ulysses or FSDP. The message names the value.
    """
    hardware, node_gpus = group.hardware, group.node_gpus
    heads = gcd(*(run.attention_heads or run.heads for run in load_model(context).layers))
    degrees = [1]
    while (degree := 2 * degrees[-1]) <= group.gpus and heads % degree == 0:
        degrees.append(degree)
    context = max(context, FITTED_TOKENS_MIN)
    context += -context % (2 * SHORT_SHARE * degrees[-1])
    half = context // 2
    full_s, half_s = (
        _evaluate(load_model(tokens), hardware, 1, node_gpus).parts.compute_s for tokens in (context, half)
    )
    quadratic_s = max(0.0, (full_s - 2 * half_s) / (2 * half**2))
    exchange_s = [(1, 0.0)]
    for degree in degrees[1:]:
        sequence_s = _evaluate(load_model(context), hardware, degree, node_gpus).parts.sequence_s
        exchange_s.append((degree, max(exchange_s[-1][1], sequence_s * degree / context)))
    fixed = _evaluate(load_model(context // SHORT_SHARE), hardware, group.gpus, node_gpus, zero=zero).parts
    fixed_bytes, token_bytes = _compute_memory(load_model, group, half, zero)
    sequences = SequenceCosts(
        gpus=group.gpus,
        quadratic_s=quadratic_s,
        linear_s=full_s / context - quadratic_s * context,
        exchange_s=tuple(exchange_s),
        micro_batch_s=fixed.data_s if zero == 3 else 0.0,
        gpu_tokens_max=_count_tokens_max(group, fixed_bytes, token_bytes),
    )
    step_s = hardware.iteration_overhead_s + fixed.other_s + (0.0 if zero == 3 else fixed.data_s)
    return DerivedCosts(sequences, step_s, fixed_bytes, token_bytes)


def _compute_memory(
    load_model: Callable[[int], ModelProfile], group: DeviceGroup, tokens: int, zero: int
) -> tuple[float, float]:
    """Return the bytes of a GPU without activations, and those of one token. Activations grow linearly with tokens."""
    less, more = (
        _evaluate(load_model(length), group.hardware, group.gpus, group.node_gpus, zero=zero).memory_bytes
        for length in (tokens // 2, tokens)
    )
    token_bytes = (more - less) / (tokens - tokens // 2)
    return more - token_bytes * tokens, token_bytes


def _count_tokens_max(group: DeviceGroup, fixed_bytes: float, token_bytes: float) -> int:
    count = int((group.limit_bytes - fixed_bytes) / token_bytes)
    if count < 1:
        raise ValueError(f"gpus is {group.gpus}; the weights of the model do not fit on so few {group.hardware.gpu}")
    return count


def _evaluate(
    model: ModelProfile, hardware: HardwareProfile, gpus: int, node_gpus: int, *, zero: int | None = None
) -> StageEvaluation:
    """Evaluate one step: of one sample split over all GPUs, or with `zero` of one sample on each GPU."""
    strategy = LayerStrategy(model.layer_count, ulysses=gpus)
    if zero is not None:
        is_sharded = zero > 0 and gpus > 1
        strategy = LayerStrategy(
            model.layer_count, dp=gpus, zero=zero if is_sharded else 0, shard_group=gpus if is_sharded else 1
        )
    batch = strategy.dp
    stage = Stage(0, model.layer_count - 1, hardware.gpu, gpus, (strategy,))
    plan = ParallelPlan(Schedule(), 1, batch, 0.0, 0.0, 0, (stage,))
    shape = GpuShape.packed(hardware.gpu, gpus, node_gpus)
    return evaluate(plan, SolveRequest(model, (hardware,), shape, batch)).stages[0]
