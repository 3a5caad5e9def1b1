"""Explains in one sentence why there is no plan, with numbers and the smallest change that would help."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, replace
from functools import reduce
from itertools import permutations

import numpy as np

from scheduler.domain.gpu_sets import GpuGroup, GpuShape
from scheduler.domain.parallel_plan import LayerStrategy, ScheduleName
from scheduler.domain.plan_limits import NO_LIMITS, PlanLimits
from scheduler.solver.costs.layer_chain import build_layer_chain
from scheduler.solver.costs.pipeline_costs import count_in_flight
from scheduler.solver.costs.strategy_space import DegreeLimits, enumerate_degrees
from scheduler.solver.instance import Floats, Ints, StageCosts
from scheduler.solver.request import Infeasibility, SolveRequest
from scheduler.solver.search.pipelines import Pipeline, PipelineGroup, enumerate_pipelines
from scheduler.solver.search.stage_oracle import OracleCache

_GB = 1e9
_ROUNDING_BYTES = 10**8
"""The memory that would suffice is rounded up to this many bytes."""

_GPU_MULTIPLES = (2, 4, 8)
"""Multiples of the GPUs that are tried before no larger shape is proposed."""


def explain_infeasible_shape(request: SolveRequest, models_max: int) -> Infeasibility:
    """Explain that the shape holds more than `models_max` GPU models."""
    models = ", ".join(group.hardware.gpu for group in request.groups)
    reason = f"{request.shape} holds {len(request.groups)} GPU models ({models}); a plan can use {models_max}"
    return Infeasibility(reason, "shape")


def explain_infeasible_batch(request: SolveRequest) -> Infeasibility:
    """Explain that no number of stages and micro-batches leaves any strategy."""
    workers = "; ".join(
        f"{group.hardware.gpu}: {', '.join(sorted(dimension.value for dimension in group.hardware.dimensions))}"
        for group in request.groups
    )
    return Infeasibility(
        f"a global batch of {request.global_batch} cannot be split evenly over {request.gpus} GPUs ({request.shape}): "
        f"no data-parallel degree that divides a micro-batch is possible (strategies supported by {workers}); "
        f"a global batch of {_find_nearest_batch(request)} is possible",
        "batch",
    )


def explain_infeasible_memory(request: SolveRequest, candidates: Iterable[Pipeline]) -> Infeasibility:
    """Explain that nothing fits, with the leanest plan of one strategy per stage and its memory.

    Where that plan fits into the GPUs, it is the host that lacks memory for what the plan offloads.
    """
    listed = list(candidates)
    need = _find_leanest_plan(listed)
    if need.excess_bytes <= 0:
        return _explain_infeasible_host(request, listed)
    group = need.pipeline.groups[need.group_index].group
    hardware, limit_bytes = group.hardware, group.limit_bytes
    needed_gb = _round_up_gb(hardware.occupied_bytes(int(need.excess_bytes) + group.capacity_bytes))
    more = _find_sufficient_shape(request)
    change = f"it would fit in {needed_gb:.1f} GB per GPU{f', or on {more}' if more else ''}"
    return Infeasibility(
        f"needs {needed_gb:.1f} GB of {limit_bytes / _GB:.1f} GB per GPU of {hardware.gpu} at "
        f"{_describe_plan(need, request)}, the leanest plan with one strategy per stage; {change}",
        "memory",
    )


def _explain_infeasible_host(request: SolveRequest, candidates: Iterable[Pipeline]) -> Infeasibility:
    """Explain that hosts lack memory, with the one-strategy plan that fits into the GPUs and offloads least."""
    need = min(
        (_find_fullest_stage(pipeline, teams, _tabulate_host_bytes) for pipeline, teams in _list_orders(candidates)),
        key=lambda need: need.excess_bytes,
    )
    hardware = need.pipeline.groups[need.group_index].group.hardware
    needed_gb = _round_up_gb(need.excess_bytes + hardware.host_memory_bytes)
    return Infeasibility(
        f"needs {needed_gb:.1f} GB of {hardware.host_memory_bytes / _GB:.1f} GB of host memory per GPU of "
        f"{hardware.gpu} at {_describe_plan(need, request)}, the plan with one strategy per stage that offloads least; "
        f"it would fit with {needed_gb:.1f} GB of host memory per GPU",
        "memory",
    )


def _round_up_gb(size_bytes: float) -> float:
    return -(-size_bytes // _ROUNDING_BYTES) * _ROUNDING_BYTES / _GB


def _describe_plan(need: _StageNeed, request: SolveRequest) -> str:
    strategy, micro_batches = need.strategy, need.pipeline.config.micro_batches
    sharding = f", zero={strategy.zero} over {strategy.shard_group}" if strategy.zero else ""
    streamed = ", offload_parameters" if strategy.offload_parameters else ""
    streamed += ", offload_activations" if strategy.offload_activations else ""
    return (
        f"tp={strategy.tp}, pp={need.pipeline.devices}, recompute={strategy.recompute.value}{sharding}{streamed}, "
        f"{micro_batches} micro-batches of {request.global_batch // micro_batches}"
    )


def explain_infeasible_limits(
    request: SolveRequest, infeasible: Infeasibility, is_feasible: Callable[[SolveRequest], bool]
) -> Infeasibility:
    """Explain that the request's limits leave no plan, with the smallest change of the limits that helps.

    Args:
        infeasible: the reason without regard to the limits; returned if lifting all of them would not help.
        is_feasible: returns whether a request has a plan.
    """
    single = list(request.limits.list_single_limits())
    lifted = next(
        (number for number in range(len(single)) if is_feasible(_lift_limits(request, single, {number}))), None
    )
    numbers = {lifted} if lifted is not None else set(range(len(single)))
    if lifted is None and not is_feasible(replace(request, limits=NO_LIMITS)):
        return infeasible
    for number in sorted(numbers) if lifted is None else ():
        if is_feasible(_lift_limits(request, single, numbers - {number})):
            numbers -= {number}
    changes = " and ".join(single[number][0] for number in sorted(numbers))
    needs = "no number of stages and micro-batches is possible"
    if infeasible.constraint == "memory":
        needs = infeasible.reason.rpartition("; ")[0]
    return Infeasibility(f"within the limits, {needs}; {changes}", "limits")


def _lift_limits(request: SolveRequest, single: Sequence[tuple[str, PlanLimits]], lifted: Set[int]) -> SolveRequest:
    """Return the request with all single limits but the lifted ones."""
    kept = [limits for number, (_, limits) in enumerate(single) if number not in lifted]
    return replace(request, limits=reduce(PlanLimits.combine, kept, NO_LIMITS))


@dataclass(frozen=True, slots=True)
class _StageNeed:
    """The stage that exceeds a capacity by most, with its strategy; by infinitely many bytes if nothing else fits."""

    excess_bytes: float
    strategy: LayerStrategy
    group_index: int
    pipeline: Pipeline


def _find_leanest_plan(candidates: Iterable[Pipeline]) -> _StageNeed:
    """Return the smallest memory need over all pipelines.

    Pipelines are tried in order of a lower bound, until the bound reaches the smallest need found.
    """
    bounded = [
        (_compute_excess_bound(pipeline), number, pipeline, teams)
        for number, (pipeline, teams) in enumerate(_list_orders(candidates))
    ]
    best: _StageNeed | None = None
    for bound, _, pipeline, teams in sorted(bounded, key=lambda entry: entry[:2]):
        if best is not None and bound >= best.excess_bytes:
            break
        need = _find_fullest_stage(pipeline, teams, _tabulate_excess_bytes)
        best = need if best is None or need.excess_bytes < best.excess_bytes else best
    assert best is not None, "at least one pipeline exists"
    return best


def _list_orders(candidates: Iterable[Pipeline]) -> list[tuple[Pipeline, tuple[int, ...]]]:
    """Return the pipelines with each order of their groups.

    An interleaved pipeline holds at least as much as 1F1B, so it counts only if limits leave nothing else.
    """
    listed = list(candidates)
    plain = [pipeline for pipeline in listed if pipeline.config.schedule.name is not ScheduleName.INTERLEAVED]
    return [(pipeline, teams) for pipeline in plain or listed for teams in permutations(range(len(pipeline.groups)))]


def _compute_excess_bound(pipeline: Pipeline) -> float:
    """Return a lower bound of the excess: no stage can need less than the mean of all layers at their leanest."""
    types = pipeline.layers.types
    least = min(
        int(pipeline_group.costed.costs.compute_memory_bytes(1).min(axis=1)[types].sum()) // pipeline.devices
        for pipeline_group in pipeline.groups
    )
    return least - max(pipeline_group.group.capacity_bytes for pipeline_group in pipeline.groups)


_Tabulate = Callable[[PipelineGroup, Ints, float], Floats]
"""Returns [S, L+1, L+1]: by how many bytes layers a to b-1 exceed a capacity under each of the lean strategies."""


def _find_fullest_stage(pipeline: Pipeline, order: Sequence[int], tabulate: _Tabulate) -> _StageNeed:
    """Return the fullest stage of the partition that exceeds capacities the least.

    Each stage has its leanest strategy.
    """
    types = pipeline.layers.types
    places = [number for number in order for _ in range(pipeline.groups[number].devices)]
    tables, reach = [], np.array([-np.inf])
    for position, number in enumerate(places):
        pipeline_group = pipeline.groups[number]
        held = count_in_flight(
            pipeline.config.schedule,
            micro_batches=pipeline.config.micro_batches,
            devices=pipeline.devices,
            position=position,
        )
        excess = tabulate(pipeline_group, types, held)
        tables.append(excess)
        least = excess.min(axis=0)
        reach = least[0] if position == 0 else np.maximum(reach[:, None], least).min(axis=0)
    peak = float(reach[-1])
    position = next(place for place, excess in enumerate(tables) if (excess == peak).any())
    pipeline_group = pipeline.groups[places[position]]
    strategy = _find_lean_strategies(pipeline_group.costed.costs)[int(np.argwhere(tables[position] == peak)[0][0])]
    return _StageNeed(peak, pipeline_group.costed.build_strategy(int(strategy)), places[position], pipeline)


def _tabulate_excess_bytes(member: PipelineGroup, types: Ints, held: float) -> Floats:
    return _compute_stage_bytes(member.costed.costs, types, held) - member.group.capacity_bytes


def _tabulate_host_bytes(member: PipelineGroup, types: Ints, held: float) -> Floats:
    """Return the same for the host; infinite where the GPU's own memory does not suffice."""
    costs = member.costed.costs.select_strategies(_find_lean_strategies(member.costed.costs))
    on_host = costs.compute_host_bytes(held)
    on_host = np.zeros_like(costs.state_bytes) if on_host is None else on_host
    needs = _sum_spans(on_host, types) - member.group.hardware.host_memory_bytes
    return np.where(_tabulate_excess_bytes(member, types, held) <= 0, needs, np.inf)


