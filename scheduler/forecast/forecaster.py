"""SeasonalForecaster: demand readings in, quantile forecasts of the largest demand ahead out."""

from __future__ import annotations

from math import isfinite

import numpy as np

from scheduler.domain.forecast import Forecast
from scheduler.forecast.calibration import WARM_RESIDUALS, residual_quantile
from scheduler.forecast.history import DemandHistory, FloatArray
from scheduler.forecast.rolling import RollingArray
from scheduler.forecast.seasonal import (
    SEASONS,
    STEPS_PER_SEASON,
    Season,
    largest_ahead,
    residual_scales,
    seasonal_points,
)

QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)
DAY_S = 86_400.0
RESIDUAL_SEASONS = 14
ORIGINS_AT_ONCE = 512


class SeasonalForecaster:
    """One pool's forecaster. It keeps a bounded window, so that a forecast costs the same after a day or a year.

    Deterministic: equal readings and calls give equal forecasts. The residuals that calibrate a horizon are those of
    the forecasts that this method would have made for it at each bin's beginning, so a new horizon is calibrated
    from the whole window at once, and later calls only add the bins that have closed since.
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
        """Demand was `gpus` from `time_s` on. A reading from before the last forecast's bin counts from that bin on.

        Raises:
            ValueError: a figure is not finite, `gpus` is negative, or `time_s` is before the last reading.
        """
        if not isfinite(time_s):
            raise ValueError(f"time_s must be finite, got {time_s}")
        if not (isfinite(gpus) and gpus >= 0):
            raise ValueError(f"gpus must be finite and not negative, got {gpus}")
        if time_s < self._observed_at_s:
            raise ValueError(f"time_s must not be before the last reading's {self._observed_at_s}, got {time_s}")
        self._observed_at_s = time_s
        number = self.season.bin_of(time_s)
        if self._opens is None or self._peaks is None:
            # Each bin in the window has seven seasons before it and its horizon after it.
            capacity = (RESIDUAL_SEASONS + 2 * SEASONS + 1) * self.season.bins
            self._opens, self._peaks = RollingArray(capacity, first=number), RollingArray(capacity, first=number)
        if number >= self._opens.end:
            is_first = not len(self._opens.values)
            starts_bin = is_first or time_s - number * self.season.step_s <= 1e-9 * self.season.step_s
            self._hold(number if starts_bin else number + 1)
            if starts_bin:
                self._opens.hold(gpus, 1)
                self._peaks.hold(gpus, 1)
        self._peaks.raise_last(gpus)
        self._gpus = gpus

    def forecast(self, now_s: float, horizon_s: float, *, quantiles: tuple[float, ...] = QUANTILES) -> Forecast:
        """Quantiles of the largest demand from now to `horizon_s` later; none lies below the demand now.

        Until `WARM_RESIDUALS` forecasts have met their outcome, levels above 0.5 allow for demand to rise by at least
        its own size; `method` says so.

        Raises:
            ValueError: nothing was observed yet, `now_s` is before the last reading, the horizon is not positive or
                longer than 7 seasons, or a quantile is not in (0, 1).
        """
        if self._opens is None or self._peaks is None:
            raise ValueError("a forecast needs at least one demand reading, got none")
        if not self._observed_at_s <= now_s < float("inf"):
            raise ValueError(f"now_s must not be before the last reading's {self._observed_at_s}, got {now_s}")
        if not all(0 < level < 1 for level in quantiles):
            raise ValueError(f"quantiles must be in (0, 1), got {quantiles}")
        horizon_bins = self.season.horizon_bins(horizon_s)
        self._hold(self.season.bin_of(now_s) + 1)
        residuals = self._calibrated(horizon_bins)
        current = self._opens.values.copy()
        current[-1] = self._gpus
        point, scale = self._points(current, len(current) - 1, len(current), horizon_bins)
        ordered = np.sort(residuals)
        gpus = tuple(
            max(float(point[0] + residual_quantile(ordered, level, overlap=horizon_bins + 1) * scale[0]), self._gpus)
            for level in quantiles
        )
        return Forecast(now_s, horizon_s, quantiles, gpus, self._method(horizon_bins, len(ordered)))

    def residual_count(self, horizon_s: float) -> int:
        """How many outcomes calibrate a horizon; 0 for one that no forecast was asked for yet."""
        kept = self._residuals.get(self.season.horizon_bins(horizon_s))
        return 0 if kept is None else len(kept.newest())

    def _hold(self, end: int) -> None:
        """Open the bins before number `end`, with the last demand still in force."""
        assert self._opens is not None
        assert self._peaks is not None
        missing = end - self._opens.end
        if missing > 0:
            self._opens.hold(self._gpus, missing)
            self._peaks.hold(self._gpus, missing)

    def _calibrated(self, horizon_bins: int) -> FloatArray:
        """Residuals of the horizon with every outcome that is known by now; the newest bin is still open."""
        assert self._opens is not None
        assert self._peaks is not None
        first = self._opens.first
        kept = self._residuals.get(horizon_bins)
        if kept is None or kept.end < first:
            oldest = max(first, self._opens.end - 1 - horizon_bins - RESIDUAL_SEASONS * self.season.bins)
            kept = self._residuals[horizon_bins] = RollingArray(RESIDUAL_SEASONS * self.season.bins, first=oldest)
        begin, end = max(kept.end, first) - first, self._opens.end - 1 - horizon_bins - first
        for start in range(begin, end, ORIGINS_AT_ONCE):
            stop = min(start + ORIGINS_AT_ONCE, end)
            points, scales = self._points(self._opens.values, start, stop, horizon_bins)
            outcome = largest_ahead(self._peaks.values, np.arange(start, stop), horizon_bins)
            kept.extend((outcome - points) / scales)
        return kept.newest()

    def _points(self, current: FloatArray, start: int, stop: int, horizon_bins: int) -> tuple[FloatArray, FloatArray]:
        assert self._peaks is not None
        peaks, origins = self._peaks.values, np.arange(start, stop)
        points = seasonal_points(peaks, current, origins, season=self.season, horizon_bins=horizon_bins)
        return points, residual_scales(peaks, points, origins, season=self.season)

    def _method(self, horizon_bins: int, residuals: int) -> str:
        assert self._opens is not None
        is_seasonal = len(self._opens.values) >= self.season.bins_needed(horizon_bins)
        name = "level-adjusted seasonal" if is_seasonal else "persistence"
        return name if residuals >= WARM_RESIDUALS else f"{name}, uncalibrated"


def forecast(
    history: DemandHistory,
    *,
    now_s: float,
    horizon_s: float,
    quantiles: tuple[float, ...] = QUANTILES,
    season_s: float = DAY_S,
    step_s: float | None = None,
) -> Forecast:
    """The forecast from a whole history at once; a caller that forecasts again and again keeps a SeasonalForecaster.

    Raises:
        ValueError: the history is empty or reaches beyond `now_s`, or as SeasonalForecaster raises it.
    """
    forecaster = SeasonalForecaster(season_s=season_s, step_s=step_s)
    for time_s, gpus in zip(history.times_s.tolist(), history.gpus.tolist(), strict=True):
        forecaster.observe(time_s, gpus)
    return forecaster.forecast(now_s, horizon_s, quantiles=quantiles)
