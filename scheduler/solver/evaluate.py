"""An independent judge: time and memory of a plan, from the plan and the request alone.

It shares the cost of single layers with the search (time_cost, memory_cost), and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan, ScheduleName, Stage
from scheduler.solver.costs.chain import Layer, chain
from scheduler.solver.costs.memory_cost import kept_bytes, state_bytes, working_bytes
from scheduler.solver.costs.setting import Setting
from scheduler.solver.costs.strategies import strategies
from scheduler.solver.costs.time_cost import border_time_s, hand_over_time_s, layer_time_s, reshard_time_s
from scheduler.solver.costs.topology import Topology
from scheduler.solver.request import SolveRequest


class PlanError(ValueError):
    """A plan that the request's model, shape or hardware cannot carry out."""


@dataclass(frozen=True, slots=True)
class StageEvaluation:
    """Of one stage: time per micro-batch, and the memory of one of its GPUs at the peak, reserve included."""

    time_s: float
    memory_bytes: int
    in_flight: int


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Of one plan: `hand_overs_s` holds one time per border between stages, per micro-batch."""

    iteration_time_s: float
    stages: tuple[StageEvaluation, ...]
    hand_overs_s: tuple[float, ...]
    fits: bool
    model_flops_utilization: float

    @property
    def peak_bytes_per_gpu(self) -> int:
        return max(stage.memory_bytes for stage in self.stages)


def evaluate(plan: ParallelPlan, request: SolveRequest) -> Evaluation:
    """Predicts `plan`; its own predictions are not looked at.

    With stage times p, hand-overs o and c micro-batches, an iteration takes
    sum(p) + sum(o) + (c - 1) * max(p, o) (UniAP, CVPR'25, objective of section 3).

    Raises:
        PlanError: the plan does not cover the model's layers in order, does not fill the shape, splits the batch
            unevenly, or uses a strategy that the hardware or the model does not allow.
    """
    setting = _setting(plan, request)
    layers = chain(request.model, request.hardware.precision, stages=len(plan.stages))
    spread = _strategies_by_layer(plan, layers, setting)
    stages = tuple(_stage(index, stage, layers, spread, setting) for index, stage in enumerate(plan.stages))
    hand_overs_s = tuple(
        hand_over_time_s(layers[stage.last_layer], cut=cut, setting=setting)
        for cut, stage in enumerate(plan.stages[:-1])
    )
    times_s = (*(stage.time_s for stage in stages), *hand_overs_s)
    iteration_s = sum(times_s) + (plan.micro_batches - 1) * max(times_s)
    useful_flops = 3 * request.model.flops_per_sample * request.global_batch
    return Evaluation(
        iteration_time_s=iteration_s,
        stages=stages,
        hand_overs_s=hand_overs_s,
        fits=all(stage.memory_bytes <= request.memory_limit_bytes for stage in stages),
        model_flops_utilization=useful_flops / (iteration_s * request.gpus * request.hardware.peak_flops_per_s),
    )


def _setting(plan: ParallelPlan, request: SolveRequest) -> Setting:
    if plan.global_batch != request.global_batch:
        raise PlanError(
            f"micro_batches x micro_batch_size is {plan.global_batch}; "
            f"it must be the global batch, {request.global_batch}"
        )
    if plan.world_size != request.gpus:
        raise PlanError(f"the plan has {plan.world_size} GPUs; the shape {request.shape} has {request.gpus}")
    if plan.schedule.name is not ScheduleName.ONE_F_ONE_B:
        raise PlanError(f"schedule is {plan.schedule.name.value!r}; only '1f1b' can be judged yet")
    sizes = {stage.gpus for stage in plan.stages}
    models = {stage.gpu for stage in plan.stages}
    if len(sizes) > 1 or models != {request.hardware.gpu}:
        raise PlanError(f"stages have {sorted(sizes)} GPUs of {sorted(models)}; all must have as many of one model")
    return Setting(
        hardware=request.hardware,
        topology=Topology.of(request),
        stages=len(plan.stages),
        stage_gpus=plan.stages[0].gpus,
        micro_batches=plan.micro_batches,
        micro_batch_size=plan.micro_batch_size,
    )


def _strategies_by_layer(plan: ParallelPlan, layers: tuple[Layer, ...], setting: Setting) -> tuple[LayerStrategy, ...]:
    allowed = {_per_layer(strategy) for strategy in strategies(layers, setting)}
    spread: list[LayerStrategy] = []
    for stage in plan.stages:
        runs = [_per_layer(run) for run in stage.strategies for _ in range(run.layers)]
        if stage.first_layer != len(spread) or stage.last_layer - stage.first_layer + 1 != len(runs):
            raise PlanError(f"stage {stage.first_layer}-{stage.last_layer} does not hold the layers it should")
        spread.extend(runs)
    if len(spread) != len(layers):
        raise PlanError(f"the plan covers {len(spread)} layers; the model has {len(layers)}")
    for strategy in spread:
        if strategy not in allowed:
            raise PlanError(f"{strategy} is not allowed for this model on {setting.stage_gpus} GPUs a stage")
    return tuple(spread)


def _per_layer(strategy: LayerStrategy) -> LayerStrategy:
    return strategy if strategy.layers == 1 else replace(strategy, layers=1)


def _stage(
    index: int, stage: Stage, layers: tuple[Layer, ...], spread: tuple[LayerStrategy, ...], setting: Setting
) -> StageEvaluation:
    own = list(zip(layers, spread, strict=True))[stage.first_layer : stage.last_layer + 1]
    in_flight = setting.in_flight(index)
    time_s = sum(layer_time_s(layer, strategy, setting) for layer, strategy in own)
    time_s += sum(
        reshard_time_s(layer, before=before, after=after, setting=setting)
        for (layer, before), (_, after) in pairwise(own)
    )
    if index > 0:
        time_s += border_time_s(*own[0], setting)
    if index < setting.stages - 1:
        time_s += border_time_s(*own[-1], setting)
    memory_bytes = setting.hardware.reserve_bytes
    memory_bytes += sum(
        state_bytes(layer, strategy, setting) + in_flight * kept_bytes(layer, strategy, setting)
        for layer, strategy in own
    )
    memory_bytes += max(working_bytes(layers, strategy, setting) for _, strategy in own)
    return StageEvaluation(time_s, memory_bytes, in_flight)
