"""Point forecasts of demand by each candidate method, for many moments at once.

Every candidate is causal: a forecast at the beginning of bin t reads the bins before t and the demand at that moment.
The exponential methods work on the logarithm, from which the usual course of a day is removed (Hyndman et al.,
Forecasting with Exponential Smoothing, 2008, chapter 2; theta: Assimakopoulos and Nikolopoulos 2000).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import ceil

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from scheduler.forecast.binned_demand import BinnedDemand
from scheduler.forecast.demand_history import FloatArray, IntArray
from scheduler.forecast.exponential_mean import compute_exponential_means
from scheduler.forecast.seasonality import DAYS, WEEKS, Season, compute_row_means, compute_row_medians, smooth, take

# The level is the mean of 1/72 of a season (20 minutes of a day): long enough to smooth a noisy reading, short
# enough to follow a ramp.
_LEVELS_PER_SEASON = 72
# The usual course of a day is smoothed over 1/144 of it (10 minutes) to both sides.
_COURSE_REACHES_PER_SEASON = 144
# No point forecast is above this many times the largest demand in the window.
_POINT_TIMES_MAX = 4.0
# The slowest exponential mean has forgotten all but 2e-12 of what is this old.
_MEMORY_BINS = 256
_LOG_MAX = 700.0
SEASONAL_ALPHAS = (0.1, 0.3, 0.6, 0.9)
PLAIN_ALPHAS = (0.1, 0.3, 0.6)
THETA_ALPHA = 0.4
ETS_NAMES = tuple(f"deseasonalised exponential smoothing {alpha:g}" for alpha in SEASONAL_ALPHAS)
PLAIN_NAMES = tuple(f"exponential smoothing {alpha:g}" for alpha in PLAIN_ALPHAS)
NAMES = ("persistence", "daily seasonal", "weekly seasonal", *ETS_NAMES, *PLAIN_NAMES, "theta")


class Target(StrEnum):
    """The demand that a forecast is for: the largest within the horizon, or that at its end."""

    PEAK = "peak"
    VALUE = "value"


@dataclass(frozen=True, slots=True)
class Horizon:
    """A horizon of `bins` bins after the current one."""

    bins: int
    target: Target = Target.PEAK


class Candidates:
    """Outcomes, and point forecasts by all methods of `NAMES`, for one pool and one horizon.

    Args:
        offset: GPUs that are added to demand before the logarithm is taken, so that zero has one.
        first_origin: forecasts are asked for from this bin on.
    """

    def __init__(
        self, demand: BinnedDemand, season: Season, horizon: Horizon, offset: float, *, first_origin: int = 0
    ) -> None:
        self.demand, self.season, self.horizon, self.offset = demand, season, horizon, offset
        self._since = max(0, first_origin - max(season.bins, _MEMORY_BINS))
        self.outcomes = compute_outcomes(demand, horizon)
        self.log_opens, self.log_peaks = np.log(demand.opens + offset), np.log(demand.peaks + offset)
        self._levels = self._compute_levels()
        self._course = self._compute_course()

    def __len__(self) -> int:
        return len(self.demand)

    def compute_points(self, origins: IntArray) -> FloatArray:
        """Return the point forecasts, in GPUs, at the beginning of each bin of `origins`, (m, len(NAMES))."""
        bins, at = self.horizon.bins, origins - self._since
        now, log_now, log_peaks = self.demand.opens[origins], self.log_opens[origins], self.log_peaks[self._since :]
        courses = sliding_window_view(self._course, bins + 1)[at]
        ahead = courses.max(axis=1) if self.horizon.target is Target.PEAK else courses[:, -1]
        flat_now, flat = log_now - courses[:, 0], log_peaks - self._course[: len(log_peaks)]
        columns = [now, self._add_usual_rise(origins, DAYS), self._add_usual_rise(origins, WEEKS)]
        columns += [self.from_log(_smooth_until(flat, flat_now, at, alpha) + ahead) for alpha in SEASONAL_ALPHAS]
        columns += [self.from_log(_smooth_until(log_peaks, log_now, at, alpha)) for alpha in PLAIN_ALPHAS]
        drift = _compute_slopes(flat, at, self.season.bins) * (bins + 1.0 / THETA_ALPHA - 1.0) / 2.0
        columns.append(self.from_log(_smooth_until(flat, flat_now, at, THETA_ALPHA) + drift + ahead))
        return np.stack([self.bound(column, origins) for column in columns], axis=1)

    def bound(self, points: FloatArray, origins: IntArray) -> FloatArray:
        """Return point forecasts at `origins`, (m,), within what demand can be: a peak is at least the demand now."""
        bounded = np.clip(points, 0.0, _POINT_TIMES_MAX * self.demand.peaks.max(initial=0.0))
        is_peak = self.horizon.target is Target.PEAK
        return np.maximum(bounded, self.demand.opens[origins]) if is_peak else bounded

    def _add_usual_rise(self, origins: IntArray, days: tuple[int, ...]) -> FloatArray:
        """Return the level plus the median rise from the same time on earlier days; without any, the demand now.

        The rise is added, not multiplied: a ratio explodes if the level at night is close to zero.
        """
        days = tuple(day for day in days if day * self.season.bins > self.horizon.bins)
        first = self.demand.first_bin
        rises = take(self.outcomes - self._levels, self.season.find_earlier(first + origins, days) - first)
        rise = compute_row_medians(rises)
        return np.where(np.isnan(rise), self.demand.opens[origins], self._levels[origins] + rise)

    def _compute_levels(self) -> FloatArray:
        """Return the mean demand of the last 20 minutes at the beginning of each bin, (n,)."""
        bins = max(1, self.season.bins // _LEVELS_PER_SEASON)
        sums = np.concatenate([[0.0], np.cumsum(self.demand.peaks)])
        at = np.arange(len(self))
        first = np.maximum(at - bins + 1, 0)
        return np.asarray((self.demand.opens + sums[at] - sums[first]) / (at - first + 1))

    def _compute_course(self) -> FloatArray:
        """Return the usual deviation of log demand from its daily mean, at bins from `_since` to the horizon's end.

        It is the mean over seven earlier days.

        A forecast reads deviations that were known when it was made. Their daily mean is centred, so the newest ones
        are half a day old.
        """
        season = self.season
        half, reach = season.bins // 2, max(1, season.bins // _COURSE_REACHES_PER_SEASON)
        sums = np.concatenate([[0.0], np.cumsum(self.log_peaks)])
        deviations = np.full(len(self), np.nan)
        middle = np.arange(half, len(self) - season.bins + half)
        deviations[middle] = (
            self.log_peaks[middle] - (sums[middle - half + season.bins] - sums[middle - half]) / season.bins
        )
        deviations[~self.demand.known] = np.nan
        oldest = ceil((self.horizon.bins + season.bins - half + reach) / season.bins)
        numbers = self.demand.first_bin + np.arange(self._since, len(self) + self.horizon.bins)
        days = tuple(range(oldest, oldest + len(DAYS)))
        earlier = season.find_earlier(numbers, days) - self.demand.first_bin
        return np.nan_to_num(compute_row_means(take(smooth(deviations, reach), earlier)))

    def from_log(self, values: FloatArray) -> FloatArray:
        """Return the demand in GPUs whose logarithm, with the offset, is each of `values`."""
        return np.asarray(np.exp(np.minimum(values, _LOG_MAX)) - self.offset)


def compute_outcomes(demand: BinnedDemand, horizon: Horizon) -> FloatArray:
    """Return the demand that a forecast at each bin should have named, (n,), in GPUs.

    It is NaN if a bin of it is missing or not closed yet.
    """
    outcomes, count = np.full(len(demand), np.nan), len(demand) - 1 - horizon.bins
    if count <= 0:
        return outcomes
    if horizon.target is Target.PEAK:
        outcomes[:count] = sliding_window_view(demand.peaks[:-1], horizon.bins + 1).max(axis=1)
        is_missing = sliding_window_view(~demand.known[:-1], horizon.bins + 1).any(axis=1)
    else:
        outcomes[:count] = demand.opens[horizon.bins : -1]
        is_missing = ~(demand.known[:count] & demand.known[horizon.bins : -1])
    outcomes[:count][is_missing] = np.nan
    return outcomes


def _smooth_until(values: FloatArray, now: FloatArray, origins: IntArray, alpha: float) -> FloatArray:
    """Return the exponentially smoothed level at each origin, (m,): of all `values` before it, and of `now` last."""
    before = np.concatenate([values[:1], compute_exponential_means(values, alpha)])[origins]
    return np.asarray((1.0 - alpha) * before + alpha * now)


def _compute_slopes(values: FloatArray, origins: IntArray, bins: int) -> FloatArray:
    """Return the least-squares slope per bin of the last `bins` values before each origin, (m,); 0 without as many."""
    at = np.arange(len(values), dtype=np.float64)
    sums, moments = (np.concatenate([[0.0], np.cumsum(each)]) for each in (values, at * values))
    first = np.maximum(origins - bins, 0)
    middle = (first + origins - 1) / 2.0
    slopes = (
        (moments[origins] - moments[first] - middle * (sums[origins] - sums[first])) * 12.0 / (bins * (bins**2 - 1.0))
    )
    return np.where(origins >= bins, slopes, 0.0)
