"""Colossal-AI: keyword arguments of `HybridParallelPlugin`, as JSON.

A plugin has one mode of sequence parallelism: that of its tensor parallelism, Ulysses or a ring.
"""

from __future__ import annotations

import json
from typing import Any

from scheduler.domain.framework_limits import FRAMEWORK_LIMITS
from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan
from scheduler.plan_export.framework import (
    ExportedFile,
    ExportedPlan,
    Framework,
    count_samples_per_replica,
    get_uniform_strategy,
    list_stage_lengths,
)


def _write(plan: ParallelPlan) -> ExportedPlan:
    strategy = get_uniform_strategy(plan)
    arguments: dict[str, Any] = {
        "tp_size": strategy.tp,
        "pp_size": plan.pipeline_devices,
        "zero_stage": strategy.zero,
        **_build_sequence_parallelism(strategy),
    }
    if plan.pipeline_devices > 1:
        chunks = plan.schedule.interleave
        arguments |= {
            "microbatch_size": count_samples_per_replica(plan),
            "pp_style": "interleaved" if chunks > 1 else "1f1b",
            "num_model_chunks": chunks,
        }
        if chunks == 1:
            arguments["num_layers_per_stage"] = list_stage_lengths(plan)
    return ExportedPlan(file=ExportedFile("colossalai.json", json.dumps(arguments, indent=2) + "\n"))


def _build_sequence_parallelism(strategy: LayerStrategy) -> dict[str, Any]:
    if strategy.sequence_sharding:
        return {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "split_gather", "sp_size": 1}
    for degree, mode in ((strategy.ulysses, "all_to_all"), (strategy.ring, "ring_attn")):
        if degree > 1:
            return {"enable_sequence_parallelism": True, "sequence_parallelism_mode": mode, "sp_size": degree}
    return {}


FRAMEWORK = Framework(
    name="colossalai",
    title="Colossal-AI",
    module="colossalai",
    limits=FRAMEWORK_LIMITS["colossalai"],
    write=_write,
    has_file=True,
)
