"""The figures of a backtest, and the forecast's quality on synthetic demand."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler.forecast.backtest import COMBINATION, ETS, BacktestReport, MethodScore, run_backtest
from scheduler.forecast.candidates import Target
from tests.unit.forecast.demands import DAY_S, HOUR_S, make_days


def score(report: BacktestReport, method: str = COMBINATION) -> MethodScore:
    return next(each for each in report.scores if each.method == method)


def test_constant_demand_costs_nothing() -> None:
    times_s = np.arange(0.0, 10 * DAY_S, HOUR_S)
    report = run_backtest(times_s, np.full(len(times_s), 7.0), horizon_s=HOUR_S)
    assert (report.step_s, report.forecasts, report.mean_gpus) == (3_600.0, 58, 7.0)
    assert score(report).loss == pytest.approx(0.0, abs=1e-6)
    assert score(report).coverage == (1.0, 1.0)


@pytest.mark.parametrize("target", list(Target))
@pytest.mark.parametrize("drift", [0.0, 0.02])
def test_combination_is_calibrated_and_no_worse_than_any_method(drift: float, target: Target) -> None:
    times_s, gpus = make_days(50, noise=0.1, step_s=1_800.0, drift=drift)
    report = run_backtest(times_s, gpus, horizon_s=HOUR_S, target=target)
    losses = {each.method: each.loss for each in report.scores}
    assert losses[COMBINATION] <= 1.03 * min(losses.values())
    assert losses[COMBINATION] < 0.97 * min(losses["persistence"], losses["daily seasonal"])
    assert score(report).coverage[0] == pytest.approx(0.95, abs=0.025)
    assert score(report).coverage[1] >= 0.995


def test_level_shift_is_survived() -> None:
    times_s, gpus = make_days(40, noise=0.05, step_s=1_800.0)
    gpus[34 * 48 :] *= 3.0
    report = run_backtest(times_s, gpus, horizon_s=HOUR_S)
    assert score(report).coverage[0] > 0.9
    assert score(report).loss < 1.05 * min(score(report, name).loss for name in ("persistence", ETS))


def test_missing_readings_are_no_outcomes() -> None:
    times_s, gpus = make_days(20, noise=0.05)
    kept = (times_s < 17 * DAY_S) | (times_s > 18 * DAY_S)
    whole, parts = (run_backtest(times_s[rows], gpus[rows], horizon_s=HOUR_S) for rows in (times_s >= 0, kept))
    assert whole.forecasts - parts.forecasts == pytest.approx(24, abs=4)


@pytest.mark.parametrize("days", [0, 1])
def test_short_recording_is_refused(days: int) -> None:
    times_s, gpus = make_days(days)
    with pytest.raises(ValueError, match="demand"):
        run_backtest(times_s, gpus, horizon_s=HOUR_S)


@pytest.mark.parametrize("level", [0.4, 1.6])
def test_days_after_a_holiday_are_forecast_as_well_as_before_it(level: float) -> None:
    times_s, gpus = make_days(40, noise=0.05, step_s=1_800.0)
    usual = run_backtest(times_s, gpus, horizon_s=HOUR_S)
    gpus[29 * 48 : 30 * 48] *= level
    after = run_backtest(times_s, gpus, horizon_s=HOUR_S)
    assert score(after).loss < 1.15 * score(usual).loss
    assert score(after).coverage[1] >= 0.995
