"""Points of a ScalingCurve: the shapes worth solving, and the plan of one shape."""

from __future__ import annotations

from scheduler.domain.gpu_shape import GpuShape
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.domain.scaling_curve import CurveRequest
from scheduler.solver.profiles.model_profile import ModelProfile
from scheduler.solver.profiles.shipped import load_gpu, load_model, parse_model
from scheduler.solver.request import Infeasible, RequestError, SolveRequest
from scheduler.solver.search.search import solve


def canonical_shapes(gpu: str, *, gpus_per_node: int, gpus_max: int) -> tuple[GpuShape, ...]:
    """Every count inside one node, then whole nodes, up to `gpus_max` GPUs.

    Raises:
        RequestError: a count is below 1.
    """
    if gpus_per_node < 1 or gpus_max < 1:
        raise RequestError(f"gpus_per_node is {gpus_per_node} and gpus_max is {gpus_max}; both must be at least 1")
    inside = range(1, min(gpus_per_node, gpus_max) + 1)
    whole_nodes = range(2 * gpus_per_node, gpus_max + 1, gpus_per_node)
    return tuple(GpuShape.packed(gpu, gpus, gpus_per_node) for gpus in (*inside, *whole_nodes))


def solve_point(request: CurveRequest, shape: GpuShape) -> ParallelPlan | Infeasible:
    """The fastest plan of one job on one shape, within the memory of the GPU; fit for a process pool.

    Raises:
        ValueError: the model, a GPU or a figure of a profile is unknown or cannot be; the message names it.
    """
    return solve(
        SolveRequest(
            model=_model(request),
            hardware=load_gpu(shape.groups[0].gpu),
            shape=shape,
            global_batch=request.global_batch,
        )
    )


def _model(request: CurveRequest) -> ModelProfile:
    if request.profile_json:
        return parse_model(request.profile_json, request.sequence_length)
    return load_model(request.model, request.sequence_length)
