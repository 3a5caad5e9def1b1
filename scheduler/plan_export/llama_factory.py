"""LLaMA-Factory: overrides of its YAML, with a DeepSpeed configuration for ZeRO."""

from __future__ import annotations

from scheduler.domain.framework_limits import FRAMEWORK_LIMITS
from scheduler.domain.parallel_plan import ParallelPlan, Recompute
from scheduler.plan_export import deepspeed
from scheduler.plan_export.framework import (
    PLAN_FILE,
    ExportedPlan,
    Framework,
    count_samples_per_replica,
    get_uniform_strategy,
)


def _write(plan: ParallelPlan) -> ExportedPlan:
    is_recomputed = get_uniform_strategy(plan).recompute is Recompute.FULL
    args = (
        f"deepspeed={PLAN_FILE}",
        f"per_device_train_batch_size={count_samples_per_replica(plan)}",
        f"gradient_accumulation_steps={plan.micro_batches}",
        f"disable_gradient_checkpointing={'false' if is_recomputed else 'true'}",
    )
    return ExportedPlan(args=args, file=deepspeed.FRAMEWORK.write(plan).file)


FRAMEWORK = Framework(
    name="llama-factory",
    title="LLaMA-Factory",
    module="llamafactory",
    limits=FRAMEWORK_LIMITS["llama-factory"],
    write=_write,
    has_args=True,
    has_file=True,
)
