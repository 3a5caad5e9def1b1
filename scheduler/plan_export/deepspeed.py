"""DeepSpeed: the JSON configuration, with ZeRO, AutoTP tensor parallelism and Ulysses.

DeepSpeed's pipeline stages are part of the model's code, so no configuration can express them.
"""

from __future__ import annotations

import json
from typing import Any

from scheduler.domain.framework_limits import FRAMEWORK_LIMITS
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.plan_export.framework import (
    ExportedFile,
    ExportedPlan,
    Framework,
    count_samples_per_replica,
    get_uniform_strategy,
)


def build_configuration(plan: ParallelPlan) -> dict[str, Any]:
    """Return the part of the configuration that a uniform plan determines."""
    strategy = get_uniform_strategy(plan)
    zero: dict[str, Any] = {"stage": max(strategy.zero, 1) if strategy.offload else strategy.zero}
    if strategy.offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if strategy.offload_parameters:
        # DeepSpeed streams parameters at stage 3 only, which one replica can use as well.
        zero |= {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": True}}
    configuration: dict[str, Any] = {
        "train_batch_size": plan.global_batch,
        "train_micro_batch_size_per_gpu": count_samples_per_replica(plan),
        "gradient_accumulation_steps": plan.micro_batches,
        "zero_optimization": zero,
    }
    if strategy.tp > 1:
        configuration["tensor_parallel"] = {"autotp_size": strategy.tp}
    if strategy.ulysses > 1:
        configuration |= {"sequence_parallel_size": strategy.ulysses, "data_parallel_size": strategy.dp}
    return configuration


def _write(plan: ParallelPlan) -> ExportedPlan:
    text = json.dumps(build_configuration(plan), indent=2) + "\n"
    return ExportedPlan(file=ExportedFile("deepspeed.json", text))


FRAMEWORK = Framework(
    name="deepspeed",
    title="DeepSpeed",
    module="deepspeed",
    limits=FRAMEWORK_LIMITS["deepspeed"],
    write=_write,
    has_file=True,
)
