"""What workers report of their work: progress as it stands, and now and then a sample for the job's series.

Layers that jobs have frozen: taken in as they are told, and the curves that count on them once those are solved.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from scheduler.domain.commands import ReportProgress
from scheduler.domain.events import EventCode
from scheduler.domain.gpu_sets import GpuShape, canonical_gpu_counts
from scheduler.domain.job import Job
from scheduler.domain.job_records import Sample, SampleSeries, SlottedSample, compute_sample_slot
from scheduler.domain.scaling_curve import ScalingCurve
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.mutable_snapshot import SnapshotBuilder
from scheduler.scheduling.policies.speed import node_sizes, packed


def record_progress(snapshot: SnapshotBuilder, report: ReportProgress, at_s: float) -> None:
    """Reports of workers that were replaced say nothing about the present ones."""
    job = snapshot.jobs.get(report.job_id)
    if job is None or not job.is_placed or report.generation != job.allocation.generation:
        return
    progress = job.progress
    if report.loss is not None:
        progress = replace(progress, loss=report.loss)
    if report.samples_per_s is not None:
        progress = replace(progress, samples_per_s=report.samples_per_s)
    if report.peak_bytes is not None and report.peak_bytes > (progress.peak_bytes or 0):
        progress = replace(progress, peak_bytes=report.peak_bytes)
    if report.checkpoint_steps is not None and report.checkpoint_steps > progress.checkpoint_steps:
        progress = replace(progress, checkpoint_steps=report.checkpoint_steps, checkpoint_at_s=snapshot.now_s)
    sampled = _record_sample(snapshot, job, report, min(at_s, snapshot.now_s))
    if progress != job.progress or sampled is not job.sampled:
        snapshot.jobs[job.id] = job = replace(job, progress=progress, sampled=sampled)
    record_frozen_layers(snapshot, job, report.frozen_layers)


def _record_sample(snapshot: SnapshotBuilder, job: Job, report: ReportProgress, at_s: float) -> SampleSeries | None:
    """The report in the job's series, where that takes one of this time."""
    sampled = job.sampled
    if sampled is not None and not sampled.accepts(at_s):
        return sampled
    first_at_s = at_s if sampled is None else sampled.first_at_s
    sample = Sample(at_s, report.steps, report.loss, report.samples_per_s, report.peak_bytes)
    snapshot.samples.append(SlottedSample(job.id, compute_sample_slot(at_s - first_at_s), sample))
    return SampleSeries(first_at_s, at_s)


def record_frozen_layers(snapshot: SnapshotBuilder, job: Job, layers: int | None) -> Job:
    """The job with so many layers frozen, if its workers say so.

    Fewer than before are an old report, which says nothing. More than the model has are refused: they would ask for a
    curve that cannot be.
    """
    if layers is None or layers <= job.freezing.layers:
        return job
    fault = frozen_layers_error(job, layers)
    if fault:
        snapshot.refuse(job.id, f"frozen_layers is {layers}; {fault}")
        return job
    before = job.freezing.layers
    snapshot.jobs[job.id] = frozen = job.with_frozen_layers(layers, snapshot.now_s)
    message = f"{layers} layers are frozen, {before} before"
    numbers = {"frozen_layers": float(layers), "frozen_layers_before": float(before)}
    snapshot.record_event(EventCode.JOB_FROZE, job.id, message, numbers)
    return frozen


def frozen_layers_error(job: Job, layers: int) -> str:
    """What a worker's number may be, where it may not be this one; empty where it may."""
    plan = job.allocation.plan
    if layers < job.freezing.layers:
        return f"it must be at least {job.freezing.layers}, as it was told before"
    if job.spec.has_profile and plan is not None and layers > plan.layers:
        return f"it must be at most {plan.layers}, the layers of its model"
    return ""


def switch_curves(snapshot: SnapshotBuilder) -> None:
    """A job goes over to the curve that counts on its frozen layers once that has all the points that it needs; until
    then it goes on under the old one."""
    names = snapshot.original.index.needs_frozen_replan | snapshot.jobs.changed_keys
    waiting = [job for job_id in sorted(names) if (job := snapshot.jobs.get(job_id)) and _awaits_next_curve(job)]
    view = snapshot.view() if waiting else snapshot.original
    for job in waiting:
        if _is_next_curve_ready(view, job):
            snapshot.jobs[job.id] = snapshot.jobs[job.id].with_next_curve()


def shapes_to_solve(snapshot: Snapshot, job: Job) -> Iterator[GpuShape]:
    """What the next curve must have before the job is planned by it: the shape that it runs on, then the canonical ones
    of its range, on the GPU models that it has (on any that it may have, where it has none)."""
    target, sizes = job.allocation.target, node_sizes(snapshot)
    if target:
        yield snapshot.shape_of(target)
    models = {snapshot.nodes[name].gpu for name in target} or {gpu for gpu in sizes if job.spec.gpu in ("", gpu)}
    for gpu in sorted(models):
        for count in canonical_gpu_counts(job.spec.min_gpus, job.spec.max_gpus, sizes[gpu]):
            yield packed(gpu, count, sizes[gpu])


def _awaits_next_curve(job: Job) -> bool:
    return not job.is_ended and job.freezing.needs_new_plan and not job.freezing.is_curve_current


def _is_next_curve_ready(snapshot: Snapshot, job: Job) -> bool:
    curve = snapshot.curves.get(job.next_curve_key, ScalingCurve())
    target = job.allocation.target
    if target and curve.plan_for(snapshot.shape_of(target)) is None:
        return False
    return all(curve.is_solved(shape) for shape in shapes_to_solve(snapshot, job))
