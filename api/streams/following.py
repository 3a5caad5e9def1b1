"""What one event stream tells: the events after its cursor, from memory where it keeps up, else from the store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from api.identity.principal import Principal, Role
from api.streams.event_stream import HEARTBEAT, RETRY, frame
from api.streams.event_tail import BATCH_EVENTS, RETRY_S, Told, told
from api.streams.job_logs import JobLogs, LogPlace, LogRead
from api.streams.sight import told_to
from api.streams.streams import Streams
from scheduler.store.protocol import Page, Store, UnavailableError

BATCH_LINES = 500


@dataclass(frozen=True, slots=True)
class Wish:
    """Events after the number `after`, of one subject or of all, of which `principal` is told what it may see. Those up
    to `swept` are kept no more."""

    principal: Principal
    after: int
    subject: str = ""
    swept: int = 0


async def follow_events(streams: Streams, store: Store, wish: Wish) -> AsyncGenerator[bytes]:
    """Chunks without end. While the database is away there are heartbeats, and afterwards what was missed."""
    tail, cursor = streams.tail, wish.after
    yield RETRY
    if 0 < cursor < wish.swept:
        yield frame({"after": cursor, "up_to": wish.swept}, number=wish.swept, event="gap")
        cursor = wish.swept
    with tail.listening():
        while True:
            news, newest = tail.news, tail.newest  # taken before the look, so that nothing comes in between
            found = tail.after(cursor)
            is_behind = found is None
            try:
                if found is None:
                    page = Page(cursor, BATCH_EVENTS)
                    stored = await asyncio.to_thread(store.events, page, subject=wish.subject)
                    found, is_behind = [told(each) for each in stored], len(stored) == BATCH_EVENTS
                chunk = b"".join(each.chunk for each in await _visible(store, wish, found))
            except UnavailableError:
                yield HEARTBEAT
                await asyncio.sleep(RETRY_S)
                continue
            if found or newest > cursor:
                cursor = found[-1].number if is_behind else max(newest, cursor, *(each.number for each in found))
            if chunk:
                yield chunk
            elif not is_behind and not await _within(news, streams.pace.heartbeat_s):
                yield HEARTBEAT


async def _visible(store: Store, wish: Wish, found: Sequence[Told]) -> Sequence[Told]:
    about = [each for each in found if wish.subject in ("", each.stored.event.subject)]
    if not about or wish.principal.may(Role.VIEWER):
        return about
    return await asyncio.to_thread(told_to, wish.principal, store, about)


async def _within(news: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            return await news.wait()
    except TimeoutError:
        return False


async def follow_logs(
    streams: Streams, logs: JobLogs, place: LogPlace, has_ended: Callable[[], bool]
) -> AsyncGenerator[bytes]:
    """Lines from `place` on, until the job has ended and nobody prints any more."""
    pace, quiet_s = streams.pace, 0.0
    yield RETRY
    while True:
        try:
            is_last = await asyncio.to_thread(has_ended)  # before the look, so that nothing comes in between
        except UnavailableError:
            is_last = False
        read = await asyncio.to_thread(logs.read, place, BATCH_LINES)
        chunk = _log_chunk(read)
        place = read.place
        if chunk:
            quiet_s = 0.0
            yield chunk
        elif is_last and (read.is_end or not logs.generations()):
            yield frame({}, number=place, event="end")
            return
        else:
            await asyncio.sleep(pace.file_s)
            quiet_s += pace.file_s
            if quiet_s >= pace.heartbeat_s:
                quiet_s = 0.0
                yield HEARTBEAT


def _log_chunk(read: LogRead) -> bytes:
    gap = {"generation": read.place.generation, "dropped_bytes": read.dropped_bytes}
    begun = frame(gap, number=read.place, event="gap") if read.dropped_bytes else b""
    return begun + b"".join(frame(line, number=line["cursor"]) for line in read.lines)
