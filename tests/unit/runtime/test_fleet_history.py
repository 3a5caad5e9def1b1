"""FleetHistory: what it records, when, and of which pools it makes forecast fans."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from scheduler.domain.fleet import DemandReading, LoanState
from scheduler.domain.job_state import JobState
from scheduler.domain.known_events import KnownEvent
from scheduler.domain.lending_policy import LendingPolicy
from scheduler.forecast.pool_forecast import PROFILE_METHOD
from scheduler.runtime.clock import ManualClock
from scheduler.runtime.fleet_history import FleetHistory
from scheduler.scheduling.past_fleet import PENDING_JOBS_MAX, capture_fleet, decode_past_fleet, encode_past_fleet
from scheduler.store.memory_store import MemoryStore
from scheduler.store.protocol import Commit
from tests.builders import a_fleet, a_job, a_loan, a_snapshot

NOW_S, DAY_S = 1_800_000_000.0, 86_400.0


class Site:
    """A store, a clock and its history."""

    def __init__(self, lending: LendingPolicy | None = None, *, epoch: int = 0) -> None:
        snapshot = a_snapshot(a_fleet(training=1, inference=2, lending=lending), [a_job("w", 2)])
        self.store = MemoryStore(replace(snapshot, generation=1, now_s=NOW_S))
        self.clock = ManualClock(NOW_S)
        self.history = FleetHistory(self.store, clock=self.clock, epoch=lambda: 1 - epoch, season_s=DAY_S)

    def commit(self, *readings: DemandReading, **changes: Any) -> None:
        previous = self.store.load().snapshot
        changed = {"generation": previous.generation + 1, "now_s": self.clock.now_s(), **changes}
        if readings:
            changed["demand"] = {"inference": readings[-1]}
        snapshot = replace(previous, **changed)
        told = tuple(("inference", each) for each in readings)
        self.store.commit(Commit(previous, snapshot, epoch=0, readings=told))

    def step(self, after_s: float) -> None:
        self.clock.move_to(self.clock.now_s() + after_s)
        self.history.step()

    def newest_checkpoint_s(self) -> float:
        found = self.store.capacity.find_checkpoint(self.clock.now_s())
        return -1.0 if found is None else float(found.at_s)


def test_states_that_changed_are_recorded_every_five_minutes() -> None:
    site = Site()
    site.step(0.0)
    assert site.newest_checkpoint_s() == NOW_S
    site.commit(jobs={})
    site.step(299.0)
    assert site.newest_checkpoint_s() == NOW_S
    site.commit(jobs={})
    site.step(1.0)
    assert site.newest_checkpoint_s() == NOW_S + 299.0
    site.commit()
    site.step(300.0)
    assert site.newest_checkpoint_s() == NOW_S + 299.0, "the content is the same"
    site.clock.move_to(NOW_S + 3700.0)
    site.commit()
    site.step(1.0)
    assert site.newest_checkpoint_s() == NOW_S + 3700.0, "each hour has a checkpoint"


def test_process_that_does_not_lead_records_nothing() -> None:
    site = Site(epoch=1)
    site.step(0.0)
    assert site.newest_checkpoint_s() == -1.0


def test_clock_that_was_set_back_does_not_stop_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site()
    site.step(0.0)
    monkeypatch.setattr(site.clock, "now_s", lambda: NOW_S - 7 * DAY_S)
    site.commit(jobs={})
    site.history.step()
    assert site.newest_checkpoint_s() == NOW_S - 7 * DAY_S


def readings(days: float) -> tuple[DemandReading, ...]:
    times = [NOW_S - DAY_S * days + 300.0 * number for number in range(int(288 * days))]
    course = [8.0 + 6.0 * math.sin(2 * math.pi * at_s / DAY_S) for at_s in times]
    return tuple(DemandReading(at_s, gpus, gpus) for at_s, gpus in zip(times, course, strict=True))


def test_pool_with_readings_has_a_fan_of_a_day() -> None:
    site = Site()
    site.step(0.0)
    assert site.store.capacity.list_fans() == ()
    site.commit(*readings(3.0))
    site.step(300.0)
    [fan] = site.store.capacity.list_fans()
    assert (fan.pool, fan.made_at_s) == ("inference", NOW_S + 300.0)
    assert NOW_S + 300.0 < fan.at_s[0] < fan.at_s[-1] <= NOW_S + 300.0 + DAY_S
    for at_s, row in zip(fan.at_s, fan.gpus, strict=True):
        assert row[0] == pytest.approx(8.0 + 6.0 * math.sin(2 * math.pi * at_s / DAY_S), abs=1.0)
        assert list(row) == sorted(row)


def test_known_event_raises_the_fan_while_it_lasts() -> None:
    event = KnownEvent("launch", NOW_S + 10_000.0, 3600.0, gpus=500.0)
    site = Site(LendingPolicy(known_events=(event,)))
    site.commit(*readings(3.0))
    site.step(0.0)
    [fan] = site.store.capacity.list_fans()
    raised = [at_s for at_s, row in zip(fan.at_s, fan.gpus, strict=True) if row[0] == 500.0]
    assert raised
    assert all(NOW_S + 10_000.0 - fan.bin_s <= at_s <= NOW_S + 13_600.0 for at_s in raised)
    assert max(row[-1] for at_s, row in zip(fan.at_s, fan.gpus, strict=True) if at_s not in raised) < 50.0


def test_profile_is_the_fan_before_there_are_readings() -> None:
    site = Site(LendingPolicy(demand_profile=tuple(float(hour + 1) for hour in range(24))))
    site.step(0.0)
    [fan] = site.store.capacity.list_fans()
    assert (fan.method, len(fan.at_s), fan.at_s[-1]) == (PROFILE_METHOD, 48, NOW_S + DAY_S)
    assert {row[0] for row in fan.gpus} == {float(hour + 1) for hour in range(24)}


def test_checkpoint_of_a_large_fleet_is_small_and_names_the_oldest_pending_jobs() -> None:
    running = [
        a_job(f"r{at}", 8, state=JobState.RUNNING, on={f"{pool}{at}": tuple(range(8))}, now_s=float(at))
        for pool, count in (("t", 500), ("i", 500))
        for at in range(count)
    ]
    running = [replace(job, id=f"{job.id}-{number}") for number, job in enumerate(running)]
    pending = [a_job(f"w{at}", 2, now_s=float(at)) for at in range(4000)]
    loans = [a_loan(f"i{at}", LoanState.ACTIVE) for at in range(500)]
    past = capture_fleet(a_snapshot(a_fleet(training=500, inference=500), [*running, *pending], loans), 3)
    body = encode_past_fleet(past)
    assert len(body) < 60_000
    assert decode_past_fleet(body) == past
    assert [job.id for job in past.pending] == [f"w{at}" for at in range(PENDING_JOBS_MAX)]
    assert past.pending_by_queue == {"default": (4000, 8000)}
