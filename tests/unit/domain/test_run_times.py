"""Histories of run times: whose typical job counts, which ended jobs count, and how many histories are kept."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.domain import run_times
from scheduler.domain.job import Job
from scheduler.domain.job_account import JobAccount
from scheduler.domain.job_state import JobState
from scheduler.domain.run_times import RUN_TIMES_KEPT, RunTimes, find_typical_run_time_s, record_run_time
from tests.builders import a_job


def ended(owner: str, gpu_s: float, *, state: JobState = JobState.SUCCEEDED, queue: str = "lab") -> Job:
    return replace(a_job("j", 2, state=state, queue=queue), owner=owner, account=JobAccount(gpu_s=gpu_s))


def recorded(*jobs: Job) -> dict[str, RunTimes]:
    known: dict[str, RunTimes] = {}
    for at, job in enumerate(jobs):
        known = record_run_time(known, job, {"lab"}, float(at))
    return known


def typical(known: dict[str, RunTimes], owner: str, queue: str) -> float | None:
    return find_typical_run_time_s(known, ended(owner, 0.0, queue=queue), {"lab"})


def test_own_jobs_count_before_those_of_the_queue_and_the_cluster() -> None:
    known = recorded(ended("ada", 200.0), ended("bob", 800.0), ended("bob", 600.0), ended("", 2000.0, queue="any"))
    assert typical(known, "ada", "any") == 100.0
    assert typical(known, "bob", "lab") == 400.0
    assert typical(known, "cyn", "lab") == 300.0
    assert typical(known, "cyn", "invented") == 1000.0, "undeclared queues share the history of the default queue"
    assert typical({}, "ada", "lab") is None


def test_failed_jobs_and_early_cancellations_do_not_count() -> None:
    known = recorded(
        ended("ada", 200.0),
        ended("ada", 2.0, state=JobState.FAILED),
        ended("ada", 2.0, state=JobState.CANCELLED),
        ended("ada", 400.0, state=JobState.CANCELLED),
        ended("ada", 0.0),
    )
    assert known["owner name:ada"].run_times_s == (100.0, 200.0)


def test_histories_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_times, "HISTORIES_MAX", 3)
    known = recorded(*[ended("ada", 2.0 * at) for at in range(1, 30)], ended("bob", 2.0))
    assert known.keys() == {"owner name:bob", "queue lab", "cluster"}
    assert len(known["cluster"].run_times_s) == RUN_TIMES_KEPT
