"""Rules that a plan must satisfy for a request's GPUs and model to be able to run it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan, Recompute, ScheduleName, Stage
from scheduler.solver.costs.collectives import StageSetting
from scheduler.solver.costs.layer_chain import Layer, build_layer_chain
from scheduler.solver.costs.strategy_space import DegreeLimits, compute_token_multiple
from scheduler.solver.profiles.hardware_profile import Dimension
from scheduler.solver.request import DeviceGroup, SolveRequest


class PlanError(ValueError):
    """A plan that the request's model, shape or hardware cannot run."""


def check_plan(plan: ParallelPlan, request: SolveRequest) -> None:
    """Check that a plan is in the strategy space of the request.

    Raises:
        PlanError: the plan breaks a rule. The message names the first one, the value and the accepted values.
    """
    if plan.global_batch != request.global_batch:
        raise PlanError(
            f"micro_batches x micro_batch_size is {plan.global_batch}; "
            f"it must be the global batch, {request.global_batch}"
        )
    _check_schedule(plan)
    _check_limits(plan, request)
    groups = {group.hardware.gpu: group for group in request.groups}
    _check_gpus(plan, groups)
    _check_layers(plan, request.model.layer_count)
    for gpu, group in groups.items():
        stages = [stage for stage in plan.stages if stage.gpu == gpu]
        if stages:
            _check_stages(
                plan,
                stages,
                group,
                build_layer_chain(request.model, group.hardware.precision, stages=plan.pipeline_devices),
            )


def _check_limits(plan: ParallelPlan, request: SolveRequest) -> None:
    violation = request.limits.find_violation(plan)
    if violation:
        raise PlanError(violation)


def expand_layer_strategies(stage: Stage) -> list[LayerStrategy]:
    """Return the strategy of each layer of `stage`, in order."""
    return [as_single_layer(run) for run in stage.strategies for _ in range(run.layers)]


def as_single_layer(strategy: LayerStrategy) -> LayerStrategy:
    """Return `strategy` for one layer, so that runs of different lengths compare equal."""
    return strategy if strategy.layers == 1 else replace(strategy, layers=1)


def describe_strategy(strategy: LayerStrategy) -> str:
    """Return what a layer's strategy uses: `tp 2, dp 4, zero 3, shard_group 4`."""
    plain = LayerStrategy(layers=1)
    values = {field.name: getattr(strategy, field.name) for field in fields(LayerStrategy) if field.name != "layers"}
    used = [f"{name} {value}" for name, value in values.items() if value != getattr(plain, name)]
    return ", ".join(used) or "tp 1, dp 1"


def find_strategy_error(strategy: LayerStrategy, limits: DegreeLimits, setting: StageSetting, batch: int) -> str:
    """Return why a layer cannot follow `strategy` at micro-batches of `batch` samples; empty if it can."""
    for broken, message in _strategy_errors(strategy, limits, setting, batch):
        if broken:
            return message
    missing = [
        dimension.value for dimension in _list_required_dimensions(strategy) if not setting.hardware.supports(dimension)
    ]
    return f"the worker of {setting.hardware.gpu} does not support {missing[0]}" if missing else ""


