"""Events and decisions: the record of what happened and what was decided, oldest first."""

from __future__ import annotations

from fastapi import APIRouter

from api.answers.page import PageOf
from api.answers.record import DecisionView, EventView, decision_view, event_view
from api.dependencies import After, Limit, WorldDep
from api.errors import refuse
from scheduler.store.protocol import Page, Store

router = APIRouter(prefix="/v1", tags=["record"])


@router.get("/events")
def list_events(
    world: WorldDep, subject: str = "", after: After = 0, limit: Limit = 100, cursor: str = ""
) -> PageOf[EventView]:
    """Events of one subject (a job id, node, pool) or of all. To follow them, ask again after the last number."""
    return page_of_events(world.store, subject=subject, after=after, limit=limit, cursor=cursor)


@router.get("/decisions")
def list_decisions(world: WorldDep, after: After = 0, limit: Limit = 100, cursor: str = "") -> PageOf[DecisionView]:
    """What ticks decided, each decision with its reason."""
    rows = world.store.decisions(Page(_start(after, cursor), limit + 1))
    items = [decision_view(row) for row in rows[:limit]]
    return {"items": items, "next": str(items[-1]["number"]) if len(rows) > limit else None}


def page_of_events(store: Store, *, subject: str, after: int, limit: int, cursor: str) -> PageOf[EventView]:
    rows = store.events(Page(_start(after, cursor), limit + 1), subject=subject)
    items = [event_view(row) for row in rows[:limit]]
    return {"items": items, "next": str(items[-1]["number"]) if len(rows) > limit else None}


def _start(after: int, cursor: str) -> int:
    """`cursor` is what an earlier answer gave as `next`: the number of its last item."""
    if not cursor:
        return after
    if not (cursor.isascii() and cursor.isdigit() and len(cursor) < 19):
        refuse("cursor", cursor, "the value of `next` in an earlier answer")
    return int(cursor)
