"""Declared length, expected remaining steps and recorded speed of a job."""

from __future__ import annotations

from dataclasses import replace

from scheduler.domain.job import OVERRUN_SHARE, Job, Progress
from scheduler.domain.job_spec import JobSpec
from scheduler.domain.job_state import Allocation, JobState
from scheduler.domain.scaling_curve import build_data_parallel_plan
from tests.builders import a_job


def running(steps: float, *, length: int = 1000, at_s: float = 0.0) -> Job:
    """A job on 2 GPUs: two steps per second."""
    plan = build_data_parallel_plan("a100-80g", 2)
    job = Job("a", JobSpec("a", 1, 4, steps=length), JobState.RUNNING, 0.0, 0.0, Progress(at_s, steps=steps))
    return replace(job, allocation=Allocation(1, {"n": (0, 1)}, {}, plan))


def test_extrapolation_stops_at_the_declared_length() -> None:
    job = running(900.0)
    assert (job.steps_at(20.0), job.remaining_steps(20.0)) == (940.0, 60.0)
    assert (job.steps_at(500.0), job.remaining_steps(500.0)) == (1000.0, 0.0)


def test_job_observed_beyond_its_length_is_expected_to_overrun() -> None:
    job = running(1200.0)
    assert job.steps_at(100.0) == 1400.0
    assert job.remaining_steps(100.0) == OVERRUN_SHARE * 1400.0


def test_job_of_unknown_length_has_no_remaining_steps() -> None:
    assert running(1200.0, length=0).remaining_steps(100.0) is None


def test_job_records_its_correction_per_number_of_gpus() -> None:
    """Runs of less than a minute are not recorded, nor jobs with a solved curve."""
    job = a_job("j", 1, 8, state=JobState.RUNNING, on={"t0": (0, 1, 2, 3)})
    job = replace(job, progress=replace(job.progress, correction=2.0))
    assert job.transition_to(JobState.RESIZING, 59.0).progress.corrections == ()
    assert job.transition_to(JobState.RESIZING, 60.0).progress.corrections == ((4, 2.0),)
    again = replace(job, progress=replace(job.progress, corrections=((4, 1.0), (8, 3.0))))
    assert again.transition_to(JobState.RESIZING, 60.0).progress.corrections == ((8, 3.0), (4, 2.0))
    modelled = a_job("m", 1, 8, state=JobState.RUNNING, on={"t0": (0, 1)}, model="gpt2", global_batch=8)
    assert modelled.transition_to(JobState.RESIZING, 60.0).progress.corrections == ()
