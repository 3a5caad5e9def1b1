"""Events, decisions and the newest snapshot: lists, and streams for clients that send `Accept: text/event-stream`.

A stream has the path of its list. OpenAPI describes both forms at the list.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal, get_args

from fastapi import Depends, Header, Query, Request
from fastapi.routing import APIRoute
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope

from api.event_views import DecisionView, EventView, SnapshotView, decision_view, event_view, snapshot_view
from api.http.conditional_requests import NOT_MODIFIED, IfNoneMatchHeader, is_current, not_modified
from api.http.dependencies import (
    AfterParameter,
    ContextDep,
    JobIdPath,
    LimitParameter,
    PrincipalDep,
    Router,
    ServiceDep,
    create_router,
)
from api.http.errors import problem_responses, raise_invalid_field
from api.http.paging import TEXT_PATTERN, CursorParameter, PageOf, page_by_key, page_by_number, page_newest_visible
from api.identity.authorization import VIEWER, VIEWER_OF_ALL, requires
from api.state import RequestContext
from api.streams.server_sent_events import MEDIA_TYPE, EventStreamResponse, StreamRegistry
from api.streams.sources import EventSubscription, follow_events
from scheduler.domain.decisions import Decision
from scheduler.domain.decisions import decision_subject as subject_of
from scheduler.domain.suggestions import suggest
from scheduler.store.api_protocol import ApiStore, HistoryLog
from scheduler.store.newest_history import DecisionFilter

STREAM_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {
            MEDIA_TYPE: {
                "schema": {"type": "string"},
                "example": 'id: 7\ndata: {"number":7,"code":"JobStarted","subject":"train-x7k2qa"}\n\n',
            }
        },
        "description": "A page. With Accept: text/event-stream, new items, one event each. "
        "Send an event's id as Last-Event-ID to continue after it.",
    }
}
"""The `responses=` of a list that has a stream."""


class StreamRoute(APIRoute):
    """Route for requests that accept an event stream."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        accepted = (value for name, value in scope.get("headers", ()) if name == b"accept")
        if not any(MEDIA_TYPE.encode() in value.lower() for value in accepted):
            return Match.NONE, {}
        return super().matches(scope)


async def _get_streams(request: Request) -> StreamRegistry:
    streams = request.app.state.streams
    assert isinstance(streams, StreamRegistry)
    return streams


stream_router = Router(prefix="/v1", route_class=StreamRoute, include_in_schema=False)
StreamsDep = Annotated[StreamRegistry, Depends(_get_streams)]
LastEventIdHeader = Annotated[str, Header(alias="Last-Event-ID")]
StreamAfterParameter = Annotated[int | None, Query(ge=0, lt=2**63)]


@stream_router.get("/events")
@requires(VIEWER)
def stream_events(
    principal: PrincipalDep,
    service: ServiceDep,
    streams: StreamsDep,
    *,
    subject: str = "",
    after: StreamAfterParameter = None,
    last_event_id: LastEventIdHeader = "",
) -> Response:
    """New events, or those after a number. An event of type `gap` stands for events that retention has deleted."""
    newest = service.store.get_last_event_number()
    start = _start_number(after, last_event_id, newest)
    subscription = EventSubscription(
        principal, newest if start is None else start, subject, _swept_up_to(service.store)
    )
    return EventStreamResponse(follow_events(streams, service.store, subscription), streams)


@stream_router.get("/jobs/{job_id}/events")
@requires(VIEWER)
def stream_job_events(
    job_id: JobIdPath,
    context: ContextDep,
    streams: StreamsDep,
    *,
    after: StreamAfterParameter = None,
    last_event_id: LastEventIdHeader = "",
) -> Response:
    """All events of the job, or those after a number."""
    context.job(job_id)
    start = _start_number(after, last_event_id, context.store.get_last_event_number())
    subscription = EventSubscription(context.principal, start or 0, job_id, _swept_up_to(context.store))
    return EventStreamResponse(follow_events(streams, context.store, subscription), streams)


def _swept_up_to(store: ApiStore) -> int:
    return store.get_retention_mark(HistoryLog.EVENTS)


def _start_number(after: int | None, last_event_id: str, newest: int) -> int | None:
    """Return the number after which the stream starts.

    Last-Event-ID of a reconnecting client overrides the URL's `after`.
    """
    if not last_event_id:
        start, field = after, "after"
    elif last_event_id.isascii() and last_event_id.isdigit() and len(last_event_id) < 19:
        start, field = int(last_event_id), "Last-Event-ID"
    else:
        raise_invalid_field("Last-Event-ID", last_event_id, "the id of an event of this stream")
    if start is not None and start > newest:
        raise_invalid_field(field, start, f"at most {newest}, the number of the newest event")
    return start


router = create_router("record")

SubjectParameter = Annotated[
    str,
    Query(
        max_length=300,
        pattern=TEXT_PATTERN,
        description="Only events about this job id, node, pool, queue or loan. Empty: all.",
    ),
]

