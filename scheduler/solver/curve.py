"""Points of a ScalingCurve: the shapes worth solving, and the plans of a job on them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from hashlib import sha256
from importlib.resources import files
from importlib.resources.abc import Traversable

from scheduler.domain.commands import CurveSolved
from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.domain.scaling_curve import CurveRequest
from scheduler.solver.profiles.catalog import load_gpu, load_model, parse_model
from scheduler.solver.profiles.model_profile import ModelProfile
from scheduler.solver.request import Infeasibility, RequestError, SolveRequest
from scheduler.solver.search.plan_search import search_plan
from scheduler.solver.search.stage_oracle import OracleCache

CURVE_TOLERANCE = 1e-3
"""Plans of a curve are proven within 0.1%. That is enough to schedule by: the cost model is off by percents, and a
resize costs seconds of a step that would gain less."""

CurvePoint = ParallelPlan | Infeasibility


def list_canonical_shapes(gpu: str, *, gpus_per_node: int, gpus_max: int) -> tuple[GpuShape, ...]:
    """Every count inside one node, then whole nodes, up to `gpus_max` GPUs.

    Raises:
        RequestError: a count is below 1.
    """
    if gpus_per_node < 1 or gpus_max < 1:
        raise RequestError(f"gpus_per_node is {gpus_per_node} and gpus_max is {gpus_max}; both must be at least 1")
    inside = range(1, min(gpus_per_node, gpus_max) + 1)
    whole_nodes = range(2 * gpus_per_node, gpus_max + 1, gpus_per_node)
    return tuple(GpuShape.packed(gpu, gpus, gpus_per_node) for gpus in (*inside, *whole_nodes))


def solve_curve(request: CurveRequest, shapes: Iterable[GpuShape]) -> Mapping[GpuShape, CurvePoint]:
    """The fastest plan of one job on each shape that uses all its GPUs, or why there is none.

    The shapes share costs, bounds and solved stages. No incumbent carries over from one to another, because a plan
    for fewer GPUs is none for more: that some GPUs are wasted is seen from the points (ScalingCurve.better_part).
    To that end a mixed shape that is slower than one of its GPU models alone brings the point of that model along.

    Fit for a process pool.

    Raises:
        ValueError: the model, a GPU or a figure of a profile is unknown or cannot be; the message names it.
    """
    model, bench = _load_model(request), OracleCache()
    points: dict[GpuShape, CurvePoint] = {}
    for shape in sorted(
        shapes, key=lambda shape: len(_list_gpu_models(shape))
    ):  # mixed ones last: their parts are proven best
        points |= _solve_points(_build_solve_request(request, model, shape), bench)
    return points


def solve_point(request: CurveRequest, shape: GpuShape) -> CurvePoint:
    """The point of one shape; raises as `solve_curve`."""
    return solve_curve(request, (shape,))[shape]


def build_solve_request(request: CurveRequest, shape: GpuShape) -> SolveRequest:
    """What a point of the curve answers; raises as `solve_curve`."""
    return _build_solve_request(request, _load_model(request), shape)


def build_curve_solved(curve_key: str, shape: GpuShape, point: CurvePoint) -> CurveSolved:
    """A point as the command that puts it into the snapshot."""
    if isinstance(point, Infeasibility):
        return CurveSolved(curve_key, shape, None, point.reason)
    return CurveSolved(curve_key, shape, point)


@cache
def compute_solver_fingerprint() -> str:
    """Digest of all that a point depends on beside its request: the solver's code and the profiles that it ships.

    The code itself is read, so that nobody has to remember to count up a version of the cost model.
    """
    digest = sha256()
    for name, content in sorted(_iter_sources(files("scheduler.solver"), "")):
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def _iter_sources(folder: Traversable, path: str) -> Iterable[tuple[str, bytes]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _iter_sources(entry, f"{path}{entry.name}/")
        elif entry.name.endswith((".py", ".json")):
            yield path + entry.name, entry.read_bytes()


def _build_solve_request(request: CurveRequest, model: ModelProfile, shape: GpuShape) -> SolveRequest:
    hardware, percent = tuple(map(load_gpu, _list_gpu_models(shape))), request.memory_percent
    return SolveRequest(model, hardware, shape, request.global_batch, memory_percent=percent)


def _solve_points(request: SolveRequest, oracle_cache: OracleCache) -> Mapping[GpuShape, CurvePoint]:
    outcome = search_plan(request, tolerance=CURVE_TOLERANCE, oracle_cache=oracle_cache)
    if not outcome.remark:
        return {request.shape: outcome.result}
    assert isinstance(outcome.result, ParallelPlan), "only a plan leaves GPUs out"
    part = request.restrict_to_gpu(outcome.result.stages[0].gpu).shape
    return {part: outcome.result, request.shape: outcome.full_shape_plan or Infeasibility(outcome.remark, "shape")}


def _list_gpu_models(shape: GpuShape) -> tuple[str, ...]:
    return tuple(dict.fromkeys(group.gpu for group in shape.groups))


def _load_model(request: CurveRequest) -> ModelProfile:
    length = request.sequence_length
    model = parse_model(request.profile_json, length) if request.profile_json else load_model(request.model, length)
    return model.with_frozen_layers(request.frozen_layers)
