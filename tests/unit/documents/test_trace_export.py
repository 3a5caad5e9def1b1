"""A live service's jobs as rows of a trace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from scheduler.documents.trace_files import (
    JobRow,
    export_trace,
    format_demand_csv,
    format_jobs_csv,
    read_demand,
    read_jobs,
)
from scheduler.domain.fleet import DemandReading
from scheduler.domain.job import Job, JobAccount, Progress
from scheduler.domain.job_state import JobState
from tests.builders import a_job

START_S = 1_790_000_000.0
ON_FOUR = {"t0": (0, 1, 2, 3)}


def an_ended_job(job_id: str, *, gpu_s: float, ran_s: float, waited_s: float = 10.0, **more: Any) -> Job:
    """Submitted at the start, waited, and ran without a break."""
    job = a_job(job_id, 2, 8, state=JobState.SUCCEEDED, now_s=START_S, **more)
    account = JobAccount(waited_s=waited_s, gpu_s=gpu_s, first_started_at_s=START_S + waited_s)
    return replace(job, state_since_s=START_S + waited_s + ran_s, account=account)


def row(job: Job, now_s: float = START_S + 1000.0) -> JobRow:
    (only,) = export_trace([job], {}, now_s).jobs
    return only


def test_an_ended_job_has_the_gpus_that_it_had_on_average_and_keeps_its_range() -> None:
    found = row(an_ended_job("a", gpu_s=410.0, ran_s=100.0, priority=2, queue="research", deadline_s=500.0))
    assert (found.gpus, found.duration_s, found.min_gpus, found.max_gpus) == (4, 102.5, 2, 8)
    assert (found.priority, found.queue, found.deadline_s, found.submit_time_s) == (2, "research", 500.0, 0.0)


def test_lost_work_does_not_count_and_waiting_between_two_runs_takes_no_gpus() -> None:
    job = an_ended_job("a", gpu_s=400.0, ran_s=200.0)
    account = replace(job.account, lost_gpu_s=40.0, waited_s=110.0)
    assert (row(replace(job, account=account)).gpus, row(replace(job, account=account)).duration_s) == (4, 90.0)


def test_a_running_job_needs_what_it_has_had_and_what_it_has_to_go() -> None:
    job = a_job("a", 2, 8, state=JobState.RUNNING, on=ON_FOUR, now_s=START_S, steps=1000)
    job = replace(job, account=JobAccount(first_started_at_s=START_S, settled_at_s=START_S))
    found = row(job, now_s=START_S + 50.0)
    assert (found.gpus, found.duration_s) == (4, 250.0), "1,000 GPU-seconds in all"


def test_a_job_that_waits_counts_by_its_owners_estimate_and_one_of_no_known_length_is_left_out() -> None:
    waiting = a_job("a", 2, 8, now_s=START_S, duration_estimate_s=60.0)
    unknown = a_job("b", 2, 8, now_s=START_S, steps=0)
    trace = export_trace([unknown, waiting], {}, START_S + 5.0)
    assert [(found.job_id, found.gpus, found.duration_s) for found in trace.jobs] == [("a", 2, 60.0)]
    assert trace.skipped == ("b",)


def test_a_model_goes_with_its_batch_and_steps() -> None:
    spec: dict[str, Any] = {"model": "gpt2", "global_batch": 64, "sequence_length": 512, "steps": 3000}
    found = row(an_ended_job("a", gpu_s=400.0, ran_s=100.0, **spec))
    assert (found.model, found.global_batch, found.sequence_length, found.iterations) == ("gpt2", 64, 512, 3000)
    endless = replace(an_ended_job("a", gpu_s=400.0, ran_s=100.0, **{**spec, "steps": 0}), progress=Progress(0.0, 70.0))
    assert row(endless).iterations == 70


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    jobs = [
        an_ended_job("a", gpu_s=410.0, ran_s=100.0, queue="research"),
        replace(an_ended_job("b", gpu_s=7.0, ran_s=3.0, model="gpt2", global_batch=8), submitted_at_s=START_S + 0.125),
    ]
    readings = {
        "chat": [DemandReading(START_S - 60.0, 2.0, 2.5), DemandReading(START_S, 3.0, 3.0)],
        "code": [DemandReading(START_S, 1.0, 1.0)],
        "training": [],
    }
    trace = export_trace(jobs, readings, START_S + 1000.0)
    (tmp_path / "jobs.csv").write_text(format_jobs_csv(trace.jobs))
    (tmp_path / "demand.csv").write_text(format_demand_csv(trace.demand))
    read = read_jobs(tmp_path / "jobs.csv")
    assert [replace(found, line=0) for found in read] == list(trace.jobs)
    assert [found.submit_time_s for found in read] == [60.0, 60.125], "counted from the first reading"
    demand = read_demand(tmp_path / "demand.csv")
    assert [(found.time_s, found.pool, found.amount) for found in demand] == [
        (0.0, "chat", 2.5),
        (60.0, "chat", 3.0),
        (60.0, "code", 1.0),
    ]
