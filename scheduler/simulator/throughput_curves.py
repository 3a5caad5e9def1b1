"""Scaling curves of a simulation: measured step times, and the solver for models that were not measured.

A measured curve has plans for the GPUs on which it was measured, and a reason for each shape without a plan.
Measurements contain only the degrees of a plan: it gets one layer, one micro-batch and no memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Protocol

from scheduler.documents.throughput import (
    ExecPlan,
    MeasuredSteps,
    Placement,
    StepByGpuCount,
    StepByLocalBatch,
    StepByPlacement,
)
from scheduler.domain.commands import CurveSolved
from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.job_spec import JobSpec
from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan, Recompute, Schedule, Stage
from scheduler.domain.scaling_curve import CurveRequest
from scheduler.domain.tick_report import WantedShape
from scheduler.solver.curve import build_curve_solved, solve_point

PlanOrReason = ParallelPlan | str
"""A plan, or the reason why there is no measurement."""


class MeasuredCurves(Protocol):
    """Curves from one kind of measurement."""

    @property
    def gpus(self) -> frozenset[str]:
        """The measured GPU models."""

    def covers(self, model: str, global_batch: int) -> bool:
        """Tell whether the model was measured at this batch size."""

    def get_point(self, model: str, global_batch: int, shape: GpuShape) -> PlanOrReason:
        """Return the fastest plan on a shape, for a model that `covers` accepts."""


def build_measured_curves(
    profiles: Iterable[Iterable[StepByGpuCount | StepByPlacement | StepByLocalBatch]],
) -> tuple[MeasuredCurves, ...]:
    """Return the curves of profiles read by `read_profile`."""
    steps = [step for profile in profiles for step in profile]
    counted = [step for step in steps if isinstance(step, StepByGpuCount)]
    placed = [step for step in steps if isinstance(step, StepByPlacement)]
    shared = [step for step in steps if isinstance(step, StepByLocalBatch)]
    curves: list[MeasuredCurves] = [PlacedCurves(placed), CountedCurves(counted), SharedCurves(shared)]
    return tuple(known for known in curves if known.gpus)


class CountedCurves:
    """Curves measured by GPU count. All shapes of a count are equally fast, and other counts have no plan."""

    def __init__(self, steps: Iterable[StepByGpuCount]) -> None:
        self._step_times_s: defaultdict[tuple[str, int], dict[tuple[str, int], float]] = defaultdict(dict)
        for step in steps:
            self._step_times_s[step.model, step.global_batch][step.gpu, step.gpus] = step.step_time_s

    @property
    def gpus(self) -> frozenset[str]:
        return frozenset(gpu for measured in self._step_times_s.values() for gpu, _ in measured)

    def covers(self, model: str, global_batch: int) -> bool:
        return (model, global_batch) in self._step_times_s

    def get_point(self, model: str, global_batch: int, shape: GpuShape) -> PlanOrReason:
        measured, gpu = self._step_times_s[model, global_batch], _get_gpu_model(shape)
        if (gpu, shape.gpus) not in measured:
            counts = ", ".join(f"{count} {gpu}" for gpu, count in sorted(measured))
            return f"{model} at batch {global_batch} was measured on {counts}"
        return _build_plan(ExecPlan(), gpu, shape.gpus, global_batch, measured[gpu, shape.gpus])


class PlacedCurves:
    """Curves measured by placement, with the best of the measured plans of each placement.

    * A placement is as fast as any measured one with the same GPUs on more, smaller nodes (two nodes of 8 are no slower
      than four nodes of 4), because communication only gets closer.
    * A data-parallel plan is interpolated linearly, by GPU count, between the largest smaller and the smallest larger
      measured placement on the same number of nodes; of equal ones the slowest is used. Step times are convex, so that
      the line is an upper bound. Plans with tensor or pipeline degrees are not interpolated.
    * All other placements, such as those with more GPUs than were measured, have no plan.
    """

    def __init__(self, steps: Iterable[StepByPlacement]) -> None:
        self._best: defaultdict[tuple[str, str], dict[Placement, StepByPlacement]] = defaultdict(dict)
        self._replicated: defaultdict[tuple[str, str], dict[Placement, StepByPlacement]] = defaultdict(dict)
        for step in sorted(steps, key=lambda step: step.step_time_s, reverse=True):
            self._best[step.gpu, step.model][step.placement] = step
            if step.plan.is_data_parallel:
                self._replicated[step.gpu, step.model][step.placement] = step

    @property
    def gpus(self) -> frozenset[str]:
        return frozenset(gpu for gpu, _ in self._best)

    def covers(self, model: str, global_batch: int) -> bool:
        """Tell whether the model was measured. The batch size is ignored: each model always has the same."""
        return any(known == model for _, known in self._best)

    def get_point(self, model: str, global_batch: int, shape: GpuShape) -> PlanOrReason:
        gpu, placement = _get_gpu_model(shape), get_placement(shape)
        measured = self._best.get((gpu, model), {})
        found = [step for at, step in measured.items() if sum(at) == sum(placement) and _can_pack(at, placement)]
        if placement not in measured and (between := _interpolate_placement(self._replicated[gpu, model], placement)):
            found.append(between)
        if not found:
            return f"{model} was not measured on {shape}, nor on placements on either side of it"
        best = min(found, key=lambda step: step.step_time_s)
        return _build_plan(best.plan, gpu, shape.gpus, global_batch, best.step_time_s)


class SharedCurves:
    """Curves measured by placement and local batch size (Pollux, OSDI'21).

    Each GPU processes its share of the global batch in the fewest micro-batches of a measured size. Only the last one
    waits for gradients. Times between two measured sizes are interpolated linearly. Of several measurements of one
    placement the slowest is used. Placements that were not measured use one with the same number of nodes and GPUs.
    """

    def __init__(self, steps: Iterable[StepByLocalBatch]) -> None:
        self._steps: defaultdict[tuple[str, str], dict[Placement | str, dict[int, StepByLocalBatch]]] = defaultdict(
            dict
        )
        for step in sorted(steps, key=lambda step: step.step_time_s):
            spot = step.placement or f"{step.gpus} on {step.nodes}"
            self._steps[step.gpu, step.model].setdefault(spot, {})[step.local_batch] = step

    @property
    def gpus(self) -> frozenset[str]:
        return frozenset(gpu for gpu, _ in self._steps)

    def covers(self, model: str, global_batch: int) -> bool:
        return any(known == model for _, known in self._steps)

    def get_point(self, model: str, global_batch: int, shape: GpuShape) -> PlanOrReason:
        gpu = _get_gpu_model(shape)
        spots = self._steps.get((gpu, model), {})
        samples = spots.get(get_placement(shape)) or spots.get(f"{shape.gpus} on {shape.nodes}")
        if samples is None:
            return f"{model} was not measured on {shape}"
        share = -(-global_batch // shape.gpus)
        if share < min(samples):
            return f"{model} was not measured with fewer than {min(samples)} samples on a GPU; {shape} have {share}"
        micro_batches = -(-share // max(samples))
        step_time_s, sync_time_s = _interpolate_batch(samples, max(min(samples), -(-share // micro_batches)))
        whole_s = step_time_s + (micro_batches - 1) * (step_time_s - sync_time_s)
        return _build_plan(ExecPlan(), gpu, shape.gpus, global_batch, whole_s)


def get_placement(shape: GpuShape) -> Placement:
    """Return the GPUs on each node, in descending order."""
    return tuple(sorted((group.gpus_per_node for group in shape.groups for _ in range(group.nodes)), reverse=True))


def _get_gpu_model(shape: GpuShape) -> str:
    """Return the GPU model of a shape, or an empty text for a mixed shape, which is never measured."""
    models = {group.gpu for group in shape.groups}
    return models.pop() if len(models) == 1 else ""


def _build_plan(plan: ExecPlan, gpu: str, gpus: int, global_batch: int, step_time_s: float) -> ParallelPlan:
    in_stage = gpus // plan.pipeline
    tensor = plan.tensor or in_stage
    data = in_stage // tensor
    strategy = LayerStrategy(
        layers=1,
        tp=tensor,
        dp=data,
        zero=plan.zero,
        shard_group=data if plan.zero else 1,
        recompute=Recompute.FULL if plan.recompute else Recompute.NONE,
        offload=plan.offload,
    )
    return ParallelPlan(
        schedule=Schedule(),
        micro_batches=1,
        micro_batch_size=global_batch,
        iteration_time_s=step_time_s,
        samples_per_s=global_batch / step_time_s,
        peak_bytes_per_gpu=0,
        stages=tuple(Stage(number, number, gpu, in_stage, (strategy,)) for number in range(plan.pipeline)),
    )


def _can_pack(parts: Placement, nodes: Placement) -> bool:
    """Tell whether groups of `parts` can fill each of the nodes exactly."""
    if not parts:
        return not any(nodes)
    first, *rest = parts
    return any(
        _can_pack(tuple(rest), (*nodes[:at], room - first, *nodes[at + 1 :]))
        for at, room in enumerate(nodes)
        if room >= first and room not in nodes[:at]
    )


def _interpolate_placement(
    measured: Mapping[Placement, StepByPlacement], placement: Placement
) -> StepByPlacement | None:
    """Return a step interpolated between a smaller and a larger measured placement, if there are both."""
    smaller = [step for at, step in measured.items() if _is_inside(at, placement)]
    larger = [step for at, step in measured.items() if _is_inside(placement, at)]
    if not smaller or not larger:
        return None
    low = max(smaller, key=lambda step: (sum(step.placement), step.step_time_s))
    high = min(larger, key=lambda step: (sum(step.placement), -step.step_time_s))
    fraction = (sum(placement) - sum(low.placement)) / (sum(high.placement) - sum(low.placement))
    step_time_s = low.step_time_s + fraction * (high.step_time_s - low.step_time_s)
    return StepByPlacement(low.gpu, low.model, placement, low.plan, step_time_s)


def _is_inside(part: Placement, whole: Placement) -> bool:
    """Tell whether `part` is smaller than `whole` and has as many nodes."""
    return len(part) == len(whole) and part != whole and all(a <= b for a, b in zip(part, whole, strict=True))


def _interpolate_batch(samples: Mapping[int, StepByLocalBatch], local_batch: int) -> tuple[float, float]:
    """Return step and sync time, interpolated between the two nearest measured local batch sizes."""
    if local_batch in samples:
        return samples[local_batch].step_time_s, samples[local_batch].sync_time_s
    low, high = next((a, b) for a, b in pairwise(sorted(samples)) if a < local_batch < b)
    fraction, below, above = (local_batch - low) / (high - low), samples[low], samples[high]
    return (
        below.step_time_s + fraction * (above.step_time_s - below.step_time_s),
        below.sync_time_s + fraction * (above.sync_time_s - below.sync_time_s),
    )


class CurveCache:
    """Points of all curves of a simulation, measured or solved once.

    A model in `profiles`, the files of measurements, is never solved.
    """

    def __init__(self, profiles: Iterable[MeasuredSteps] = ()) -> None:
        self._measured = build_measured_curves(profiles)
        self._points: dict[WantedShape, CurveSolved] = {}

    def find_measured(self, model: str, global_batch: int) -> MeasuredCurves | None:
        """Return the measured curves with the model at this batch size."""
        return next((curves for curves in self._measured if curves.covers(model, global_batch)), None)

    def has_measured_gpu(self, gpu: str) -> bool:
        """Tell whether any model was measured on this GPU model."""
        return any(gpu in curves.gpus for curves in self._measured)

    def get_job_point(self, spec: JobSpec, shape: GpuShape) -> CurveSolved:
        """Return the point of a submitted job that has a model."""
        request = spec.curve_request
        assert request is not None, "jobs without a model have a linear curve"
        return self.get_point(request, shape)

    def get_point(self, request: CurveRequest, shape: GpuShape) -> CurveSolved:
        """Return a plan, or the reason why there is none on this shape."""
        wanted = WantedShape(request.key, shape)
        if wanted not in self._points:
            self._points[wanted] = self._compute_point(request, wanted)
        return self._points[wanted]

    def _compute_point(self, request: CurveRequest, wanted: WantedShape) -> CurveSolved:
        if not (curves := self.find_measured(request.model, request.global_batch)):
            return build_curve_solved(wanted.curve_key, wanted.shape, solve_point(request, wanted.shape))
        point = curves.get_point(request.model, request.global_batch, wanted.shape)
        if isinstance(point, str):
            return CurveSolved(wanted.curve_key, wanted.shape, None, point)
        return CurveSolved(wanted.curve_key, wanted.shape, point)
