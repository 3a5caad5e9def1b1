"""PoolForecaster: cold start, fits, working levels and bounded memory."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pytest

from scheduler.forecast.coverage import TRACKED_LEVELS, WorkingLevels
from scheduler.forecast.demand_history import FloatArray
from scheduler.forecast.forecaster import PoolForecaster, fit_due
from scheduler.forecast.regression import FEATURES, NormalEquations, compute_prior
from tests.unit.forecast.demands import HOUR_S, make_days


def learn(
    times_s: FloatArray, gpus: FloatArray, *, horizon_s: float = 2 * HOUR_S, method: str | None = None
) -> PoolForecaster:
    """Return a forecaster that has observed all readings and was fitted when fits were due."""
    forecaster = PoolForecaster(step_s=HOUR_S, method=method)
    for time_s, value in zip(times_s.tolist(), gpus.tolist(), strict=True):
        forecaster.observe(time_s, value)
        forecaster.forecast(time_s, horizon_s)
        fit_due([forecaster], time_s)
    return forecaster


@pytest.mark.parametrize("quantile", [0.0, 1.0, -0.5])
def test_quantile_must_be_between_zero_and_one(quantile: float) -> None:
    forecaster = PoolForecaster()
    forecaster.observe(0.0, 4.0)
    with pytest.raises(ValueError, match="quantiles must be in"):
        forecaster.forecast(0.0, 600.0, quantiles=(quantile,))


def test_first_day_is_cautious_and_not_calibrated() -> None:
    times_s, gpus = make_days(1)
    forecaster = learn(times_s, gpus)
    made = forecaster.forecast(float(times_s[-1]), 2 * HOUR_S)
    assert (made.demand_at(0.5), made.demand_at(0.9)) == (gpus[-1], 2 * gpus[-1])
    assert not made.is_calibrated


@pytest.mark.parametrize("gpus", [0.0, 10.0])
def test_constant_demand_is_forecast_exactly(gpus: float) -> None:
    times_s, _ = make_days(4)
    forecaster = learn(times_s, np.full(len(times_s), gpus))
    made = forecaster.forecast(float(times_s[-1]), 2 * HOUR_S)
    assert made.is_calibrated
    assert made.gpus == pytest.approx((gpus,) * 5, abs=1e-6)


def test_quantiles_ascend_and_none_is_below_the_current_demand() -> None:
    times_s, gpus = make_days(6, noise=0.1)
    forecaster = PoolForecaster(step_s=HOUR_S)
    for time_s, value in zip(times_s.tolist(), gpus.tolist(), strict=True):
        forecaster.observe(time_s, value)
        made = forecaster.forecast(time_s, 2 * HOUR_S)
        fit_due([forecaster], time_s)
        assert min(made.gpus) >= value
        assert list(made.gpus) == sorted(made.gpus)


def test_equal_readings_give_equal_forecasts() -> None:
    times_s, gpus = make_days(5, noise=0.1)
    made = [learn(times_s, gpus).forecast(float(times_s[-1]), 2 * HOUR_S) for _ in range(2)]
    assert made[0] == made[1]


def test_fits_are_due_four_times_a_day_and_each_hour_until_calibrated() -> None:
    forecaster, due = PoolForecaster(step_s=HOUR_S), list[int]()
    times_s, gpus = make_days(4, noise=0.1)
    for hour, (time_s, value) in enumerate(zip(times_s.tolist(), gpus.tolist(), strict=True)):
        forecaster.observe(time_s, value)
        forecaster.forecast(time_s, HOUR_S)
        for horizon_s, task in forecaster.list_due_fits(time_s, np.zeros(FEATURES)).items():
            forecaster.accept(horizon_s, task.run())
            due.append(hour)
    assert due[:4] == [24, 25, 26, 27]
    assert [later - earlier for earlier, later in zip(due[-7:], due[-6:], strict=False)] == [6] * 6


def test_readings_older_than_a_month_do_not_matter() -> None:
    times_s, gpus = make_days(60, noise=0.1, step_s=HOUR_S)
    old, now_s = gpus.copy(), float(times_s[-1])
    old[: 30 * 24] = 7.0
    forecasters = []
    for values in (gpus, old):
        forecaster = PoolForecaster(step_s=HOUR_S)
        for time_s, value in zip(times_s.tolist(), values.tolist(), strict=True):
            forecaster.observe(time_s, value)
        forecaster.forecast(now_s, HOUR_S)
        fit_due([forecaster], now_s)
        forecasters.append(forecaster)
    made = [each.forecast(now_s, HOUR_S).gpus for each in forecasters]
    assert made[0] == made[1]


def test_models_of_other_horizons_stand_in_until_one_is_fitted() -> None:
    times_s, gpus = make_days(4, noise=0.1)
    forecaster, now_s = learn(times_s, gpus, horizon_s=2 * HOUR_S), float(times_s[-1])
    usual = forecaster.forecast(now_s, 2 * HOUR_S)
    shorter, longer = (forecaster.forecast(now_s, hours * HOUR_S) for hours in (1, 3))
    assert (shorter.gpus, shorter.horizon_s, shorter.is_calibrated) == (usual.gpus, 2 * HOUR_S, True)
    assert (longer.gpus, longer.horizon_s, longer.is_calibrated) == (usual.gpus, 2 * HOUR_S, False)
    fit_due([forecaster], now_s)
    own = [forecaster.forecast(now_s, hours * HOUR_S) for hours in (1, 3)]
    assert [(each.horizon_s, each.is_calibrated) for each in own] == [(HOUR_S, True), (3 * HOUR_S, True)]


def test_models_of_horizons_that_are_no_longer_asked_for_are_dropped() -> None:
    times_s, gpus = make_days(4, noise=0.1)
    forecaster, now_s = learn(times_s, gpus, horizon_s=2 * HOUR_S), float(times_s[-1])
    for hour in range(8):
        forecaster.observe(now_s + hour * HOUR_S, 10.0)
        forecaster.forecast(now_s + hour * HOUR_S, HOUR_S)
        fit_due([forecaster], now_s + hour * HOUR_S)
    assert len(forecaster.equations) == 1


def test_forecast_by_one_method_alone() -> None:
    times_s, gpus = make_days(4, noise=0.1)
    made = learn(times_s, gpus, method="persistence").forecast(float(times_s[-1]), 2 * HOUR_S)
    assert made.method == "persistence"
    assert made.is_calibrated


def test_working_level_falls_with_each_miss_and_recovers() -> None:
    levels = WorkingLevels()
    above = np.full((1, len(TRACKED_LEVELS)), 5.0)
    missed = levels.learn(np.array([9.0]), above, overlap=1)
    assert missed.find(0.95) > 0.95
    assert missed.find(0.5) == 0.5
    kept = missed.learn(np.full(100, 1.0), np.repeat(above, 100, axis=0), overlap=1)
    assert 0.9 <= kept.find(0.95) < missed.find(0.95)
    assert levels.learn(np.array([np.nan]), above, overlap=1) == levels


@pytest.mark.parametrize("level", TRACKED_LEVELS[:2])
def test_adapted_levels_are_missed_as_often_as_promised(level: float) -> None:
    """The forecast's quantiles have three quarters of the true spread."""
    generator, levels, misses, unadapted = np.random.default_rng(4), WorkingLevels(), 0, 0
    for outcome in np.abs(generator.standard_normal(4_000)):
        quantiles = np.array([[0.75 * find_half_normal(levels.find(each)) for each in TRACKED_LEVELS]])
        misses += int(outcome > quantiles[0, TRACKED_LEVELS.index(level)])
        unadapted += int(outcome > 0.75 * find_half_normal(level))
        levels = levels.learn(np.array([outcome]), quantiles, overlap=1)
    assert misses / 4_000 == pytest.approx(1 - level, rel=0.3)
    assert misses < unadapted / 1.8


def find_half_normal(level: float) -> float:
    return NormalDist().inv_cdf(0.5 + level / 2)


def test_pools_without_an_own_fit_start_from_the_coefficients_of_all() -> None:
    known = NormalEquations.empty().add_rows(np.eye(FEATURES), np.ones(FEATURES), np.ones(FEATURES), decay=1.0)
    prior = compute_prior([known, NormalEquations.empty()])
    assert prior[:-1] == pytest.approx(np.full(FEATURES - 1, 0.97), abs=0.03)
    assert NormalEquations.empty().solve(prior) is prior
