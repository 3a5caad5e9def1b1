"""Level-adjusted seasonal forecast of the largest demand within a horizon, and quantiles of its errors.

Demand is divided into bins of equal length. `SEASONS` earlier days show by how much demand usually rises from this time
of day, and the current level shows from where. The rise is added, not multiplied: a ratio explodes if the level at
night is close to zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log

import numpy as np

from scheduler.forecast.demand_history import FloatArray, IntArray

SEASONS = 7
STEPS_PER_SEASON = 288
# The level is the mean of 1/72 of a season (20 minutes of a day): long enough to smooth a noisy reading, short
# enough to follow a ramp.
LEVELS_PER_SEASON = 72
# Residuals have the unit (point forecast + this share of the last season's mean): errors grow with demand, but do not
# vanish with it.
SCALE_FLOOR = 0.25


# With fewer residuals than this, a forecast allows for a rise by UNCALIBRATED_RESIDUAL scales.
CALIBRATION_MIN_RESIDUALS = 20
UNCALIBRATED_RESIDUAL = 1.0
TAIL_SHARE = 0.05
TAIL_RESIDUALS_MIN = 5


@dataclass(frozen=True, slots=True)
class Season:
    """A season of `bins` bins of `step_s` seconds.

    Raises:
        ValueError: `season_s` is not a whole number, at least 2, of `step_s`.
    """

    season_s: float
    step_s: float

    def __post_init__(self) -> None:
        if not 0 < self.step_s < self.season_s < float("inf"):
            raise ValueError(f"step_s must be positive and below season_s {self.season_s}, got {self.step_s}")
        if abs(self.season_s / self.step_s - self.bins) > 1e-6 * self.bins:
            raise ValueError(f"season_s must be a whole number of step_s {self.step_s}, got {self.season_s}")

    @property
    def bins(self) -> int:
        return round(self.season_s / self.step_s)

    @property
    def level_bins(self) -> int:
        return max(1, self.bins // LEVELS_PER_SEASON)

    def count_required_bins(self, horizon_bins: int) -> int:
        """Return the bins, including the current one, that must be known before one earlier season can be used."""
        return -(-horizon_bins // self.bins) * self.bins + self.level_bins

    def bin_index(self, time_s: float) -> int:
        return int(np.floor(time_s / self.step_s))

    def count_horizon_bins(self, horizon_s: float) -> int:
        """Return the bins after the current one that a horizon touches.

        Raises:
            ValueError: the horizon is not positive, or is longer than the seasons that are used.
        """
        if not 0 < horizon_s <= SEASONS * self.season_s:
            raise ValueError(f"horizon_s must be positive and at most {SEASONS * self.season_s}, got {horizon_s}")
        return int(np.ceil(horizon_s / self.step_s - 1e-9))


def max_demand_ahead(peaks: FloatArray, origins: IntArray, horizon_bins: int) -> FloatArray:
    """Return the largest demand of the bins `origin` to `origin + horizon_bins`, both included.

    The result has the shape of `origins`.
    """
    ahead = peaks[origins[..., None] + np.arange(horizon_bins + 1)]
    return np.asarray(ahead.max(axis=-1))


def compute_point_forecasts(
    peaks: FloatArray, current: FloatArray, origins: IntArray, *, season: Season, horizon_bins: int
) -> FloatArray:
    """Return point forecasts, shape (m,), of the largest demand from each of m origins to `horizon_bins` bins later.

    A forecast for origin k reads only `peaks[:k]` and `current[:k + 1]`. The usual rise is the median over up to
    `SEASONS` seasons, so that one unusual day does not move it. An origin with less than one full season before it gets
    persistence: its current demand. No forecast is below the current demand.

    Args:
        peaks: (n,), the largest demand of each bin.
        current: (n,), the demand when each bin began; for the newest bin, the demand now.
    """
    back = season.bins * np.arange(1, SEASONS + 1)
    past = origins[:, None] - back
    usable = (past >= season.level_bins - 1) & (back >= horizon_bins)
    now = current[origins]
    if not usable.any():
        return now
    past = np.where(usable, past, past[usable][0])
    rises = max_demand_ahead(peaks, past, horizon_bins) - _compute_levels(peaks, current, past, season.level_bins)
    rise = _compute_masked_median(rises, usable)
    level = _compute_levels(peaks, current, np.maximum(origins, season.level_bins - 1), season.level_bins)
    return np.where(usable.any(axis=1), np.maximum(level + rise, now), now)


def compute_residual_scales(peaks: FloatArray, points: FloatArray, origins: IntArray, *, season: Season) -> FloatArray:
    """Return the scale, in GPUs, of the residuals at consecutive `origins`, shape (m,).

    The scale is one GPU if demand has been zero.
    """
    first = max(0, int(origins[0]) - season.bins)
    sums = np.concatenate([[0.0], np.cumsum(peaks[first : int(origins[-1])])])
    begins = np.maximum(origins - season.bins, 0)
    means = (sums[origins - first] - sums[begins - first]) / np.maximum(origins - begins, 1)
    scales = points + SCALE_FLOOR * means
    return np.where(scales > 0, scales, 1.0)


def _compute_levels(peaks: FloatArray, current: FloatArray, origins: IntArray, level_bins: int) -> FloatArray:
    before = peaks[origins[..., None] - np.arange(1, level_bins)]
    return np.asarray((current[origins] + before.sum(axis=-1)) / level_bins)


def _compute_masked_median(values: FloatArray, usable: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> FloatArray:
    """Return the median of the usable values of each row; the result for a row without any has no meaning."""
    ordered = np.sort(np.where(usable, values, np.inf), axis=1)
    count = np.maximum(usable.sum(axis=1), 1)
    rows = np.arange(len(values))
    middle = ordered[rows, (count - 1) // 2] + ordered[rows, count // 2]
    return np.asarray(np.where(np.isfinite(middle), middle / 2, 0.0))


def compute_residual_quantile(sorted_residuals: FloatArray, level: float, *, overlap: int = 1) -> float:
    """Return the residual that the next one stays below with probability `level`. It never decreases in `level`.

    The rank is that of split conformal prediction, ceil((m + 1) x level) (Vovk et al., Algorithmic Learning in a Random
    World, 2005, chapter 2), over a rolling window because demand drifts. If there are too few independent residuals for
    the level, the result is the larger of the empirical quantile (the largest residual if the rank exceeds m) and an
    exponential tail fitted to the top residuals (peaks over threshold with shape 0: Pickands 1975; Coles, An
    Introduction to Statistical Modeling of Extreme Values, 2001, chapter 4).

    Args:
        sorted_residuals: ascending, shape (m,).
        overlap: number of neighboring residuals that share outcomes, so that m residuals count as m / overlap
            independent ones.
    """
    count = len(sorted_residuals)
    rank = max(1, ceil((count + 1) * level - 1e-9))
    empirical = float(sorted_residuals[min(rank, count) - 1]) if count else 0.0
    if count < CALIBRATION_MIN_RESIDUALS:
        return max(empirical, UNCALIBRATED_RESIDUAL) if level > 0.5 else min(empirical, 0.0)
    independent = count / overlap
    if (independent + 1) * level <= independent:
        return empirical
    top = max(TAIL_RESIDUALS_MIN, ceil(TAIL_SHARE * count))
    threshold = float(sorted_residuals[-top - 1])
    mean_excess = float(np.mean(sorted_residuals[-top:])) - threshold
    return max(empirical, threshold + mean_excess * log(top / count / (1.0 - level)))
