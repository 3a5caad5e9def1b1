"""Quantiles of demand at each time of the next season, for display.

`PoolForecaster` predicts the largest demand until one horizon, with a model per horizon, on which lending relies. This
forecast is a cheap one of the course of a whole day: for each time ahead, a regression of log demand on the demand now
and on that of a day and a week before, and the quantiles of its errors over the last two weeks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scheduler.forecast.binned_demand import BinnedDemand
from scheduler.forecast.demand_history import BoolArray, FloatArray, IntArray
from scheduler.forecast.forecaster import compute_offset
from scheduler.forecast.seasonality import Season

FAN_QUANTILES = (0.5, 0.9, 0.95, 0.999)
_SEASONS_MIN = 2
"""Fewest seasons of readings: one to compare with, and one whose outcomes give the errors."""
_TRAINED_SEASONS = 14
_KNOWN_SHARE_MIN = 0.5
_RIDGE = 1e-3
_WEEK = 7


@dataclass(frozen=True, slots=True, eq=False)
class DemandFan:
    """Quantiles of the peak of some coming bins. `bins` are their numbers, (m,); `gpus` is (m, quantiles)."""

    bins: IntArray
    gpus: FloatArray


def forecast_fan(demand: BinnedDemand, season: Season, quantiles: Sequence[float] = FAN_QUANTILES) -> DemandFan | None:
    """Return the quantiles over the next season, or None with too few readings."""
    if len(demand) < _SEASONS_MIN * season.bins or demand.known.mean() < _KNOWN_SHARE_MIN:
        return None
    model = _FanModel(demand, season)
    steps = _choose_steps(season.bins)
    rows = [model.forecast(ahead, quantiles) for ahead in steps]
    return DemandFan(demand.first_bin + len(demand) - 1 + np.array(steps), np.array(rows))


def _choose_steps(bins: int) -> list[int]:
    """Return how many bins ahead the fan has points: close ones first, then one in half an hour of a day."""
    near = range(1, max(2, bins // 48 + 1))
    middle = range(bins // 48, bins // 12, max(1, bins // 96))
    far = range(bins // 12, bins + 1, max(1, bins // 48))
    return sorted({*near, *middle, *far} - {0})


class _FanModel:
    """Log demand of a window, whose last bin is the present, with the demand in force now."""

    def __init__(self, demand: BinnedDemand, season: Season) -> None:
        self._season = season
        self._first_bin = demand.first_bin
        self._offset = compute_offset(demand.peaks[demand.known])
        self._logs = np.log(demand.peaks + self._offset)
        self._logs[-1] = np.log(demand.opens[-1] + self._offset)
        self._known: BoolArray = demand.known
        has_weeks = len(demand) >= (_WEEK + _SEASONS_MIN) * season.bins
        self._days = (1, _WEEK) if has_weeks else (1,)

    def forecast(self, ahead: int, quantiles: Sequence[float]) -> FloatArray:
        """Return the quantiles of the peak of the bin that is `ahead` bins later, (quantiles,)."""
        present = len(self._logs) - 1
        first = max(self._days[-1] * self._season.bins + 1, present - ahead - _TRAINED_SEASONS * self._season.bins)
        origins = np.arange(first, present - ahead)
        origins = origins[self._known[origins] & self._known[origins + ahead]]
        features = self._build_features(np.append(origins, present), ahead)
        outcomes = self._logs[origins + ahead]
        coefficients = _solve_ridge(features[:-1], outcomes)
        errors = np.sort(outcomes - features[:-1] @ coefficients)
        levels = np.quantile(errors, np.asarray(quantiles), method="higher")
        return np.asarray(np.maximum(np.exp(features[-1] @ coefficients + levels) - self._offset, 0.0))

    def _build_features(self, origins: IntArray, ahead: int) -> FloatArray:
        """Return (m, 2 + 2 days): one, demand now, and demand at both times some days before."""
        columns = [np.ones(len(origins)), self._logs[origins]]
        for later in (0, ahead):
            earlier = self._season.find_earlier(self._first_bin + origins + later, self._days) - self._first_bin
            columns += list(self._logs[np.clip(earlier, 0, len(self._logs) - 1)].T)
        return np.column_stack(columns)


def _solve_ridge(features: FloatArray, outcomes: FloatArray) -> FloatArray:
    """Return the coefficients of least squares, slightly drawn to zero so that equal columns share their weight."""
    gram = features.T @ features + _RIDGE * len(features) * np.diag([0.0, *np.ones(features.shape[1] - 1)])
    return np.asarray(np.linalg.solve(gram, features.T @ outcomes))
