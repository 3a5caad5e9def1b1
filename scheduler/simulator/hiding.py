"""From submissions as they were told to those of a world that hides something (`Truth`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from scheduler.documents.cluster import ClusterDocument
from scheduler.documents.trace import JobRow
from scheduler.domain.gpu_shape import GpuShape, canonical_counts
from scheduler.domain.job import JobSpec
from scheduler.simulator.curves import CurveBook
from scheduler.simulator.truth import Truth
from scheduler.simulator.workloads import Submission, gpu_models, submissions


def true_submissions(
    rows: Iterable[JobRow], cluster: ClusterDocument, curves: CurveBook, truth: Truth, *, elastic: bool
) -> tuple[Submission, ...]:
    """The trace's jobs as `submissions` makes them, with what `truth` hides: models by size, true and declared lengths.

    On the trace's GPUs, packed, a job truly runs as long as in the trace. `run_time_s_min` is the shortest true run
    time on any canonical count of the job's range.

    Raises:
        WorkloadError: as `submissions`.
    """
    hardware = _Hardware(cluster, curves)
    modelled = [hardware.modelled(row, truth) for row in rows]
    told = submissions(modelled, cluster, curves, elastic=elastic)
    if truth.is_as_told:
        return told
    widest = told if elastic else submissions(modelled, cluster, curves, elastic=True)
    return tuple(_hidden(one, wide.spec, hardware, truth) for one, wide in zip(told, widest, strict=True))


class _Hardware:
    """Step times of jobs on packed GPUs of the model that they ask for, else of the one that training has most of."""

    def __init__(self, cluster: ClusterDocument, curves: CurveBook) -> None:
        self._models = gpu_models(cluster)
        self._curves = curves

    def modelled(self, row: JobRow, truth: Truth) -> JobRow:
        """The row with the first of its size's models that can run on the trace's GPUs; as it is where none can."""
        for candidate in truth.with_models(row):
            spec = JobSpec(
                row.job_id,
                row.gpus,
                row.gpus,
                gpu=row.gpu,
                model=candidate.model,
                global_batch=candidate.global_batch,
                sequence_length=candidate.sequence_length,
            )
            if self.step_times_s(spec, (row.gpus,)):
                return candidate
        return row

    def canonical_step_times_s(self, spec: JobSpec) -> Mapping[int, float]:
        per_node = self._models.per_node[spec.gpu or self._models.commonest]
        return self.step_times_s(spec, canonical_counts(spec.min_gpus, spec.max_gpus, per_node))

    def step_times_s(self, spec: JobSpec, counts: Sequence[int]) -> Mapping[int, float]:
        """By GPU count; without those that have no plan."""
        if not spec.has_profile:
            return {count: 1.0 / count for count in counts}
        gpu = spec.gpu or self._models.commonest
        shapes = {count: GpuShape.packed(gpu, count, self._models.per_node[gpu]) for count in counts}
        points = {count: self._curves.point(spec, shape) for count, shape in shapes.items()}
        return {count: point.plan.iteration_time_s for count, point in points.items() if point.plan}


def _hidden(told: Submission, widest: JobSpec, hardware: _Hardware, truth: Truth) -> Submission:
    spec, job_id = told.spec, told.job_id
    steps_true = max(1, round(spec.steps / truth.step_time_factor(job_id, told.trace_gpus)))
    believed_ratio = truth.believed_ratio(job_id)
    estimate_s = None if spec.duration_estimate_s is None else spec.duration_estimate_s * believed_ratio
    declared = replace(spec, steps=max(1, round(spec.steps * believed_ratio)), duration_estimate_s=estimate_s)
    times_s = hardware.canonical_step_times_s(widest).items()
    fastest_s = min(step_s * truth.step_time_factor(job_id, count) for count, step_s in times_s)
    return replace(told, spec=declared, steps_true=float(steps_true), run_time_s_min=steps_true * fastest_s)
