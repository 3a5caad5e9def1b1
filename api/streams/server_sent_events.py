"""Server-sent events (HTML Living Standard, 9.2): frames, the streaming response, and what streams of a process share.

`EventTail` reads new events once for all streams of a process. Each stream reads only what its socket takes, so a slow
reader costs no memory. sse-starlette is not used: it keeps process-wide state, polls twice a second per event loop, and
has no lifetime, token or capacity checks.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.event_views import event_view
from api.http.errors import ProblemError
from api.identity.authorization import Visibility
from api.identity.principals import Principal
from scheduler.store.api_protocol import ApiStore
from scheduler.store.protocol import Page, StoredEvent, UnavailableError
from scheduler.telemetry.metrics import STREAMS

logger = logging.getLogger(__name__)

MEDIA_TYPE = "text/event-stream"
HEARTBEAT_FRAME = b": still here\n\n"
RETRY_FRAME = b"retry: 1000\n\n"
"""Milliseconds after which a client reconnects."""
_CLOSE_TIMEOUT_S = 1.0


def encode_frame(document: Mapping[str, Any], *, number: object, event: str = "") -> bytes:
    """Return one event as bytes. `event` is its type, if it is not `message`."""
    kind = f"event: {event}\n" if event else ""
    data = json.dumps(document, separators=(",", ":"))
    return f"id: {number}\n{kind}data: {data}\n\n".encode()


class EventStreamResponse(Response):
    """A response that sends chunks until the stream ends.

    The stream ends when its chunks do, when the client disconnects, a write times out, the token becomes invalid, the
    lifetime is over, or the service stops. Clients reconnect with the id of the last event.
    """

    media_type = MEDIA_TYPE

    def __init__(self, chunks: AsyncGenerator[bytes], streams: StreamRegistry) -> None:
        self._chunks = chunks
        self._streams = streams
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream. Raises ProblemError (503, 429) before the first byte if there are too many streams."""
        caller = _stream_owner(scope)
        self._streams.require_capacity(caller)
        sending = asyncio.create_task(self._send(send))
        disconnecting = asyncio.create_task(_wait_for_disconnect(receive))
        expiring = asyncio.create_task(self._wait_for_invalid_token(scope))
        tasks: tuple[asyncio.Task[None], ...] = (sending, disconnecting, expiring)
        self._streams.add(sending, caller)
        try:
            lifetime_s = self._streams.timings.lifetime_s
            await asyncio.wait(tasks, timeout=lifetime_s, return_when=asyncio.FIRST_COMPLETED)
            is_disconnected = disconnecting.done()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        failure = None if sending.cancelled() else sending.exception()
        if isinstance(failure, TimeoutError):
            logger.info("closing a stream of %s: the client does not read", scope["path"])
        elif failure is not None:
            raise failure
        elif not is_disconnected:
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                    await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._chunks) as chunks:
            async for chunk in chunks:
                async with asyncio.timeout(self._streams.timings.write_timeout_s):
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def _wait_for_invalid_token(self, scope: Scope) -> None:
        """Return when the token is no longer valid; never, if authentication is off."""
        is_token_valid = scope.get("state", {}).get("is_token_valid")
        while is_token_valid is None or await is_token_valid():
            await asyncio.sleep(self._streams.timings.token_check_s)


def _stream_owner(scope: Scope) -> str:
    """Return the token id or the subject of the stream's principal; empty while authentication is off."""
    state = scope.get("state", {})
    principal = state.get("principal")
    return "" if principal is None or "is_token_valid" not in state else principal.token_id or principal.subject


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


RING_EVENTS = 4096
BATCH_EVENTS = 500
RETRY_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class EncodedEvent:
    """An event with its frame, encoded once for all streams."""

    stored: StoredEvent
    chunk: bytes

    @property
    def number(self) -> int:
        return self.stored.number


def encode_event(stored: StoredEvent) -> EncodedEvent:
    return EncodedEvent(stored, encode_frame(event_view(stored), number=stored.number))