def _sum_spans(sizes: Ints, types: Ints) -> Floats:
    """Return [S, L+1, L+1]: the sums of sizes [T, S] over the layers a to b-1."""
    rows = sizes[types].T.astype(np.float64)
    sums = np.concatenate([np.zeros((len(rows), 1)), np.cumsum(rows, axis=1)], axis=1)
    return np.asarray(sums[:, None, :] - sums[:, :, None])


def _find_lean_strategies(costs: StageCosts) -> Ints:
    """Return the strategies that no other strategy undercuts in state, activation, buffer and host bytes."""
    host = [each for each in (costs.host_bytes, costs.host_kept_bytes) if each is not None]
    columns = np.concatenate([costs.state_bytes, costs.kept_bytes, costs.working_bytes[None], *host])
    first = np.unique(columns, axis=1, return_index=True)[1]
    distinct = columns[:, first]
    undercut = np.asarray((distinct[:, :, None] <= distinct[:, None, :]).all(axis=0))
    np.fill_diagonal(undercut, False)
    return np.sort(first[~undercut.any(axis=0)])


def _compute_stage_bytes(costs: StageCosts, types: Ints, held: float) -> Floats:
    """Return [S, L+1, L+1]: memory of layers a to b-1 under one of the lean strategies.

    The memory is infinite if there is no layer.
    """
    lean = costs.select_strategies(_find_lean_strategies(costs))
    needs: Floats = _sum_spans(lean.compute_memory_bytes(held), types) + lean.working_bytes[:, None, None]
    needs[:, np.tril(np.ones(needs.shape[1:], dtype=bool))] = np.inf
    return needs


