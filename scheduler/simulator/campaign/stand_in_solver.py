"""A fast stand-in for the solver in fault campaigns, which test what the scheduler does with plans and not the plans.

It splits the batch over all GPUs. So some GPU counts have no plan, and GPUs on several nodes are slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import replace
from typing import ParamSpec, TypeVar

from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.scaling_curve import CurveRequest, build_data_parallel_plan
from scheduler.solver.curve import CurvePoint
from scheduler.solver.profiles.gpu_throughput import list_throughputs
from scheduler.solver.request import Infeasibility

P = ParamSpec("P")
T = TypeVar("T")
_NODE_COST = 0.05
"""Share of the step time that each further node costs."""


class InlineExecutor(Executor):
    """Runs each call at once, in the thread of the caller."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future = Future[T]()
        future.set_result(fn(*args, **kwargs))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Do nothing: no call is left."""


def solve_stand_in(request: CurveRequest, shapes: Iterable[GpuShape]) -> Mapping[GpuShape, CurvePoint]:
    """Return a data-parallel plan for each shape whose GPUs divide the batch."""
    return {shape: _solve(request.global_batch, shape) for shape in shapes}


def _solve(global_batch: int, shape: GpuShape) -> CurvePoint:
    if global_batch % shape.gpus:
        return Infeasibility(f"a batch of {global_batch} cannot be split over {shape.gpus} GPUs", "batch")
    speeds, counts = list_throughputs(), dict[str, int]()
    for group in shape.groups:
        counts[group.gpu] = counts.get(group.gpu, 0) + group.gpus
    slowest = min(speeds[gpu] for gpu in counts)
    step_time_s = (1.0 + _NODE_COST * (shape.nodes - 1)) * speeds["a100-80g"] / (slowest * shape.gpus)
    stages = [build_data_parallel_plan(gpu, gpus).stages[0] for gpu, gpus in counts.items()]
    plan = build_data_parallel_plan(stages[0].gpu, stages[0].gpus)
    return replace(plan, stages=tuple(stages), iteration_time_s=step_time_s, samples_per_s=global_batch / step_time_s)
