"""Reports of workers: progress, samples and frozen layers, and the curves that count on frozen layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from scheduler.domain.commands import ReportProgress
from scheduler.domain.events import EventCode
from scheduler.domain.gpu_sets import GpuShape, canonical_gpu_counts
from scheduler.domain.job import Job, Progress
from scheduler.domain.job_records import Sample, SampleSeries, SlottedSample, compute_sample_slot
from scheduler.domain.job_state import JobState
from scheduler.domain.scaling_curve import ScalingCurve
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.mutable_snapshot import MutableSnapshot
from scheduler.scheduling.policies.speed import node_sizes, packed


def record_progress(snapshot: MutableSnapshot, report: ReportProgress, at_s: float) -> None:
    """Record a progress report. Reports of earlier generations are ignored."""
    job = snapshot.jobs.get(report.job_id)
    if job is None or not job.is_placed or report.generation != job.allocation.generation:
        return
    progress = job.progress
    reported_at_s = min(at_s, snapshot.now_s)
    if job.id not in snapshot.measured_jobs and reported_at_s >= progress.at_s:
        progress = with_measured_steps(job, progress, report.steps, reported_at_s)
    elif not progress.is_reported:
        progress = replace(progress, is_reported=True)
    if report.loss is not None:
        progress = replace(progress, loss=report.loss)
    if report.samples_per_s is not None:
        progress = replace(progress, samples_per_s=report.samples_per_s)
    if report.peak_bytes is not None and report.peak_bytes > (progress.peak_bytes or 0):
        progress = replace(progress, peak_bytes=report.peak_bytes)
    if report.checkpoint_steps is not None and report.checkpoint_steps > progress.checkpoint_steps:
        progress = replace(progress, checkpoint_steps=report.checkpoint_steps, checkpoint_at_s=snapshot.now_s)
    sampled = _record_sample(snapshot, job, report, reported_at_s)
    if progress != job.progress or sampled is not job.sampled:
        job = replace(job, progress=progress, sampled=sampled)
        snapshot.put_job(job)
    record_frozen_layers(snapshot, job, report.frozen_layers)


_DRIFT_S = 5.0
"""Measured progress replaces extrapolated progress when they are this far apart, so that most ticks write nothing."""


def with_measured_steps(
    job: Job, progress: Progress, steps: float, at_s: float, *, loss: float | None = None
) -> Progress:
    """Return the progress after a report of `steps` as of `at_s`.

    The same object is returned if the job has reported before, and the report is older than what is known, or the
    extrapolated steps have not drifted from it.
    """
    if not progress.is_reported:
        progress = replace(progress, is_reported=True)
    if job.state is not JobState.RUNNING or at_s < job.progress.at_s:
        return progress
    if abs(steps - job.steps_at(at_s)) * job.step_time_s() <= _DRIFT_S:
        return progress
    correction, loss = _compute_correction(job, steps, at_s), progress.loss if loss is None else loss
    return replace(progress, steps=steps, at_s=at_s, loss=loss, correction=correction)


def _compute_correction(job: Job, steps: float, at_s: float) -> float:
    """Return the job's curve correction after one more measurement, the mean of the old and the measured one.

    Averaging keeps one slow minute from changing the correction much. A measurement needs one finished step.
    """
    elapsed_s, done = at_s - max(job.state_since_s, job.progress.at_s), steps - job.progress.steps
    plan = job.allocation.plan
    if plan is None or done < 1.0 or elapsed_s <= 0.0:
        return job.progress.correction
    return 0.5 * job.progress.correction + 0.5 * elapsed_s / done / plan.iteration_time_s


def _record_sample(snapshot: MutableSnapshot, job: Job, report: ReportProgress, at_s: float) -> SampleSeries | None:
    """Add the report to the job's series of samples if the series accepts a sample at this time."""
    sampled = job.sampled
    if sampled is not None and not sampled.accepts(at_s):
        return sampled
    first_at_s = at_s if sampled is None else sampled.first_at_s
    sample = Sample(at_s, report.steps, report.loss, report.samples_per_s, report.peak_bytes)
    snapshot.samples.append(SlottedSample(job.id, compute_sample_slot(at_s - first_at_s), sample))
    return SampleSeries(first_at_s, at_s)


def record_frozen_layers(snapshot: MutableSnapshot, job: Job, layers: int | None) -> Job:
    """Record the number of frozen layers that the workers report, and return the job.

    A smaller number than before comes from an old report and is ignored. A number above the model's layers is refused,
    because no curve can be solved for it.
    """
    if layers is None or layers <= job.freezing.layers:
        return job
    if error := frozen_layers_error(job, layers):
        snapshot.refuse(job.id, f"`frozen_layers` is {layers}; {error}")
        return job
    before = job.freezing.layers
    frozen = job.with_frozen_layers(layers, snapshot.now_s)
    snapshot.put_job(frozen)
    message = f"{layers} layers are frozen; before: {before}"
    numbers = {"frozen_layers": float(layers), "frozen_layers_before": float(before)}
    snapshot.record_event(EventCode.JOB_FROZE, job.id, message, numbers)
    return frozen


def frozen_layers_error(job: Job, layers: int) -> str:
    """Return which numbers of frozen layers the job accepts if not this one, or an empty string."""
    plan = job.allocation.plan
    if layers < job.freezing.layers:
        return f"it must be at least {job.freezing.layers}, the number reported before"
    if job.spec.has_profile and plan is not None and layers > plan.layers:
        return f"it must be at most {plan.layers}, the number of layers of the model"
    return ""


def switch_curves(snapshot: MutableSnapshot) -> None:
    """Switch jobs to their next curve once it has all points that the job needs."""
    job_ids = snapshot.original.index.needs_new_plan | snapshot.jobs.changed_keys
    waiting = [job for job_id in sorted(job_ids) if (job := snapshot.jobs.get(job_id)) and _awaits_next_curve(job)]
    view = snapshot.view() if waiting else snapshot.original
    for job in waiting:
        if _is_next_curve_ready(view, job):
            snapshot.put_job(snapshot.jobs[job.id].with_next_curve())


def shapes_to_solve(snapshot: Snapshot, job: Job) -> Iterator[GpuShape]:
    """Yield the shapes that the job's next curve must have before the job switches to it.

    These are the shape that the job runs on, then the canonical shapes of its range on its GPU models: those that it
    holds, or every model that it can use if it holds no GPUs.
    """
    target, sizes = job.allocation.target, node_sizes(snapshot)
    if target:
        yield snapshot.shape_of(target)
    models = {snapshot.nodes[name].gpu for name in target} or {gpu for gpu in sizes if job.spec.gpu in ("", gpu)}
    for gpu in sorted(models):
        for count in canonical_gpu_counts(job.spec.min_gpus, job.spec.max_gpus, sizes[gpu]):
            yield packed(gpu, count, sizes[gpu])


def _awaits_next_curve(job: Job) -> bool:
    return not job.is_ended and not job.is_curve_current


def _is_next_curve_ready(snapshot: Snapshot, job: Job) -> bool:
    curve = snapshot.curves.get(job.next_curve_key, ScalingCurve())
    target = job.allocation.target
    if target and curve.plan_for(snapshot.shape_of(target)) is None:
        return False
    return all(curve.is_solved(shape) for shape in shapes_to_solve(snapshot, job))
