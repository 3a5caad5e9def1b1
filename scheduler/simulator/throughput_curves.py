"""Scaling curves that were measured: how long a step takes on a GpuShape, without the solver.

A curve answers for the GPUs that it was measured on, and says why where it has no plan for a shape: such counts are
holes. What a plan does beyond its degrees is not recorded, so its layers and micro-batches count as one and its memory
as none.

CurveBook: measured curves and the solver at a simulation's side. Every point is solved once, whoever asks for it.
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
from scheduler.domain.job import JobSpec
from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan, Recompute, Schedule, Stage
from scheduler.domain.scaling_curve import CurveRequest
from scheduler.domain.tick_report import WantedShape
from scheduler.solver.curve import build_curve_solved, solve_point

PlanOrReason = ParallelPlan | str
"""A plan, or why none was measured."""


class MeasuredCurves(Protocol):
    """One kind of measurement."""

    @property
    def gpus(self) -> frozenset[str]:
        """The GPU models that were measured."""

    def covers(self, model: str, global_batch: int) -> bool:
        """The model was measured at this batch."""

    def get_point(self, model: str, global_batch: int, shape: GpuShape) -> PlanOrReason:
        """The fastest plan on a shape, of a model that `knows` knows."""


def build_measured_curves(
    profiles: Iterable[Iterable[StepByGpuCount | StepByPlacement | StepByLocalBatch]],
) -> tuple[MeasuredCurves, ...]:
    """The curves of files that `read_profile` has read."""
    steps = [step for profile in profiles for step in profile]
    counted = [step for step in steps if isinstance(step, StepByGpuCount)]
    placed = [step for step in steps if isinstance(step, StepByPlacement)]
    shared = [step for step in steps if isinstance(step, StepByLocalBatch)]
    curves: list[MeasuredCurves] = [PlacedCurves(placed), CountedCurves(counted), SharedCurves(shared)]
    return tuple(known for known in curves if known.gpus)


class CountedCurves:
    """Counts alone were measured: every shape of a measured count is as fast, and any other count has no plan."""

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
    """Placements were measured, under several plans each; the best plan of a placement counts.

    * Fewer nodes are no slower: a placement is as fast as any that was measured with as many GPUs and whose nodes can
      be laid together to give it (four nodes of 4 give two of 8; communication only gets nearer).
    * Between two measured placements on as many nodes, one inside and one around it, a data-parallel plan takes the
      time on the straight line between theirs, by the number of GPUs. Step times fall convexly, so that the line lies
      above them; the largest such inside and the smallest around are taken, of equals the slowest. A plan with tensor
      or pipeline degrees has nothing in between.
    * Anything else, more GPUs than were measured above all, has no plan.
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
        """Whatever the batch: each model was measured at the one that it always has."""
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
    """Steps were measured by placement and samples on each GPU (Pollux, OSDI'21).

    Each GPU takes its share of the global batch, in as few micro-batches as keep it within the largest that was
    measured; only the last of them waits for the gradients of others. Between two measured numbers of samples the
    time is on the straight line. Of the orders in which the nodes were asked the slowest counts. Beyond the measured
    placements, the number of nodes and GPUs decides where both together were measured.
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
    """GPUs on each node, most first."""
    return tuple(sorted((group.gpus_per_node for group in shape.groups for _ in range(group.nodes)), reverse=True))


def _get_gpu_model(shape: GpuShape) -> str:
    """The GPU model of a shape that has one; "" for a mixed one, which nobody measured."""
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
    """Whether `parts` can be laid together so that each node is filled."""
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
    """A step on the straight line between a placement inside and one around, where both were measured."""
    inside = [step for at, step in measured.items() if _is_inside(at, placement)]
    around = [step for at, step in measured.items() if _is_inside(placement, at)]
    if not inside or not around:
        return None
    low = max(inside, key=lambda step: (sum(step.placement), step.step_time_s))
    high = min(around, key=lambda step: (sum(step.placement), -step.step_time_s))
    way = (sum(placement) - sum(low.placement)) / (sum(high.placement) - sum(low.placement))
    step_time_s = low.step_time_s + way * (high.step_time_s - low.step_time_s)
    return StepByPlacement(low.gpu, low.model, placement, low.plan, step_time_s)


def _is_inside(part: Placement, whole: Placement) -> bool:
    """On as many nodes, and smaller."""
    return len(part) == len(whole) and part != whole and all(own <= all_ for own, all_ in zip(part, whole, strict=True))


def _interpolate_batch(samples: Mapping[int, StepByLocalBatch], local_batch: int) -> tuple[float, float]:
    """Step and sync time between the two nearest measured numbers of samples."""
    if local_batch in samples:
        return samples[local_batch].step_time_s, samples[local_batch].sync_time_s
    low, high = next((a, b) for a, b in pairwise(sorted(samples)) if a < local_batch < b)
    way, below, above = (local_batch - low) / (high - low), samples[low], samples[high]
    return (
        below.step_time_s + way * (above.step_time_s - below.step_time_s),
        below.sync_time_s + way * (above.sync_time_s - below.sync_time_s),
    )


class CurveCache:
    """Points by curve key and shape.

    `profiles`: files of measurements. A model that they have is never solved.
    """

    def __init__(self, profiles: Iterable[MeasuredSteps] = ()) -> None:
        self._measured = build_measured_curves(profiles)
        self._points: dict[WantedShape, CurveSolved] = {}

    def find_measured(self, model: str, global_batch: int) -> MeasuredCurves | None:
        """The measured curves that have the model at this batch."""
        return next((curves for curves in self._measured if curves.covers(model, global_batch)), None)

    def has_measured_gpu(self, gpu: str) -> bool:
        """Some model was measured on GPUs of this model."""
        return any(gpu in curves.gpus for curves in self._measured)

    def get_job_point(self, spec: JobSpec, shape: GpuShape) -> CurveSolved:
        """The solved point of a job with a model, as it was submitted."""
        request = spec.curve_request
        assert request is not None, "any other job has the linear curve"
        return self.get_point(request, shape)

    def get_point(self, request: CurveRequest, shape: GpuShape) -> CurveSolved:
        """A plan, or why none can work on that shape."""
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
