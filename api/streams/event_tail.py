"""EventTail: the newest events of the store, read by one task for all streams of a process.

It runs while anybody listens, and keeps the last RING_EVENTS in memory. A stream that is further behind reads from the
store itself. Numbers are given and committed by one leader at a time, so that none appears below one that was seen.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from api.answers.record import event_view
from api.streams.event_stream import frame
from scheduler.store.front import FrontStore
from scheduler.store.protocol import Page, StoredEvent, UnavailableError

logger = logging.getLogger(__name__)

RING_EVENTS = 4096
BATCH_EVENTS = 500
RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Told:
    """An event as it is sent: written out once for all streams."""

    stored: StoredEvent
    chunk: bytes

    @property
    def number(self) -> int:
        return self.stored.number


def told(stored: StoredEvent) -> Told:
    return Told(stored, frame(event_view(stored), number=stored.number))


class EventTail:
    """To be used in one event loop at a time. `news` is set, and replaced by another, when there is something new."""

    def __init__(self, store: FrontStore, *, poll_s: float) -> None:
        self.news = asyncio.Event()
        self.newest = 0
        self._store = store
        self._poll_s = poll_s
        self._ring: deque[Told] = deque()
        self._floor: float = float("inf")  # what has higher numbers, up to the newest, is in the ring
        self._listeners = 0
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """While somebody does, the store is asked."""
        self._listeners += 1
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            self._listeners -= 1
            if not self._listeners:
                self._task.cancel()
                self._task, self._floor = None, float("inf")

    def after(self, number: int) -> list[Told] | None:
        """All events after that one; None where the ring does not reach back so far."""
        if number < self._floor:
            return None
        found: list[Told] = []
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
                    self._floor = self.newest = await asyncio.to_thread(self._store.newest_event)
                    has_begun = True
                    self._wake()
                count = await self._read()
            except Exception as failure:
                if not isinstance(failure, UnavailableError):
                    logger.exception("events cannot be read")
                elif not is_away:
                    logger.warning("streams wait for the database: %s", failure)
                is_away = True
                await asyncio.sleep(RETRY_S)
                continue
            is_away = False
            if count < BATCH_EVENTS:
                await asyncio.sleep(self._poll_s)

    async def _read(self) -> int:
        """How many new events there were. Mostly none, and to ask for the last number costs half as much."""
        if await asyncio.to_thread(self._store.newest_event) <= self.newest:
            return 0
        page = Page(self.newest, BATCH_EVENTS)
        new = [told(stored) for stored in await asyncio.to_thread(self._store.events, page)]
        if new:
            self._ring.extend(new)
            self.newest = new[-1].number
            while len(self._ring) > RING_EVENTS:
                self._floor = self._ring.popleft().number
            self._wake()
        return len(new)

    def _wake(self) -> None:
        news, self.news = self.news, asyncio.Event()
        news.set()
