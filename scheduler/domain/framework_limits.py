"""The plans that each training framework can run, by the name that users write in `framework` and `--for`.

Each limit is a fact about the framework's newest release:

* Megatron-LM shards optimizer states (ZeRO-1), and gradients and weights only through another data-parallel wrapper.
* DeepSpeed's AutoTP excludes Ulysses, and ZeRO-3 with it is experimental. Its pipelines are part of the model's code.
  It streams parameters from the host at ZeRO-3. Models must call its checkpointing to keep layer inputs there.
* torchtitan needs a micro-batch per stage. Its shards spread over data and context parallelism together. Its expert
  groups take ranks from tensor groups, which our plans do not.
* Accelerate refuses plain replication together with tensor or context parallelism.
* Galvatron's search and runtime know ZeRO-2 as default, ZeRO-3 by layer, and one kind of split per layer.
* Colossal-AI has one mode of sequence parallelism, and ZeRO-2 only without a pipeline.
* LLaMA-Factory runs its DeepSpeed configurations for ZeRO only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from scheduler.domain.plan_limits import PlanDimension as Use
from scheduler.domain.plan_limits import PlanLimits

_PIPELINES = (Use.PIPELINE, Use.ONE_F_ONE_B, Use.INTERLEAVE)
_MEGATRON_TENSOR = (Use.TENSOR, Use.SEQUENCE_SHARDING)

FRAMEWORK_LIMITS: Mapping[str, PlanLimits] = {
    "megatron-lm": replace(
        PlanLimits.allow_only(
            (
                *(Use.DDP, Use.ZERO1, *_MEGATRON_TENSOR, Use.ULYSSES, Use.RING, Use.EXPERT),
                *(*_PIPELINES, Use.RECOMPUTE, Use.SELECTIVE_RECOMPUTE),
            )
        ),
        is_uniform=True,
    ),
    "deepspeed": replace(
        PlanLimits.allow_only(
            (
                *(Use.DDP, Use.ZERO1, Use.ZERO2, Use.FSDP, Use.TENSOR, Use.ULYSSES, Use.RECOMPUTE),
                *(Use.OFFLOAD, Use.OFFLOAD_PARAMETERS),
            )
        ),
        exclusive=(
            (Use.TENSOR, Use.FSDP),
            (Use.TENSOR, Use.OFFLOAD_PARAMETERS),
            (Use.TENSOR, Use.ULYSSES),
        ),
        is_uniform=True,
    ),
    "torchtitan": replace(
        PlanLimits.allow_only(
            (
                *(Use.DDP, Use.ZERO2, Use.FSDP, Use.HYBRID_SHARD, *_MEGATRON_TENSOR, Use.RING, Use.EXPERT),
                *(*_PIPELINES, Use.RECOMPUTE, Use.SELECTIVE_RECOMPUTE),
            )
        ),
        exclusive=(
            (Use.DDP, Use.RING),
            (Use.DDP, Use.EXPERT),
            (Use.HYBRID_SHARD, Use.RING),
            (Use.HYBRID_SHARD, Use.EXPERT),
            (Use.TENSOR, Use.EXPERT),
        ),
        fills_pipeline=True,
        is_uniform=True,
        has_equal_stages=True,
    ),
    "accelerate": replace(
        PlanLimits.allow_only(
            (*(Use.DDP, Use.ZERO2, Use.FSDP, Use.HYBRID_SHARD, Use.TENSOR, Use.RING, Use.RECOMPUTE),)
        ),
        exclusive=((Use.DDP, Use.TENSOR), (Use.DDP, Use.RING), (Use.HYBRID_SHARD, Use.RING)),
        is_uniform=True,
    ),
    "galvatron": replace(
        PlanLimits.allow_only(
            (*(Use.ZERO2, Use.FSDP, *_MEGATRON_TENSOR, Use.ULYSSES, Use.PIPELINE, Use.ONE_F_ONE_B, Use.RECOMPUTE),)
        ),
        exclusive=((Use.TENSOR, Use.ULYSSES),),
    ),
    "colossalai": replace(
        PlanLimits.allow_only(
            (*(Use.DDP, Use.ZERO1, Use.ZERO2, *_MEGATRON_TENSOR, Use.ULYSSES, Use.RING, *_PIPELINES, Use.RECOMPUTE),)
        ),
        exclusive=(
            (Use.ZERO2, Use.PIPELINE),
            (Use.TENSOR, Use.ULYSSES),
            (Use.TENSOR, Use.RING),
            (Use.ULYSSES, Use.RING),
        ),
        is_uniform=True,
        has_equal_chunks=True,
    ),
    "llama-factory": replace(
        PlanLimits.allow_only(
            (Use.DDP, Use.ZERO1, Use.ZERO2, Use.FSDP, Use.OFFLOAD, Use.OFFLOAD_PARAMETERS, Use.RECOMPUTE)
        ),
        is_uniform=True,
    ),
}


@lru_cache(maxsize=1024)
def combine_framework_limits(framework: str, limits: PlanLimits) -> PlanLimits:
    """Return the limits that only plans within `limits` keep that the framework can run.

    Args:
        framework: one of FRAMEWORK_LIMITS, or empty for none.
    """
    return limits.combine(FRAMEWORK_LIMITS[framework]) if framework else limits
