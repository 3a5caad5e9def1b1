"""Events and decisions: the record of what happened and what was decided, oldest first."""

from __future__ import annotations

from typing import TypeVar

from fastapi import APIRouter

from api.answers.page import PageOf
from api.answers.record import DecisionView, EventView, decision_view, event_view
from api.dependencies import After, Limit, WorldDep
from api.filters import Text
from api.paging import Cursor, cursor_of, place_in
from api.routers.streams import STREAMED
from scheduler.store.protocol import Page, Store

router = APIRouter(prefix="/v1", tags=["record"])

Numbered = TypeVar("Numbered", EventView, DecisionView)


@router.get("/events", responses=STREAMED)
def list_events(
    world: WorldDep,
    subject: Text = "",
    after: After = 0,
    limit: Limit = 100,
    cursor: Cursor = "",
) -> PageOf[EventView]:
    """Events of one subject (a job id, node, pool) or of all. To follow them, ask again after the last number."""
    return page_of_events(world.store, subject=subject, after=after, limit=limit, cursor=cursor)


@router.get("/decisions")
def list_decisions(world: WorldDep, after: After = 0, limit: Limit = 100, cursor: Cursor = "") -> PageOf[DecisionView]:
    """What ticks decided, each decision with its reason."""
    rows = world.store.decisions(Page(_start(after, cursor, "decisions"), limit + 1))
    return _page("decisions", [decision_view(row) for row in rows], limit)


def page_of_events(store: Store, *, subject: str, after: int, limit: int, cursor: str) -> PageOf[EventView]:
    rows = store.events(Page(_start(after, cursor, "events"), limit + 1), subject=subject)
    return _page("events", [event_view(row) for row in rows], limit)


def _start(after: int, cursor: str, noun: str) -> int:
    place = place_in(cursor, noun, int)
    return after if place is None else int(place[0])


def _page(noun: str, items: list[Numbered], limit: int) -> PageOf[Numbered]:
    """`items` are one more than fit on the page, where there are more."""
    following = cursor_of(noun, items[limit - 1]["number"]) if len(items) > limit else None
    return {"items": items[:limit], "next": following}
