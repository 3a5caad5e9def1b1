"""The figures of a backtest, and the forecaster's quality on synthetic demand."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler.forecast.demand_history import DemandHistory
from scheduler.forecast.forecaster import run_backtest

STEP_S = 1_800.0


def _demand(generator: np.random.Generator, *, days: int, drift: float = 0.0) -> DemandHistory:
    times_s = np.arange(0.0, days * 86_400.0, STEP_S)
    wave = 100.0 + 60.0 * np.sin(2 * np.pi * times_s / 86_400.0)
    noise = np.convolve(generator.standard_normal(len(times_s) + 3), [0.4, 0.3, 0.2, 0.1], mode="valid")
    return DemandHistory(times_s, wave * np.exp(0.1 * noise + drift * times_s / 86_400.0))


def test_constant_demand_is_covered_without_surplus() -> None:
    history = DemandHistory.from_sequences([0.0, 10 * 86_400.0], [7.0, 7.0])
    report = run_backtest(history, horizon_s=STEP_S, step_s=STEP_S)
    assert report.coverage == (1.0,) * 5
    assert report.underforecast_share == (0.0,) * 5
    assert report.surplus == pytest.approx((0.0,) * 5)
    assert report.weighted_quantile_loss == pytest.approx(0.0)


def test_jump_is_missed_only_by_the_forecast_before_it() -> None:
    history = DemandHistory.from_sequences([0.0, 5 * 86_400.0, 6 * 86_400.0], [7.0, 70.0, 70.0])
    report = run_backtest(history, horizon_s=STEP_S, step_s=STEP_S, quantiles=(0.9,))
    assert report.forecasts == 5 * 48
    assert report.coverage[0] == pytest.approx(1 - 1 / report.forecasts)
    assert report.underforecast_share[0] == pytest.approx(1 / report.forecasts)


@pytest.mark.parametrize("seed", [11, 12, 13])
@pytest.mark.parametrize("drift", [0.0, 0.02])
def test_quantiles_reach_their_coverage_on_seasonal_demand(seed: int, drift: float) -> None:
    history = _demand(np.random.default_rng(seed), days=40, drift=drift)
    report = run_backtest(history, horizon_s=2 * STEP_S, step_s=STEP_S)
    for level, covered in zip(report.quantiles[1:4], report.coverage[1:4], strict=True):
        assert covered == pytest.approx(level, abs=0.025)
    assert report.underforecast_share[-1] <= 0.003
    assert report.surplus[-1] < 0.5


def test_correct_season_lowers_the_loss() -> None:
    history = _demand(np.random.default_rng(14), days=20)
    knowing = run_backtest(history, horizon_s=4 * STEP_S, step_s=STEP_S, warm_up_s=7 * 86_400.0)
    # A wrong season is useless: its rises belong to other hours.
    unknowing = run_backtest(history, horizon_s=4 * STEP_S, step_s=STEP_S, season_s=30 * STEP_S, warm_up_s=7 * 86_400.0)
    assert knowing.weighted_quantile_loss < 0.8 * unknowing.weighted_quantile_loss


def test_history_too_short_for_one_outcome_is_rejected() -> None:
    with pytest.raises(ValueError, match="history must be longer than warm-up and horizon, 49 steps, got 10"):
        run_backtest(DemandHistory.from_sequences([0.0, 9 * STEP_S], [1.0, 1.0]), horizon_s=STEP_S, step_s=STEP_S)
