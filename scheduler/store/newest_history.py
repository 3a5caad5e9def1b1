"""Events and decisions in descending number, for lists that begin with the newest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from scheduler.domain.decisions import decision_subject
from scheduler.store.protocol import StoredDecision, StoredEvent

Row = TypeVar("Row")

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
