"""Quantiles of forecast errors: causal local scales, split-conformal ranks and a fitted tail."""

from __future__ import annotations

from math import ceil, log

import numpy as np

from scheduler.forecast.demand_history import FloatArray, IntArray
from scheduler.forecast.exponential_mean import compute_exponential_means
from scheduler.forecast.seasonality import DAYS, Season, compute_row_means, smooth, take

CALIBRATION_MIN_RESIDUALS = 20
_TAIL_SHARE = 0.05
_TAIL_RESIDUALS_MIN = 5
# The scale of an error is a mean of the errors of the last hour, at this time of the last seven days, and of two days.
_RECENT_SHARE, _TIME_OF_DAY_SHARE, _LONG_SHARE = 0.3, 0.4, 0.3
_HOURS_PER_SEASON, _LONG_SEASONS = 24, 2
_RECENT_MEMORY = 3.0
_TIME_OF_DAY_REACHES_PER_SEASON = 48


def compute_recent_sizes(errors: FloatArray, season: Season, horizon_bins: int) -> FloatArray:
    """Return the exponential mean of the errors of about the last hour, (n, c), in GPUs; NaN without one.

    At each bin, errors count whose outcome was known at its beginning.
    """
    return _smooth_known(np.abs(errors), _compute_recent_rate(season), delay=horizon_bins + 1)


def compute_recent_memory(season: Season) -> int:
    """Return the number of bins before one whose errors matter for `compute_recent_sizes`."""
    return round(_RECENT_MEMORY / _compute_recent_rate(season))


def compute_scales(errors: FloatArray, first_bin: int, season: Season, horizon_bins: int) -> FloatArray:
    """Return the scale of each error, (n, c), in GPUs, from errors whose outcome was known at the bin's beginning.

    Args:
        errors: (n, c), outcome less point forecast of consecutive bins, for c methods; NaN without an outcome.
    """
    sizes = np.abs(errors)
    recent = compute_recent_sizes(errors, season, horizon_bins)
    long = _smooth_known(sizes, 1.0 / (_LONG_SEASONS * season.bins), delay=horizon_bins + 1)
    numbers = first_bin + np.arange(len(errors))
    by_time = compute_sizes_by_time(errors, first_bin, season, horizon_bins, numbers)
    return mix_scales(recent, np.where(np.isnan(by_time), long, by_time), long)


def mix_scales(recent: FloatArray, by_time: FloatArray, long: FloatArray) -> FloatArray:
    """Return the scale of errors, of any common shape, in GPUs. Where nothing is known yet, it is one GPU."""
    scales = _RECENT_SHARE * recent + _TIME_OF_DAY_SHARE * by_time + _LONG_SHARE * long
    return np.where(np.isnan(scales), 1.0, np.maximum(scales, 1e-9))


def compute_sizes_by_time(
    errors: FloatArray, first_bin: int, season: Season, horizon_bins: int, numbers: IntArray
) -> FloatArray:
    """Return the mean size of errors at the time of day of the bins `numbers`, on the last seven days, (m, c).

    Errors of neighboring bins count too. NaN if no day is known.
    """
    reach = max(1, season.bins // _TIME_OF_DAY_REACHES_PER_SEASON)
    oldest = ceil((horizon_bins + reach + 1) / season.bins)
    earlier = season.find_earlier(numbers, tuple(range(oldest, oldest + len(DAYS)))) - first_bin
    columns = [compute_row_means(take(smooth(np.abs(column), reach), earlier)) for column in errors.T]
    return np.stack(columns, axis=1)


def _compute_recent_rate(season: Season) -> float:
    return min(1.0, _HOURS_PER_SEASON / season.bins)


def _smooth_known(sizes: FloatArray, rate: float, *, delay: int) -> FloatArray:
    """Return the exponential mean of the known sizes at least `delay` bins before each bin, (n, c); NaN before one."""
    known = ~np.isnan(sizes)
    weights = compute_exponential_means(known.astype(np.float64), rate, start=0.0)
    sums = compute_exponential_means(np.where(known, sizes, 0.0), rate, start=0.0)
    means = np.where(weights > 0, sums / np.maximum(weights, 1e-300), np.nan)
    delayed = np.full_like(means, np.nan)
    delayed[delay:] = means[: max(0, len(means) - delay)]
    return delayed


def compute_residual_quantile(sorted_residuals: FloatArray, level: float, *, overlap: int = 1) -> float:
    """Return the residual that the next one stays below with probability `level`. It never decreases in `level`.

    The rank is that of split conformal prediction, ceil((m + 1) x level) (Vovk et al., Algorithmic Learning in a Random
    World, 2005, chapter 2), over a rolling window because demand drifts. If there are too few independent residuals for
    the level, the result is the larger of the empirical quantile (the largest residual if the rank exceeds m) and an
    exponential tail fitted to the top residuals (peaks over threshold with shape 0: Pickands 1975; Coles, An
    Introduction to Statistical Modeling of Extreme Values, 2001, chapter 4).

    Args:
        sorted_residuals: ascending, shape (m,), m at least `CALIBRATION_MIN_RESIDUALS`.
        overlap: number of neighboring residuals that share outcomes, so that m residuals count as m / overlap
            independent ones.
    """
    count = len(sorted_residuals)
    rank = max(1, ceil((count + 1) * level - 1e-9))
    empirical = float(sorted_residuals[min(rank, count) - 1])
    independent = count / overlap
    if (independent + 1) * level <= independent:
        return empirical
    top = max(_TAIL_RESIDUALS_MIN, ceil(_TAIL_SHARE * count))
    threshold = float(sorted_residuals[-top - 1])
    mean_excess = float(np.mean(sorted_residuals[-top:])) - threshold
    return max(empirical, threshold + mean_excess * log(top / count / (1.0 - level)))
