"""Kubernetes Events for the store's events."""

from __future__ import annotations

from typing import Any

from scheduler.domain.events import Event, EventCode
from scheduler.domain.snapshot import Snapshot
from scheduler.kubernetes.api_objects import ELASTIC_JOB, NODE, POOL
from scheduler.kubernetes.event_recorder import EventSeriesLog, build_event_writes, index_event_objects
from scheduler.kubernetes.resource_writes import Create, Patch, Writes
from scheduler.store.protocol import StoredEvent
from tests.builders import a_fleet, a_job, a_snapshot
from tests.unit.kubernetes.fake_server import FakeServer

SPEC = {"gpus": {"min": 1, "max": 1}, "command": ["x"]}


def build_resources() -> tuple[FakeServer, Snapshot]:
    server = FakeServer()
    annotations = {"ebbtide.dev/origin": "api"}
    server.add(ELASTIC_JOB, "llama-1", SPEC, namespace="team-a", annotations=annotations)
    server.add(NODE, "i0", {})
    server.add(POOL, "inference", {})
    return server, a_snapshot(a_fleet(training=0, inference=1), [a_job("llama-1")])


def told(number: int, at_s: float, subject: str, message: str = "m", code: str = "JobState") -> StoredEvent:
    return StoredEvent(number, 1, Event(at_s, EventCode(code), subject, message))


def recorded(log: EventSeriesLog, *events: StoredEvent) -> tuple[EventSeriesLog, tuple[Writes, ...]]:
    server, snapshot = build_resources()
    return build_event_writes(
        log,
        events,
        index_event_objects(server.resources(), snapshot, job_namespace="team-a"),
        reporting_instance="operator-0",
    )


def body_of(steps: Writes) -> dict[str, Any]:
    assert isinstance(steps[0], Create)
    return steps[0].body


def test_event_regards_its_object() -> None:
    _, (job, node) = recorded(
        EventSeriesLog(),
        told(1, 10.0, "llama-1"),
        told(2, 11.0, "i0", "down", EventCode.LOAN_LOST),
        told(3, 12.0, "nobody"),
    )
    first, second = body_of(job), body_of(node)
    assert first["metadata"] == {"name": "llama-1.0000000000000001", "namespace": "team-a"}
    assert (first["regarding"]["kind"], first["regarding"]["namespace"], first["type"]) == (
        "ElasticJob",
        "team-a",
        "Normal",
    )
    assert (second["metadata"]["namespace"], second["regarding"]["kind"], second["type"]) == (
        "default",
        "Node",
        "Warning",
    )
    assert (second["reason"], second["note"], second["eventTime"]) == (
        "LoanLost",
        "down",
        "1970-01-01T00:00:11.000000Z",
    )


def test_repeated_event_is_counted() -> None:
    log, steps = recorded(EventSeriesLog(), told(1, 10.0, "llama-1"), told(2, 11.0, "llama-1", "other"))
    assert len(steps) == 2
    _, ((again,),) = recorded(log, told(3, 500.0, "llama-1"), told(4, 609.0, "llama-1"))
    assert isinstance(again, Patch)
    assert (again.namespace, again.name) == ("team-a", "llama-1.0000000000000001")
    assert again.change == {"series": {"count": 3, "lastObservedTime": "1970-01-01T00:10:09.000000Z"}}


def test_event_is_created_before_it_is_counted() -> None:
    _, ((first, again),) = recorded(EventSeriesLog(), told(1, 10.0, "llama-1"), told(2, 11.0, "llama-1"))
    assert isinstance(first, Create)
    assert isinstance(again, Patch)


def test_late_repetition_starts_a_new_series() -> None:
    log, _ = recorded(EventSeriesLog(), told(1, 10.0, "llama-1"))
    log, ((new,),) = recorded(log, told(2, 611.0, "llama-1"))
    assert isinstance(new, Create)
    assert len(log.series) == 1


def test_long_note_is_truncated() -> None:
    _, (steps,) = recorded(EventSeriesLog(), told(1, 10.0, "inference", "x" * 5000, EventCode.POOL_CHANGED))
    assert len(body_of(steps)["note"]) <= 1024