def _strategy_errors(
    strategy: LayerStrategy, limits: DegreeLimits, setting: StageSetting, batch: int
) -> Iterator[tuple[bool, str]]:
    """Yield pairs (broken, message), one per rule."""
    context, node = strategy.ulysses * strategy.ring, setting.node_gpus
    replicas, in_node = strategy.dp * context, node // strategy.tp
    multiple = compute_token_multiple(strategy.ulysses, strategy.ring)
    yield (
        strategy.gpus != setting.gpus,
        f"tp x dp x ulysses x ring is {strategy.gpus}; the stage has {setting.gpus} GPUs",
    )
    yield node % strategy.tp > 0, f"tp is {strategy.tp}; it must divide the {node} GPUs of the stage that share a node"
    yield limits.heads % strategy.tp > 0, f"tp is {strategy.tp}; it must divide the {limits.heads} heads"
    yield (
        bool(limits.measured) and strategy.tp not in limits.measured,
        f"tp is {strategy.tp}; forward_s_per_sample has values only for {', '.join(map(str, sorted(limits.measured)))}",
    )
    yield strategy.sequence_sharding and strategy.tp == 1, "sequence_sharding is true; it must be false if tp is 1"
    yield (
        limits.attention_heads % (strategy.tp * strategy.ulysses) > 0,
        f"tp x ulysses is {strategy.tp * strategy.ulysses}; "
        f"it must divide the {limits.attention_heads} attention heads",
    )
    yield (
        limits.tokens % multiple > 0,
        f"tokens is {limits.tokens}; it must be a multiple of {multiple} "
        f"for ulysses {strategy.ulysses} x ring {strategy.ring}",
    )
    yield (
        strategy.sequence_sharding and limits.tokens % (strategy.tp * context) > 0,
        f"tp x ulysses x ring is {strategy.tp * context}; "
        f"with sequence_sharding it must divide the {limits.tokens} tokens",
    )
    yield batch % strategy.dp > 0, f"dp is {strategy.dp}; it must divide the micro-batch of {batch} samples"
    yield replicas % strategy.ep > 0, f"ep is {strategy.ep}; it must divide the {replicas} replicas"
    yield limits.experts % strategy.ep > 0, f"ep is {strategy.ep}; it must divide the {limits.experts} experts"
    yield strategy.ep > 1 and not limits.experts, f"ep is {strategy.ep}; it must be 1, because the model has no experts"
    yield strategy.zero not in range(4), f"zero is {strategy.zero}; it must be 0 to 3"
    yield (
        strategy.zero > 0 and replicas == 1,
        f"zero is {strategy.zero}; it must be 0, because there is only one replica",
    )
    hybrid = (
        strategy.zero == 3 and 1 < in_node < replicas and (in_node % strategy.ep == 0 or strategy.ep % in_node == 0)
    )
    groups = [1] if strategy.zero == 0 else [replicas, in_node] if hybrid else [replicas]
    yield (
        strategy.shard_group not in groups,
        f"shard_group is {strategy.shard_group}; it must be {' or '.join(map(str, groups))} at zero={strategy.zero}",
    )
    yield from _offload_errors(strategy)


def _offload_errors(strategy: LayerStrategy) -> Iterator[tuple[bool, str]]:
    replicas = strategy.dp * strategy.ulysses * strategy.ring
    yield (
        strategy.offload and not strategy.zero and replicas > 1,
        "offload is true; with several replicas, zero must be above 0",
    )
    yield strategy.offload_parameters and not strategy.offload, "offload_parameters is true; offload must be true too"
    yield (
        strategy.offload_parameters and replicas > 1 and (strategy.zero, strategy.shard_group) != (3, replicas),
        "offload_parameters is true; with several replicas, zero must be 3 over all of them",
    )
    yield (
        strategy.offload_activations and strategy.recompute is not Recompute.FULL,
        f"offload_activations is true; recompute is {strategy.recompute.value}, and must be full",
    )


def _list_required_dimensions(strategy: LayerStrategy) -> Iterator[Dimension]:
    sharding = (Dimension.DATA, Dimension.ZERO, Dimension.ZERO, Dimension.FSDP)[strategy.zero]
    if strategy.zero == 3 and strategy.shard_group < strategy.dp * strategy.ulysses * strategy.ring:
        sharding = Dimension.HYBRID_SHARD
    uses = {
        sharding: True,
        Dimension.TENSOR: strategy.tp > 1,
        Dimension.SEQUENCE_SHARDING: strategy.sequence_sharding,
        Dimension.ULYSSES: strategy.ulysses > 1,
        Dimension.RING: strategy.ring > 1,
        Dimension.EXPERT: strategy.ep > 1,
        Dimension.RECOMPUTE: strategy.recompute is Recompute.FULL,
        Dimension.SELECTIVE_RECOMPUTE: strategy.recompute is Recompute.SELECTIVE,
        Dimension.OFFLOAD: strategy.offload,
        Dimension.OFFLOAD_PARAMETERS: strategy.offload_parameters,
        Dimension.OFFLOAD_ACTIVATIONS: strategy.offload_activations,
    }
    return (dimension for dimension, used in uses.items() if used)


