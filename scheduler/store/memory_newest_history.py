"""Events and decisions in descending number, in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TypeVar

from scheduler.store.newest_history import DecisionFilter, NewestRows
from scheduler.store.protocol import StoredDecision, StoredEvent

Row = TypeVar("Row", StoredEvent, StoredDecision)


class MemoryNewestHistory:
    """NewestHistory of the lists of a MemoryStore, which only grow and are numbered from 1."""

    def __init__(self, events: Sequence[StoredEvent], decisions: Sequence[StoredDecision]) -> None:
        self._events = events
        self._decisions = decisions

    def list_events(self, before: int, limit: int, subject: str = "") -> NewestRows[StoredEvent]:
        older = reversed(self._events[: max(0, before - 1)])
        return _take_newest((each for each in older if subject in ("", each.event.subject)), limit)

    def list_decisions(self, before: int, limit: int, filters: DecisionFilter) -> NewestRows[StoredDecision]:
        return _take_newest(filter(filters.matches, reversed(self._decisions[: max(0, before - 1)])), limit)


def _take_newest(rows: Iterator[Row], limit: int) -> NewestRows[Row]:
    found = tuple(islice(rows, limit))
    older_below = found[-1].number if len(found) == limit else 0
    return NewestRows(found, older_below if older_below > 1 else 0)
