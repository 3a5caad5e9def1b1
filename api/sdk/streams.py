"""What comes as it comes: events and logs as iterators; and a checkpoint now."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from api.answers.checkpoints import CheckpointsView
from api.answers.logs import LogLineView
from api.connection import JsonObject
from api.event_source import Message, follow
from api.sdk.calls import Calls, job_path


class StreamCalls(Calls):
    """The followers come back by themselves where a connection breaks, and tell nothing twice. They raise
    UnreachableError once the service has not answered for most of a minute."""

    def follow_events(self, *, subject: str = "", job_id: str = "", after: int | None = None) -> Iterator[JsonObject]:
        """Events without end: those after the number `after`; without it, all of one job, or all from now on. Of
        those that are kept no more an event of code Gap tells."""
        path = f"{job_path(job_id)}/events" if job_id else "/v1/events"
        query = {"subject": subject, "after": "" if after is None else str(after)}
        for message in follow(self._connection, path, {name: value for name, value in query.items() if value}):
            yield message.data if message.kind == "message" else _gap(message)

    def logs(
        self, job_id: str, *, rank: int = 0, generation: int | None = None, tail: int | None = None
    ) -> Iterator[LogLineView]:
        """What a rank has printed: the newest generation, or that one; all of it, or its last `tail` lines."""
        query = _log_query(rank, generation, tail)
        yield from cast("Iterator[LogLineView]", self._connection.items(f"{job_path(job_id)}/logs", query=query))

    def follow_logs(
        self, job_id: str, *, rank: int = 0, generation: int | None = None, tail: int | None = None
    ) -> Iterator[LogLineView]:
        """As `logs`, and then what is printed until the job has ended, from one generation to the next. Where bytes
        were dropped before they could be read, a line says so."""
        for message in follow(self._connection, f"{job_path(job_id)}/logs", _log_query(rank, generation, tail)):
            if message.kind == "message":
                yield cast("LogLineView", message.data)
            elif message.kind == "gap":
                gap = f"... {message.data['dropped_bytes']} bytes are not kept any more"
                of = int(message.data["generation"])
                yield LogLineView(generation=of, rank=rank, text=gap, cut=False, cursor=message.id)

    def checkpoint(self, job_id: str) -> CheckpointsView:
        """Have the running job save at its next step boundary; `checkpoints` tells when it is done."""
        return self._connection.object("POST", f"{job_path(job_id)}:checkpoint")

    def checkpoints(self, job_id: str) -> CheckpointsView:
        return self._connection.object("GET", f"{job_path(job_id)}/checkpoints")


def _gap(message: Message) -> JsonObject:
    """In the form of an event, so that whoever prints events prints it."""
    up_to = int(message.data["up_to"])
    said = f"events after number {message.data['after']} up to {up_to} are kept no more"
    known = {"generation": 0, "at_s": 0.0, "subject": "", "numbers": {}, "cause": ""}
    return {"number": up_to, "code": "Gap", "message": said, **known}


def _log_query(rank: int, generation: int | None, tail: int | None) -> dict[str, str]:
    asked = {"rank": rank, "generation": generation, "tail": tail}
    return {name: str(value) for name, value in asked.items() if value is not None}
