"""What ranks have printed, as answers.

JobLogs: what one rank of a job has printed, generation after generation, read from the run folder by place.

What one event stream tells: the events after its cursor, from memory where it keeps up, else from the store.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from typing_extensions import TypedDict

from api.identity.principals import Principal, Role
from api.streams.server_sent_events import (
    BATCH_EVENTS,
    HEARTBEAT_FRAME,
    RETRY_FRAME,
    RETRY_INTERVAL_S,
    EncodedEvent,
    StreamRegistry,
    encode_event,
    encode_frame,
    redact_events,
)
from scheduler.executors.local_records import RunRoot
from scheduler.executors.log_files import find_tail_offset, read_lines
from scheduler.store.protocol import Page, Store, UnavailableError


class LogLineView(TypedDict):
    """`cursor` is the place behind it. `cut`: the line is too long for one item and goes on in the next."""

    generation: int
    rank: int
    text: str
    cut: bool
    cursor: str


class LogPageView(TypedDict):
    """`dropped_bytes` were printed before the first line and are no longer kept. `next` leads to more that is there
    now, `resume` to what comes later."""

    job_id: str
    generations: list[int]
    items: list[LogLineView]
    dropped_bytes: int
    next: str | None
    resume: str


_POSITION_PATTERN = re.compile(r"(\d{1,9}):(\d{1,18})", re.ASCII)


@dataclass(frozen=True, slots=True)
class LogPosition:
    """Behind `offset` bytes of what the rank has printed in a generation."""

    generation: int
    offset: int = 0

    def __str__(self) -> str:
        return f"{self.generation}:{self.offset}"


@dataclass(frozen=True, slots=True)
class LogBatch:
    """Lines up to `place`, before which `dropped_bytes` are gone. `is_end`: nobody prints behind it any more, in the
    generations that have begun so far."""

    lines: tuple[LogLineView, ...]
    position: LogPosition
    dropped_bytes: int
    is_end: bool


def parse_position(text: str) -> LogPosition | None:
    """None for what no answer ever held."""
    found = _POSITION_PATTERN.fullmatch(text)
    return LogPosition(int(found[1]), int(found[2])) if found else None


class JobLogReader:
    """`only`: this generation alone; None: from one to the next."""

    def __init__(self, root: RunRoot, job_id: str, rank: int, *, only: int | None = None) -> None:
        self._root = root
        self._job_id = job_id
        self._rank = rank
        self._generation = only

    def generations(self) -> list[int]:
        begun = self._root.list_generations(self._job_id)
        return begun if self._generation is None else [each for each in begun if each == self._generation]

    def tail_position(self, lines: int) -> LogPosition:
        """Where the last `lines` lines of the newest generation begin."""
        newest = self.newest_generation()
        folder = self._root.folder(self._job_id, newest)
        is_over = folder.read_end() is not None
        return LogPosition(newest, find_tail_offset(folder.log_path(self._rank), lines, is_complete=is_over))

    def newest_generation(self) -> int:
        return next(reversed(self.generations()), 0)

    def read(self, position: LogPosition, lines_max: int) -> LogBatch:
        """The next lines, if there are any by now."""
        while True:
            folder = self._root.folder(self._job_id, position.generation)
            later = [each for each in self.generations() if each > position.generation]
            # Before the file is read: what was printed before the end is then always seen with it.
            is_over = bool(later) or folder.read_end() is not None
            part = read_lines(folder.log_path(self._rank), position.offset, lines_max=lines_max, is_complete=is_over)
            position = LogPosition(position.generation, part.end)
            if part.lines or part.dropped_bytes or not later:
                lines = tuple(
                    LogLineView(
                        generation=position.generation,
                        rank=self._rank,
                        text=line.text,
                        cut=line.is_cut,
                        cursor=f"{position.generation}:{line.end}",
                    )
                    for line in part.lines
                )
                is_end = is_over and not (lines or part.dropped_bytes or later)
                return LogBatch(lines, position, part.dropped_bytes, is_end)
            position = LogPosition(later[0])


BATCH_LINES = 500


@dataclass(frozen=True, slots=True)
class EventSubscription:
    """Events after the number `after`, of one subject or of all, of which `principal` is told what it may see. Those up
    to `swept` are kept no more."""

    principal: Principal
    after: int
    subject: str = ""
    swept: int = 0


async def follow_events(
    streams: StreamRegistry, store: Store, subscription: EventSubscription
) -> AsyncGenerator[bytes]:
    """Chunks without end. While the database is away there are heartbeats, and afterwards what was missed."""
    tail, cursor = streams.tail, subscription.after
    yield RETRY_FRAME
    if 0 < cursor < subscription.swept:
        yield encode_frame({"after": cursor, "up_to": subscription.swept}, number=subscription.swept, event="gap")
        cursor = subscription.swept
    with tail.subscribe():
        while True:
            news, newest = tail.changed, tail.newest  # taken before the look, so that nothing comes in between
            found = tail.events_after(cursor)
            is_behind = found is None
            try:
                if found is None:
                    page = Page(cursor, BATCH_EVENTS)
                    stored = await asyncio.to_thread(store.list_events, page, subject=subscription.subject)
                    found, is_behind = [encode_event(each) for each in stored], len(stored) == BATCH_EVENTS
                chunk = b"".join(each.chunk for each in await _visible_events(store, subscription, found))
            except UnavailableError:
                yield HEARTBEAT_FRAME
                await asyncio.sleep(RETRY_INTERVAL_S)
                continue
            if found or newest > cursor:
                cursor = found[-1].number if is_behind else max(newest, cursor, *(each.number for each in found))
            if chunk:
                yield chunk
            elif not is_behind and not await _wait_for(news, streams.timings.heartbeat_s):
                yield HEARTBEAT_FRAME


async def _visible_events(
    store: Store, subscription: EventSubscription, events: Sequence[EncodedEvent]
) -> Sequence[EncodedEvent]:
    about = [each for each in events if subscription.subject in ("", each.stored.event.subject)]
    if not about or subscription.principal.has_role(Role.VIEWER):
        return about
    return await asyncio.to_thread(redact_events, subscription.principal, store, about)


async def _wait_for(changed: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            return await changed.wait()
    except TimeoutError:
        return False


async def follow_logs(
    streams: StreamRegistry, logs: JobLogReader, position: LogPosition, has_ended: Callable[[], bool]
) -> AsyncGenerator[bytes]:
    """Lines from `place` on, until the job has ended and nobody prints any more."""
    pace, quiet_s = streams.timings, 0.0
    yield RETRY_FRAME
    while True:
        try:
            is_last = await asyncio.to_thread(has_ended)  # before the look, so that nothing comes in between
        except UnavailableError:
            is_last = False
        read = await asyncio.to_thread(logs.read, position, BATCH_LINES)
        chunk = _encode_log_batch(read)
        position = read.position
        if chunk:
            quiet_s = 0.0
            yield chunk
        elif is_last and (read.is_end or not logs.generations()):
            yield encode_frame({}, number=position, event="end")
            return
        else:
            await asyncio.sleep(pace.file_poll_s)
            quiet_s += pace.file_poll_s
            if quiet_s >= pace.heartbeat_s:
                quiet_s = 0.0
                yield HEARTBEAT_FRAME


def _encode_log_batch(read: LogBatch) -> bytes:
    gap = {"generation": read.position.generation, "dropped_bytes": read.dropped_bytes}
    begun = encode_frame(gap, number=read.position, event="gap") if read.dropped_bytes else b""
    return begun + b"".join(encode_frame(line, number=line["cursor"]) for line in read.lines)
