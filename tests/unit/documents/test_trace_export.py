"""Export of a service's jobs and demand as a trace."""

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
from scheduler.domain.job import Job, Progress
from scheduler.domain.job_account import JobAccount
from scheduler.domain.job_state import JobState
from tests.builders import a_job

START_S = 1_790_000_000.0
ON_FOUR = {"t0": (0, 1, 2, 3)}


def an_ended_job(job_id: str, *, gpu_s: float, ran_s: float, waited_s: float = 10.0, **more: Any) -> Job:
    """A job that was submitted at the start, waited, and ran without interruption."""
    job = a_job(job_id, 2, 8, state=JobState.SUCCEEDED, now_s=START_S, **more)
    account = JobAccount(waited_s=waited_s, gpu_s=gpu_s, first_started_at_s=START_S + waited_s)
    return replace(job, state_since_s=START_S + waited_s + ran_s, account=account)


def export_job(job: Job, now_s: float = START_S + 1000.0) -> JobRow:
    (only,) = export_trace([job], {}, now_s).jobs
    return only


def test_ended_job_has_its_average_gpus_and_its_range() -> None:
    exported = export_job(an_ended_job("a", gpu_s=410.0, ran_s=100.0, priority=2, queue="research", deadline_s=500.0))
    assert (exported.gpus, exported.duration_s, exported.min_gpus, exported.max_gpus) == (4, 102.5, 2, 8)
    assert (exported.priority, exported.queue, exported.deadline_s, exported.submit_time_s) == (
        2,
        "research",
        500.0,
        0.0,
    )


def test_owners_of_one_name_stay_apart() -> None:
    jobs = [
        replace(an_ended_job(job_id, gpu_s=10.0, ran_s=10.0), owner="ada", owner_id=owner_id)
        for job_id, owner_id in (("a", "token:1"), ("b", "token:2"), ("c", ""))
    ]
    rows = export_trace(jobs, {}, START_S + 1000.0).jobs
    assert [row.user for row in rows] == ["token:1", "token:2", "name:ada"]
    assert "token:1" in format_jobs_csv(rows)


def test_lost_work_and_waiting_between_runs_do_not_count() -> None:
    job = an_ended_job("a", gpu_s=400.0, ran_s=200.0)
    account = replace(job.account, lost_gpu_s=40.0, waited_s=110.0)
    assert (export_job(replace(job, account=account)).gpus, export_job(replace(job, account=account)).duration_s) == (
        4,
        90.0,
    )


def test_running_job_has_its_past_and_remaining_work() -> None:
    job = a_job("a", 2, 8, state=JobState.RUNNING, on=ON_FOUR, now_s=START_S, steps=1000)
    job = replace(job, account=JobAccount(first_started_at_s=START_S, settled_at_s=START_S))
    exported = export_job(job, now_s=START_S + 50.0)
    assert (exported.gpus, exported.duration_s) == (4, 250.0), "1,000 GPU-seconds in all"


def test_pending_job_uses_its_estimate_and_is_skipped_without_one() -> None:
    waiting = a_job("a", 2, 8, now_s=START_S, duration_estimate_s=60.0)
    unknown = a_job("b", 2, 8, now_s=START_S, steps=0)
    trace = export_trace([unknown, waiting], {}, START_S + 5.0)
    assert [(exported.job_id, exported.gpus, exported.duration_s) for exported in trace.jobs] == [("a", 2, 60.0)]
    assert trace.skipped == ("b",)


def test_model_is_exported_with_batch_and_steps() -> None:
    spec: dict[str, Any] = {"model": "gpt2", "global_batch": 64, "sequence_length": 512, "steps": 3000}
    exported = export_job(an_ended_job("a", gpu_s=400.0, ran_s=100.0, **spec))
    assert (exported.model, exported.global_batch, exported.sequence_length, exported.iterations) == (
        "gpt2",
        64,
        512,
        3000,
    )
    endless = replace(an_ended_job("a", gpu_s=400.0, ran_s=100.0, **{**spec, "steps": 0}), progress=Progress(0.0, 70.0))
    assert export_job(endless).iterations == 70


def test_exported_files_can_be_read(tmp_path: Path) -> None:
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
    assert [replace(exported, line=0) for exported in read] == list(trace.jobs)
    assert [exported.submit_time_s for exported in read] == [60.0, 60.125], "counted from the first reading"
    demand = read_demand(tmp_path / "demand.csv")
    assert [(exported.time_s, exported.pool, exported.amount) for exported in demand] == [
        (0.0, "chat", 2.5),
        (60.0, "chat", 3.0),
        (60.0, "code", 1.0),
    ]


def test_job_that_was_measured_has_its_gpu_model() -> None:
    job = an_ended_job("a", gpu_s=400.0, ran_s=100.0)
    measured = replace(job, progress=job.progress.with_measured_gpu_s("t4", 4, 2.0))
    assert (export_job(job).ran_on, export_job(measured).ran_on) == ("", "t4")
    assert export_job(measured).duration_s == export_job(job).duration_s


def test_work_on_unlike_models_counts_as_on_the_last_one() -> None:
    job = an_ended_job("a", gpu_s=400.0, ran_s=100.0)
    progress = job.progress.with_measured_gpu_s("t4", 4, 3.0).with_measured_gpu_s("v100-32g", 4, 1.0)
    exported = export_job(replace(job, progress=replace(progress, steps=200.0)))
    assert (exported.ran_on, exported.duration_s * exported.gpus) == ("v100-32g", 200.0)
