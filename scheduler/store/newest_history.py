"""Events and decisions in descending number, for lists that begin with the newest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Generic, Protocol, TypeVar

from scheduler.domain.decisions import decision_subject
from scheduler.store.protocol import StoredDecision, StoredEvent

Row = TypeVar("Row")
NumberedRow = TypeVar("NumberedRow", StoredEvent, StoredDecision)

DECISIONS_SCANNED_MAX = 20_000
"""Decisions that one read compares with a filter. No index finds them by subject or kind."""


@dataclass(frozen=True, slots=True)
class DecisionFilter:
    """Filter for lists of decisions. The empty string matches everything.

    `subject` is a job id or the name of a node, `kind` the name of a decision's class.
    """

    subject: str = ""
    kind: str = ""

    def matches(self, stored: StoredDecision) -> bool:
        is_kind = self.kind in ("", type(stored.decision).__name__)
        return is_kind and self.subject in ("", decision_subject(stored.decision))


@dataclass(frozen=True, slots=True)
class NewestRows(Generic[Row]):
    """Rows in descending number. `older_below` is the number below which to read on; 0: there are no older rows."""

    rows: tuple[Row, ...]
    older_below: int


class NewestHistory(Protocol):
    """Every method may raise UnavailableError."""

    def list_events(self, before: int, limit: int, subject: str = "") -> NewestRows[StoredEvent]:
        """Return up to `limit` events with a number below `before`, of one subject or of all."""

    def list_decisions(self, before: int, limit: int, filters: DecisionFilter) -> NewestRows[StoredDecision]:
        """Return up to `limit` matching decisions with a number below `before`.

        Compares a limited number of decisions with the filter, so older ones may follow although few were found.
        """


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


def _take_newest(rows: Iterator[NumberedRow], limit: int) -> NewestRows[NumberedRow]:
    found = tuple(islice(rows, limit))
    older_below = found[-1].number if len(found) == limit else 0
    return NewestRows(found, older_below if older_below > 1 else 0)
