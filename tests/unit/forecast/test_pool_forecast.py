"""Forecasts of pools with known events and demand profiles."""

from __future__ import annotations

from datetime import datetime
from zoneinfo import ZoneInfo

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.domain.fleet import Forecast
from scheduler.domain.known_events import KnownEvent
from scheduler.domain.lending_policy import LendingPolicy
from scheduler.forecast.pool_forecast import PROFILE_MARGIN, forecast_pool, list_local_hours

HOUR_S, DAY_S, WEEK_S = 3_600.0, 86_400.0, 604_800.0
LEVELS = (0.5, 0.999)
BERLIN = "Europe/Berlin"
LAUNCH = KnownEvent("launch", 10_000.0, HOUR_S, gpus=50.0)


class FixedForecaster:
    """Forecaster that expects 20 GPUs, or 40 at high levels."""

    def __init__(self, *, is_calibrated: bool = True) -> None:
        self._is_calibrated = is_calibrated

    def forecast(self, now_s: float, horizon_s: float, *, quantiles: tuple[float, ...]) -> Forecast:
        gpus = tuple(20.0 if level <= 0.5 else 40.0 for level in quantiles)
        return Forecast(now_s, horizon_s, quantiles, gpus, "fixed", is_calibrated=self._is_calibrated)


def forecast(
    rules: LendingPolicy, now_s: float, *, observed_gpus: float = 0.0, forecaster: FixedForecaster | None = None
) -> Forecast:
    return forecast_pool(
        forecaster, rules, LEVELS, now_s=now_s, horizon_s=rules.horizon_s, observed_gpus=observed_gpus, period_s=300.0
    )


def with_event(now_s: float, *events: KnownEvent, loan_s_min: float = 0.0) -> Forecast:
    rules = LendingPolicy(known_events=events or (LAUNCH,), loan_s_min=loan_s_min)
    return forecast(rules, now_s, forecaster=FixedForecaster())


def test_event_raises_the_forecast_two_periods_before_the_horizon_reaches_it_until_it_ends() -> None:
    plain, raised = ((20.0, 40.0), ""), ((50.0, 50.0), "launch")
    instants = (0.0, 8_799.0, 8_800.0, 10_000.0, 13_599.0, 13_600.0)
    found = [(made.gpus, made.event) for made in map(with_event, instants)]
    assert found == [plain, plain, raised, raised, raised, plain]


def test_event_within_the_shortest_loan_raises_the_demand_of_new_loans_only() -> None:
    made = with_event(0.0, loan_s_min=3 * HOUR_S)
    assert (made.gpus, made.lasting_gpus, made.event) == ((20.0, 40.0), (50.0, 50.0), "launch")


def test_factor_multiplies_the_forecast_and_the_largest_event_is_named() -> None:
    double = KnownEvent("double", 10_000.0, HOUR_S, factor=2.0)
    assert (with_event(10_000.0, double).gpus, with_event(10_000.0, double).event) == ((40.0, 80.0), "double")
    both = with_event(10_000.0, LAUNCH, double)
    assert (both.gpus, both.event) == ((50.0, 80.0), "double")


def test_event_below_the_forecast_changes_nothing() -> None:
    made = with_event(10_000.0, KnownEvent("quiet", 10_000.0, HOUR_S, gpus=10.0))
    assert (made.gpus, made.event, made.is_calibrated) == ((20.0, 40.0), "", True)


def test_profile_replaces_an_uncalibrated_forecast_only() -> None:
    rules = LendingPolicy(demand_profile=tuple(float(hour) for hour in range(24)))
    guess = forecast(rules, 6 * HOUR_S, forecaster=FixedForecaster(is_calibrated=False))
    assert guess == forecast(rules, 6 * HOUR_S)
    assert (guess.gpus, guess.method, guess.is_calibrated) == ((6.0, 6.0 * PROFILE_MARGIN), "demand profile", False)
    assert forecast(rules, 6 * HOUR_S, forecaster=FixedForecaster()).method == "fixed"


def test_profile_is_read_over_the_whole_horizon_and_by_the_local_clock() -> None:
    rules = LendingPolicy(demand_profile=tuple(float(hour) for hour in range(24)), time_zone=BERLIN)
    just_before_seven = datetime.fromisoformat("2026-07-01T06:55+02:00").timestamp()
    assert forecast(rules, just_before_seven).gpus[0] == 7.0
    assert forecast(rules, just_before_seven - 600.0).gpus[0] == 6.0


def test_demand_above_the_profile_scales_it() -> None:
    rules = LendingPolicy(demand_profile=(10.0,) * 7 + (20.0,) * 17)
    made = forecast(rules, 7 * HOUR_S - 300.0, observed_gpus=15.0)
    assert made.gpus == (30.0, 30.0 * PROFILE_MARGIN)
    assert forecast(rules, 0.0, observed_gpus=5.0).gpus == (10.0, 10.0 * PROFILE_MARGIN)


def test_profile_of_a_week_begins_on_monday() -> None:
    rules = LendingPolicy(demand_profile=(1.0,) * 24 + (2.0,) * 120 + (3.0,) * 24)
    days = ("2026-11-23T12:00Z", "2026-11-24T12:00Z", "2026-11-29T12:00Z")
    assert [forecast(rules, datetime.fromisoformat(day).timestamp()).gpus[0] for day in days] == [1.0, 2.0, 3.0]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.sampled_from([BERLIN, "UTC", "Asia/Kolkata", "Australia/Lord_Howe"]),
    st.sampled_from(["2026-03-28T18:00Z", "2026-10-24T18:00Z", "2026-04-04T10:00Z", "2026-06-01T00:00Z"]),
    st.floats(0.0, DAY_S),
    st.floats(0.0, DAY_S),
)
def test_each_local_hour_of_a_span_is_read(zone: str, day: str, after_s: float, span_s: float) -> None:
    start_s = datetime.fromisoformat(day).timestamp() + after_s
    steps = [start_s + each * 60.0 for each in range(int(span_s / 60.0) + 1)]
    local = [datetime.fromtimestamp(each, ZoneInfo(zone)) for each in steps]
    expected = {each.weekday() * 24 + each.hour for each in local}
    assert expected <= set(list_local_hours(zone, start_s, start_s + span_s, count=168))
