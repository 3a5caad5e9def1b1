"""The pipelines that a request allows: all stage widths, numbers of micro-batches and schedules, each with its search.

GPipe is left out unless limits of the request can forbid 1F1B: its iteration takes as long as that of 1F1B, and each
device holds at least as many micro-batches.

If all layers must have one strategy, each pipeline is enumerated once per strategy that can be of use.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import inf

import numpy as np

from scheduler.domain.parallel_plan import Schedule, ScheduleName
from scheduler.domain.plan_limits import NO_LIMITS, SCHEDULES, PlanDimension, PlanLimits
from scheduler.solver.costs.collectives import StageSetting
from scheduler.solver.costs.layer_chain import LayerChain, build_layer_chain
from scheduler.solver.costs.pipeline_costs import (
    CostedStrategies,
    StageGroup,
    compute_hand_over_table_s,
    compute_stage_costs,
    count_in_flight,
)
from scheduler.solver.costs.strategy_space import list_divisors
from scheduler.solver.instance import Instance, Ints, Objective
from scheduler.solver.profiles.hardware_profile import Dimension
from scheduler.solver.request import DeviceGroup, SolveRequest
from scheduler.solver.search.pipeline_bounds import PipelineOutline
from scheduler.solver.search.pipeline_search import PipelineSearch
from scheduler.solver.search.shared_strategies import list_shared_strategies
from scheduler.solver.search.stage_oracle import OracleCache

_COUNTED_ENDS = ((0, 0), (1, 1), (1, 0), (0, 1))
"""Whether embedding and head count as a layer of their chunk, which then holds one layer less."""


@dataclass(frozen=True, slots=True)
class PipelineGroup:
    """The devices that one group of GPUs provides to a pipeline."""

    group: DeviceGroup
    devices: int
    setting: StageSetting
    costed: CostedStrategies


@dataclass(frozen=True, slots=True)
class PipelineConfig:
    """The choices that are fixed before the search of a pipeline.

    `borders` are empty if the cuts are free. `stage_layers` above 0 is the number of layers of every stage.
    """

    schedule: Schedule
    micro_batches: int
    borders: tuple[int, ...]
    stage_layers: int = 0

    @property
    def objective(self) -> Objective:
        return Objective(self.micro_batches, self.schedule.interleave)

    def list_in_flight(self, devices: int) -> tuple[float, ...]:
        """Return the micro-batches that each device holds at its peak, by position."""
        return tuple(
            count_in_flight(self.schedule, micro_batches=self.micro_batches, devices=devices, position=position)
            for position in range(devices)
        )


@dataclass(frozen=True, slots=True, eq=False)
class Pipeline:
    """One combination of stage widths, micro-batches and schedule, with the search for its best plan."""

    layers: LayerChain
    groups: tuple[PipelineGroup, ...]
    config: PipelineConfig
    search: PipelineSearch
    restriction: Hashable = None

    @property
    def devices(self) -> int:
        return sum(member.devices for member in self.groups)

    @property
    def widths(self) -> tuple[int, ...]:
        """GPUs of a stage, by group."""
        return tuple(member.setting.gpus for member in self.groups)

    @property
    def candidates(self) -> int:
        """Number of strategies of a layer that the search may choose from."""
        return sum(member.costed.costs.strategies for member in self.groups)


def enumerate_pipelines(
    request: SolveRequest, oracle_cache: OracleCache, *, useful_s: float = inf
) -> Iterator[Pipeline]:
    """Yield all pipelines within the request's limits in a fixed order; each uses all GPUs of the request.

    Pipelines of one strategy that takes `useful_s` or longer at best are left out.
    """
    if request.limits.is_uniform:
        request = _keep_common_dimensions(request)
    limits = request.limits
    for layers, members in _enumerate_widths(request, oracle_cache):
        costed = [compute_stage_costs(layers, setting, limits) for _, setting in members]
        devices = sum(group.gpus // setting.gpus for group, setting in members)
        stage_layers = len(layers) // devices if limits.has_equal_stages and devices > 1 else 0
        for micro_batches in sorted(set(costed[0]).intersection(*costed[1:])):
            if limits is not NO_LIMITS and not limits.allows_micro_batches(micro_batches, devices):
                continue
            groups = tuple(
                PipelineGroup(group, group.gpus // setting.gpus, setting, costs[micro_batches])
                for (group, setting), costs in zip(members, costed, strict=True)
            )
            for schedule, borders in _enumerate_schedules(groups, micro_batches, len(layers), limits):
                config = PipelineConfig(schedule, micro_batches, borders, 0 if borders else stage_layers)
                for chosen, restriction in _restrict_groups(layers, groups, config, limits, useful_s):
                    yield _build_pipeline(layers, chosen, config, oracle_cache, restriction)


def _keep_common_dimensions(request: SolveRequest) -> SolveRequest:
    """Return the request with the dimensions that all its workers support, for strategies that all GPUs share."""
    common = frozenset.intersection(*(hardware.dimensions for hardware in request.hardware))
    return replace(request, hardware=tuple(replace(hardware, dimensions=common) for hardware in request.hardware))


def _enumerate_widths(
    request: SolveRequest, oracle_cache: OracleCache
) -> Iterator[tuple[LayerChain, tuple[tuple[DeviceGroup, StageSetting], ...]]]:
    """Yield (layers, ((group, setting of its stages), ...)) for every pipeline with no more stages than layers."""
    groups, limits = request.groups, request.limits
    pipelined = all(group.hardware.supports(Dimension.PIPELINE) for group in groups)
    stages_max = request.model.layer_count if pipelined else 1
    stages_max = limits.compute_degree_max(PlanDimension.PIPELINE, stages_max)
    settings = [
        [
            (group, oracle_cache.intern_setting(group.build_stage_setting(width, request.global_batch)))
            for width in list_divisors(group.gpus)
        ]
        for group in groups
    ]
    for members in product(*settings):
        stages = sum(group.gpus // setting.gpus for group, setting in members)
        if limits.is_uniform and len({setting.gpus for _, setting in members}) > 1:
            continue
        if limits.has_equal_stages and request.model.layer_count % stages:
            continue
        if stages <= stages_max:
            precision = groups[0].hardware.precision
            one_node = len(groups) == 1 and groups[0].gpus <= groups[0].node_gpus
            layers = build_layer_chain(request.model, precision, stages=stages, one_node=one_node)
            yield layers, members


def _enumerate_schedules(
    groups: tuple[PipelineGroup, ...], micro_batches: int, layers: int, limits: PlanLimits
) -> Iterator[tuple[Schedule, tuple[int, ...]]]:
    """Yield 1F1B with free cuts, and interleaved 1F1B as Megatron runs it.

    Megatron needs micro-batches in whole rounds, and even chunks, among whose layers embedding and head may count.
    """
    devices = sum(member.devices for member in groups)
    if devices == 1 or limits.allows(PlanDimension.ONE_F_ONE_B):
        yield Schedule(), ()
    if devices > 1 and _needs_gpipe(groups, limits):
        yield Schedule(ScheduleName.GPIPE), ()
    chunks_max = limits.compute_degree_max(PlanDimension.INTERLEAVE, layers)
    supported = all(member.group.hardware.supports(Dimension.INTERLEAVE) for member in groups)
    if len(groups) > 1 or devices == 1 or not supported or micro_batches % devices:
        return
    is_even = limits.has_equal_stages or limits.has_equal_chunks
    for embedding, head in _COUNTED_ENDS[:1] if is_even else _COUNTED_ENDS:
        counted = layers + embedding + head
        for chunks in list_divisors(counted // devices) if counted % devices == 0 else ():
            length = counted // (devices * chunks)
            if 1 < chunks <= chunks_max and length > max(embedding, head):
                inner = range(length - embedding, layers, length)
                yield Schedule(ScheduleName.INTERLEAVED, chunks), (0, *inner, layers)


def _needs_gpipe(groups: tuple[PipelineGroup, ...], limits: PlanLimits) -> bool:
    """Return whether GPipe is possible where limits may forbid 1F1B."""
    supported = all(member.group.hardware.supports(Dimension.GPIPE) for member in groups)
    return supported and limits.may_forbid(PlanDimension.ONE_F_ONE_B) and limits.allows(PlanDimension.GPIPE)


def _restrict_groups(
    layers: LayerChain, groups: tuple[PipelineGroup, ...], config: PipelineConfig, limits: PlanLimits, useful_s: float
) -> Iterator[tuple[tuple[PipelineGroup, ...], Hashable]]:
    """Yield the groups with the strategies that one pipeline may use, and a key of this choice.

    Nothing is yielded if limits leave a group without a strategy.
    """
    if limits is NO_LIMITS:
        yield groups, None
        return
    restriction: Hashable = limits
    if sum(member.devices for member in groups) > 1:
        used = (PlanDimension.PIPELINE, SCHEDULES[config.schedule.name])
        if used in limits.exclusive:
            return
        groups, forbidden = _drop_exclusive_strategies(groups, used, limits)
        restriction = (restriction, used) if forbidden else restriction
    if not all(member.costed.costs.strategies for member in groups):
        return
    if not limits.is_uniform:
        yield groups, restriction
        return
    devices = sum(member.devices for member in groups)
    shared = list_shared_strategies(
        [member.costed for member in groups], layers.types, in_flight_max=config.micro_batches
    )
    for columns, layers_s in shared:
        if config.objective.compute_time_s(layers_s, layers_s / devices) < useful_s:
            yield _select_columns(groups, columns), (restriction, _to_key(columns))


def select_strategies(pipeline: Pipeline, columns: tuple[Ints, ...], oracle_cache: OracleCache) -> Pipeline:
    """Return the pipeline with only some of its strategies, given by their numbers in each group."""
    groups = _select_columns(pipeline.groups, columns)
    restriction = (pipeline.restriction, _to_key(columns))
    return _build_pipeline(pipeline.layers, groups, pipeline.config, oracle_cache, restriction)


def _select_columns(groups: tuple[PipelineGroup, ...], columns: tuple[Ints, ...]) -> tuple[PipelineGroup, ...]:
    return tuple(
        replace(member, costed=member.costed.select(numbers)) for member, numbers in zip(groups, columns, strict=True)
    )


def _to_key(columns: tuple[Ints, ...]) -> Hashable:
    return tuple(tuple(numbers.tolist()) for numbers in columns)


def _drop_exclusive_strategies(
    groups: tuple[PipelineGroup, ...], used: tuple[PlanDimension, ...], limits: PlanLimits
) -> tuple[tuple[PipelineGroup, ...], tuple[PlanDimension, ...]]:
    """Return the groups without strategies that may not be used in this pipeline, and the dimensions concerned."""
    forbidden = tuple(
        other for one, two in limits.exclusive for mine, other in ((one, two), (two, one)) if mine in used
    )
    for dimension in forbidden:
        groups = tuple(
            replace(member, costed=member.costed.select(np.flatnonzero(~member.costed.use(dimension))))
            for member in groups
        )
    return groups, forbidden


def _build_pipeline(
    layers: LayerChain,
    groups: tuple[PipelineGroup, ...],
    config: PipelineConfig,
    oracle_cache: OracleCache,
    restriction: Hashable,
) -> Pipeline:
    oracles = tuple(
        oracle_cache.get_oracle(
            layers,
            member.setting,
            member.costed,
            micro_batches=config.micro_batches,
            capacity_bytes=member.group.capacity_bytes,
            host_capacity_bytes=member.group.hardware.host_memory_bytes,
            restriction=restriction,
        )
        for member in groups
    )
    counts = tuple(member.devices for member in groups)
    in_flight = config.list_in_flight(sum(counts))
    outline = PipelineOutline(oracles, counts, in_flight, config.objective, has_fixed_cuts=bool(config.borders))
    search = PipelineSearch(outline, partial(_build_instance, layers, groups, config))
    return Pipeline(layers, groups, config, search, restriction)


def _build_instance(layers: LayerChain, groups: tuple[PipelineGroup, ...], config: PipelineConfig) -> Instance:
    schedule, micro_batches = config.schedule, config.micro_batches
    devices = sum(member.devices for member in groups)
    stage_groups = tuple(
        StageGroup(member.group.hardware, member.group.node_gpus, member.setting.gpus, member.devices)
        for member in groups
    )
    batch = groups[0].setting.global_batch // micro_batches
    return Instance(
        types=layers.types,
        costs=tuple(member.costed.costs for member in groups),
        counts=tuple(member.devices for member in groups),
        capacity_bytes=tuple(member.group.capacity_bytes for member in groups),
        in_flight=config.list_in_flight(devices),
        hand_over_s=compute_hand_over_table_s(layers, stage_groups, batch, interleave=schedule.interleave),
        micro_batches=micro_batches,
        interleave=schedule.interleave,
        borders=config.borders,
        stage_layers=config.stage_layers,
        host_capacity_bytes=_list_host_limits(groups),
    )


def _list_host_limits(groups: tuple[PipelineGroup, ...]) -> tuple[int, ...]:
    """Return the host memory per GPU of each group; nothing if no host sets a limit."""
    is_limited = any(member.costed.costs.host_bytes is not None for member in groups)
    return tuple(member.group.hardware.host_memory_bytes for member in groups) if is_limited else ()
