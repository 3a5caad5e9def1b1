"""Server-sent events: who asks for a list with `Accept: text/event-stream` is told of what comes, as it comes.

They have the paths of the lists, which stand in OpenAPI with both forms of answer.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Header, Query, Request
from fastapi.routing import APIRoute
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope

from api.dependencies import PrincipalDep, ServiceDep, WorldDep
from api.errors import refuse
from api.routing import Router
from api.streams.event_stream import MEDIA_TYPE, EventStream
from api.streams.following import Wish, follow_events
from api.streams.streams import Streams
from scheduler.store.front import FrontStore, HistoryLog

STREAMED: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {
            MEDIA_TYPE: {
                "schema": {"type": "string"},
                "example": 'id: 7\ndata: {"number":7,"code":"JobStarted","subject":"train-x7k2qa"}\n\n',
            }
        },
        "description": "A page; or, where Accept is text/event-stream, what comes from now on, one event an item. "
        "Its id, sent back as Last-Event-ID, goes on from there.",
    }
}
"""For the decorators of the lists that can be followed."""


class StreamRoute(APIRoute):
    """Matches only who asks for a stream."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        accepted = (value for name, value in scope.get("headers", ()) if name == b"accept")
        if not any(MEDIA_TYPE.encode() in value.lower() for value in accepted):
            return Match.NONE, {}
        return super().matches(scope)


async def _streams(request: Request) -> Streams:
    streams = request.app.state.streams
    assert isinstance(streams, Streams)
    return streams


router = Router(prefix="/v1", route_class=StreamRoute, include_in_schema=False)
StreamsDep = Annotated[Streams, Depends(_streams)]
LastEventId = Annotated[str, Header(alias="Last-Event-ID")]
AfterNumber = Annotated[int | None, Query(ge=0, lt=2**63)]


@router.get("/events")
def stream_events(
    principal: PrincipalDep,
    service: ServiceDep,
    streams: StreamsDep,
    *,
    subject: str = "",
    after: AfterNumber = None,
    last_event_id: LastEventId = "",
) -> Response:
    """Events from now on, or those after a number. `gap` tells of events that are kept no more."""
    newest = service.store.newest_event()
    start = _start(after, last_event_id, newest)
    wish = Wish(principal, newest if start is None else start, subject, _swept(service.store))
    return EventStream(follow_events(streams, service.store, wish), streams)


@router.get("/jobs/{job_id}/events")
def stream_job_events(
    job_id: str, world: WorldDep, streams: StreamsDep, *, after: AfterNumber = None, last_event_id: LastEventId = ""
) -> Response:
    """All events of the job, or those after a number."""
    world.job(job_id)
    start = _start(after, last_event_id, world.store.newest_event())
    wish = Wish(world.principal, start or 0, job_id, _swept(world.store))
    return EventStream(follow_events(streams, world.store, wish), streams)


def _swept(store: FrontStore) -> int:
    return store.swept_up_to(HistoryLog.EVENTS)


def _start(after: int | None, last_event_id: str, newest: int) -> int | None:
    """The number after which a stream goes on: a client that comes back says so in its header, and still has in its URL
    where it began."""
    if not last_event_id:
        start, field = after, "after"
    elif last_event_id.isascii() and last_event_id.isdigit() and len(last_event_id) < 19:
        start, field = int(last_event_id), "Last-Event-ID"
    else:
        refuse("Last-Event-ID", last_event_id, "the id of an event of this stream")
    if start is not None and start > newest:
        refuse(field, start, f"at most {newest}, the number of the newest event")
    return start