class EventTail:
    """The newest events of the store, read by one task while there are subscribers.

    The last RING_EVENTS stay in memory; a stream that is further behind reads the store. One leader at a time assigns
    and commits numbers, so no event appears below a number that was already read. Belongs to one event loop. `changed`
    is set and replaced whenever there are new events.
    """

    def __init__(self, store: ApiStore, *, poll_s: float) -> None:
        self.changed = asyncio.Event()
        self.newest = 0
        self._store = store
        self._poll_s = poll_s
        self._ring: deque[EncodedEvent] = deque()
        self._floor: float = float("inf")  # the ring holds all events with higher numbers
        self._subscribers = 0
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def subscribe(self) -> Iterator[None]:
        """Poll the store while at least one caller is inside the block."""
        self._subscribers += 1
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            self._subscribers -= 1
            if not self._subscribers:
                self._task.cancel()
                self._task, self._floor = None, float("inf")

    def events_after(self, number: int) -> list[EncodedEvent] | None:
        """Return all events after the number, or None if the ring does not reach back that far."""
        if number < self._floor:
            return None
        found: list[EncodedEvent] = []
        for event in reversed(self._ring):
            if event.number <= number:
                break
            found.append(event)
        return found[::-1]

    async def _run(self) -> None:
        self._ring.clear()
        is_started, is_unavailable = False, False
        while True:
            try:
                if not is_started:
                    self._floor = self.newest = await asyncio.to_thread(self._store.get_last_event_number)
                    is_started = True
                    self._notify()
                count = await self._read()
            except Exception as error:
                if not isinstance(error, UnavailableError):
                    logger.exception("cannot read events")
                elif not is_unavailable:
                    logger.warning("event streams are waiting for the database: %s", error)
                is_unavailable = True
                await asyncio.sleep(RETRY_INTERVAL_S)
                continue
            is_unavailable = False
            if count < BATCH_EVENTS:
                await asyncio.sleep(self._poll_s)

    async def _read(self) -> int:
        """Read new events and return their count.

        Asks for the last number first, which is half as expensive as an empty page.
        """
        if await asyncio.to_thread(self._store.get_last_event_number) <= self.newest:
            return 0
        page = Page(self.newest, BATCH_EVENTS)
        new = [encode_event(stored) for stored in await asyncio.to_thread(self._store.list_events, page)]
        if new:
            self._ring.extend(new)
            self.newest = new[-1].number
            while len(self._ring) > RING_EVENTS:
                self._floor = self._ring.popleft().number
            self._notify()
        return len(new)

    def _notify(self) -> None:
        previous, self.changed = self.changed, asyncio.Event()
        previous.set()


def redact_events(principal: Principal, store: ApiStore, events: Sequence[EncodedEvent]) -> list[EncodedEvent]:
    """Return the events that the principal may see, with hidden job ids replaced. Reads the store."""
    visibility = Visibility(principal, store.load().snapshot, store.get_ended_job, store.find_ended_job_queues)
    visibility.load_job_queues(event.stored.event.subject for event in events)
    visible = [event for event in events if visibility.can_see_subject(event.stored.event.subject)]
    views = visibility.redact_all([event_view(event.stored) for event in visible])
    return [
        EncodedEvent(event.stored, encode_frame(view, number=event.number))
        for event, view in zip(visible, views, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class StreamTimings:
    """`heartbeat_s`: silence after which a heartbeat is sent. `write_timeout_s`: how long one write may take.
    `lifetime_s`: maximum age of a stream. `token_check_s`: interval of token checks. `poll_s` and `file_poll_s`:
    intervals at which the store and log files are polled."""

    heartbeat_s: float = 15.0
    write_timeout_s: float = 30.0
    lifetime_s: float = 3600.0
    token_check_s: float = 5.0
    poll_s: float = 0.03
    file_poll_s: float = 0.5


class StreamRegistry:
    """All open streams of a process: their number, their timings and their shutdown. Used in the event loop only."""

    def __init__(self, store: ApiStore, *, streams_max: int, timings: StreamTimings | None = None) -> None:
        self.timings = timings or StreamTimings()
        self.tail = EventTail(store, poll_s=self.timings.poll_s)
        self._streams_max = streams_max
        self._streams_per_caller_max = max(1, streams_max // 2)
        self._open: dict[asyncio.Task[None], str] = {}

    def require_capacity(self, caller: str) -> None:
        """Check that another stream may open. `caller` is empty while authentication is off.

        Raises:
            ProblemError: 503 if the service has no capacity, 429 if the caller holds half of it.
        """
        held = list(self._open.values()).count(caller) if caller else 0
        if held >= self._streams_per_caller_max:
            detail = f"you have {held} open streams, the maximum per caller. Close some"
            raise ProblemError(429, "busy", detail, headers={"Retry-After": "10"})
        if len(self._open) >= self._streams_max:
            detail = f"{len(self._open)} streams are open, the maximum of this service. Retry later"
            raise ProblemError(503, "busy", detail, headers={"Retry-After": "10"})

    def add(self, sending: asyncio.Task[None], caller: str) -> None:
        """Count the stream until its task ends. `close` cancels it."""
        self._open[sending] = caller
        STREAMS.set(len(self._open))
        sending.add_done_callback(self._remove)

    def close(self) -> None:
        """End all streams. Their clients reconnect to another process."""
        for sending in self._open:
            sending.cancel()

    def _remove(self, sending: asyncio.Task[None]) -> None:
        self._open.pop(sending, None)
        STREAMS.set(len(self._open))
