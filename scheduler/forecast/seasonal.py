"""The level-adjusted seasonal point forecast of the largest demand within a horizon.

Demand is cut into bins of equal length; `SEASONS` earlier days say by how much the demand usually rises from this
time of day, and the current level says from where. The rise is added rather than multiplied: a ratio explodes
where the night's level is close to zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scheduler.forecast.history import FloatArray, IntArray

SEASONS = 7
STEPS_PER_SEASON = 288
# The level is the mean of 1/72 of a season (20 minutes of a day): long enough to level a noisy reading, short
# enough to follow a ramp.
LEVELS_PER_SEASON = 72
# Residuals are measured in units of (point forecast + this share of the last season's mean): errors grow with the
# demand, but do not vanish with it.
SCALE_FLOOR = 0.25


@dataclass(frozen=True, slots=True)
class Season:
    """How time is cut: `bins` bins of `step_s` make a season.

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

    def bins_needed(self, horizon_bins: int) -> int:
        """Bins that must be known, the current one counted, before one earlier season can be looked back at."""
        return -(-horizon_bins // self.bins) * self.bins + self.level_bins

    def bin_of(self, time_s: float) -> int:
        return int(np.floor(time_s / self.step_s))

    def horizon_bins(self, horizon_s: float) -> int:
        """Bins after the current one that a horizon touches.

        Raises:
            ValueError: the horizon is not positive or is longer than the seasons that are looked back at.
        """
        if not 0 < horizon_s <= SEASONS * self.season_s:
            raise ValueError(f"horizon_s must be positive and at most {SEASONS * self.season_s}, got {horizon_s}")
        return int(np.ceil(horizon_s / self.step_s - 1e-9))


def largest_ahead(peaks: FloatArray, origins: IntArray, horizon_bins: int) -> FloatArray:
    """Largest demand of the bins `origin` to `origin + horizon_bins`, both counted; the shape of `origins`."""
    ahead = peaks[origins[..., None] + np.arange(horizon_bins + 1)]
    return np.asarray(ahead.max(axis=-1))


def seasonal_points(
    peaks: FloatArray, current: FloatArray, origins: IntArray, *, season: Season, horizon_bins: int
) -> FloatArray:
    """Point forecasts, shape (m,), of the largest demand from each of the m origins to `horizon_bins` bins on.

    `peaks` (n,) is the largest demand of each bin; `current` (n,) the demand in force when each bin began (for the
    newest bin: the demand now). A forecast for origin k reads `peaks[:k]` and `current[:k + 1]` alone. The usual
    rise is the median over up to `SEASONS` seasons, which one strange day does not move; with less than one full
    season before it, an origin gets persistence: its current demand. No point lies below the current demand.
    """
    back = season.bins * np.arange(1, SEASONS + 1)
    past = origins[:, None] - back
    usable = (past >= season.level_bins - 1) & (back >= horizon_bins)
    now = current[origins]
    if not usable.any():
        return now
    past = np.where(usable, past, past[usable][0])
    rises = largest_ahead(peaks, past, horizon_bins) - _levels(peaks, current, past, season.level_bins)
    rise = _masked_median(rises, usable)
    level = _levels(peaks, current, np.maximum(origins, season.level_bins - 1), season.level_bins)
    return np.where(usable.any(axis=1), np.maximum(level + rise, now), now)


def residual_scales(peaks: FloatArray, points: FloatArray, origins: IntArray, *, season: Season) -> FloatArray:
    """The unit, in GPUs, shape (m,), of the residuals at consecutive `origins`; one GPU where demand has been zero."""
    first = max(0, int(origins[0]) - season.bins)
    sums = np.concatenate([[0.0], np.cumsum(peaks[first : int(origins[-1])])])
    begins = np.maximum(origins - season.bins, 0)
    means = (sums[origins - first] - sums[begins - first]) / np.maximum(origins - begins, 1)
    scales = points + SCALE_FLOOR * means
    return np.where(scales > 0, scales, 1.0)


def _levels(peaks: FloatArray, current: FloatArray, origins: IntArray, level_bins: int) -> FloatArray:
    before = peaks[origins[..., None] - np.arange(1, level_bins)]
    return np.asarray((current[origins] + before.sum(axis=-1)) / level_bins)


def _masked_median(values: FloatArray, usable: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> FloatArray:
    """Median of the usable values of each row; rows without one give a number of no meaning."""
    ordered = np.sort(np.where(usable, values, np.inf), axis=1)
    count = np.maximum(usable.sum(axis=1), 1)
    rows = np.arange(len(values))
    middle = ordered[rows, (count - 1) // 2] + ordered[rows, count // 2]
    return np.asarray(np.where(np.isfinite(middle), middle / 2, 0.0))
