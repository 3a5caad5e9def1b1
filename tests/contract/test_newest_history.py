"""Contract of all stores for events and decisions in descending number."""

from __future__ import annotations

import pytest

from scheduler.domain.decisions import Decision, LendNode, Reason, ReasonCode, RejectJob, ReturnNode
from scheduler.domain.events import Event, EventCode
from scheduler.domain.snapshot import Snapshot
from scheduler.store import sql_newest_history
from scheduler.store.api_protocol import ApiStore
from scheduler.store.newest_history import DecisionFilter
from scheduler.store.protocol import Commit, Page, StoredDecision
from tests.contract.store_records import make_next_snapshot

_ALL = 10**9
_REASON = Reason(ReasonCode.OPERATOR_ASKED, "asked")


@pytest.fixture
def filled(store: ApiStore) -> ApiStore:
    """A store with twelve events and twelve decisions, about two nodes and a job."""
    kinds: tuple[Decision, ...] = (LendNode("i0", _REASON), RejectJob("job-1", _REASON), ReturnNode("i1", _REASON))
    events = tuple(Event(1.0, EventCode.NODE_CHANGED, f"i{at % 2}", "changed") for at in range(12))
    store.commit(Commit(Snapshot(), make_next_snapshot(Snapshot()), epoch=0, decisions=kinds * 4, events=events))
    return store


def _walk(store: ApiStore, filters: DecisionFilter, limit: int) -> list[StoredDecision]:
    """Read all matching decisions in pages."""
    found: list[StoredDecision] = []
    before = _ALL
    while before:
        newest = store.newest.list_decisions(before, limit, filters)
        assert len(newest.rows) <= limit
        found += newest.rows
        before = newest.older_below
    return found


@pytest.mark.parametrize("limit", [1, 5, 12, 100])
@pytest.mark.parametrize(
    "filters",
    [
        DecisionFilter(),
        DecisionFilter(subject="i0"),
        DecisionFilter(subject="job-1"),
        DecisionFilter(kind="ReturnNode"),
        DecisionFilter(subject="i0", kind="ReturnNode"),
        DecisionFilter(subject="kind"),
    ],
)
def test_pages_of_newest_decisions_are_complete(filled: ApiStore, filters: DecisionFilter, limit: int) -> None:
    expected = [each for each in filled.list_decisions(Page()) if filters.matches(each)]
    assert _walk(filled, filters, limit) == expected[::-1]


def test_a_read_compares_a_limited_number_of_decisions(filled: ApiStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql_newest_history, "DECISIONS_SCANNED_MAX", 2)
    wanted = DecisionFilter(subject="job-1")
    assert len(_walk(filled, wanted, 100)) == 4
    assert len(_walk(filled, DecisionFilter(), 5)) == 12


def test_newest_events_are_read_by_subject_and_in_pages(filled: ApiStore) -> None:
    events = filled.list_events(Page())
    assert filled.newest.list_events(_ALL, 100).rows == events[::-1]
    assert filled.newest.list_events(_ALL, 100).older_below == 0
    page = filled.newest.list_events(_ALL, 2, "i1")
    assert page.rows == (events[11], events[9])
    assert filled.newest.list_events(page.older_below, 100, "i1").rows == events[7::-2]


def test_an_empty_history_has_no_newest_rows(store: ApiStore) -> None:
    assert store.newest.list_decisions(_ALL, 10, DecisionFilter()).rows == ()
    assert store.newest.list_events(_ALL, 10).older_below == 0
