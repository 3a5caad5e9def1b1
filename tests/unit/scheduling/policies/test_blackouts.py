"""Blackouts: daily windows and windows by a cron expression, through daylight saving."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.domain.fleet import DemandReading, Forecast
from scheduler.domain.lending_policy import Blackout, LendingPolicy
from scheduler.scheduling.policies.blackouts import is_in_blackout
from scheduler.scheduling.policies.lending import lend_forecast_idle
from scheduler.scheduling.policies.settings import PolicySettings
from tests.builders import a_fleet, a_snapshot

HOUR_S = 3_600.0
BERLIN = "Europe/Berlin"
ZONES = ("UTC", BERLIN, "America/New_York", "Asia/Kolkata", "Australia/Lord_Howe", "Pacific/Apia")


def at(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def nightly(hours: float, *, zone: str = "", start: str = "0 22 * * *") -> LendingPolicy:
    return LendingPolicy(time_zone=BERLIN, blackouts=(Blackout(0.0, hours * HOUR_S, start, zone),))


def edges(rules: LendingPolicy, start_s: float, end_s: float) -> str:
    """Return the instants at which blackouts begin and end, in UTC: `+21:00 -05:00`."""
    instants = [start_s + 60.0 * minute for minute in range(int((end_s - start_s) / 60.0))]
    inside = [is_in_blackout(rules, each) for each in instants]
    changes = (
        (each, now) for each, now, before in zip(instants[1:], inside[1:], inside, strict=False) if now is not before
    )
    return " ".join(f"{'+' if now else '-'}{datetime.fromtimestamp(each, UTC):%H:%M}" for each, now in changes)


@pytest.mark.parametrize(
    ("rules", "day", "found"),
    [
        (nightly(8), "2026-01-15", "+21:00 -05:00"),
        (nightly(8), "2026-03-28", "+21:00 -05:00"),  # contains the lost hour: it ends at 7:00 in Berlin
        (nightly(8), "2026-10-24", "+20:00 -04:00"),  # contains the doubled hour: it ends at 5:00 in Berlin
        (nightly(1, start="30 2 * * *"), "2026-03-28", "+01:00 -02:00"),  # 2:30 does not exist, so 3:00 begins it
        (nightly(1, start="30 2 * * *"), "2026-10-24", "+00:30 -01:30"),  # the first 2:30 only
        (nightly(8, zone="UTC"), "2026-01-15", "+22:00 -06:00"),
    ],
    ids=["winter", "lost hour inside", "doubled hour inside", "begins in the lost hour", "doubled", "own zone"],
)
def test_window_lasts_for_its_duration_through_daylight_saving(rules: LendingPolicy, day: str, found: str) -> None:
    assert edges(rules, at(f"{day}T12:00Z"), at(f"{day}T12:00Z") + 24 * HOUR_S) == found


def test_days_of_the_week_are_local() -> None:
    rules = nightly(10, start="0 8 * * 1-5")
    assert edges(rules, at("2026-11-26T12:00Z"), at("2026-11-30T12:00Z")) == "-17:00 +07:00 -17:00 +07:00"


def test_windows_of_one_expression_may_overlap() -> None:
    assert edges(nightly(30), at("2026-01-15T12:00Z"), at("2026-01-18T12:00Z")) == ""


@pytest.mark.parametrize(
    ("zone", "found"),
    [("", "+22:00 -06:00"), (BERLIN, "+21:00 -04:00"), ("Asia/Kolkata", "+16:30 -00:30")],
)
def test_daily_window_is_in_utc_unless_it_names_a_zone(zone: str, found: str) -> None:
    rules = LendingPolicy(time_zone=BERLIN, blackouts=(Blackout(22 * HOUR_S, 6 * HOUR_S, time_zone=zone),))
    assert edges(rules, at("2026-03-28T12:00Z"), at("2026-03-29T12:00Z")) == found


def test_window_of_an_expression_may_begin_after_its_time() -> None:
    rules = LendingPolicy(blackouts=(Blackout(HOUR_S, 2 * HOUR_S, "0 0 * * *"),))
    assert edges(rules, at("2026-01-15T12:00Z"), at("2026-01-16T12:00Z")) == "+01:00 -02:00"


@dataclass(frozen=True)
class Weekly:
    """Windows that begin at one local time on some days of the week, and an instant near them."""

    zone: str
    hour: int
    minute: int
    days: frozenset[int]
    duration_s: float
    now_s: float

    @property
    def cron(self) -> str:
        days = ",".join(str((day + 1) % 7) for day in sorted(self.days))
        return f"{self.minute} {self.hour} * * {days}"

    def covers_now(self) -> bool:
        """Return whether a window covers the instant, by walking through the days before it."""
        today = datetime.fromtimestamp(self.now_s, UTC).date()
        days = (today + timedelta(days=back) for back in range(2, -5, -1))
        starts = (self._find_start_s(day) for day in days if day.weekday() in self.days)
        return any(start_s <= self.now_s < start_s + self.duration_s for start_s in starts)

    def _find_start_s(self, day: date) -> float:
        """Return the first instant of the day that is not before the time of the window by the clock on the wall."""
        minutes = (
            datetime(day.year, day.month, day.day, tzinfo=ZoneInfo(self.zone)).astimezone(UTC) + timedelta(minutes=each)
            for each in range(1_600)
        )
        reached = (each for each in minutes if self._is_reached(each.astimezone(ZoneInfo(self.zone)), day))
        return next(reached).timestamp()

    def _is_reached(self, local: datetime, day: date) -> bool:
        return (local.date(), local.hour, local.minute) >= (day, self.hour, self.minute)


@st.composite
def weekly_windows(draw: st.DrawFn) -> Weekly:
    """Windows of common zones, often around a change of the clock."""
    zone = draw(st.sampled_from(ZONES[:4]))
    changes = [at("2026-03-08T07:00Z"), at("2026-03-29T01:00Z"), at("2026-10-25T01:00Z"), at("2026-11-01T06:00Z")]
    base_s = draw(st.sampled_from(changes) | st.floats(at("2026-01-01T00:00Z"), at("2026-12-31T00:00Z")))
    return Weekly(
        zone,
        draw(st.integers(0, 23)),
        draw(st.sampled_from([0, 30, 59])),
        draw(st.frozensets(st.integers(0, 6), min_size=1)),
        draw(st.sampled_from([HOUR_S, 8 * HOUR_S, 30 * HOUR_S])),
        base_s + draw(st.floats(-36 * HOUR_S, 36 * HOUR_S)),
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(weekly_windows())
def test_no_loan_begins_in_a_blackout(windows: Weekly) -> None:
    rules = LendingPolicy(time_zone=windows.zone, blackouts=(Blackout(0.0, windows.duration_s, windows.cron),))
    assert is_in_blackout(rules, windows.now_s) is windows.covers_now()
    snapshot = a_snapshot(
        a_fleet(training=0, inference=4, lending=rules),
        now_s=windows.now_s,
        demand={"inference": DemandReading(windows.now_s, 0.0, 0.0)},
        forecasts={"inference": Forecast(windows.now_s, 600.0, (0.999,), (0.0,), "scripted")},
    )
    target = lend_forecast_idle(snapshot, snapshot.pools["inference"], PolicySettings())
    assert target.allows_new_loans is not windows.covers_now()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.sampled_from(ZONES), st.integers(0, 86_400), st.integers(0, 86_400), st.integers(0, 4 * 10**9))
def test_daily_window_follows_the_clock_on_the_wall(zone: str, start_s: int, end_s: int, now_s: int) -> None:
    local = datetime.fromtimestamp(now_s, UTC).astimezone(ZoneInfo(zone))
    second = (local - local.replace(hour=0, minute=0, second=0, microsecond=0)).total_seconds()
    inside = start_s <= second < end_s if start_s <= end_s else second >= start_s or second < end_s
    rules = LendingPolicy(blackouts=(Blackout(float(start_s), float(end_s), time_zone=zone),))
    assert is_in_blackout(rules, now_s) is inside
