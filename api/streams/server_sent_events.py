"""Server-sent events (HTML Living Standard, 9.2) over ASGI: the frames, and the response that sends them.

Each stream waits for its own socket alone: what it has not sent it does not read, so that a slow reader costs nobody
memory or time.

EventTail: the newest events of the store, read by one task for all streams of a process.

It runs while anybody listens, and keeps the last RING_EVENTS in memory. A stream that is further behind reads from the
store itself. Numbers are given and committed by one leader at a time, so that none appears below one that was seen.

Events as somebody may see them who does not see everything.

Streams: what all event streams of one process share: how many there may be, their pace, their common end.
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
from scheduler.store.protocol import Page, Store, StoredEvent, UnavailableError
from scheduler.telemetry.metrics import STREAMS

logger = logging.getLogger(__name__)

MEDIA_TYPE = "text/event-stream"
HEARTBEAT_FRAME = b": still here\n\n"
RETRY_FRAME = b"retry: 1000\n\n"
"""A client that has lost its stream comes back after so many milliseconds."""
_CLOSE_TIMEOUT_S = 1.0


def encode_frame(document: Mapping[str, Any], *, number: object, event: str = "") -> bytes:
    """One event. `event` is its type where that is not `message`; JSON of one line needs no other escape."""
    kind = f"event: {event}\n" if event else ""
    data = json.dumps(document, separators=(",", ":"))
    return f"id: {number}\n{kind}data: {data}\n\n".encode()


class EventStreamResponse(Response):
    """Sends the chunks until they end, the client goes, the service ends, the socket takes nothing for a while, the
    token of who asked is good no more, or it has lived for long enough: who asks then comes back with its last id."""

    media_type = MEDIA_TYPE

    def __init__(self, chunks: AsyncGenerator[bytes], streams: StreamRegistry) -> None:
        self._chunks = chunks
        self._streams = streams
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ProblemError (503, 429) before it sends anything where there are too many streams already."""
        asker = _stream_owner(scope)
        self._streams.require_capacity(asker)
        sending = asyncio.create_task(self._send(send))
        leaving = asyncio.create_task(_wait_for_disconnect(receive))
        refusing = asyncio.create_task(self._wait_for_invalid_token(scope))
        tasks: tuple[asyncio.Task[None], ...] = (sending, leaving, refusing)
        self._streams.add(sending, asker)
        try:
            lifetime_s = self._streams.timings.lifetime_s
            await asyncio.wait(tasks, timeout=lifetime_s, return_when=asyncio.FIRST_COMPLETED)
            is_gone = leaving.done()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        failure = None if sending.cancelled() else sending.exception()
        if isinstance(failure, TimeoutError):
            logger.info("a stream of %s ends: its reader takes nothing", scope["path"])
        elif failure is not None:
            raise failure
        elif not is_gone:
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
        """Until the token is good no more; for ever where nobody had to say who asks."""
        is_good = scope.get("state", {}).get("is_good")
        while is_good is None or await is_good():
            await asyncio.sleep(self._streams.timings.token_check_s)


def _stream_owner(scope: Scope) -> str:
    """Whose stream it is; empty where nobody has to say."""
    state = scope.get("state", {})
    principal = state.get("principal")
    return "" if principal is None or "is_good" not in state else principal.token_id or principal.name


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


RING_EVENTS = 4096
BATCH_EVENTS = 500
RETRY_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class EncodedEvent:
    """An event as it is sent: written out once for all streams."""

    stored: StoredEvent
    chunk: bytes

    @property
    def number(self) -> int:
        return self.stored.number


def encode_event(stored: StoredEvent) -> EncodedEvent:
    return EncodedEvent(stored, encode_frame(event_view(stored), number=stored.number))


