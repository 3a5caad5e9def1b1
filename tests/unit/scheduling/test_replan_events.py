"""Re-plan events: how long the phases of two generations of workers took."""

from __future__ import annotations

from dataclasses import replace

from scheduler.domain.events import Event, EventCode
from scheduler.domain.job import Job
from scheduler.domain.job_records import LoadTraffic
from scheduler.domain.job_state import JobState
from scheduler.domain.observation import Observation, Run, RunPhase
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.snapshot_update import SnapshotUpdate, update_snapshot
from tests.builders import a_fleet, a_job, a_snapshot

TWO = {"t0": (0, 1)}
STARTUP_S = {"start": 4.0, "load": 1.0, "first_step": 0.5}
SHUTDOWN_S = {**STARTUP_S, "notice": 0.25, "save": 2.0, "teardown": 0.125}


def resizing(generation: int = 2) -> Job:
    job = a_job("j", 2, state=JobState.RESIZING, on=TWO)
    return replace(job, allocation=replace(job.allocation, generation=generation))


def observe(snapshot: Snapshot | Job, *runs: Run) -> SnapshotUpdate:
    if isinstance(snapshot, Job):
        snapshot = a_snapshot(a_fleet(training=1, inference=0), [snapshot], now_s=10.0)
    return update_snapshot(snapshot, Observation(10.0, 7, runs), ())


def replan_events(update: SnapshotUpdate) -> list[Event]:
    return [event for event in update.events if event.code is EventCode.JOB_REPLANNED]


def run(generation: int, phase: RunPhase, **phases_s: float) -> Run:
    return Run("j", generation, phase, TWO if phase is RunPhase.RUNNING else {}, phases_s=phases_s)


def test_replan_event_follows_the_first_step_once() -> None:
    left = observe(resizing(), run(1, RunPhase.LEFT, **SHUTDOWN_S), run(2, RunPhase.STARTING))
    loading = observe(left.snapshot, run(1, RunPhase.LEFT, **SHUTDOWN_S), run(2, RunPhase.RUNNING, start=7.0))
    assert loading.snapshot.jobs["j"].state is JobState.RUNNING
    first = observe(loading.snapshot, run(2, RunPhase.RUNNING, start=7.0, load=1.0, first_step=0.5))
    again = observe(first.snapshot, run(2, RunPhase.RUNNING, start=7.0, load=1.0, first_step=0.5))
    assert [*replan_events(left), *replan_events(loading), *replan_events(again)] == []
    (event,) = replan_events(first)
    assert event.numbers == {
        "notice_s": 0.25, "save_s": 2.0, "teardown_s": 0.125, "start_s": 7.0, "load_s": 1.0, "first_step_s": 0.5,
    }  # fmt: skip
    assert "10.9 s: notice 0.2 s, save 2.0 s" in event.message


def test_replan_event_has_the_bytes_read() -> None:
    left = observe(resizing(), run(1, RunPhase.LEFT, **SHUTDOWN_S))
    back = replace(run(2, RunPhase.RUNNING, **STARTUP_S), traffic=LoadTraffic(3_000_000, 3_100_000, 2_000_000))
    (event,) = replan_events(observe(left.snapshot, back))
    assert all(size in event.message for size in ("3.1 MB", "2.0 MB"))
    byte_counts = {name: count for name, count in event.numbers.items() if name.endswith("_bytes")}
    assert byte_counts == {"needed_bytes": 3e6, "read_bytes": 3.1e6, "moved_bytes": 2e6}


def test_first_start_is_not_a_replan() -> None:
    job = replace(resizing(1), state=JobState.STARTING)
    first = observe(job, run(1, RunPhase.RUNNING, **STARTUP_S))
    assert replan_events(first) == []
    assert first.snapshot.jobs["j"].replan.generation == 1


def test_failed_generation_leaves_the_event_to_the_next() -> None:
    left = observe(resizing(), run(1, RunPhase.LEFT, **SHUTDOWN_S), run(2, RunPhase.FAILED)).snapshot.jobs["j"]
    assert left.state is JobState.QUEUED
    third = replace(resizing(3), replan=left.replan)
    (event,) = replan_events(observe(third, run(3, RunPhase.RUNNING, **STARTUP_S)))
    assert event.numbers["save_s"] == 2.0


def test_job_that_succeeds_at_once_still_has_the_event() -> None:
    left = observe(resizing(), run(1, RunPhase.LEFT, **SHUTDOWN_S))
    assert len(replan_events(observe(left.snapshot, run(2, RunPhase.SUCCEEDED, **STARTUP_S)))) == 1
