"""Events and decisions: the record of what happened and what was decided, oldest first."""

from __future__ import annotations

from functools import partial

from api.answers.page import PageOf
from api.answers.record import DecisionView, EventView, decision_view, event_view
from api.dependencies import After, Limit, WorldDep
from api.filters import Text
from api.paging import Cursor, page_by_number
from api.problems import problems
from api.routers.streams import STREAMED
from api.routing import noun_router
from api.world import World
from scheduler.domain.decision import subject as subject_of
from scheduler.store.front import HistoryLog

router = noun_router("record")


@router.get("/events", responses=STREAMED | problems(410))
def list_events(
    world: WorldDep,
    subject: Text = "",
    after: After = 0,
    limit: Limit = 100,
    cursor: Cursor = "",
) -> PageOf[EventView]:
    """Events of one subject (a job id, node, pool) or of all. To follow them, ask for a stream, or again after
    the last number."""
    return page_of_events(world, subject=subject, after=after, limit=limit, cursor=cursor)


@router.get("/decisions", responses=problems(410))
def list_decisions(world: WorldDep, after: After = 0, limit: Limit = 100, cursor: Cursor = "") -> PageOf[DecisionView]:
    """What ticks decided, each decision with its reason."""
    sight = world.sight
    page = page_by_number(
        "decisions",
        world.store.decisions,
        lambda row: sight.subject(subject_of(row.decision)),
        swept=partial(world.store.swept_up_to, HistoryLog.DECISIONS),
        after=after,
        cursor=cursor,
        limit=limit,
    )
    return {"items": sight.redacted([decision_view(row) for row in page["items"]]), "next": page["next"]}


def page_of_events(world: World, *, subject: str, after: int, limit: int, cursor: str) -> PageOf[EventView]:
    sight = world.sight
    page = page_by_number(
        "events",
        partial(world.store.events, subject=subject),
        lambda row: sight.subject(row.event.subject),
        swept=partial(world.store.swept_up_to, HistoryLog.EVENTS),
        after=after,
        cursor=cursor,
        limit=limit,
    )
    return {"items": sight.redacted([event_view(row) for row in page["items"]]), "next": page["next"]}
