"""The record: events, decisions, the newest snapshot; and plans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from api.sdk.calls import Calls

if TYPE_CHECKING:
    from api.answers.plan import SolvedPlanView
    from api.answers.record import DecisionView, EventView, SnapshotView


class RecordCalls(Calls):
    def events(self, *, subject: str = "", after: int = 0, limit: int = 100) -> Iterator[EventView]:
        """Events in order, of one subject or of all, a page of `limit` at a time. To follow them, ask again with
        `after` = the last one's number."""
        query = {"subject": subject, "after": str(after or "")}
        yield from self._connection.items("/v1/events", limit=limit, query=query)

    def decisions(self, *, limit: int = 100) -> Iterator[DecisionView]:
        yield from self._connection.items("/v1/decisions", limit=limit, query={})

    def snapshot(self) -> SnapshotView:
        """The newest snapshot, as `scheduler.domain.codec` encodes it."""
        return self._connection.object("GET", "/v1/snapshots/latest")

    def plan(self, request: Mapping[str, Any]) -> SolvedPlanView:
        """Solve a plan request on the service."""
        return self._connection.object("POST", "/v1/plans", json=request)
