"""Forecasts of a simulation."""

from __future__ import annotations

from scheduler.domain.fleet import Pool, PoolKind
from scheduler.domain.lending_policy import LendingPolicy
from scheduler.domain.snapshot import Snapshot
from scheduler.simulator.demand import DemandChange, DemandTrace, ForecastSource, OracleForecaster

LENDS = Pool("chat", PoolKind.INFERENCE, LendingPolicy(return_deadline_s=300.0, cold_start_s=600.0))
KEEPS = Pool("code", PoolKind.INFERENCE, LendingPolicy(enabled=False))
UNKNOWN = Pool("vision", PoolKind.INFERENCE)


def test_only_lending_pools_with_a_trace_get_forecasts() -> None:
    traces = [DemandTrace(name, (0.0,), (4.0,)) for name in ("chat", "code")]
    forecasts = ForecastSource([Pool("training", PoolKind.TRAINING), LENDS, KEEPS, UNKNOWN], traces)
    for name in ("chat", "code"):
        forecasts.observe(DemandChange(0.0, name, 4.0))
    (made,) = forecasts.make_forecasts(300.0, Snapshot())
    assert (made.pool, made.forecast.made_at_s, made.forecast.horizon_s) == ("chat", 300.0, 900.0)
    assert made.forecast.demand_at(0.999) >= 4.0


def test_pool_without_observed_demand_gets_no_forecast() -> None:
    forecasts = ForecastSource([LENDS], [DemandTrace("chat", (600.0,), (4.0,))])
    assert forecasts.make_forecasts(300.0, Snapshot()) == ()
    forecasts.observe(DemandChange(600.0, "chat", 4.0))
    assert len(forecasts.make_forecasts(600.0, Snapshot())) == 1


def test_forecaster_follows_the_clock_of_its_pool() -> None:
    zones = list[str]()

    def make_forecaster(trace: DemandTrace, zone: str) -> OracleForecaster:
        zones.append(zone)
        return OracleForecaster(trace, seed=1, period_s=0.0)

    local = Pool("chat", PoolKind.INFERENCE, LendingPolicy(time_zone="Europe/Berlin"))
    ForecastSource([local], [DemandTrace("chat", (0.0,), (4.0,))], make_forecaster)
    assert zones == ["Europe/Berlin"]


def test_pool_with_a_profile_gets_a_forecast_before_its_demand_is_observed() -> None:
    pool = Pool("chat", PoolKind.INFERENCE, LendingPolicy(demand_profile=(3.0,) * 24))
    (made,) = ForecastSource([pool], [DemandTrace("chat", (600.0,), (4.0,))]).make_forecasts(300.0)
    assert (made.forecast.gpus[0], made.forecast.is_calibrated) == (3.0, False)


def test_oracle_returns_the_maximum_over_horizon_and_period() -> None:
    oracle = OracleForecaster(DemandTrace("chat", (0.0, 600.0, 1200.0), (4.0, 9.0, 2.0)), seed=1, period_s=300.0)
    assert [oracle.forecast(now_s, 200.0).demand_at(0.5) for now_s in (0.0, 99.0, 100.0, 1199.0, 1200.0)] == [
        4,
        4,
        9,
        9,
        2,
    ]


def test_oracle_knows_the_repetitions_of_the_trace() -> None:
    trace = DemandTrace("chat", (0.0, 600.0), (4.0, 9.0))
    seen = [change for change, _ in zip(trace.iter_changes(7), range(20), strict=False)]
    oracle = OracleForecaster(trace, seed=7, period_s=0.0)
    assert [oracle.forecast(change.at_s, 1.0).demand_at(0.999) for change in seen] == [change.gpus for change in seen]


def test_oracle_answers_a_short_horizon_after_a_long_one() -> None:
    rules = LendingPolicy(return_deadline_s=100.0, cold_start_s=0.0, loan_s_min=1000.0)
    lends = Pool("chat", PoolKind.INFERENCE, rules)
    trace = DemandTrace("chat", (0.0, 600.0, 5000.0), (4.0, 9.0, 2.0))
    forecasts = ForecastSource([lends], [trace], lambda trace, zone: OracleForecaster(trace, seed=1, period_s=0.0))
    forecasts.observe(DemandChange(0.0, "chat", 4.0))
    for now_s in (0.0, 10.0):
        (made,) = forecasts.make_forecasts(now_s, Snapshot())
        assert (made.forecast.demand_at(0.999), made.forecast.min_loan_demand_at(0.999)) == (4.0, 9.0)
