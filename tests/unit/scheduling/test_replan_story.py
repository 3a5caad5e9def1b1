"""How long a re-plan took, told once, from what two generations of workers said."""

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
CAME_S = {"start": 4.0, "load": 1.0, "first_step": 0.5}
LEFT_S = {**CAME_S, "notice": 0.25, "save": 2.0, "teardown": 0.125}


def resizing(generation: int = 2) -> Job:
    job = a_job("j", 2, state=JobState.RESIZING, on=TWO)
    return replace(job, allocation=replace(job.allocation, generation=generation))


def seen(snapshot: Snapshot | Job, *runs: Run) -> SnapshotUpdate:
    if isinstance(snapshot, Job):
        snapshot = a_snapshot(a_fleet(training=1, inference=0), [snapshot], now_s=10.0)
    return update_snapshot(snapshot, Observation(10.0, 7, runs), ())


def told(absorbed: SnapshotUpdate) -> list[Event]:
    return [event for event in absorbed.events if event.code is EventCode.JOB_REPLANNED]


def run(generation: int, phase: RunPhase, **phases_s: float) -> Run:
    return Run("j", generation, phase, TWO if phase is RunPhase.RUNNING else {}, phases_s=phases_s)


def test_the_phases_of_both_generations_are_told_with_the_first_step_and_only_then_and_once() -> None:
    left = seen(resizing(), run(1, RunPhase.LEFT, **LEFT_S), run(2, RunPhase.STARTING))
    loading = seen(left.snapshot, run(1, RunPhase.LEFT, **LEFT_S), run(2, RunPhase.RUNNING, start=7.0))
    assert loading.snapshot.jobs["j"].state is JobState.RUNNING
    first = seen(loading.snapshot, run(2, RunPhase.RUNNING, start=7.0, load=1.0, first_step=0.5))
    again = seen(first.snapshot, run(2, RunPhase.RUNNING, start=7.0, load=1.0, first_step=0.5))
    assert [*told(left), *told(loading), *told(again)] == []
    (event,) = told(first)
    assert event.numbers == {
        "notice_s": 0.25, "save_s": 2.0, "teardown_s": 0.125, "start_s": 7.0, "load_s": 1.0, "first_step_s": 0.5,
    }  # fmt: skip
    assert event.message.startswith("the re-plan took its workers 10.9 s: notice 0.2 s, save 2.0 s")


def test_what_the_workers_read_to_come_back_is_told_beside_the_times() -> None:
    left = seen(resizing(), run(1, RunPhase.LEFT, **LEFT_S))
    back = replace(run(2, RunPhase.RUNNING, **CAME_S), traffic=LoadTraffic(3_000_000, 3_100_000, 2_000_000))
    (event,) = told(seen(left.snapshot, back))
    assert event.message.endswith("; they read 3.1 MB, of which other nodes had written 2.0 MB")
    bytes_told = {name: count for name, count in event.numbers.items() if name.endswith("_bytes")}
    assert bytes_told == {"needed_bytes": 3e6, "read_bytes": 3.1e6, "moved_bytes": 2e6}


def test_a_start_that_follows_no_notice_is_no_replan() -> None:
    job = replace(resizing(1), state=JobState.STARTING)
    first = seen(job, run(1, RunPhase.RUNNING, **CAME_S))
    assert told(first) == []
    assert first.snapshot.jobs["j"].replan.generation == 1


def test_workers_that_die_before_their_first_step_leave_the_story_to_the_next() -> None:
    left = seen(resizing(), run(1, RunPhase.LEFT, **LEFT_S), run(2, RunPhase.FAILED)).snapshot.jobs["j"]
    assert left.state is JobState.QUEUED
    third = replace(resizing(3), replan=left.replan)
    (event,) = told(seen(third, run(3, RunPhase.RUNNING, **CAME_S)))
    assert event.numbers["save_s"] == 2.0


def test_a_job_that_ends_at_once_still_tells_its_first_step() -> None:
    left = seen(resizing(), run(1, RunPhase.LEFT, **LEFT_S))
    assert len(told(seen(left.snapshot, run(2, RunPhase.SUCCEEDED, **CAME_S)))) == 1
