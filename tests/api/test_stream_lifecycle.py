"""The life of a stream without a socket: idle streams, slow readers, an unavailable database, limits, expired
tokens."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import httpx
import pytest

from api.identity.principals import ANONYMOUS, Grant, Principal, Role
from api.streams.server_sent_events import EventStreamResponse, EventTail, StreamRegistry, StreamTimings
from api.streams.sources import EventSubscription, follow_events
from scheduler.domain.events import Event, EventCode
from scheduler.domain.snapshot import Snapshot
from scheduler.store.memory_store import MemoryStore
from scheduler.store.protocol import Commit, Page, StoredEvent, UnavailableError
from tests.api.authenticated_service import AuthenticatedService
from tests.builders import a_job

QUICK = StreamTimings(heartbeat_s=0.02, write_timeout_s=0.05, lifetime_s=0.5, poll_s=0.005)
SCOPE = {"type": "http", "path": "/v1/events"}


class FlakyStore(MemoryStore):
    """A store that is unavailable while `away` is set."""

    away = False

    def list_events(self, page: Page, *, subject: str = "") -> tuple[StoredEvent, ...]:
        if self.away:
            raise UnavailableError("gone")
        return super().list_events(page, subject=subject)


def tell(store: MemoryStore, *subjects: str, code: EventCode = EventCode.JOB_STATE) -> None:
    before = store.load().snapshot
    jobs = {name: a_job(name, 1, 1, queue=name) for name in ("a", "b")}
    after = Snapshot(generation=before.generation + 1, jobs=jobs)
    events = tuple(Event(0.0, code, subject, "it happened") for subject in subjects)
    store.commit(Commit(before, after, epoch=0, events=events))


async def sent_by(
    streams: StreamRegistry, store: MemoryStore, subscription: EventSubscription, *, stalls: bool = False
) -> list[dict[str, Any]]:
    """Return all ASGI messages of one stream."""
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)
        if stalls and len(sent) > 1:
            await asyncio.sleep(3600)

    async def receive() -> Any:
        await asyncio.sleep(3600)

    await EventStreamResponse(follow_events(streams, store, subscription), streams)(SCOPE, receive, send)
    return sent


def test_an_idle_stream_sends_heartbeats_and_ends_after_its_lifetime() -> None:
    store = MemoryStore()
    sent = asyncio.run(
        sent_by(StreamRegistry(store, streams_max=1, timings=QUICK), store, EventSubscription(ANONYMOUS, 0))
    )
    assert sent[1]["body"] == b"retry: 1000\n\n"
    assert {message["body"] for message in sent[2:-1]} == {b": still here\n\n"}
    assert sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}


def test_a_stalled_reader_is_dropped_and_frees_its_slot() -> None:
    async def play() -> list[dict[str, Any]]:
        store = MemoryStore()
        streams = StreamRegistry(store, streams_max=1, timings=QUICK)
        sent = await sent_by(streams, store, EventSubscription(ANONYMOUS, 0), stalls=True)
        streams.require_capacity("")
        return sent

    assert len(asyncio.run(play())) == 2


def test_a_stream_survives_an_unavailable_database(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.streams.server_sent_events.RETRY_INTERVAL_S", 0.01)
    monkeypatch.setattr("api.streams.sources.RETRY_INTERVAL_S", 0.01)

    async def play() -> bytes:
        store = FlakyStore()
        store.away = True
        streams = StreamRegistry(store, streams_max=1, timings=QUICK)
        chunks = follow_events(streams, store, EventSubscription(ANONYMOUS, 0))
        frames = [await anext(chunks) for _ in range(3)]
        assert frames[1:] == [b": still here\n\n"] * 2
        tell(store, "a")
        store.away = False
        while (chunk := await anext(chunks)) == b": still here\n\n":
            pass
        await chunks.aclose()
        return chunk

    assert asyncio.run(play()).startswith(b"id: 1\ndata: {")


@pytest.mark.parametrize("path", ["/v1/events", "/v1/jobs/{job}/events", "/v1/jobs/{job}/logs"])
def test_a_stream_ends_when_its_token_becomes_invalid(path: str) -> None:
    guarded = AuthenticatedService().with_fleet()
    timings = replace(QUICK, lifetime_s=60.0, token_check_s=0.01)
    guarded.app.state.streams = StreamRegistry(guarded.store, streams_max=1, timings=timings)
    job_id, secret = guarded.job(guarded.root, "research"), guarded.token("ann", "viewer", life_s=60.0)

    async def play() -> httpx.Response:
        transport = httpx.ASGITransport(guarded.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://service") as http:
            headers = {"Authorization": f"Bearer {secret}", "Accept": "text/event-stream"}
            stream = asyncio.create_task(http.get(path.format(job=job_id), headers=headers))
            assert not (await asyncio.wait([stream], timeout=0.5))[0]
            guarded.clock.move_to(guarded.clock.now_s() + 61.0)
            return await asyncio.wait_for(stream, 30.0)

    assert asyncio.run(play()).status_code == 200


def test_one_token_may_hold_half_of_the_streams() -> None:
    guarded = AuthenticatedService()
    guarded.app.state.streams = StreamRegistry(guarded.store, streams_max=4, timings=replace(QUICK, lifetime_s=60.0))
    greedy, other = (guarded.token(name, "viewer") for name in ("greedy", "other"))

    async def play() -> list[int]:
        transport = httpx.ASGITransport(guarded.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://service") as http:

            async def ask(secret: str) -> int:
                headers = {"Authorization": f"Bearer {secret}", "Accept": "text/event-stream"}
                return (await http.get("/v1/events", headers=headers)).status_code

            streams = [asyncio.create_task(ask(secret)) for secret in (greedy, greedy, greedy, other, other, other)]
            while sum(stream.done() for stream in streams) < 2:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)
            refused = [stream.result() for stream in streams if stream.done()]
            guarded.app.state.streams.close()
            await asyncio.wait(streams)
            return refused

    assert asyncio.run(play()) == [429, 429], "the third of each"


def test_a_viewer_of_a_queue_gets_events_of_its_jobs_only() -> None:
    async def play() -> list[bytes]:
        store = MemoryStore()
        tell(store, "a", "b", "t0")
        tell(store, "b", code=EventCode.QUEUE_CHANGED)
        tell(store, "a", code=EventCode.QUEUE_CHANGED)
        viewer = Principal("ann", (Grant(Role.VIEWER, "a"),), subject="token:ann")
        streams = StreamRegistry(store, streams_max=1, timings=QUICK)
        chunks = follow_events(streams, store, EventSubscription(viewer, 0))
        first = [await anext(chunks) for _ in range(2)][1]
        tell(store, "b", "a")
        while (second := await anext(chunks)) == b": still here\n\n":
            pass
        await chunks.aclose()
        return [line for line in (first + second).split(b"\n") if line.startswith(b"id: ")]

    assert asyncio.run(play()) == [b"id: 1", b"id: 5", b"id: 7"]


def test_events_outside_the_ring_are_read_from_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.streams.server_sent_events.RING_EVENTS", 3)

    async def play() -> tuple[list[int] | None, ...]:
        store = MemoryStore()
        tail = EventTail(store, poll_s=0.001)
        with tail.subscribe():
            while not tail.changed.is_set() and tail.events_after(0) is None:
                await asyncio.sleep(0.001)
            tell(store, *"abcde")
            while tail.newest < 5:
                await asyncio.sleep(0.001)
            found = [tail.events_after(number) for number in (1, 2, 4, 5)]
        assert tail.events_after(5) is None, "nobody listens: nothing is known"
        return tuple(None if each is None else [event.number for event in each] for each in found)

    assert asyncio.run(play()) == (None, [3, 4, 5], [5], [])