class EventTail:
    """To be used in one event loop at a time. `news` is set, and replaced by another, when there is something new."""

    def __init__(self, store: ApiStore, *, poll_s: float) -> None:
        self.changed = asyncio.Event()
        self.newest = 0
        self._store = store
        self._poll_s = poll_s
        self._ring: deque[EncodedEvent] = deque()
        self._floor: float = float("inf")  # what has higher numbers, up to the newest, is in the ring
        self._subscribers = 0
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def subscribe(self) -> Iterator[None]:
        """While somebody does, the store is asked."""
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
        """All events after that one; None where the ring does not reach back so far."""
        if number < self._floor:
            return None
        found: list[EncodedEvent] = []
        for each in reversed(self._ring):
            if each.number <= number:
                break
            found.append(each)
        return found[::-1]

    async def _run(self) -> None:
        self._ring.clear()
        has_begun, is_away = False, False
        while True:
            try:
                if not has_begun:
                    self._floor = self.newest = await asyncio.to_thread(self._store.get_last_event_number)
                    has_begun = True
                    self._notify()
                count = await self._read()
            except Exception as failure:
                if not isinstance(failure, UnavailableError):
                    logger.exception("events cannot be read")
                elif not is_away:
                    logger.warning("streams wait for the database: %s", failure)
                is_away = True
                await asyncio.sleep(RETRY_INTERVAL_S)
                continue
            is_away = False
            if count < BATCH_EVENTS:
                await asyncio.sleep(self._poll_s)

    async def _read(self) -> int:
        """How many new events there were. Mostly none, and to ask for the last number costs half as much."""
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
        news, self.changed = self.changed, asyncio.Event()
        news.set()


def redact_events(principal: Principal, store: Store, events: Sequence[EncodedEvent]) -> list[EncodedEvent]:
    """Those of the events that `principal` may see, without names that it may not. Reads the store."""
    sight = Visibility(principal, store.load().snapshot, store.get_ended_job)
    return [
        EncodedEvent(each.stored, encode_frame(sight.redact(event_view(each.stored)), number=each.number))
        for each in events
        if sight.can_see_subject(each.stored.event.subject)
    ]


@dataclass(frozen=True, slots=True)
class StreamTimings:
    """A stream that has nothing to tell says so every `heartbeat_s`, is ended when its socket takes nothing for
    `stall_s`, and after `lifetime_s` in any case; every `token_s` it is asked whether its token is still good. The
    store is asked for news every `poll_s`, files every `file_s`."""

    heartbeat_s: float = 15.0
    write_timeout_s: float = 30.0
    lifetime_s: float = 3600.0
    token_check_s: float = 5.0
    poll_s: float = 0.03
    file_poll_s: float = 0.5


class StreamRegistry:
    """To be used in the event loop alone, but for its making."""

    def __init__(self, store: ApiStore, *, streams_max: int, pace: StreamTimings | None = None) -> None:
        self.timings = pace or StreamTimings()
        self.tail = EventTail(store, poll_s=self.timings.poll_s)
        self._streams_max = streams_max
        self._streams_per_caller_max = max(1, streams_max // 2)
        self._open: dict[asyncio.Task[None], str] = {}

    def require_capacity(self, caller: str) -> None:
        """Raises ProblemError: 503 where there are as many streams as there may be, 429 where `asker` alone holds half
        of them, so that one script that leaks cannot shut everybody out. Empty: nobody has to say who asks."""
        held = list(self._open.values()).count(caller) if caller else 0
        if held >= self._streams_per_caller_max:
            detail = f"you hold {held} streams open, which is the most that one may: close some"
            raise ProblemError(429, "busy", detail, headers={"Retry-After": "10"})
        if len(self._open) >= self._streams_max:
            detail = f"{len(self._open)} streams are open, which is the most that this service has room for"
            raise ProblemError(503, "busy", detail, headers={"Retry-After": "10"})

    def add(self, sending: asyncio.Task[None], caller: str) -> None:
        """It counts until it ends, and is cancelled by `close`."""
        self._open[sending] = caller
        STREAMS.set(len(self._open))
        sending.add_done_callback(self._remove)

    def close(self) -> None:
        """End all streams; their clients come back to who answers next."""
        for sending in self._open:
            sending.cancel()

    def _remove(self, sending: asyncio.Task[None]) -> None:
        self._open.pop(sending, None)
        STREAMS.set(len(self._open))
