"""What workers report of their work: progress as it stands, and now and then a sample for the job's series."""

from __future__ import annotations

from dataclasses import replace

from scheduler.core.frozen_layers import freeze
from scheduler.core.intake import Intake
from scheduler.domain.command import ReportProgress
from scheduler.domain.job import Job
from scheduler.domain.sample import PlacedSample, Sample, Sampled, sample_place


def take_report(intake: Intake, report: ReportProgress, at_s: float) -> None:
    """Reports of workers that were replaced say nothing about the present ones."""
    job = intake.jobs.get(report.job_id)
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
        progress = replace(progress, checkpoint_steps=report.checkpoint_steps, checkpoint_at_s=intake.now_s)
    sampled = _sample(intake, job, report, min(at_s, intake.now_s))
    if progress != job.progress or sampled is not job.sampled:
        intake.jobs[job.id] = job = replace(job, progress=progress, sampled=sampled)
    freeze(intake, job, report.frozen_layers)


def _sample(intake: Intake, job: Job, report: ReportProgress, at_s: float) -> Sampled | None:
    """The report in the job's series, where that takes one of this time."""
    sampled = job.sampled
    if sampled is not None and not sampled.takes(at_s):
        return sampled
    first_at_s = at_s if sampled is None else sampled.first_at_s
    sample = Sample(at_s, report.steps, report.loss, report.samples_per_s, report.peak_bytes)
    intake.samples.append(PlacedSample(job.id, sample_place(at_s - first_at_s), sample))
    return Sampled(first_at_s, at_s)
