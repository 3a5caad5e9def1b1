"""Looks for plans on fewer GPUs than are offered, where all of them cannot be used or are no faster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf

from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.solver.inspection import inspect_plan
from scheduler.solver.request import Infeasibility, SolveRequest
from scheduler.solver.search.plan_search import SearchOutcome, search_plan
from scheduler.solver.search.stage_oracle import OracleCache

_SHAPES_MAX = 16
"""Smaller shapes that are tried before a batch is taken for indivisible."""


def search_offered_gpus(
    request: SolveRequest, *, tolerance: float = 0.0, runners_up: int = 0, oracle_cache: OracleCache | None = None
) -> tuple[SearchOutcome, SolveRequest]:
    """Return the outcome of `search_plan`, or that of fewer GPUs, with the request for the GPUs that its plan uses.

    Fewer GPUs are taken if the batch cannot be split over all of them, or if a plan on fewer is faster. The outcome's
    `remark` then says so, and `full_shape_plan` is the plan for all. Shapes of several GPU models are not reduced,
    apart from what `search_plan` does. Runners-up are searched on the GPUs that the plan uses.
    """
    oracle_cache = oracle_cache or OracleCache()

    def search(shape: GpuShape) -> SearchOutcome:
        return search_plan(replace(request, shape=shape), tolerance=tolerance, oracle_cache=oracle_cache)

    best, used = _search_fewer_gpus(search, request)
    if runners_up and isinstance(best.result, ParallelPlan):
        others = search_plan(used, tolerance=tolerance, runners_up=runners_up, oracle_cache=oracle_cache)
        best = replace(best, runners_up=others.runners_up)
    return best, used


def _search_fewer_gpus(
    search: Callable[[GpuShape], SearchOutcome], request: SolveRequest
) -> tuple[SearchOutcome, SolveRequest]:
    offered = search(request.shape)
    best, shape = offered, request.shape
    if len(request.groups) > 1 or (isinstance(best.result, Infeasibility) and best.result.constraint != "batch"):
        return offered, request
    if isinstance(best.result, Infeasibility):
        best, shape = _search_next_smaller(search, offered, request.shape)
    for smaller in _list_promising_shapes(request):
        if not _could_be_faster(smaller, best.result, replace(request, shape=shape)):
            continue
        found = search(smaller)
        if _get_step_s(found) < _get_step_s(best):
            best, shape = found, smaller
    if shape == request.shape:
        return offered, request
    used = replace(request, shape=shape)
    return _add_remark(best, used, offered, request), used


def _search_next_smaller(
    search: Callable[[GpuShape], SearchOutcome], offered: SearchOutcome, shape: GpuShape
) -> tuple[SearchOutcome, GpuShape]:
    """Return the plan on the most GPUs that has one, or `offered` if there is none on the shapes tried."""
    for smaller in _list_next_smaller(shape):
        found = search(smaller)
        if isinstance(found.result, ParallelPlan):
            return found, smaller
    return offered, shape


def _could_be_faster(shape: GpuShape, plan: ParallelPlan | Infeasibility, used: SolveRequest) -> bool:
    """Return whether fewer GPUs would be faster than the plan is on the used ones, if they ran at full efficiency."""
    if isinstance(plan, Infeasibility) or shape.gpus >= used.gpus:
        return False
    needed = inspect_plan(plan, used).model_flops_utilization * used.gpus / shape.gpus
    return needed < max(profile.efficiency for profile in used.hardware)


def _get_step_s(outcome: SearchOutcome) -> float:
    return outcome.result.iteration_time_s if isinstance(outcome.result, ParallelPlan) else inf


def _list_next_smaller(shape: GpuShape) -> Iterator[GpuShape]:
    """Yield whole nodes of a shape, one node fewer each time; then fewer GPUs of one node."""
    per_node = max(group.gpus_per_node for group in shape.groups)
    whole = [nodes * per_node for nodes in range(shape.gpus // per_node, 0, -1) if nodes * per_node < shape.gpus]
    for gpus in [*whole, *range(min(per_node, shape.gpus) - 1, 0, -1)][:_SHAPES_MAX]:
        yield GpuShape.packed(shape.groups[0].gpu, gpus, per_node)


def _list_promising_shapes(request: SolveRequest) -> Iterator[GpuShape]:
    """Yield equal nodes, the most GPUs that divide the batch, and half of all GPUs, a quarter and so on."""
    shape, per_node = request.shape, max(group.gpus_per_node for group in request.shape.groups)
    counts = [gpus for gpus in range(shape.gpus - 1, 0, -1) if gpus < per_node or gpus % per_node == 0]
    dividing = [gpus for gpus in counts if request.global_batch % gpus == 0][:1]
    halves = [shape.gpus >> times for times in range(1, shape.gpus.bit_length())]
    whole = [gpus if gpus < per_node else gpus // per_node * per_node for gpus in (shape.gpus, *dividing, *halves)]
    for gpus in sorted(set(whole) - {shape.gpus}, reverse=True):
        yield GpuShape.packed(shape.groups[0].gpu, gpus, per_node)


def _add_remark(
    best: SearchOutcome, used: SolveRequest, offered: SearchOutcome, request: SolveRequest
) -> SearchOutcome:
    assert isinstance(best.result, ParallelPlan), "a remark belongs to a plan"
    whole = offered.result if isinstance(offered.result, ParallelPlan) else None
    others = (
        f"the best plan found for all of {request.shape} takes {whole.iteration_time_s:.4g} s"
        if whole
        else f"a global batch of {request.global_batch} cannot be split evenly over all of {request.shape}"
    )
    remark = f"{used.shape} alone takes {best.result.iteration_time_s:.4g} s per step; {others}"
    return replace(best, remark=remark, full_shape_plan=whole)
