"""Reports of demand history: the present demand, back-fill, and what they leave alone."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.domain.commands import Command, DemandSourceFailed, ReportDemand, ReportDemandHistory
from scheduler.domain.events import EventCode
from scheduler.domain.observation import Observation
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.snapshot_update import SnapshotUpdate, update_snapshot
from tests.builders import a_fleet, a_snapshot

NOW_S = 1_000_000.0
FLEET = a_fleet(training=1, inference=1)
TIMES = st.integers(0, 40).map(lambda step: NOW_S - 300.0 * step)
HISTORIES = st.dictionaries(TIMES, st.floats(0.0, 64.0), min_size=1).map(lambda found: tuple(sorted(found.items())))


def report(snapshot: Snapshot, *bodies: ReportDemand | ReportDemandHistory, at_s: float = NOW_S) -> SnapshotUpdate:
    commands = [Command(str(at), at_s, body) for at, body in enumerate(bodies)]
    return update_snapshot(replace(snapshot, now_s=NOW_S), Observation(NOW_S, 0), commands)


def test_new_pool_gets_its_history_and_its_present_demand_at_once() -> None:
    history = ((NOW_S - 600.0, 3.0), (NOW_S - 300.0, 20.0), (NOW_S, 5.0))
    update = report(a_snapshot(FLEET), ReportDemandHistory("inference", history))
    present = update.snapshot.demand["inference"]
    assert (present.at_s, present.gpus, present.backfills) == (NOW_S, 5.0, 0)
    assert update.readings == (("inference", present),)
    assert [(reading.at_s, reading.gpus, reading.asked_gpus) for _, reading in update.backfill] == [
        (NOW_S - 600.0, 3.0, 3.0),
        (NOW_S - 300.0, 8.0, 20.0),
    ]
    assert update.events == ()


def test_older_readings_change_neither_the_present_demand_nor_the_shortages() -> None:
    known = report(a_snapshot(FLEET), ReportDemand("inference", 4.0)).snapshot
    update = report(known, ReportDemandHistory("inference", ((NOW_S - 300.0, 8.0), (NOW_S, 9.0))))
    present = update.snapshot.demand["inference"]
    assert present == replace(known.demand["inference"], backfills=1)
    assert update.readings == ()
    assert [reading.at_s for _, reading in update.backfill] == [NOW_S - 300.0]


def test_gap_after_the_latest_reading_is_no_back_fill_of_what_forecasts_know() -> None:
    known = report(a_snapshot(FLEET), ReportDemand("inference", 4.0), at_s=NOW_S - 1200.0).snapshot
    update = report(known, ReportDemandHistory("inference", ((NOW_S - 600.0, 6.0), (NOW_S, 7.0))))
    present = update.snapshot.demand["inference"]
    assert (present.gpus, present.backfills) == (7.0, 0)
    assert [reading.asked_gpus for _, reading in update.backfill] == [6.0]


def test_report_for_an_unknown_pool_is_refused() -> None:
    update = report(a_snapshot(FLEET), ReportDemandHistory("nowhere", ((1.0, 1.0),)))
    assert [event.code for event in update.events] == [EventCode.COMMAND_REFUSED]


def test_failed_source_is_an_event_of_the_pool() -> None:
    failed = DemandSourceFailed("inference", "NoSeries", "the query returns no series")
    update = update_snapshot(a_snapshot(FLEET), Observation(0.0, 0), (Command("c", 0.0, failed),))
    assert [(event.code, event.subject, event.cause) for event in update.events] == [
        (EventCode.DEMAND_UNKNOWN, "inference", "NoSeries")
    ]


@given(st.lists(HISTORIES, min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_reports_in_any_order_lead_to_the_newest_demand(histories: list[tuple[tuple[float, float], ...]]) -> None:
    update = report(a_snapshot(FLEET), *(ReportDemandHistory("inference", each) for each in histories))
    present = update.snapshot.demand["inference"]
    newest_s = max(at_s for history in histories for at_s, _ in history)
    first = next(dict(history)[newest_s] for history in histories if newest_s in dict(history))
    assert (present.at_s, present.asked_gpus) == (newest_s, first)
    recorded = {reading.at_s for _, reading in (*update.backfill, *update.readings)}
    assert recorded == {at_s for history in histories for at_s, _ in history}
    assert len(update.backfill) == len({reading.at_s for _, reading in update.backfill})
