"""Hetu-Galvatron: its strategy file, with one value per layer for the degrees.

Data parallelism is ZeRO-2 (`default_dp_type`) or ZeRO-3 (`dp_types_enc` 1), as in Galvatron's own search. A layer uses
tensor parallelism or Ulysses (`use_sp` 1), and `tp_sizes_enc` is the degree of the one that it uses.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from scheduler.domain.framework_limits import FRAMEWORK_LIMITS
from scheduler.domain.parallel_plan import ParallelPlan, Recompute
from scheduler.plan_export.framework import (
    PLAN_FILE,
    ExportedFile,
    ExportedPlan,
    Framework,
    list_layer_strategies,
    list_stage_lengths,
)


def _write(plan: ParallelPlan) -> ExportedPlan:
    layers = list_layer_strategies(plan)
    strategy_file = {
        "pp_deg": plan.pipeline_devices,
        "tp_sizes_enc": _join(max(layer.tp, layer.ulysses) for layer in layers),
        "tp_consecutive_flags": _join(1 for _ in layers),
        "dp_types_enc": _join(int(layer.zero == 3) for layer in layers),
        "use_sp": _join(int(layer.ulysses > 1) for layer in layers),
        "checkpoint": _join(int(layer.recompute is Recompute.FULL) for layer in layers),
        "global_bsz": plan.global_batch,
        "chunks": plan.micro_batches,
        "pp_division": _join(list_stage_lengths(plan)),
        "pipeline_type": "pipedream_flush",
        "default_dp_type": "zero2",
        "vtp": min(layer.tp for layer in layers),
        "vsp": int(all(layer.ulysses > 1 for layer in layers)),
        "embed_sdp": int(all(layer.zero == 3 for layer in layers)),
    }
    args = ["--galvatron_config_path", PLAN_FILE]
    if any(layer.sequence_sharding for layer in layers):
        args.append("--sequence-parallel")
    text = json.dumps(strategy_file, indent=4) + "\n"
    return ExportedPlan(args=tuple(args), file=ExportedFile("galvatron.json", text))


def _join(values: Iterable[int]) -> str:
    return ",".join(map(str, values))


FRAMEWORK = Framework(
    name="galvatron",
    title="Hetu-Galvatron",
    module="galvatron",
    limits=FRAMEWORK_LIMITS["galvatron"],
    write=_write,
    has_args=True,
    has_file=True,
)
