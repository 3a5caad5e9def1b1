"""The chunks of event streams: `follow_events` for events, `follow_logs` for the output of a job's rank."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field
from typing_extensions import TypedDict

from api.http.paging import JobId
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
from scheduler.executors.log_files import find_tail_offset, read_lines
from scheduler.executors.shipped_logs import LAST_OUTPUT_S, read_run_machines
from scheduler.executors.stored_logs import LogFolder, LogRoot
from scheduler.store.api_protocol import ApiStore
from scheduler.store.protocol import Page, UnavailableError


class LogLineView(TypedDict):
    """One line of output of a rank."""

    generation: Annotated[
        int, Field(description="Run of the job that printed it. Each change of its GPUs or plan starts another one.")
    ]
    rank: Annotated[int, Field(description="Number of the worker process, from 0.")]
    text: Annotated[str, Field(description="The output without its line break.")]
    cut: Annotated[bool, Field(description="Whether the output is too long for one item and continues in the next.")]
    cursor: Annotated[str, Field(description="Position after this item, to continue from.")]


class LogPageView(TypedDict):
    """Output of one rank of a job, oldest first."""

    job_id: JobId
    generations: Annotated[
        list[int], Field(description="Generations that still have output of the requested ones, ascending.")
    ]
    items: Annotated[list[LogLineView], Field(description="Lines of output. Empty: the rank has printed nothing yet.")]
    dropped_bytes: Annotated[int, Field(description="Number of bytes before the first line that were deleted.")]
    next: Annotated[str | None, Field(description="Value of `cursor` for further lines that exist now. Null: none.")]
    resume: Annotated[str, Field(description="Value of `cursor` for lines that are printed later.")]


_POSITION_PATTERN = re.compile(r"(\d{1,9}):(\d{1,18})", re.ASCII)


@dataclass(frozen=True, slots=True)
class LogPosition:
    """The position after `offset` bytes of a rank's output in a generation."""

    generation: int
    offset: int = 0

    def __str__(self) -> str:
        return f"{self.generation}:{self.offset}"


@dataclass(frozen=True, slots=True)
class LogBatch:
    """Lines of output up to `position`.

    `dropped_bytes` before them were deleted. If `is_end`, no further line can follow in the generations that have
    started.
    """

    lines: tuple[LogLineView, ...]
    position: LogPosition
    dropped_bytes: int
    is_end: bool


def parse_position(text: str) -> LogPosition | None:
    """Return the position, or None if the text is not one."""
    found = _POSITION_PATTERN.fullmatch(text)
    return LogPosition(int(found[1]), int(found[2])) if found else None


