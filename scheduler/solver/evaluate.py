"""Independent evaluation: time and memory of a plan, from the plan and the request alone.

The evaluation shares with the search only the costs of single layers and hand-overs. It accepts any strategy that the
model and the worker allow, including those that the search leaves out because they cannot win.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import ceil

import numpy as np

from scheduler.domain.parallel_plan import STEP_TERMS, LayerStrategy, ParallelPlan, Stage
from scheduler.solver.costs.communication_time import Layout, compute_border_s, compute_reshard_s
from scheduler.solver.costs.layer_chain import Layer, build_layer_chain, build_layer_table
from scheduler.solver.costs.layer_memory import (
    compute_activation_bytes,
    compute_buffer_bytes,
    compute_host_activation_bytes,
    compute_host_bytes,
    compute_state_bytes,
)
from scheduler.solver.costs.layer_time import LayerTimes, compute_layer_times
from scheduler.solver.costs.memory_parts import StateParts, compute_state_parts
from scheduler.solver.costs.pipeline_costs import StageGroup, compute_hand_over_s, count_in_flight
from scheduler.solver.costs.strategy_space import StrategyCandidates
from scheduler.solver.instance import Floats, Ints
from scheduler.solver.plan_rules import PlanError, as_single_layer, check_plan, expand_layer_strategies
from scheduler.solver.request import DeviceGroup, SolveRequest

__all__ = ["Evaluation", "PlanError", "StageEvaluation", "TimeParts", "evaluate", "evaluate_unchecked"]


@dataclass(frozen=True, slots=True)
class TimeParts:
    """Seconds of a device per micro-batch, by cause.

    `data_s` is the part that computation does not hide. `other_s` is the optimizer step, streaming from the
    host, changes of layout and gathering at borders.
    """

    compute_s: float = 0.0
    tensor_s: float = 0.0
    sequence_s: float = 0.0
    expert_s: float = 0.0
    data_s: float = 0.0
    other_s: float = 0.0

    @property
    def communication_s(self) -> float:
        return self.tensor_s + self.sequence_s + self.expert_s + self.data_s

    @property
    def total_s(self) -> float:
        return self.compute_s + self.communication_s + self.other_s

    def add(self, other: TimeParts) -> TimeParts:
        return TimeParts(*(getattr(self, name) + getattr(other, name) for name in _PARTS))


_PARTS = ("compute_s", "tensor_s", "sequence_s", "expert_s", "data_s", "other_s")


@dataclass(frozen=True, slots=True)
class MemoryParts:
    """Peak memory of one GPU by purpose, in bytes.

    `optimizer` are master weights and moments, `buffers` what a layer needs while it computes or sends, and `reserve`
    what the profile keeps free of a plan: the framework's context and fragmentation.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    reserve: int


