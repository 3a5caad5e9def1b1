"""Readers whose place has been swept: they are told so, and where to go on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from api.client import Client
from api.identity.principals import ANONYMOUS
from api.streams.server_sent_events import StreamRegistry
from api.streams.sources import EventSubscription, follow_events
from scheduler.domain.events import Event, EventCode
from scheduler.domain.snapshot import Snapshot
from scheduler.store.api_protocol import HistoryLog
from scheduler.store.protocol import Commit
from scheduler.store.schema_migration import migrate
from scheduler.store.sql_store import SqlStore
from tests.api.conftest import ApiService, problem_of


@pytest.fixture
def swept(tmp_path: Path) -> Iterator[ApiService]:
    """Of 5 events, 2 are kept."""
    url = f"sqlite:///{tmp_path / 'state.sqlite'}"
    migrate(url)
    store = SqlStore(url)
    events = tuple(Event(at_s, EventCode.JOB_STATE, "t0", "it happened") for at_s in (1.0, 2.0, 3.0, 4.0, 5.0))
    store.commit(Commit(Snapshot(), replace(Snapshot(), generation=1), epoch=0, events=events))
    store.retention.delete_old_rows(HistoryLog.EVENTS, before_s=3.5, rows_max=9, epoch=0)
    yield ApiService(store=store)
    store.close()


def test_a_page_from_the_start_begins_with_what_is_kept(swept: ApiService) -> None:
    assert [event["number"] for event in swept.get("/v1/events")["items"]] == [4, 5]
    assert [event["number"] for event in swept.get("/v1/events", after=3)["items"]] == [4, 5]


def test_a_cursor_into_what_was_swept_is_gone_and_the_answer_says_how_to_go_on(swept: ApiService) -> None:
    problem = problem_of(swept.http.get("/v1/events", params={"after": 2}), 410)
    assert problem["type"] == "urn:ebbtide:problem:swept"
    assert "events up to number 3 are kept no more, 2 among them: ask from the start" in problem["detail"]


@pytest.mark.parametrize(
    ("after", "begins"), [(1, b'id: 3\nevent: gap\ndata: {"after":1,"up_to":3}\n\n'), (3, b"id: 4\n")]
)
def test_a_stream_tells_of_the_gap_and_goes_on_behind_it(swept: ApiService, after: int, begins: bytes) -> None:
    async def play() -> list[bytes]:
        streams = StreamRegistry(swept.store, streams_max=1)
        wish = EventSubscription(ANONYMOUS, after, swept=swept.store.get_retention_mark(HistoryLog.EVENTS))
        chunks = follow_events(streams, swept.store, wish)
        told = [await anext(chunks) for _ in range(2 if after == 3 else 3)]
        await chunks.aclose()
        return told

    told = asyncio.run(play())
    assert told[1].startswith(begins)
    assert told[-1].startswith(b"id: 4\n")


def test_the_client_gives_a_gap_in_the_form_of_an_event() -> None:
    told = httpx.Response(200, text='id: 3\nevent: gap\ndata: {"after":1,"up_to":3}\n\n')
    with Client("http://service", transport=httpx.MockTransport(lambda _: told)) as client:
        event = next(client.follow_events(after=1))
    assert (event["code"], event["number"]) == ("Gap", 3)
    assert event["message"] == "events after number 1 up to 3 are kept no more"