def _find_sufficient_shape(request: SolveRequest) -> str:
    """Return the smallest multiple of the shape on which a plan with one strategy per stage fits.

    The result is empty if none does.
    """
    if len(request.groups) > 1:
        return ""
    for times in _GPU_MULTIPLES:
        groups = tuple(GpuGroup(group.gpu, group.nodes * times, group.gpus_per_node) for group in request.shape.groups)
        larger = replace(request, shape=GpuShape(groups))
        pipelines = list(enumerate_pipelines(larger, OracleCache()))
        if pipelines and _find_leanest_plan(pipelines).excess_bytes <= 0:
            return str(larger.shape)
    return ""


def _find_nearest_batch(request: SolveRequest) -> int:
    """Return the nearest batch that can be split. A multiple of the GPUs always can, by data parallelism alone."""
    for step in range(1, request.gpus):
        for batch in (request.global_batch - step, request.global_batch + step):
            if batch > 0 and (batch % request.gpus == 0 or _has_single_stage_strategy(request, batch)):
                return batch
    return request.global_batch + request.gpus


def _has_single_stage_strategy(request: SolveRequest, batch: int) -> bool:
    """Return whether one stage of all GPUs has a strategy at this batch; longer pipelines are not tried."""
    group = request.groups[0]
    limits = DegreeLimits.from_layers(build_layer_chain(request.model, group.hardware.precision, stages=1))
    found = enumerate_degrees(
        limits, group.hardware.dimensions, group.node_gpus, group.gpus, batch, plan_limits=request.limits
    )
    return len(request.groups) == 1 and len(found.tp) > 0
