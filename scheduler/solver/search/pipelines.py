"""The pipelines that a request allows: all stage widths, numbers of micro-batches and schedules, each with its search.

GPipe is left out: its iteration takes as long as that of 1F1B, and each device holds at least as many micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

from scheduler.domain.parallel_plan import Schedule, ScheduleName
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
from scheduler.solver.instance import Instance, Objective
from scheduler.solver.profiles.hardware_profile import Dimension
from scheduler.solver.request import DeviceGroup, SolveRequest
from scheduler.solver.search.pipeline_search import PipelineSearch, compute_balanced_bound_s
from scheduler.solver.search.stage_oracle import OracleCache


@dataclass(frozen=True, slots=True)
class PipelineGroup:
    """The devices that one group of GPUs provides to a pipeline."""

    group: DeviceGroup
    devices: int
    setting: StageSetting
    costed: CostedStrategies


@dataclass(frozen=True, slots=True)
class PipelineConfig:
    """The choices that are fixed before the search of a pipeline; `borders` are empty if the cuts are free."""

    schedule: Schedule
    micro_batches: int
    borders: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Pipeline:
    """One combination of stage widths, micro-batches and schedule, with the search for its best plan."""

    layers: LayerChain
    groups: tuple[PipelineGroup, ...]
    config: PipelineConfig
    search: PipelineSearch

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


def enumerate_pipelines(request: SolveRequest, oracle_cache: OracleCache) -> Iterator[Pipeline]:
    """Yield all pipelines in a fixed order; each uses all GPUs of the request."""
    for layers, widths in _enumerate_widths(request):
        settings = [group.build_stage_setting(width, request.global_batch) for group, width in widths]
        costed = [compute_stage_costs(layers, setting) for setting in settings]
        for micro_batches in sorted(set(costed[0]).intersection(*costed[1:])):
            groups = tuple(
                PipelineGroup(group, group.gpus // width, setting, costs[micro_batches])
                for (group, width), setting, costs in zip(widths, settings, costed, strict=True)
            )
            for schedule, borders in _enumerate_schedules(groups, micro_batches, len(layers)):
                yield _build_pipeline(layers, groups, PipelineConfig(schedule, micro_batches, borders), oracle_cache)


def _enumerate_widths(request: SolveRequest) -> Iterator[tuple[LayerChain, list[tuple[DeviceGroup, int]]]]:
    """Yield (layers, [(group, GPUs of one of its stages)]) for every pipeline with at most as many stages as layers."""
    groups = request.groups
    pipelined = all(group.hardware.supports(Dimension.PIPELINE) for group in groups)
    stages_max = request.model.layer_count if pipelined else 1
    for widths in product(*(list_divisors(group.gpus) for group in groups)):
        stages = sum(group.gpus // width for group, width in zip(groups, widths, strict=True))
        if stages <= stages_max:
            precision = groups[0].hardware.precision
            one_node = len(groups) == 1 and groups[0].gpus <= groups[0].node_gpus
            layers = build_layer_chain(request.model, precision, stages=stages, one_node=one_node)
            yield layers, list(zip(groups, widths, strict=True))


def _enumerate_schedules(
    groups: tuple[PipelineGroup, ...], micro_batches: int, layers: int
) -> Iterator[tuple[Schedule, tuple[int, ...]]]:
    """Yield 1F1B with free cuts, and interleaved 1F1B as Megatron runs it.

    Megatron needs even chunks, and micro-batches in whole rounds.
    """
    yield Schedule(), ()
    devices = sum(member.devices for member in groups)
    supported = all(member.group.hardware.supports(Dimension.INTERLEAVE) for member in groups)
    if len(groups) > 1 or devices == 1 or not supported or micro_batches % devices or layers % devices:
        return
    for chunks in list_divisors(layers // devices):
        if chunks > 1:
            length = layers // (devices * chunks)
            yield Schedule(ScheduleName.INTERLEAVED, chunks), tuple(range(0, layers + 1, length))


def _build_pipeline(
    layers: LayerChain, groups: tuple[PipelineGroup, ...], config: PipelineConfig, oracle_cache: OracleCache
) -> Pipeline:
    oracles = tuple(
        oracle_cache.get_oracle(
            layers,
            member.setting,
            member.costed,
            micro_batches=config.micro_batches,
            capacity_bytes=member.group.capacity_bytes,
        )
        for member in groups
    )
    objective = Objective(config.micro_batches, config.schedule.interleave)
    bound_s = compute_balanced_bound_s(oracles, [member.devices for member in groups], objective)
    return Pipeline(
        layers, groups, config, PipelineSearch(partial(_build_instance, layers, groups, config), oracles, bound_s)
    )


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
        in_flight=tuple(
            count_in_flight(schedule, micro_batches=micro_batches, devices=devices, position=position)
            for position in range(devices)
        ),
        hand_over_s=compute_hand_over_table_s(layers, stage_groups, batch, interleave=schedule.interleave),
        micro_batches=micro_batches,
        interleave=schedule.interleave,
        borders=config.borders,
    )
