"""Readers whose cursor points to events that retention has deleted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from api.identity.principals import ANONYMOUS
from api.streams.server_sent_events import StreamRegistry
from api.streams.sources import EventSubscription, follow_events
from ebbtide.client import Client
from scheduler.domain.events import Event, EventCode
from scheduler.domain.snapshot import Snapshot
from scheduler.store.api_protocol import HistoryLog
from scheduler.store.protocol import Commit
from scheduler.store.schema_migration import migrate
from scheduler.store.sql_store import SqlStore
from tests.api.conftest import ApiService, problem_of


@pytest.fixture
def service_after_retention(tmp_path: Path) -> Iterator[ApiService]:
    """A service that has kept 2 of 5 events."""
    url = f"sqlite:///{tmp_path / 'state.sqlite'}"
    migrate(url)
    store = SqlStore(url)
    events = tuple(Event(at_s, EventCode.JOB_STATE, "t0", "it happened") for at_s in (1.0, 2.0, 3.0, 4.0, 5.0))
    store.commit(Commit(Snapshot(), replace(Snapshot(), generation=1), epoch=0, events=events))
    store.retention.delete_old_rows(HistoryLog.EVENTS, before_s=3.5, rows_max=9, epoch=0)
    yield ApiService(store=store)
    store.close()


def test_the_first_page_starts_with_the_oldest_remaining_event(service_after_retention: ApiService) -> None:
    assert [event["number"] for event in service_after_retention.get("/v1/events")["items"]] == [4, 5]
    assert [event["number"] for event in service_after_retention.get("/v1/events", after=3)["items"]] == [4, 5]


def test_a_cursor_to_deleted_events_is_a_410(service_after_retention: ApiService) -> None:
    problem = problem_of(service_after_retention.http.get("/v1/events", params={"after": 2}), 410)
    assert problem["type"] == "urn:ebbtide:problem:swept"
    assert "number 3" in problem["detail"]


@pytest.mark.parametrize(
    ("after", "first_chunk"), [(1, b'id: 3\nevent: gap\ndata: {"after":1,"up_to":3}\n\n'), (3, b"id: 4\n")]
)
def test_a_stream_reports_the_gap_and_continues(
    service_after_retention: ApiService, after: int, first_chunk: bytes
) -> None:
    async def read_stream() -> list[bytes]:
        streams = StreamRegistry(service_after_retention.store, streams_max=1)
        subscription = EventSubscription(
            ANONYMOUS, after, deleted_up_to=service_after_retention.store.get_retention_mark(HistoryLog.EVENTS)
        )
        chunks = follow_events(streams, service_after_retention.store, subscription)
        chunks_sent = [await anext(chunks) for _ in range(2 if after == 3 else 3)]
        await chunks.aclose()
        return chunks_sent

    chunks_sent = asyncio.run(read_stream())
    assert chunks_sent[1].startswith(first_chunk)
    assert chunks_sent[-1].startswith(b"id: 4\n")


def test_the_client_yields_the_gap_as_an_event() -> None:
    stream = httpx.Response(
        200, headers={"Content-Type": "text/event-stream"}, text='id: 3\nevent: gap\ndata: {"after":1,"up_to":3}\n\n'
    )
    with Client("http://service", transport=httpx.MockTransport(lambda _: stream)) as client:
        event = next(client.follow_events(after=1))
    assert (event["code"], event["number"]) == ("Gap", 3)
    assert "2 to 3" in event["message"]
