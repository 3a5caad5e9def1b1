"""Walk-forward backtest: forecasts made with the past alone, held against what then happened."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scheduler.forecast.forecaster import DAY_S, QUANTILES, SeasonalForecaster
from scheduler.forecast.history import DemandHistory, FloatArray


@dataclass(frozen=True, slots=True)
class BacktestReport:
    """What `forecasts` forecasts of one horizon were worth; tuples have one entry a quantile.

    * `weighted_quantile_loss`: 2 x pinball loss / mean outcome, averaged over forecasts and quantiles.
    * `coverage`: share of forecasts that the largest demand within the horizon did not exceed.
    * `intervals_short`: share of steps whose demand exceeded the oldest forecast that covers them, which is the
      one that a recall would have had to act on.
    * `surplus`: mean forecast above the mean outcome, relative to the mean outcome.
    """

    forecasts: int
    horizon_s: float
    quantiles: tuple[float, ...]
    weighted_quantile_loss: float
    coverage: tuple[float, ...]
    intervals_short: tuple[float, ...]
    surplus: tuple[float, ...]


def backtest(
    history: DemandHistory,
    *,
    horizon_s: float,
    quantiles: tuple[float, ...] = QUANTILES,
    season_s: float = DAY_S,
    step_s: float | None = None,
    warm_up_s: float | None = None,
) -> BacktestReport:
    """Forecast at every step after `warm_up_s` (default: one season) whose outcome the history holds.

    Demand is read at each step's beginning, as a scheduler that polls would read it.

    Raises:
        ValueError: the history is too short for one forecast, or as SeasonalForecaster raises it.
    """
    forecaster = SeasonalForecaster(season_s=season_s, step_s=step_s)
    season = forecaster.season
    horizon_bins = season.horizon_bins(horizon_s)
    demand = history.resampled(season.step_s)
    first = int(np.ceil((season_s if warm_up_s is None else warm_up_s) / season.step_s))
    count = len(demand) - horizon_bins - first
    if count < 1:
        raise ValueError(
            f"history must be longer than warm-up and horizon, {first + horizon_bins} steps, got {len(demand)}"
        )
    made = np.empty((count, len(quantiles)))
    for index in range(first + count):
        now_s = float(demand.times_s[index])
        forecaster.observe(now_s, float(demand.gpus[index]))
        if index >= first:
            made[index - first] = forecaster.forecast(now_s, horizon_s, quantiles=quantiles).gpus
    return _report(demand.gpus[first:], made, horizon_s=horizon_s, horizon_bins=horizon_bins, quantiles=quantiles)


def _report(
    demand: FloatArray, made: FloatArray, *, horizon_s: float, horizon_bins: int, quantiles: tuple[float, ...]
) -> BacktestReport:
    """`demand` has shape (m + horizon_bins,) for the m rows of `made`, shape (m, quantiles)."""
    outcome = np.lib.stride_tricks.sliding_window_view(demand, horizon_bins + 1).max(axis=1)[:, None]
    mean = max(float(outcome.mean()), np.finfo(np.float64).tiny)
    levels = np.array(quantiles)
    pinball = np.maximum(levels * (outcome - made), (levels - 1) * (outcome - made))
    return BacktestReport(
        forecasts=len(made),
        horizon_s=horizon_s,
        quantiles=quantiles,
        weighted_quantile_loss=2 * float(pinball.mean()) / mean,
        coverage=tuple((outcome <= made).mean(axis=0).tolist()),
        intervals_short=tuple((demand[horizon_bins:, None] > made).mean(axis=0).tolist()),
        surplus=tuple(((made.mean(axis=0) - mean) / mean).tolist()),
    )
