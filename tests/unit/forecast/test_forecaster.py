"""SeasonalForecaster: validation, bounded memory, and the quality of its quantiles."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler.forecast.demand_history import DemandHistory
from scheduler.forecast.forecaster import QUANTILES, SeasonalForecaster, forecast_from_history

HOUR_S = 3_600.0


def _noisy_days(generator: np.random.Generator, *, days: int, step_s: float = HOUR_S) -> DemandHistory:
    times_s = np.arange(0.0, days * 86_400.0, step_s)
    wave = 100.0 + 60.0 * np.sin(2 * np.pi * times_s / 86_400.0)
    return DemandHistory(times_s, wave * np.exp(0.05 * generator.standard_normal(len(times_s))))


def test_forecast_without_readings_is_rejected() -> None:
    with pytest.raises(ValueError, match="at least one demand reading"):
        SeasonalForecaster().forecast(0.0, 600.0)


@pytest.mark.parametrize(("time_s", "gpus"), [(float("nan"), 1.0), (1.0, float("inf")), (1.0, -1.0)])
def test_invalid_reading_is_rejected(time_s: float, gpus: float) -> None:
    with pytest.raises(ValueError, match=r"must be finite"):
        SeasonalForecaster().observe(time_s, gpus)


def test_readings_must_be_in_time_order() -> None:
    forecaster = SeasonalForecaster()
    forecaster.observe(1_000.0, 4.0)
    with pytest.raises(ValueError, match=r"time_s must not be before the last reading's 1000\.0, got 999\.0"):
        forecaster.observe(999.0, 4.0)
    with pytest.raises(ValueError, match="now_s must not be before the last reading"):
        forecaster.forecast(999.0, 600.0)


@pytest.mark.parametrize("quantile", [0.0, 1.0, -0.5])
def test_quantile_must_be_between_zero_and_one(quantile: float) -> None:
    forecaster = SeasonalForecaster()
    forecaster.observe(0.0, 4.0)
    with pytest.raises(ValueError, match="quantiles must be in"):
        forecaster.forecast(0.0, 600.0, quantiles=(quantile,))


def test_first_forecast_is_cautious_and_marked_uncalibrated() -> None:
    forecaster = SeasonalForecaster()
    forecaster.observe(0.0, 10.0)
    made = forecaster.forecast(0.0, 600.0)
    assert made.demand_at(0.5) == 10.0
    assert made.demand_at(0.9) == 20.0
    assert made.method == "persistence, uncalibrated"


def test_constant_demand_is_forecast_exactly() -> None:
    forecaster = SeasonalForecaster()
    forecaster.observe(0.0, 10.0)
    made = forecaster.forecast(3 * 86_400.0, 600.0)
    assert made.gpus == pytest.approx((10.0,) * len(QUANTILES))
    assert made.method == "level-adjusted seasonal"


def test_zero_demand_is_forecast_without_a_warning() -> None:
    forecaster = SeasonalForecaster()
    forecaster.observe(0.0, 0.0)
    assert forecaster.forecast(3 * 86_400.0, 600.0).gpus == (0.0,) * len(QUANTILES)


def test_no_quantile_is_below_the_current_demand() -> None:
    history = _noisy_days(np.random.default_rng(3), days=9)
    forecaster = SeasonalForecaster(step_s=HOUR_S)
    for time_s, gpus in zip(history.times_s, history.gpus, strict=True):
        forecaster.observe(float(time_s), float(gpus))
        made = forecaster.forecast(float(time_s), 2 * HOUR_S)
        assert min(made.gpus) >= gpus
        assert list(made.gpus) == sorted(made.gpus)


def test_incremental_forecasts_match_a_single_forecast_at_the_end() -> None:
    history = _noisy_days(np.random.default_rng(4), days=12)
    forecaster = SeasonalForecaster(step_s=HOUR_S)
    for time_s, gpus in zip(history.times_s, history.gpus, strict=True):
        forecaster.observe(float(time_s), float(gpus))
        along = forecaster.forecast(float(time_s), 2 * HOUR_S)
    once = forecast_from_history(history, now_s=float(history.times_s[-1]), horizon_s=2 * HOUR_S, step_s=HOUR_S)
    assert along.gpus == pytest.approx(once.gpus)
    assert along.method == once.method


def test_memory_is_bounded_and_old_history_is_dropped() -> None:
    long = _noisy_days(np.random.default_rng(5), days=150, step_s=2 * HOUR_S)
    recent = long.times_s >= long.times_s[-1] - 60 * 86_400.0
    short = DemandHistory(long.times_s[recent], long.gpus[recent])
    made = [
        forecast_from_history(history, now_s=float(long.times_s[-1]), horizon_s=4 * HOUR_S, step_s=2 * HOUR_S)
        for history in (long, short)
    ]
    assert made[0].gpus == pytest.approx(made[1].gpus)


def test_gap_of_years_is_filled_in_bounded_time() -> None:
    forecaster = SeasonalForecaster()
    forecaster.observe(0.0, 5.0)
    forecaster.forecast(3_000.0, 600.0)
    forecaster.observe(1e12, 8.0)
    made = forecaster.forecast(1e12, 600.0)
    assert made.demand_at(0.5) == 8.0
    assert forecaster.count_residuals(600.0) == 14 * 288


def test_largest_reading_of_a_step_counts() -> None:
    forecaster = SeasonalForecaster(season_s=180.0)
    for index in range(4 * 180 * 5):
        forecaster.observe(index / 5, 8.0 if index % 50 == 0 else 2.0)
    made = forecaster.forecast(720.0, 10.0)
    assert made.demand_at(0.5) > 2.0
    assert made.demand_at(0.9) >= 8.0


def test_late_reading_counts_from_the_last_forecast_on() -> None:
    forecaster = SeasonalForecaster()
    forecaster.observe(0.0, 5.0)
    forecaster.forecast(3_000.0, 600.0)
    forecaster.observe(1_000.0, 50.0)
    assert forecaster.forecast(3_000.0, 600.0).demand_at(0.5) == 50.0


def test_new_horizon_is_calibrated_from_the_whole_window() -> None:
    forecaster = SeasonalForecaster(step_s=HOUR_S)
    history = _noisy_days(np.random.default_rng(6), days=5)
    for time_s, gpus in zip(history.times_s, history.gpus, strict=True):
        forecaster.observe(float(time_s), float(gpus))
    now_s = float(history.times_s[-1])
    assert forecaster.count_residuals(HOUR_S) == 0
    forecaster.forecast(now_s, HOUR_S)
    assert forecaster.count_residuals(HOUR_S) == 5 * 24 - 2
    assert forecaster.forecast(now_s, 6 * HOUR_S).demand_at(0.99) > forecaster.forecast(now_s, HOUR_S).demand_at(0.99)
