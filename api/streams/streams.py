"""Streams: what all event streams of one process share: how many there may be, their pace, their common end."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from api.errors import ProblemError
from api.streams.event_tail import EventTail
from scheduler.store.front import FrontStore
from scheduler.telemetry.metrics import STREAMS


@dataclass(frozen=True, slots=True)
class Pace:
    """A stream that has nothing to tell says so every `heartbeat_s`, is ended when its socket takes nothing for
    `stall_s`, and after `lifetime_s` in any case; every `token_s` it is asked whether its token is still good. The
    store is asked for news every `poll_s`, files every `file_s`."""

    heartbeat_s: float = 15.0
    stall_s: float = 30.0
    lifetime_s: float = 3600.0
    token_s: float = 5.0
    poll_s: float = 0.03
    file_s: float = 0.5


class Streams:
    """To be used in the event loop alone, but for its making."""

    def __init__(self, store: FrontStore, *, streams_max: int, pace: Pace | None = None) -> None:
        self.pace = pace or Pace()
        self.tail = EventTail(store, poll_s=self.pace.poll_s)
        self._streams_max = streams_max
        self._streams_of_one_max = max(1, streams_max // 2)
        self._open: dict[asyncio.Task[None], str] = {}

    def require_room(self, asker: str) -> None:
        """Raises ProblemError: 503 where there are as many streams as there may be, 429 where `asker` alone holds half
        of them, so that one script that leaks cannot shut everybody out. Empty: nobody has to say who asks."""
        held = list(self._open.values()).count(asker) if asker else 0
        if held >= self._streams_of_one_max:
            detail = f"you hold {held} streams open, which is the most that one may: close some"
            raise ProblemError(429, "busy", detail, headers={"Retry-After": "10"})
        if len(self._open) >= self._streams_max:
            detail = f"{len(self._open)} streams are open, which is the most that this service has room for"
            raise ProblemError(503, "busy", detail, headers={"Retry-After": "10"})

    def add(self, sending: asyncio.Task[None], asker: str) -> None:
        """It counts until it ends, and is cancelled by `close`."""
        self._open[sending] = asker
        STREAMS.set(len(self._open))
        sending.add_done_callback(self._remove)

    def close(self) -> None:
        """End all streams; their clients come back to who answers next."""
        for sending in self._open:
            sending.cancel()

    def _remove(self, sending: asyncio.Task[None]) -> None:
        self._open.pop(sending, None)
        STREAMS.set(len(self._open))
