"""Preconditions: commands with an ETag, and the limit of waiting jobs of a user."""

from __future__ import annotations

import pytest

from scheduler.domain.commands import (
    CancelJob,
    ChangeJob,
    ChangeNode,
    ChangeQueue,
    Command,
    CommandBody,
    CordonNode,
    DeletePool,
    DeleteQueue,
    ForecastMade,
    RemoveNode,
    ResumeJob,
    ScaleJob,
    SetLendingPolicy,
    SubmitJob,
    SuspendJob,
    UncordonNode,
)
from scheduler.domain.events import EventCode
from scheduler.domain.fleet import Forecast
from scheduler.domain.job_queue import JobQueue
from scheduler.domain.job_state import JobState
from scheduler.domain.lending_policy import LendingPolicy
from scheduler.domain.observation import Observation
from scheduler.scheduling.preconditions import job_etag, node_etag, pool_etag, queue_etag
from scheduler.scheduling.snapshot_update import SnapshotUpdate, update_snapshot
from tests.builders import a_fleet, a_job, a_snapshot, a_spec

JOB = a_job("j", 1, state=JobState.QUEUED)
QUEUE = JobQueue("blue", user_jobs_max=2)
NOW = a_snapshot(a_fleet(training=1, inference=1), [JOB], queues={"blue": QUEUE}, now_s=100.0)
JOB_READ, NODE_READ, QUEUE_READ = job_etag(JOB), node_etag(NOW.nodes["t0"]), queue_etag(QUEUE)
POOL_READ = pool_etag(NOW.pools["inference"])


def apply(*commands: Command) -> SnapshotUpdate:
    return update_snapshot(NOW, Observation(0.0, 0), commands)


def refusals(absorbed: SnapshotUpdate) -> list[tuple[str, str]]:
    return [(event.subject, event.cause) for event in absorbed.events if event.code is EventCode.COMMAND_REFUSED]


@pytest.mark.parametrize(
    ("read", "change", "again"),
    [
        (JOB_READ, ScaleJob("j", 2, 2), ScaleJob("j", 3, 3)),
        (JOB_READ, ChangeJob("j", priority=3), CancelJob("j")),
        (JOB_READ, SuspendJob("j"), ResumeJob("j")),
        (JOB_READ, CancelJob("j"), SuspendJob("j")),
        (POOL_READ, SetLendingPolicy("inference", LendingPolicy(headroom=0.5)), DeletePool("inference")),
        (NODE_READ, CordonNode("t0"), CordonNode("t0", drain=True)),
        (NODE_READ, CordonNode("t0"), UncordonNode("t0")),
        (NODE_READ, ChangeNode("t0", lendable=False), ChangeNode("t0", lendable=True)),
        (NODE_READ, RemoveNode("t0"), RemoveNode("t0")),
        (QUEUE_READ, ChangeQueue(JobQueue("blue")), DeleteQueue("blue")),
        (QUEUE_READ, DeleteQueue("blue"), ChangeQueue(JobQueue("blue"))),
    ],
)
def test_second_change_of_the_same_version_is_refused(read: str, change: CommandBody, again: CommandBody) -> None:
    subject = getattr(change, "name", None) or getattr(change, "job_id", None) or "blue"
    subject = "inference" if isinstance(change, SetLendingPolicy) else subject
    first, second = Command("first", 90.0, change, basis=read), Command("second", 90.0, again, basis=read)
    assert refusals(apply(first)) == []
    both = apply(first, second)
    assert refusals(both) == [(subject, "second")]
    assert both.snapshot == apply(first).snapshot


def test_command_without_an_etag_always_applies() -> None:
    both = apply(
        Command("first", 90.0, ScaleJob("j", 2, 2), basis=JOB_READ), Command("second", 90.0, ScaleJob("j", 3, 3))
    )
    assert refusals(both) == []
    assert both.snapshot.jobs["j"].spec.max_gpus == 3


def test_etag_on_a_command_without_one_raises() -> None:
    forecast = ForecastMade("inference", Forecast(0.0, 1.0, (0.5,), (0.0,), ""))
    with pytest.raises(ValueError, match="ForecastMade"):
        apply(Command("odd", 90.0, forecast, basis="x"))


def submit(number: int, owner: str, *, is_counted: bool = True) -> Command:
    body = SubmitJob(f"{owner}-{number}", a_spec(queue="blue"))
    return Command(f"c-{owner}-{number}", 90.0, body, owner, is_counted=is_counted)


def test_user_jobs_max_limits_waiting_jobs() -> None:
    both = apply(*(submit(at, owner) for at in range(4) for owner in ("ann", "bob")))
    assert sorted(both.snapshot.jobs) == ["ann-0", "ann-1", "bob-0", "bob-1", "j"]
    assert refusals(both) == [(f"{owner}-{at}", f"c-{owner}-{at}") for at in (2, 3) for owner in ("ann", "bob")]
    assert "ann has 2 waiting jobs in queue blue" in next(e.message for e in both.events if e.subject == "ann-2")


def test_jobs_from_other_sources_are_not_limited() -> None:
    assert refusals(apply(*(submit(at, "ann", is_counted=False) for at in range(4)))) == []


def test_move_into_a_full_queue_is_refused() -> None:
    move = Command("move", 90.0, ChangeJob("other-0", queue="blue"), "boss", is_counted=True)
    stay = Command("stay", 90.0, ChangeJob("ann-0", queue="blue", priority=1), "boss", is_counted=True)
    other = Command("c", 90.0, SubmitJob("other-0", a_spec(queue="red")), "ann", is_counted=True)
    told = apply(submit(0, "ann"), submit(1, "ann"), other, move, stay)
    assert refusals(told) == [("other-0", "move")]
    assert told.snapshot.jobs["other-0"].spec.queue == "red"
    assert told.snapshot.jobs["ann-0"].spec.priority == 1
