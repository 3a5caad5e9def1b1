"""Hugging Face Accelerate: the YAML of `accelerate launch`, with DDP or FSDP2 and its parallelism configuration.

FSDP2 that keeps parameters gathered between forward and backward is ZeRO-2, and one that does not is ZeRO-3. Context
parallelism is a ring. The script itself takes samples per replica (`{plan.micro_batch_size}`), gradient accumulation
(`{plan.micro_batches}`) and recomputation (`{plan.gradient_checkpointing}`): the YAML holds what the launcher reads.
"""

from __future__ import annotations

from collections.abc import Mapping

from scheduler.domain.framework_limits import FRAMEWORK_LIMITS
from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan
from scheduler.plan_export.framework import PLAN_FILE, ExportedFile, ExportedPlan, Framework, get_uniform_strategy

_Value = str | int | bool


def _write(plan: ParallelPlan) -> ExportedPlan:
    strategy = get_uniform_strategy(plan)
    is_sharded = strategy.zero > 0
    kind = "FSDP" if is_sharded else "NO" if plan.world_size == 1 else "MULTI_GPU"
    document: dict[str, _Value | Mapping[str, _Value]] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind,
        "num_processes": plan.world_size,
    }
    if is_sharded:
        document["fsdp_config"] = _build_fsdp(strategy)
    if is_sharded or strategy.tp > 1:
        document["parallelism_config"] = _build_parallelism(strategy)
    return ExportedPlan(args=("--config_file", PLAN_FILE), file=ExportedFile("accelerate.yaml", _format_yaml(document)))


def _build_fsdp(strategy: LayerStrategy) -> Mapping[str, _Value]:
    return {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": strategy.zero == 3,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_activation_checkpointing": False,
        "fsdp_offload_params": False,
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }


def _build_parallelism(strategy: LayerStrategy) -> Mapping[str, _Value]:
    """Return the mesh. Shards spread over data and context parallelism together."""
    replicated = strategy.dp * strategy.ring // strategy.shard_group
    return {
        "parallelism_config_dp_replicate_size": replicated,
        "parallelism_config_dp_shard_size": strategy.dp // replicated,
        "parallelism_config_tp_size": strategy.tp,
        "parallelism_config_cp_size": strategy.ring,
        "parallelism_config_cp_comm_strategy": "alltoall",
    }


def _format_yaml(document: Mapping[str, _Value | Mapping[str, _Value]]) -> str:
    """Return YAML of plain words, numbers and booleans, at most two levels deep."""
    lines = []
    for name, value in document.items():
        if isinstance(value, Mapping):
            lines.append(f"{name}:")
            lines += [f"  {inner}: {_format_scalar(each)}" for inner, each in value.items()]
        else:
            lines.append(f"{name}: {_format_scalar(value)}")
    return "\n".join(lines) + "\n"


def _format_scalar(value: _Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return "'NO'" if value == "NO" else str(value)  # unquoted, YAML reads it as false


FRAMEWORK = Framework(
    name="accelerate",
    title="Accelerate",
    module="accelerate",
    limits=FRAMEWORK_LIMITS["accelerate"],
    write=_write,
    has_args=True,
    has_file=True,
)
