"""SequenceCosts of a model on a GPU model, from Ebbtide's own cost model and profiles."""

from __future__ import annotations

from collections.abc import Callable
from math import gcd

from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan, Schedule, Stage
from scheduler.solver.evaluate import StageEvaluation, evaluate
from scheduler.solver.lengths.sequence_costs import SequenceCosts
from scheduler.solver.profiles.hardware_profile import HardwareProfile
from scheduler.solver.profiles.model_profile import ModelProfile
from scheduler.solver.request import SolveRequest

SHORT_SHARE = 16
"""The fixed time of a micro-batch is that of samples of this fraction of the context, which hide little of it."""


def derive_sequence_costs(
    load_model: Callable[[int], ModelProfile],
    hardware: HardwareProfile,
    *,
    gpus: int,
    gpus_per_node: int,
    context: int,
) -> SequenceCosts:
    """Return the costs of training with ZeRO-3 over all GPUs and Ulysses groups, without recomputation.

    Compute time is fitted to `context` and half of it, so short sequences are slightly too cheap, because their matrix
    products are thinner. The time of weights and gradients is that of short samples, an upper bound.

    Args:
        load_model: returns the model at a number of tokens.
        context: tokens of the longest sequence; a multiple of 16 times the largest degree.

    Raises:
        ValueError: the model is not available at several lengths, its weights do not fit, or the profile of the GPU
            does not support Ulysses or FSDP. The message names the value.
    """
    half = context // 2
    full_s, half_s = (
        _evaluate(load_model(tokens), hardware, 1, gpus_per_node).parts.compute_s for tokens in (context, half)
    )
    quadratic_s = max(0.0, (full_s - 2 * half_s) / (2 * half**2))
    linear_s = full_s / context - quadratic_s * context
    model, exchange_s = load_model(context), [(1, 0.0)]
    heads = gcd(*(run.attention_heads or run.heads for run in model.layers))
    while (degree := 2 * exchange_s[-1][0]) <= gpus and heads % degree == 0:
        sequence_s = _evaluate(model, hardware, degree, gpus_per_node).parts.sequence_s
        exchange_s.append((degree, max(exchange_s[-1][1], sequence_s * degree / context)))
    fixed = _evaluate(load_model(context // SHORT_SHARE), hardware, gpus, gpus_per_node, is_sharded=True).parts
    return SequenceCosts(
        gpus=gpus,
        quadratic_s=quadratic_s,
        linear_s=linear_s,
        exchange_s=tuple(exchange_s),
        micro_batch_s=fixed.data_s + fixed.other_s,
        gpu_tokens_max=_count_tokens_max(load_model, hardware, gpus, gpus_per_node, half),
    )


def _count_tokens_max(
    load_model: Callable[[int], ModelProfile], hardware: HardwareProfile, gpus: int, gpus_per_node: int, tokens: int
) -> int:
    """Return the number of tokens that fit on a GPU with its share of the weights.

    Activations grow linearly with tokens.
    """
    less, more = (
        _evaluate(load_model(length), hardware, gpus, gpus_per_node, is_sharded=True).memory_bytes
        for length in (tokens // 2, tokens)
    )
    token_bytes = (more - less) / (tokens - tokens // 2)
    count = int(tokens + (hardware.memory_bytes - more) / token_bytes)
    if count < 1:
        raise ValueError(f"gpus is {gpus}; the weights of the model do not fit on so few {hardware.gpu}")
    return count


def _evaluate(
    model: ModelProfile, hardware: HardwareProfile, gpus: int, gpus_per_node: int, *, is_sharded: bool = False
) -> StageEvaluation:
    """Evaluate one step: of one sample split over all GPUs, or with `is_sharded` of one sample on each GPU."""
    strategy = LayerStrategy(model.layer_count, ulysses=gpus)
    if is_sharded:
        strategy = LayerStrategy(model.layer_count, dp=gpus, zero=3 if gpus > 1 else 0, shard_group=gpus)
    batch = strategy.dp
    stage = Stage(0, model.layer_count - 1, hardware.gpu, gpus, (strategy,))
    plan = ParallelPlan(Schedule(), 1, batch, 0.0, 0.0, 0, (stage,))
    shape = GpuShape.packed(hardware.gpu, gpus, gpus_per_node)
    return evaluate(plan, SolveRequest(model, (hardware,), shape, batch)).stages[0]