DECISION_KINDS = tuple(sorted(kind.__name__ for kind in get_args(Decision)))
OrderParameter = Annotated[Literal["oldest", "newest"], Query(description="Which items come first.")]
DecisionSubjectParameter = Annotated[
    str,
    Query(max_length=300, pattern=TEXT_PATTERN, description="Only decisions about this job id or node. Empty: all."),
]
KindParameter = Annotated[
    str,
    Query(max_length=100, pattern=TEXT_PATTERN, description="Only decisions of this kind. Empty: all."),
]


@router.get("/events", responses=STREAM_RESPONSES | problem_responses(410))
@requires(VIEWER)
def list_events(
    context: ContextDep,
    subject: SubjectParameter = "",
    after: AfterParameter = 0,
    *,
    order: OrderParameter = "oldest",
    limit: LimitParameter = 100,
    cursor: CursorParameter = "",
) -> PageOf[EventView]:
    """List events of one subject (a job id, node, pool, queue or loan) or of all subjects, oldest first. To follow
    them, request a stream, or list again after the last number."""
    if order == "newest":
        _refuse_after(after)
        return _page_of_newest_events(context, subject=subject, limit=limit, cursor=cursor)
    return page_of_events(context, subject=subject, after=after, limit=limit, cursor=cursor)


@router.get("/decisions", responses=problem_responses(410))
@requires(VIEWER)
def list_decisions(
    context: ContextDep,
    after: AfterParameter = 0,
    *,
    subject: DecisionSubjectParameter = "",
    kind: KindParameter = "",
    order: OrderParameter = "oldest",
    limit: LimitParameter = 100,
    cursor: CursorParameter = "",
) -> PageOf[DecisionView]:
    """List the decisions of ticks with their reasons, oldest first. A page of a filtered list can be short or empty
    although `next` continues it."""
    filters = DecisionFilter(subject, _parse_kind(kind))
    if order == "newest":
        _refuse_after(after)
        page = page_newest_visible(
            "decisions newest first",
            partial(context.store.newest.list_decisions, filters=filters),
            lambda row: context.visibility.can_see_subject(subject_of(row.decision)),
            cursor=cursor,
            limit=limit,
        )
    else:
        page = page_by_number(
            "decisions",
            context.store.list_decisions,
            lambda row: filters.matches(row) and context.visibility.can_see_subject(subject_of(row.decision)),
            get_retention_mark=partial(context.store.get_retention_mark, HistoryLog.DECISIONS),
            after=after,
            cursor=cursor,
            limit=limit,
        )
    return {"items": context.visibility.redact_all(list(map(decision_view, page["items"]))), "next": page["next"]}


def _parse_kind(kind: str) -> str:
    if kind and kind not in DECISION_KINDS:
        allowed = f"one of {', '.join(DECISION_KINDS)}{suggest(kind, DECISION_KINDS)}"
        raise_invalid_field("kind", kind, allowed)
    return kind


def _refuse_after(after: int) -> None:
    if after:
        raise_invalid_field("after", after, "0 with `order` newest. Continue with `cursor` instead")


def _page_of_newest_events(context: RequestContext, *, subject: str, limit: int, cursor: str) -> PageOf[EventView]:
    page = page_newest_visible(
        "events newest first",
        partial(context.store.newest.list_events, subject=subject),
        lambda row: context.visibility.can_see_subject(row.event.subject),
        cursor=cursor,
        limit=limit,
    )
    return {"items": context.visibility.redact_all(list(map(event_view, page["items"]))), "next": page["next"]}


def page_of_events(context: RequestContext, *, subject: str, after: int, limit: int, cursor: str) -> PageOf[EventView]:
    visibility, store = context.visibility, context.store
    get_retention_mark = partial(store.get_retention_mark, HistoryLog.EVENTS)
    if visibility.is_unrestricted or subject:
        is_visible = not subject or visibility.can_see_subject(subject)
        page = page_by_number(
            "events",
            partial(store.list_events, subject=subject) if is_visible else lambda page: (),
            lambda row: True,
            get_retention_mark=get_retention_mark,
            after=after,
            cursor=cursor,
            limit=limit,
        )
    else:
        page = page_by_key(
            "events",
            store.list_event_subjects,
            visibility.select_visible_subjects,
            store.get_events,
            get_retention_mark=get_retention_mark,
            after=after,
            cursor=cursor,
            limit=limit,
        )
    return {"items": visibility.redact_all([event_view(row) for row in page["items"]]), "next": page["next"]}


snapshot_router = create_router("record")


@snapshot_router.get("/snapshots/latest", response_model=SnapshotView, responses=NOT_MODIFIED)
@requires(VIEWER_OF_ALL)
def get_latest_snapshot(
    service: ServiceDep, response: Response, if_none_match: IfNoneMatchHeader = ""
) -> SnapshotView | Response:
    """Return the newest committed snapshot. Commands in the inbox are not applied."""
    snapshot = service.store.load().snapshot
    etag = f'"{snapshot.generation}-{snapshot.now_s!r}"'  # a restored database counts generations again
    if is_current(if_none_match, etag):
        return not_modified(etag)
    response.headers.update({"ETag": etag, "Cache-Control": "private, no-cache"})
    return snapshot_view(snapshot)