@dataclass(frozen=True, slots=True)
class StageEvaluation:
    """Time per micro-batch and peak memory of one device of the pipeline, with all its stages if it is interleaved.

    `memory_bytes` is for one GPU of the device, reserve included, and `host_bytes` is what offload keeps on the host
    for it.
    """

    parts: TimeParts
    memory_bytes: int
    host_bytes: int
    in_flight: float
    memory: MemoryParts

    @property
    def time_s(self) -> float:
        return self.parts.total_s


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Time and memory of a plan.

    `hand_overs_s` is the time per micro-batch of each link between devices. `terms` are the shares of the iteration
    time by cause, in the order of STEP_TERMS. The bubble of a pipeline counts as what the stages do.
    """

    iteration_time_s: float
    stages: tuple[StageEvaluation, ...]
    hand_overs_s: tuple[float, ...]
    fits: bool
    model_flops_utilization: float
    terms: tuple[float, ...]

    @property
    def peak_bytes_per_gpu(self) -> int:
        return max(stage.memory_bytes for stage in self.stages)


def evaluate(plan: ParallelPlan, request: SolveRequest) -> Evaluation:
    """Predict the time and memory of `plan`, regardless of the predictions that it contains.

    With a load per micro-batch on every device and every link, c micro-batches and v stages per device, an iteration
    takes sum(loads) / v + (c - 1 / v) x max(loads), plus the profile's overhead (UniAP, CVPR'25, objective of section
    3; the bubble shrinks by v, SC'21, section 2.2).

    Raises:
        PlanError: the plan does not cover the model's layers in order, does not fill the shape, splits the batch
            unevenly, or uses a schedule or strategy that the hardware or the model does not support.
    """
    check_plan(plan, request)
    return evaluate_unchecked(plan, request)


def evaluate_unchecked(plan: ParallelPlan, request: SolveRequest) -> Evaluation:
    """Predict as `evaluate`, also a plan that breaks a rule of the solver, because it was measured where it could run.

    It must cover the model's layers and fill the shape.
    """
    groups = [group for group in request.groups if group.hardware.gpu in {stage.gpu for stage in plan.stages}]
    costs = {group.hardware.gpu: _compute_group_costs(plan, request, group) for group in groups}
    stages = tuple(
        _evaluate_device(plan, position, costs[plan.stages[position].gpu]) for position in range(plan.pipeline_devices)
    )
    links = _compute_link_loads(plan, costs)
    links_s = tuple(links.sum(axis=1).tolist())
    loads_s = (*(stage.time_s for stage in stages), *links_s)
    chunks = plan.schedule.interleave
    iteration_s = sum(loads_s) / chunks + (plan.micro_batches - 1 / chunks) * max(loads_s)
    overhead_s = max(group.hardware.iteration_overhead_s for group in groups)
    iteration_s += overhead_s
    by_cause = np.array([*(_sum_causes(plan, at, stage, costs) for at, stage in enumerate(stages)), *links])
    causes_s = by_cause.sum(axis=0) / chunks + (plan.micro_batches - 1 / chunks) * by_cause[int(np.argmax(loads_s))]
    peak_flops_per_s = sum(group.gpus * group.hardware.peak_flops_per_s for group in groups)
    useful_flops = request.model.training_flops_per_sample * request.global_batch
    members = [costs[plan.stages[position].gpu].group for position in range(plan.pipeline_devices)]
    return Evaluation(
        iteration_time_s=iteration_s,
        stages=stages,
        hand_overs_s=links_s,
        fits=all(_fits(stage, group) for stage, group in zip(stages, members, strict=True)),
        model_flops_utilization=useful_flops / (iteration_s * peak_flops_per_s),
        terms=(*(causes_s / iteration_s).tolist(), overhead_s / iteration_s),
    )


def _fits(stage: StageEvaluation, group: DeviceGroup) -> bool:
    host_limit_bytes = group.hardware.host_memory_bytes
    return stage.memory_bytes <= group.limit_bytes and not stage.host_bytes > host_limit_bytes > 0


def _sum_causes(
    plan: ParallelPlan, position: int, stage: StageEvaluation, costs: dict[str, _GroupCosts]
) -> tuple[float, ...]:
    """Return the seconds of a device per micro-batch by cause, in the order of STEP_TERMS without the fixed part.

    A collective is on the network if its group has more GPUs than share a node. Of several strategies of a stage, the
    largest group counts.
    """
    group, own, parts = costs[plan.stages[position].gpu].group, plan.stages[position], stage.parts
    setting = group.build_stage_setting(own.gpus, plan.global_batch)
    tensor = max(strategy.tp for strategy in own.strategies)
    sequence = max(strategy.tp * strategy.ulysses * strategy.ring for strategy in own.strategies)
    sent = ((parts.tensor_s, tensor), (parts.sequence_s, sequence), (parts.data_s, own.gpus))
    network_s = sum(seconds for seconds, gpus in sent if gpus > setting.node_gpus_min)
    links_s = sum(seconds for seconds, _ in sent) - network_s
    return parts.compute_s, links_s, network_s, parts.expert_s, parts.other_s


@dataclass(frozen=True, slots=True, eq=False)
class _GroupCosts:
    """Costs of every layer type under every strategy that the stages on one GPU model use."""

    group: DeviceGroup
    layers: tuple[Layer, ...]
    kinds: dict[Layer, int]
    numbers: dict[LayerStrategy, int]
    layouts: dict[Layout, int]
    times: LayerTimes
    state_bytes: Ints
    state_parts: StateParts
    kept_bytes: Ints
    working_bytes: Ints
    host_bytes: Ints | None
    host_kept_bytes: Ints | None
    border_s: Floats
    reshard_s: Floats


def _compute_group_costs(plan: ParallelPlan, request: SolveRequest, group: DeviceGroup) -> _GroupCosts:
    stages = [stage for stage in plan.stages if stage.gpu == group.hardware.gpu]
    one_node = len({stage.gpu for stage in plan.stages}) == 1 and group.gpus <= group.node_gpus
    layers = build_layer_chain(request.model, group.hardware.precision, stages=plan.pipeline_devices, one_node=one_node)
    setting = group.build_stage_setting(stages[0].gpus, plan.global_batch)
    kinds = tuple(dict.fromkeys(layers))
    used = list(dict.fromkeys(as_single_layer(run) for stage in stages for run in stage.strategies))
    candidates = StrategyCandidates.from_strategies(used, micro_batches=plan.micro_batches, batch=plan.micro_batch_size)
    layouts = tuple(dict.fromkeys(_get_layout(strategy) for strategy in used))
    table, batches = build_layer_table(kinds), np.array([plan.micro_batch_size])
    return _GroupCosts(
        group=group,
        layers=layers,
        kinds={kind: number for number, kind in enumerate(kinds)},
        numbers={strategy: number for number, strategy in enumerate(used)},
        layouts={layout: number for number, layout in enumerate(layouts)},
        times=compute_layer_times(kinds, candidates, setting),
        state_bytes=compute_state_bytes(kinds, candidates, setting),
        state_parts=compute_state_parts(kinds, candidates, setting),
        kept_bytes=compute_activation_bytes(kinds, candidates, setting),
        working_bytes=compute_buffer_bytes(kinds, candidates, setting),
        host_bytes=compute_host_bytes(kinds, candidates, setting),
        host_kept_bytes=compute_host_activation_bytes(kinds, candidates),
        border_s=compute_border_s(table, candidates.degrees, setting),
        reshard_s=compute_reshard_s(table, layouts, batches, setting)[0],
    )


def _evaluate_device(plan: ParallelPlan, position: int, costs: _GroupCosts) -> StageEvaluation:
    """Evaluate one device of the pipeline, with all the stages that it runs."""
    held = count_in_flight(
        plan.schedule, micro_batches=plan.micro_batches, devices=plan.pipeline_devices, position=position
    )
    parts, state_bytes, kept_bytes, working, host_bytes = TimeParts(), 0, 0, 0, 0
    occupied: list[tuple[int, int]] = []
    for stage in plan.stages[position :: plan.pipeline_devices]:
        strategies = expand_layer_strategies(stage)
        places = [
            (costs.kinds[costs.layers[stage.first_layer + offset]], costs.numbers[strategy])
            for offset, strategy in enumerate(strategies)
        ]
        occupied.extend(places)
        for place in places:
            parts = parts.add(TimeParts(*(float(getattr(costs.times, name)[place]) for name in _PARTS)))
            state_bytes += int(costs.state_bytes[place])
            kept_bytes += ceil(float(costs.kept_bytes[place]) * held)
            working = max(working, int(costs.working_bytes[place[1]]))
            host_bytes += 0 if costs.host_bytes is None else int(costs.host_bytes[place])
            host_bytes += 0 if costs.host_kept_bytes is None else ceil(float(costs.host_kept_bytes[place]) * held)
        parts = parts.add(TimeParts(other_s=_compute_layout_changes_s(stage, places, strategies, costs)))
    memory_bytes = costs.group.hardware.occupied_bytes(state_bytes + kept_bytes + working)
    memory = _split_memory(occupied, costs.state_parts, kept_bytes, working, memory_bytes)
    return StageEvaluation(parts, memory_bytes, host_bytes, held, memory)


def _split_memory(
    places: list[tuple[int, int]], parts: StateParts, kept_bytes: int, working: int, memory_bytes: int
) -> MemoryParts:
    """Split `memory_bytes` of a device that holds the layers at `places`."""
    parameters, gradients, optimizer = (
        int(sum(float(part[place]) for place in places))
        for part in (parts.parameters, parts.gradients, parts.optimizer)
    )
    reserve = memory_bytes - parameters - gradients - optimizer - kept_bytes - working
    return MemoryParts(parameters, gradients, optimizer, kept_bytes, working, reserve)


def _compute_layout_changes_s(
    stage: Stage, places: list[tuple[int, int]], strategies: list[LayerStrategy], costs: _GroupCosts
) -> float:
    """Return the time of changes of layout within the stage and of gathering at its borders."""
    time_s = 0.0
    for (kind, _), (before, after) in zip(places, pairwise(strategies), strict=False):
        time_s += float(costs.reshard_s[kind, costs.layouts[_get_layout(before)], costs.layouts[_get_layout(after)]])
    if stage.first_layer > 0:
        time_s += float(costs.border_s[places[0]])
    if stage.last_layer < len(costs.layers) - 1:
        time_s += float(costs.border_s[places[-1]])
    return time_s


def _get_layout(strategy: LayerStrategy) -> Layout:
    return strategy.tp, strategy.sequence_sharding


def _compute_link_loads(plan: ParallelPlan, costs: dict[str, _GroupCosts]) -> Floats:
    """Return the load of each link between devices in seconds, by cause in the columns of `_sum_causes`.

    In an interleaved pipeline, the last link leads back to the first device.
    """
    devices, mixed = plan.pipeline_devices, len(costs) > 1
    sides = {
        gpu: StageGroup(
            hardware=group_costs.group.hardware,
            node_gpus=group_costs.group.node_gpus,
            gpus=next(stage.gpus for stage in plan.stages if stage.gpu == gpu),
            count=sum(stage.gpu == gpu for stage in plan.stages[:devices]),
        )
        for gpu, group_costs in costs.items()
    }
    loads_s = np.zeros((devices if plan.schedule.interleave > 1 else devices - 1, len(STEP_TERMS) - 1))
    for number, (stage, following) in enumerate(pairwise(plan.stages)):
        sender, receiver, cut = sides[stage.gpu], sides[following.gpu], number % devices
        inside = sender.spans_nodes if mixed or cut == devices - 1 else sender.crosses_nodes(cut)
        layer = costs[stage.gpu].layers[stage.last_layer]
        crosses = sender is not receiver or inside
        cause = STEP_TERMS.index("network" if crosses else "node_links")
        loads_s[cut, cause] += compute_hand_over_s(layer, plan.micro_batch_size, sender, receiver, crosses=crosses)
    return loads_s
