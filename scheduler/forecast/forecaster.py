"""SeasonalForecaster: quantile forecasts of a pool's largest demand ahead, and their walk-forward backtest."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import numpy as np

from scheduler.domain.fleet import Forecast
from scheduler.forecast.demand_history import DemandHistory, FloatArray, RollingArray
from scheduler.forecast.seasonal import (
    CALIBRATION_MIN_RESIDUALS,
    SEASONS,
    STEPS_PER_SEASON,
    Season,
    compute_point_forecasts,
    compute_residual_quantile,
    compute_residual_scales,
    max_demand_ahead,
)

QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)
DAY_S = 86_400.0
RESIDUAL_SEASONS = 14
ORIGINS_PER_BATCH = 512


class SeasonalForecaster:
    """Forecaster of one pool. It keeps a bounded window, so a forecast costs the same after a day and after a year.

    Equal readings and calls give equal forecasts. A horizon is calibrated by the residuals of the forecasts that this
    method would have made for it at the beginning of each bin. A new horizon is therefore calibrated from the whole
    window at once, and later calls add only the bins that have closed since.
    """

    def __init__(self, *, season_s: float = DAY_S, step_s: float | None = None) -> None:
        """Raises ValueError unless `season_s` is a whole number of `step_s` (default: 1/288 of the season)."""
        self.season = Season(season_s, season_s / STEPS_PER_SEASON if step_s is None else step_s)
        self._opens: RollingArray | None = None
        self._peaks: RollingArray | None = None
        self._residuals: dict[int, RollingArray] = {}
        self._observed_at_s = float("-inf")
        self._gpus = 0.0

    def observe(self, time_s: float, gpus: float) -> None:
        """Record that demand is `gpus` from `time_s` on.

        A reading from before the last forecast's bin counts from that bin on.

        Raises:
            ValueError: a value is not finite, `gpus` is negative, or `time_s` is before the last reading.
        """
        if not isfinite(time_s):
            raise ValueError(f"time_s must be finite, got {time_s}")
        if not (isfinite(gpus) and gpus >= 0):
            raise ValueError(f"gpus must be finite and not negative, got {gpus}")
        if time_s < self._observed_at_s:
            raise ValueError(f"time_s must not be before the last reading's {self._observed_at_s}, got {time_s}")
        self._observed_at_s = time_s
        number = self.season.bin_index(time_s)
        if self._opens is None or self._peaks is None:
            # Each bin of the window needs seven seasons before it and its horizon after it.
            capacity = (RESIDUAL_SEASONS + 2 * SEASONS + 1) * self.season.bins
            self._opens, self._peaks = (
                RollingArray(capacity, start_index=number),
                RollingArray(capacity, start_index=number),
            )
        if number >= self._opens.end_index:
            is_first = not len(self._opens.values)
            starts_bin = is_first or time_s - number * self.season.step_s <= 1e-9 * self.season.step_s
            self._extend_bins(number if starts_bin else number + 1)
            if starts_bin:
                self._opens.append_repeated(gpus, 1)
                self._peaks.append_repeated(gpus, 1)
        self._peaks.raise_last(gpus)
        self._gpus = gpus

    def forecast(self, now_s: float, horizon_s: float, *, quantiles: tuple[float, ...] = QUANTILES) -> Forecast:
        """Return quantiles of the largest demand from now until `horizon_s` later; none is below the demand now.

        Until `CALIBRATION_MIN_RESIDUALS` forecasts have met their outcome, levels above 0.5 allow for demand to rise by
        at least its own size, and `method` says so.

        Raises:
            ValueError: there is no reading yet, `now_s` is before the last reading, the horizon is not positive or
                longer than 7 seasons, or a quantile is not in (0, 1).
        """
        if self._opens is None or self._peaks is None:
            raise ValueError("a forecast needs at least one demand reading, got none")
        if not self._observed_at_s <= now_s < float("inf"):
            raise ValueError(f"now_s must not be before the last reading's {self._observed_at_s}, got {now_s}")
        if not all(0 < level < 1 for level in quantiles):
            raise ValueError(f"quantiles must be in (0, 1), got {quantiles}")
        horizon_bins = self.season.count_horizon_bins(horizon_s)
        self._extend_bins(self.season.bin_index(now_s) + 1)
        residuals = self._update_residuals(horizon_bins)
        current = self._opens.values.copy()
        current[-1] = self._gpus
        point, scale = self._compute_point_forecasts(current, len(current) - 1, len(current), horizon_bins)
        ordered = np.sort(residuals)
        gpus = tuple(
            max(
                float(point[0] + compute_residual_quantile(ordered, level, overlap=horizon_bins + 1) * scale[0]),
                self._gpus,
            )
            for level in quantiles
        )
        return Forecast(now_s, horizon_s, quantiles, gpus, self._describe_method(horizon_bins, len(ordered)))

    def count_residuals(self, horizon_s: float) -> int:
        """Return the number of outcomes that calibrate a horizon; 0 if it has not been forecast yet."""
        kept = self._residuals.get(self.season.count_horizon_bins(horizon_s))
        return 0 if kept is None else len(kept.latest())

    def _extend_bins(self, end: int) -> None:
        """Open all bins before number `end`, with the last demand still in force."""
        assert self._opens is not None
        assert self._peaks is not None
        missing = end - self._opens.end_index
        if missing > 0:
            self._opens.append_repeated(self._gpus, missing)
            self._peaks.append_repeated(self._gpus, missing)

    def _update_residuals(self, horizon_bins: int) -> FloatArray:
        """Return the residuals of the horizon for all outcomes known by now; the newest bin is still open."""
        assert self._opens is not None
        assert self._peaks is not None
        first = self._opens.start_index
        kept = self._residuals.get(horizon_bins)
        if kept is None or kept.end_index < first:
            oldest = max(first, self._opens.end_index - 1 - horizon_bins - RESIDUAL_SEASONS * self.season.bins)
            kept = self._residuals[horizon_bins] = RollingArray(RESIDUAL_SEASONS * self.season.bins, start_index=oldest)
        begin, end = max(kept.end_index, first) - first, self._opens.end_index - 1 - horizon_bins - first
        for start in range(begin, end, ORIGINS_PER_BATCH):
            stop = min(start + ORIGINS_PER_BATCH, end)
            points, scales = self._compute_point_forecasts(self._opens.values, start, stop, horizon_bins)
            outcome = max_demand_ahead(self._peaks.values, np.arange(start, stop), horizon_bins)
            kept.extend((outcome - points) / scales)
        return kept.latest()

    def _compute_point_forecasts(
        self, current: FloatArray, start: int, stop: int, horizon_bins: int
    ) -> tuple[FloatArray, FloatArray]:
        assert self._peaks is not None
        peaks, origins = self._peaks.values, np.arange(start, stop)
        points = compute_point_forecasts(peaks, current, origins, season=self.season, horizon_bins=horizon_bins)
        return points, compute_residual_scales(peaks, points, origins, season=self.season)

    def _describe_method(self, horizon_bins: int, residuals: int) -> str:
        assert self._opens is not None
        is_seasonal = len(self._opens.values) >= self.season.count_required_bins(horizon_bins)
        name = "level-adjusted seasonal" if is_seasonal else "persistence"
        return name if residuals >= CALIBRATION_MIN_RESIDUALS else f"{name}, uncalibrated"


def forecast_from_history(
    history: DemandHistory,
    *,
    now_s: float,
    horizon_s: float,
    quantiles: tuple[float, ...] = QUANTILES,
    season_s: float = DAY_S,
    step_s: float | None = None,
) -> Forecast:
    """Return the forecast from a whole history. To forecast repeatedly, keep a SeasonalForecaster instead.

    Raises:
        ValueError: the history is empty or reaches beyond `now_s`, or as SeasonalForecaster raises it.
    """
    forecaster = SeasonalForecaster(season_s=season_s, step_s=step_s)
    for time_s, gpus in zip(history.times_s.tolist(), history.gpus.tolist(), strict=True):
        forecaster.observe(time_s, gpus)
    return forecaster.forecast(now_s, horizon_s, quantiles=quantiles)


@dataclass(frozen=True, slots=True)
class BacktestReport:
    """Quality of `forecasts` forecasts of one horizon; tuples have one entry per quantile.

    * `weighted_quantile_loss`: 2 x pinball loss / mean outcome, averaged over forecasts and quantiles.
    * `coverage`: share of forecasts that the largest demand within the horizon did not exceed.
    * `underforecast_share`: share of steps whose demand exceeded the oldest forecast that covers them, which is the one
      that a recall would have had to act on.
    * `surplus`: mean forecast above the mean outcome, relative to the mean outcome.
    """

    forecasts: int
    horizon_s: float
    quantiles: tuple[float, ...]
    weighted_quantile_loss: float
    coverage: tuple[float, ...]
    underforecast_share: tuple[float, ...]
    surplus: tuple[float, ...]


def run_backtest(
    history: DemandHistory,
    *,
    horizon_s: float,
    quantiles: tuple[float, ...] = QUANTILES,
    season_s: float = DAY_S,
    step_s: float | None = None,
    warm_up_s: float | None = None,
) -> BacktestReport:
    """Forecast at every step after `warm_up_s` (default: one season) whose outcome the history holds.

    Demand is read at the beginning of each step, as a polling scheduler reads it.

    Raises:
        ValueError: the history is too short for one forecast, or as SeasonalForecaster raises it.
    """
    forecaster = SeasonalForecaster(season_s=season_s, step_s=step_s)
    season = forecaster.season
    horizon_bins = season.count_horizon_bins(horizon_s)
    demand = history.resample(season.step_s)
    first = int(np.ceil((season_s if warm_up_s is None else warm_up_s) / season.step_s))
    count = len(demand) - horizon_bins - first
    if count < 1:
        raise ValueError(
            f"history must be longer than warm-up and horizon, {first + horizon_bins} steps, got {len(demand)}"
        )
    forecasts = np.empty((count, len(quantiles)))
    for index in range(first + count):
        now_s = float(demand.times_s[index])
        forecaster.observe(now_s, float(demand.gpus[index]))
        if index >= first:
            forecasts[index - first] = forecaster.forecast(now_s, horizon_s, quantiles=quantiles).gpus
    return _build_report(
        demand.gpus[first:], forecasts, horizon_s=horizon_s, horizon_bins=horizon_bins, quantiles=quantiles
    )


def _build_report(
    demand: FloatArray, forecasts: FloatArray, *, horizon_s: float, horizon_bins: int, quantiles: tuple[float, ...]
) -> BacktestReport:
    """Build the report from `demand`, shape (m + horizon_bins,), and `forecasts`, shape (m, quantiles)."""
    outcome = np.lib.stride_tricks.sliding_window_view(demand, horizon_bins + 1).max(axis=1)[:, None]
    mean = max(float(outcome.mean()), np.finfo(np.float64).tiny)
    levels = np.array(quantiles)
    pinball = np.maximum(levels * (outcome - forecasts), (levels - 1) * (outcome - forecasts))
    return BacktestReport(
        forecasts=len(forecasts),
        horizon_s=horizon_s,
        quantiles=quantiles,
        weighted_quantile_loss=2 * float(pinball.mean()) / mean,
        coverage=tuple((outcome <= forecasts).mean(axis=0).tolist()),
        underforecast_share=tuple((demand[horizon_bins:, None] > forecasts).mean(axis=0).tolist()),
        surplus=tuple(((forecasts.mean(axis=0) - mean) / mean).tolist()),
    )
