"""Events and decisions in descending number, in the database."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import ColumnElement, Engine, func, or_, select

from scheduler.store.database import AnyRow, fetch_rows
from scheduler.store.newest_history import DECISIONS_SCANNED_MAX, DecisionFilter, NewestRows
from scheduler.store.protocol import StoredDecision, StoredEvent
from scheduler.store.sql_history import DECISIONS, EVENTS, decode_decision_row, decode_event_row

_ROW = DECISIONS.c


class SqlNewestHistory:
    """NewestHistory in SQL."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def list_events(self, before: int, limit: int, subject: str = "") -> NewestRows[StoredEvent]:
        query = select(EVENTS).where(EVENTS.c.number < before).order_by(EVENTS.c.number.desc()).limit(limit)
        rows = fetch_rows(self._engine, query.where(EVENTS.c.subject == subject) if subject else query)
        return NewestRows(tuple(map(decode_event_row, rows)), _last_number(rows, limit))

    def list_decisions(self, before: int, limit: int, filters: DecisionFilter) -> NewestRows[StoredDecision]:
        range_query = select(func.max(_ROW.number), func.min(_ROW.number)).where(_ROW.number < before)
        newest, oldest = fetch_rows(self._engine, range_query)[0]
        if newest is None:
            return NewestRows((), 0)
        floor = max(oldest, newest - DECISIONS_SCANNED_MAX + 1)
        query = select(DECISIONS).where(_ROW.number < before, _ROW.number >= floor, *_conditions(filters))
        rows = fetch_rows(self._engine, query.order_by(_ROW.number.desc()).limit(limit))
        older_below = _last_number(rows, limit) or floor
        return NewestRows(tuple(map(decode_decision_row, rows)), older_below if older_below > oldest else 0)


def _conditions(filters: DecisionFilter) -> list[ColumnElement[bool]]:
    body = DECISIONS.c.body
    found: list[ColumnElement[bool]] = []
    if filters.subject:
        found.append(or_(body["job_id"].as_string() == filters.subject, body["node"].as_string() == filters.subject))
    if filters.kind:
        found.append(body["kind"].as_string() == filters.kind)
    return found


def _last_number(rows: Sequence[AnyRow], limit: int) -> int:
    """Return the number of the last row if the page is full, else 0."""
    return int(rows[-1].number) if len(rows) == limit else 0
