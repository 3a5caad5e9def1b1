"""A job's declared length, and what is believed of one that is seen beyond it."""

from __future__ import annotations

from dataclasses import replace

from scheduler.domain.allocation import Allocation
from scheduler.domain.job import OVERRUN_SHARE, Job, JobSpec, Progress
from scheduler.domain.job_state import JobState
from scheduler.domain.scaling_curve import data_parallel_plan


def running(steps: float, *, length: int = 1000, at_s: float = 0.0) -> Job:
    """A job on 2 GPUs: two steps a second."""
    plan = data_parallel_plan("a100-80g", 2)
    job = Job("a", JobSpec("a", 1, 4, steps=length), JobState.RUNNING, 0.0, 0.0, Progress(at_s, steps=steps))
    return replace(job, allocation=Allocation(1, {"n": (0, 1)}, {}, plan))


def test_extrapolation_stops_at_the_declared_length() -> None:
    job = running(900.0)
    assert (job.steps_at(20.0), job.remaining_steps(20.0)) == (940.0, 60.0)
    assert (job.steps_at(500.0), job.remaining_steps(500.0)) == (1000.0, 0.0)


def test_a_job_that_was_seen_beyond_its_length_goes_on_and_needs_a_part_of_its_work_again() -> None:
    job = running(1200.0)
    assert job.steps_at(100.0) == 1400.0
    assert job.remaining_steps(100.0) == OVERRUN_SHARE * 1400.0


def test_a_job_of_unknown_length_has_no_remaining_steps() -> None:
    assert running(1200.0, length=0).remaining_steps(100.0) is None
