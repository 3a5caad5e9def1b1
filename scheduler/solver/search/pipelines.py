"""The pipelines that a request allows: every choice of stage widths, micro-batches and schedule, as searches to run.

GPipe never appears: its iteration takes as long as that of 1F1B, and each device holds at least as many micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

from scheduler.domain.parallel_plan import Schedule, ScheduleName
from scheduler.solver.costs.chain import Chain, chain
from scheduler.solver.costs.divisors import divisors
from scheduler.solver.costs.hand_over import StageGroup, hand_over_times_s
from scheduler.solver.costs.schedules import in_flight
from scheduler.solver.costs.setting import Setting
from scheduler.solver.costs.stage_costs import CostedStrategies, stage_costs
from scheduler.solver.instance import Instance, Objective
from scheduler.solver.profiles.hardware_profile import Dimension
from scheduler.solver.request import DeviceGroup, SolveRequest
from scheduler.solver.search.pair_search import PairSearch, even_bound_s
from scheduler.solver.search.workbench import Workbench


@dataclass(frozen=True, slots=True)
class Team:
    """The devices that one group of GPUs gives to a pipeline."""

    group: DeviceGroup
    devices: int
    setting: Setting
    costed: CostedStrategies


@dataclass(frozen=True, slots=True)
class Frame:
    """What is settled before the search of a pipeline begins; `borders` are empty where the cuts are free."""

    schedule: Schedule
    micro_batches: int
    borders: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Pipeline:
    """One pair of pipeline and micro-batches, with the search for its best plan."""

    layers: Chain
    teams: tuple[Team, ...]
    frame: Frame
    search: PairSearch

    @property
    def devices(self) -> int:
        return sum(team.devices for team in self.teams)

    @property
    def widths(self) -> tuple[int, ...]:
        """GPUs of a stage, by group."""
        return tuple(team.setting.gpus for team in self.teams)

    @property
    def candidates(self) -> int:
        """Strategies of a layer that the search may choose from."""
        return sum(team.costed.costs.strategies for team in self.teams)


def pipelines(request: SolveRequest, bench: Workbench) -> Iterator[Pipeline]:
    """All of them, in a fixed order; every one uses all GPUs of the request."""
    for layers, widths in _widths(request):
        settings = [group.setting(width, request.global_batch) for group, width in widths]
        costed = [stage_costs(layers, setting) for setting in settings]
        for micro_batches in sorted(set(costed[0]).intersection(*costed[1:])):
            teams = tuple(
                Team(group, group.gpus // width, setting, costs[micro_batches])
                for (group, width), setting, costs in zip(widths, settings, costed, strict=True)
            )
            for schedule, borders in _schedules(teams, micro_batches, len(layers)):
                yield _pipeline(layers, teams, Frame(schedule, micro_batches, borders), bench)


def _widths(request: SolveRequest) -> Iterator[tuple[Chain, list[tuple[DeviceGroup, int]]]]:
    """(layers, [(group, GPUs of one of its stages)]) of every pipeline that is not longer than the model."""
    groups = request.groups
    pipelined = all(group.hardware.supports(Dimension.PIPELINE) for group in groups)
    stages_max = request.model.layer_count if pipelined else 1
    for widths in product(*(divisors(group.gpus) for group in groups)):
        stages = sum(group.gpus // width for group, width in zip(groups, widths, strict=True))
        if stages <= stages_max:
            precision = groups[0].hardware.precision
            one_node = len(groups) == 1 and groups[0].gpus <= groups[0].node_gpus
            layers = chain(request.model, precision, stages=stages, one_node=one_node)
            yield layers, list(zip(groups, widths, strict=True))


def _schedules(teams: tuple[Team, ...], micro_batches: int, layers: int) -> Iterator[tuple[Schedule, tuple[int, ...]]]:
    """1F1B with free cuts; interleaved 1F1B as Megatron runs it: even chunks, micro-batches in whole rounds."""
    yield Schedule(), ()
    devices = sum(team.devices for team in teams)
    supported = all(team.group.hardware.supports(Dimension.INTERLEAVE) for team in teams)
    if len(teams) > 1 or devices == 1 or not supported or micro_batches % devices or layers % devices:
        return
    for chunks in divisors(layers // devices):
        if chunks > 1:
            length = layers // (devices * chunks)
            yield Schedule(ScheduleName.INTERLEAVED, chunks), tuple(range(0, layers + 1, length))


def _pipeline(layers: Chain, teams: tuple[Team, ...], frame: Frame, bench: Workbench) -> Pipeline:
    oracles = tuple(
        bench.oracle(
            layers,
            team.setting,
            team.costed,
            micro_batches=frame.micro_batches,
            capacity_bytes=team.group.capacity_bytes,
        )
        for team in teams
    )
    objective = Objective(frame.micro_batches, frame.schedule.interleave)
    bound_s = even_bound_s(oracles, [team.devices for team in teams], objective)
    return Pipeline(layers, teams, frame, PairSearch(partial(_instance, layers, teams, frame), oracles, bound_s))


def _instance(layers: Chain, teams: tuple[Team, ...], frame: Frame) -> Instance:
    schedule, micro_batches = frame.schedule, frame.micro_batches
    devices = sum(team.devices for team in teams)
    stage_groups = tuple(
        StageGroup(team.group.hardware, team.group.node_gpus, team.setting.gpus, team.devices) for team in teams
    )
    batch = teams[0].setting.global_batch // micro_batches
    return Instance(
        types=layers.types,
        costs=tuple(team.costed.costs for team in teams),
        counts=tuple(team.devices for team in teams),
        capacity_bytes=tuple(team.group.capacity_bytes for team in teams),
        in_flight=tuple(
            in_flight(schedule, micro_batches=micro_batches, devices=devices, position=position)
            for position in range(devices)
        ),
        hand_over_s=hand_over_times_s(layers, stage_groups, batch, interleave=schedule.interleave),
        micro_batches=micro_batches,
        interleave=schedule.interleave,
        borders=frame.borders,
    )