def _check_schedule(plan: ParallelPlan) -> None:
    name, chunks = plan.schedule.name, plan.schedule.interleave
    if name is not ScheduleName.INTERLEAVED:
        if chunks != 1:
            raise PlanError(f"interleave is {chunks}; it must be 1 under {name.value}")
        return
    if chunks < 2 or len(plan.stages) % chunks or plan.pipeline_devices < 2:
        raise PlanError(
            f"interleave is {chunks} over {len(plan.stages)} stages; it must be 2 or more and divide the stages"
        )
    if plan.micro_batches % plan.pipeline_devices:
        raise PlanError(
            f"micro_batches is {plan.micro_batches}; with interleaving it must be a multiple of {plan.pipeline_devices}"
        )
    if len({(stage.gpu, stage.gpus) for stage in plan.stages}) > 1:
        raise PlanError(
            "stages have different GPUs; in an interleaved pipeline all must have the same model and number"
        )


def _check_gpus(plan: ParallelPlan, groups: dict[str, DeviceGroup]) -> None:
    """Check that the plan uses either all GPUs of a model or none; a mixed shape may be used in part."""
    held = plan.stages[: plan.pipeline_devices]
    for gpu in dict.fromkeys(stage.gpu for stage in held):
        if gpu not in groups:
            raise PlanError(f"a stage is on {gpu!r}; the shape has {', '.join(groups)}")
        widths = {stage.gpus for stage in held if stage.gpu == gpu}
        if len(widths) > 1:
            raise PlanError(f"stages on {gpu} have {sorted(widths)} GPUs; all must have the same number")
        used = sum(stage.gpus for stage in held if stage.gpu == gpu)
        if used != groups[gpu].gpus:
            raise PlanError(f"the plan has {used} GPUs of {gpu}; the shape has {groups[gpu].gpus}")


def _check_layers(plan: ParallelPlan, layers: int) -> None:
    covered = 0
    for stage in plan.stages:
        count = sum(run.layers for run in stage.strategies)
        if stage.first_layer != covered or stage.last_layer - stage.first_layer + 1 != count:
            raise PlanError(
                f"stage {stage.first_layer}-{stage.last_layer} has strategies for layers {covered} to "
                f"{covered + count - 1}; they must be the layers of the stage"
            )
        covered += count
    if covered != layers:
        raise PlanError(f"the plan covers {covered} layers; the model has {layers}")


def _check_stages(plan: ParallelPlan, stages: list[Stage], group: DeviceGroup, layers: tuple[Layer, ...]) -> None:
    name = plan.schedule.name
    needed = [Dimension.PIPELINE] if plan.pipeline_devices > 1 else []
    needed += [Dimension.GPIPE] if name is ScheduleName.GPIPE else []
    needed += [Dimension.INTERLEAVE] if name is ScheduleName.INTERLEAVED else []
    for dimension in needed:
        if not group.hardware.supports(dimension):
            raise PlanError(f"the worker of {group.hardware.gpu} does not support {dimension.value}")
    limits = DegreeLimits.from_layers(layers)
    setting = group.build_stage_setting(stages[0].gpus, plan.global_batch)
    for strategy in dict.fromkeys(as_single_layer(run) for stage in stages for run in stage.strategies):
        error = find_strategy_error(strategy, limits, setting, plan.micro_batch_size)
        if error:
            raise PlanError(f"{error} (in layers with {describe_strategy(strategy)})")
