"""torchtitan: flags that override its Python configuration.

FSDP2 that keeps parameters gathered between forward and backward is ZeRO-2, and one that does not is ZeRO-3. Context
parallelism is a ring. With a pipeline, a local batch holds all micro-batches of a step; without one, torchtitan
accumulates gradients over local batches until it reaches the global batch. The arguments end with a subcommand, so they
belong at the end of a command.
"""

from __future__ import annotations

from scheduler.domain.framework_limits import FRAMEWORK_LIMITS
from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan, ScheduleName
from scheduler.plan_export.framework import (
    ExportedPlan,
    Framework,
    count_samples_per_replica,
    get_uniform_strategy,
    list_stage_lengths,
)

_SCHEDULES = {ScheduleName.ONE_F_ONE_B: "1F1B", ScheduleName.INTERLEAVED: "Interleaved1F1B"}


def _write(plan: ParallelPlan) -> ExportedPlan:
    strategy = get_uniform_strategy(plan)
    samples, pp = count_samples_per_replica(plan), plan.pipeline_devices
    flags: dict[str, str | int] = {
        "training.local_batch_size": samples * (plan.micro_batches if pp > 1 else 1),
        "training.global_batch_size": plan.global_batch,
        **_build_degrees(strategy),
        "parallelism.pipeline_parallel_degree": pp,
    }
    if pp > 1:
        flags |= {
            "parallelism.pipeline_parallel_schedule": _SCHEDULES[plan.schedule.name],
            "parallelism.pipeline_parallel_microbatch_size": samples,
            "parallelism.pipeline_parallel_layers_per_stage": list_stage_lengths(plan)[0],
            "parallelism.pipeline_parallel_first_stage_less_layers": 0,
            "parallelism.pipeline_parallel_last_stage_less_layers": 0,
        }
    args = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    if strategy.tp > 1 and not strategy.sequence_sharding:
        args.append("--parallelism.no-enable_sequence_parallel")
    # The words of a tyro subcommand come after all flags.
    args.append(f"activation-checkpoint:{strategy.recompute.value}")
    return ExportedPlan(args=tuple(args))


def _build_degrees(strategy: LayerStrategy) -> dict[str, str | int]:
    """Return the mesh. Shards spread over data and context parallelism together."""
    replicas = strategy.dp * strategy.ring
    replicated = replicas // strategy.shard_group if strategy.zero else strategy.dp
    degrees: dict[str, str | int] = {
        "parallelism.data_parallel_replicate_degree": replicated,
        "parallelism.data_parallel_shard_degree": strategy.dp // replicated,
        "parallelism.tensor_parallel_degree": strategy.tp,
        "parallelism.context_parallel_degree": strategy.ring,
        "parallelism.expert_parallel_degree": strategy.ep,
    }
    if strategy.zero:
        reshards = "always" if strategy.zero == 3 else "never"
        degrees["parallelism.fsdp_reshard_after_forward"] = reshards
    return degrees


FRAMEWORK = Framework(
    name="torchtitan",
    title="torchtitan",
    module="torchtitan",
    limits=FRAMEWORK_LIMITS["torchtitan"],
    write=_write,
    has_args=True,
)
