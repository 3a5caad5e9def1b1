"""Points of a scaling curve: the shapes worth solving, and a job's fastest plan on each of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache, partial
from hashlib import sha256
from importlib.resources import files
from importlib.resources.abc import Traversable

from scheduler.domain.commands import CurveSolved
from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.learned_constants import LearnedConstants, list_factors
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.domain.scaling_curve import CurveRequest
from scheduler.solver.evaluate import evaluate_unchecked
from scheduler.solver.lengths.expected_step import plan_unlike_lengths
from scheduler.solver.profiles.catalog import find_profiles_folder, load_gpu, read_own_files
from scheduler.solver.profiles.hardware_profile import HardwareProfile
from scheduler.solver.profiles.job_model import load_job_model
from scheduler.solver.profiles.learned_hardware import adjust_profile
from scheduler.solver.profiles.model_profile import ModelProfile
from scheduler.solver.request import Infeasibility, RequestError, SolveRequest
from scheduler.solver.search.plan_search import search_plan
from scheduler.solver.search.simple_plan import find_simplest_plan
from scheduler.solver.search.stage_oracle import OracleCache

CURVE_TOLERANCE = 1e-3
"""Plans of a curve are proven optimal within 0.1%. That is precise enough for scheduling: the cost model is off by
several percent, and a resize costs more time than such a gain would save."""

CurvePoint = ParallelPlan | Infeasibility


def list_canonical_shapes(gpu: str, *, gpus_per_node: int, gpus_max: int) -> tuple[GpuShape, ...]:
    """Return every GPU count within one node, then whole nodes, up to `gpus_max` GPUs.

    Raises:
        RequestError: a count is below 1.
    """
    if gpus_per_node < 1 or gpus_max < 1:
        raise RequestError(f"gpus_per_node is {gpus_per_node} and gpus_max is {gpus_max}; both must be at least 1")
    inside = range(1, min(gpus_per_node, gpus_max) + 1)
    whole_nodes = range(2 * gpus_per_node, gpus_max + 1, gpus_per_node)
    return tuple(GpuShape.packed(gpu, gpus, gpus_per_node) for gpus in (*inside, *whole_nodes))


def solve_curve(request: CurveRequest, shapes: Iterable[GpuShape]) -> Mapping[GpuShape, CurvePoint]:
    """Return the fastest plan of one job on each shape, or the reason why there is none. Can run in a process pool.

    The shapes share costs, bounds and solved stages. A plan for fewer GPUs is no incumbent for a larger shape, because
    every plan uses all GPUs of its shape; ScalingCurve.better_part finds shapes on which GPUs are wasted. For that
    purpose, if a mixed shape is slower than one of its GPU models alone, the result also holds the point of that model.

    Raises:
        ValueError: a model or GPU is unknown, or a value of a profile is invalid. The message names it.
    """
    model, oracle_cache = load_job_model(request), OracleCache()
    points: dict[GpuShape, CurvePoint] = {}
    # Mixed shapes come last, so that the points which they prove for their parts win.
    for shape in sorted(shapes, key=lambda shape: len(_list_gpu_models(shape))):
        solve_request = _build_solve_request(request, model, shape)
        if request.lengths:
            points[shape] = plan_unlike_lengths(partial(load_job_model, request), solve_request, request.lengths)
        else:
            points |= _solve_points(solve_request, request.simplicity, oracle_cache)
    return {shape: _relate_to_profiles(request, model, shape, point) for shape, point in points.items()}


def solve_point(request: CurveRequest, shape: GpuShape) -> CurvePoint:
    """Return the point of one shape; raises as `solve_curve`."""
    return solve_curve(request, (shape,))[shape]


def build_solve_request(request: CurveRequest, shape: GpuShape) -> SolveRequest:
    """Return the request that a point of the curve answers; raises as `solve_curve`."""
    return _build_solve_request(request, load_job_model(request), shape)


def build_curve_solved(curve_key: str, shape: GpuShape, point: CurvePoint) -> CurveSolved:
    """Return the command that adds a point to the snapshot."""
    if isinstance(point, Infeasibility):
        return CurveSolved(curve_key, shape, None, point.reason)
    return CurveSolved(curve_key, shape, point)


@cache
def compute_solver_fingerprint() -> str:
    """Return a digest of what all points depend on apart from requests: the solver's code, and profiles in files.

    The code itself is hashed, so that no version number of the cost model has to be maintained. What was set for GPU
    models is not included: it has digests of its own (`FleetHardware.digests`).
    """
    digest, own_folder = sha256(), find_profiles_folder()
    sources = [*_iter_sources(files("scheduler.solver"), "")]
    if own_folder is not None:
        sources += read_own_files(own_folder)
    for name, content in sorted(sources):
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def _iter_sources(folder: Traversable, path: str) -> Iterable[tuple[str, bytes]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _iter_sources(entry, f"{path}{entry.name}/")
        elif entry.name.endswith((".py", ".json")):
            yield path + entry.name, entry.read_bytes()


def _build_solve_request(request: CurveRequest, model: ModelProfile, shape: GpuShape) -> SolveRequest:
    hardware = tuple(_load_corrected_gpu(request.constants, gpu, shape) for gpu in _list_gpu_models(shape))
    percent = request.memory_percent
    return SolveRequest(model, hardware, shape, request.global_batch, memory_percent=percent, limits=request.limits)


def _load_corrected_gpu(constants: LearnedConstants, gpu: str, shape: GpuShape) -> HardwareProfile:
    profile = load_gpu(gpu)
    if not any(name == gpu for name, _ in constants):
        return profile
    node_gpus = max(group.gpus_per_node for group in shape.groups if group.gpu == gpu)
    return adjust_profile(profile, list_factors(constants, gpu), node_gpus)


def _relate_to_profiles(request: CurveRequest, model: ModelProfile, shape: GpuShape, point: CurvePoint) -> CurvePoint:
    """Return a plan with its step time by the profiles alone, to which measured steps are compared."""
    if not request.constants or request.lengths or isinstance(point, Infeasibility):
        return point
    uncorrected = _build_solve_request(replace(request, constants=()), model, shape)
    judged = evaluate_unchecked(point, uncorrected)
    return replace(point, terms=judged.terms, profile_time_s=judged.iteration_time_s)


def _solve_points(request: SolveRequest, simplicity: float, oracle_cache: OracleCache) -> Mapping[GpuShape, CurvePoint]:
    """Return the points that one search proves. On a shape that is worth using in full, a simpler plan is preferred."""
    outcome = search_plan(request, tolerance=CURVE_TOLERANCE, oracle_cache=oracle_cache)
    if not outcome.remark:
        result = outcome.result
        if simplicity and isinstance(result, ParallelPlan):
            simplest = find_simplest_plan(request, result, ratio=simplicity, oracle_cache=oracle_cache).plan
            result = simplest if simplest.world_size == request.gpus else result
        return {request.shape: result}
    assert isinstance(outcome.result, ParallelPlan), "only a feasible plan can leave GPUs unused"
    part = request.restrict_to_gpus({stage.gpu for stage in outcome.result.stages}).shape
    return {part: outcome.result, request.shape: outcome.full_shape_plan or Infeasibility(outcome.remark, "shape")}


def _list_gpu_models(shape: GpuShape) -> tuple[str, ...]:
    return tuple(dict.fromkeys(group.gpu for group in shape.groups))