class JobLogReader:
    """Reader of one rank's output in the job's run folder, across generations or of one generation only."""

    def __init__(
        self,
        root: LogRoot,
        job_id: str,
        rank: int,
        *,
        generation: int | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._root = root
        self._now = now
        self._job_id = job_id
        self._rank = rank
        self._generation = generation

    def generations(self) -> list[int]:
        generations = self._root.list_generations(self._job_id)
        return (
            generations
            if self._generation is None
            else [number for number in generations if number == self._generation]
        )

    def ranks(self) -> list[int]:
        """Return the ranks that have output, in any of the generations."""
        folders = (self._root.folder(self._job_id, number) for number in self.generations())
        return sorted({rank for folder in folders for rank in folder.list_ranks()})

    def tail_position(self, lines: int) -> LogPosition:
        """Return the position of the last `lines` lines of the newest generation."""
        newest = self.newest_generation()
        folder = self._root.folder(self._job_id, newest)
        is_over = folder.is_complete(self._rank)
        return LogPosition(newest, find_tail_offset(folder.log_path(self._rank), lines, is_complete=is_over))

    def newest_generation(self) -> int:
        return next(reversed(self.generations()), 0)

    def read(self, position: LogPosition, lines_max: int) -> LogBatch:
        """Return the next lines that exist."""
        while True:
            folder = self._root.folder(self._job_id, position.generation)
            later = [number for number in self.generations() if number > position.generation]
            # Checked before the file is read, so that a complete file is read to its end.
            is_over = self._is_over(folder, later)
            part = read_lines(folder.log_path(self._rank), position.offset, lines_max=lines_max, is_complete=is_over)
            position = LogPosition(position.generation, part.end)
            if part.lines or part.dropped_bytes or not later or not is_over:
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

    def may_lack_output(self, generation: int) -> bool:
        """Return whether a machine has not sent all output of the rank yet."""
        folder = self._root.folder(self._job_id, generation)
        return read_run_machines(folder) is not None and not folder.is_complete(self._rank)

    def _is_over(self, folder: LogFolder, later: Sequence[int]) -> bool:
        """Return whether the output in `folder` is complete. Lost machines are not waited for."""
        if folder.is_complete(self._rank):
            return True
        if not later or read_run_machines(folder) is None:
            return bool(later)
        successor = read_run_machines(self._root.folder(self._job_id, later[0]))
        return successor is None or self._now() >= successor.begun_at_s + LAST_OUTPUT_S


BATCH_LINES = 500


@dataclass(frozen=True, slots=True)
class EventSubscription:
    """Events after the number `after`, of one subject or of all, as `principal` may see them.

    Retention has deleted the events up to `deleted_up_to`.
    """

    principal: Principal
    after: int
    subject: str = ""
    deleted_up_to: int = 0


async def follow_events(
    streams: StreamRegistry, store: ApiStore, subscription: EventSubscription
) -> AsyncGenerator[bytes]:
    """Yield chunks without end. While the database is unavailable, yields heartbeats; then the missed events."""
    tail, cursor = streams.tail, subscription.after
    yield RETRY_FRAME
    if 0 < cursor < subscription.deleted_up_to:
        yield encode_frame(
            {"after": cursor, "up_to": subscription.deleted_up_to}, number=subscription.deleted_up_to, event="gap"
        )
        cursor = subscription.deleted_up_to
    with tail.subscribe():
        while True:
            changed, newest = tail.changed, tail.newest  # taken before the read, so that no change is missed
            found = tail.events_after(cursor)
            is_behind = found is None
            try:
                if found is None:
                    page = Page(cursor, BATCH_EVENTS)
                    stored = await asyncio.to_thread(store.list_events, page, subject=subscription.subject)
                    found, is_behind = [encode_event(event) for event in stored], len(stored) == BATCH_EVENTS
                chunk = b"".join(event.chunk for event in await _visible_events(store, subscription, found))
            except UnavailableError:
                yield HEARTBEAT_FRAME
                await asyncio.sleep(RETRY_INTERVAL_S)
                continue
            if found or newest > cursor:
                cursor = found[-1].number if is_behind else max(newest, cursor, *(event.number for event in found))
            if chunk:
                yield chunk
            elif not is_behind and not await _wait_for(changed, streams.timings.heartbeat_s):
                yield HEARTBEAT_FRAME


async def _visible_events(
    store: ApiStore, subscription: EventSubscription, events: Sequence[EncodedEvent]
) -> Sequence[EncodedEvent]:
    matching = [event for event in events if subscription.subject in ("", event.stored.event.subject)]
    if not matching or subscription.principal.has_role(Role.VIEWER):
        return matching
    return await asyncio.to_thread(redact_events, subscription.principal, store, matching)


async def _wait_for(changed: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            return await changed.wait()
    except TimeoutError:
        return False


async def follow_logs(
    streams: StreamRegistry, logs: JobLogReader, position: LogPosition, has_ended: Callable[[], bool]
) -> AsyncGenerator[bytes]:
    """Yield chunks from `position` on, until the job has ended and all output was read."""
    timings, quiet_s, ended_s = streams.timings, 0.0, 0.0
    yield RETRY_FRAME
    while True:
        try:
            has_job_ended = await asyncio.to_thread(has_ended)  # checked before the read, so that no output is missed
        except UnavailableError:
            has_job_ended = False
        batch = await asyncio.to_thread(logs.read, position, BATCH_LINES)
        chunk = _encode_log_batch(batch)
        position = batch.position
        if chunk:
            quiet_s = ended_s = 0.0
            yield chunk
        elif has_job_ended and (batch.is_end or not logs.generations() or ended_s >= LAST_OUTPUT_S):
            yield encode_frame({}, number=position, event="end")
            return
        else:
            await asyncio.sleep(timings.file_poll_s)
            quiet_s += timings.file_poll_s
            if has_job_ended and logs.may_lack_output(position.generation):
                ended_s += timings.file_poll_s
            if quiet_s >= timings.heartbeat_s:
                quiet_s = 0.0
                yield HEARTBEAT_FRAME


def _encode_log_batch(batch: LogBatch) -> bytes:
    gap = {"generation": batch.position.generation, "dropped_bytes": batch.dropped_bytes}
    gap_frame = encode_frame(gap, number=batch.position, event="gap") if batch.dropped_bytes else b""
    return gap_frame + b"".join(encode_frame(line, number=line["cursor"]) for line in batch.lines)
