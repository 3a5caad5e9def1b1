"""Jobs that are preempted if a recall leaves others without GPUs."""

from __future__ import annotations

from typing import Any

from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.policies.preemption import find_preemption_victims
from scheduler.scheduling.policies.settings import PolicySettings
from tests.builders import a_fleet, a_job, a_snapshot

SETTINGS = PolicySettings(run_time_min_s=0.0)


def runs(job_id: str, node: str, first: int, gpus: int, for_s: float, **more: Any) -> Job:
    on = {node: tuple(range(first, first + gpus))}
    return a_job(job_id, gpus, state=JobState.RUNNING, on=on, steps=int(for_s * gpus), **more)


SHORT = [runs(f"short{at}", "i0", at, 1, 100.0) for at in range(3)]


def seen(*jobs: Job) -> Snapshot:
    return a_snapshot(a_fleet(training=2, inference=1), [*SHORT, *jobs])


def ways(*jobs: Job, stranded: list[Job] = SHORT, settings: PolicySettings = SETTINGS) -> dict[str, tuple[str, ...]]:
    return dict(find_preemption_victims(seen(*jobs), stranded, {job.id for job in stranded}, settings))


def test_long_job_is_preempted_for_all_that_fit_on_its_gpus() -> None:
    wide, narrow = runs("wide", "t0", 0, 4, 1_000.0), runs("narrow", "t1", 0, 1, 1_000.0)
    assert ways(wide, narrow) == {"wide": ("short0", "short1", "short2")}


def test_stranded_jobs_with_least_service_come_first() -> None:
    long = runs("long", "i0", 3, 1, 450.0)
    assert ways(runs("one", "t0", 0, 1, 1_000.0), stranded=[long, SHORT[0]]) == {"one": ("short0",)}


def test_job_with_similar_remaining_service_stays() -> None:
    assert ways(runs("similar", "t0", 0, 1, 199.0)) == {}
    assert ways(runs("twice", "t0", 0, 1, 200.0)) == {"twice": ("short0",)}


def test_recently_started_or_non_fungible_job_stays() -> None:
    begun = runs("begun", "t0", 0, 4, 1_000.0)
    assert ways(begun, settings=PolicySettings(run_time_min_s=600.0)) == {}
    assert ways(runs("fixed", "t0", 0, 4, 1_000.0, fungible=False)) == {}


def test_no_preemption_for_another_queue_or_lower_priority() -> None:
    assert ways(runs("other", "t0", 0, 4, 1_000.0, queue="research")) == {}
    assert ways(runs("higher", "t0", 0, 4, 1_000.0, priority=1)) == {}
