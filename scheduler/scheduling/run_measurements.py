"""Measurements of a run: checkpoints, progress, throughput and memory, and how long a re-plan took."""

from __future__ import annotations

from dataclasses import asdict, replace

from scheduler.domain.events import EventCode
from scheduler.domain.job import Job, Progress
from scheduler.domain.job_records import SHUTDOWN_PHASES, STARTUP_PHASES, Replan, ReplanPhase
from scheduler.domain.observation import Run
from scheduler.scheduling.job_progress import with_measured_steps
from scheduler.scheduling.mutable_snapshot import MutableSnapshot

CHECKPOINT_DRIFT_S = 1.0
"""Times of the same checkpoint in two reports differ by less than this."""
_DRIFT_SHARE = 0.05
"""Measured throughput and memory replace the known figures when they differ by more than this share."""


def record_measurements(snapshot: MutableSnapshot, job: Job, run: Run) -> Job:
    """Record a new checkpoint at once, and measured progress once the extrapolation has drifted from it."""
    progress = with_usage(record_script_checkpoint(job, run).progress, run)
    if run.checkpoint_steps is not None and run.checkpoint_steps > progress.checkpoint_steps:
        progress = Progress(  # called for every checkpoint; `replace` would take three times as long
            progress.at_s,
            progress.steps,
            run.checkpoint_steps,
            snapshot.now_s,
            progress.correction,
            progress.loss,
            progress.corrections,
            progress.samples_per_s,
            progress.peak_bytes,
            progress.measured_gpu,
            progress.other_gpus,
            progress.is_reported,
        )
    if run.steps is not None:
        at_s = snapshot.now_s if run.steps_at_s is None else min(run.steps_at_s, snapshot.now_s)
        progress = with_measured_steps(job, progress, run.steps, at_s, loss=run.loss)
    if progress is job.progress:
        return job
    measured = job.with_progress(progress)
    snapshot.put_job(measured)
    return measured


def record_script_checkpoint(job: Job, run: Run) -> Job:
    """Return the job with the steps that the last checkpoint of a script without a session covers, by its time."""
    at_s, progress = run.checkpoint_at_s, job.progress
    if at_s is None or run.steps is not None or at_s <= progress.checkpoint_at_s + CHECKPOINT_DRIFT_S:
        return job
    steps = max(progress.checkpoint_steps, job.steps_at(at_s))
    return replace(job, progress=replace(progress, checkpoint_steps=steps, checkpoint_at_s=at_s))


def with_usage(progress: Progress, run: Run) -> Progress:
    """Return the progress with the run's throughput and memory, or the same object where neither has changed."""
    speed = progress.samples_per_s if run.samples_per_s is None else run.samples_per_s
    peak = progress.peak_bytes if run.peak_bytes is None else max(run.peak_bytes, progress.peak_bytes or 0)
    if not _has_changed(progress.samples_per_s, speed) and not _has_changed(progress.peak_bytes, peak):
        return progress
    return replace(progress, samples_per_s=speed, peak_bytes=peak)


def _has_changed(before: float | None, now: float | None) -> bool:
    return now is not None and (before is None or abs(now - before) > _DRIFT_SHARE * before)


def latest_loss(job: Job, run: Run) -> float | None:
    return job.progress.loss if run.loss is None else run.loss


def record_shutdown_phases(snapshot: MutableSnapshot, job: Job, run: Run) -> Job:
    """Keep how long the workers of an ended generation took to leave, until the next generation runs."""
    left_s = {phase.value: run.phases_s[phase] for phase in SHUTDOWN_PHASES if phase in run.phases_s}
    if not left_s or run.generation < job.replan.generation or left_s == job.replan.left_s:
        return job
    job = replace(job, replan=Replan(job.replan.generation, left_s))
    snapshot.put_job(job)
    return job


def record_first_step(snapshot: MutableSnapshot, job: Job, run: Run) -> Job:
    """Record a generation's first step once, with an event if it ends a re-plan. A first start is not a re-plan."""
    if ReplanPhase.FIRST_STEP not in run.phases_s or run.generation <= job.replan.generation:
        return job
    if job.replan.left_s:
        _record_replan(snapshot, job, run)
    job = replace(job, replan=Replan(run.generation))
    snapshot.put_job(job)
    return job


def _record_replan(snapshot: MutableSnapshot, job: Job, run: Run) -> None:
    started_s = {phase.value: run.phases_s[phase] for phase in STARTUP_PHASES if phase in run.phases_s}
    phases_s = {**job.replan.left_s, **started_s}
    parts = ", ".join(f"{phase.replace('_', ' ')} {seconds:.1f} s" for phase, seconds in phases_s.items())
    message = f"re-plan took {sum(phases_s.values()):.1f} s: {parts}"
    numbers = {f"{phase}_s": seconds for phase, seconds in phases_s.items()}
    if run.traffic is not None:
        read_mb, moved_mb = run.traffic.read_bytes / 1e6, run.traffic.moved_bytes / 1e6
        message += f"; read {read_mb:.1f} MB, {moved_mb:.1f} MB of it written by other nodes"
        numbers |= {name: float(count) for name, count in asdict(run.traffic).items()}
    snapshot.record_event(EventCode.JOB_REPLANNED, job.id, message, numbers)
