"""Seasons of demand: bins of a day, earlier days at the same local time, and the usual course of a day."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scheduler.domain.time_zones import find_utc_offset_s, is_zone
from scheduler.forecast.demand_history import FloatArray, IntArray

DAY_S = 86_400.0
STEPS_PER_SEASON = 288
DAYS = (1, 2, 3, 4, 5, 6, 7)
WEEKS = (7, 14)


@dataclass(frozen=True, slots=True)
class Season:
    """A day of `bins` bins of `step_s` seconds, by the clock of a time zone.

    Args:
        season_s: length of a day; other than 86,400 s in demonstrations and tests only.
        zone: an IANA time zone such as Europe/Berlin. The usual course of a day follows its local time.

    Raises:
        ValueError: `season_s` is not a whole number, at least 2, of `step_s`; or there is no such zone.
    """

    season_s: float
    step_s: float
    zone: str = "UTC"

    def __post_init__(self) -> None:
        if not 0 < self.step_s < self.season_s < float("inf"):
            raise ValueError(f"step_s must be positive and below season_s {self.season_s}, got {self.step_s}")
        if abs(self.season_s / self.step_s - self.bins) > 1e-6 * self.bins:
            raise ValueError(f"season_s must be a whole number of step_s {self.step_s}, got {self.season_s}")

        if not is_zone(self.zone):
            raise ValueError(f"time zone {self.zone!r} is unknown. Use an IANA name such as Europe/Berlin")

    @property
    def bins(self) -> int:
        return round(self.season_s / self.step_s)

    def count_horizon_bins(self, horizon_s: float) -> int:
        """Return the bins after the current one that a horizon touches.

        Raises:
            ValueError: the horizon is not positive, or is longer than a week.
        """
        if not 0 < horizon_s <= 7 * self.season_s:
            raise ValueError(f"horizon_s must be positive and at most {7 * self.season_s}, got {horizon_s}")
        return int(np.ceil(horizon_s / self.step_s - 1e-9))

    def find_earlier(self, bins: IntArray, days: tuple[int, ...]) -> IntArray:
        """Return the bins at the same local time some days before each of `bins`, (m, len(days)), as numbers."""
        back = self.bins * np.asarray(days)
        earlier = np.asarray(bins[:, None] - back)
        if self.zone == "UTC":
            return earlier
        return np.asarray(
            earlier + self._offsets(bins)[:, None] - self._offsets(earlier.ravel()).reshape(earlier.shape)
        )

    def find_time_of_day(self, bins: IntArray) -> IntArray:
        """Return the number of each bin within its local day, from 0 to `self.bins` - 1."""
        local = bins if self.zone == "UTC" else bins + self._offsets(bins)
        return np.asarray(local % self.bins)

    def _offsets(self, bins: IntArray) -> IntArray:
        """Return by how many bins local time is ahead of UTC."""
        hours = np.floor(bins * self.step_s / 3_600.0).astype(np.int64)
        unique, positions = np.unique(hours, return_inverse=True)
        offsets_s = np.array([find_utc_offset_s(self.zone, int(hour)) for hour in unique])
        return np.asarray(np.rint(offsets_s[positions] / self.step_s).astype(np.int64))


def take(values: FloatArray, positions: IntArray) -> FloatArray:
    """Return the values at positions of any shape; NaN where there is none."""
    if not len(values):
        return np.full(positions.shape, np.nan)
    inside = (positions >= 0) & (positions < len(values))
    return np.where(inside, values[np.where(inside, positions, 0)], np.nan)


def compute_row_means(rows: FloatArray) -> FloatArray:
    """Return the mean of each row over its numbers, shape (m,); NaN for a row without any."""
    present = ~np.isnan(rows)
    counts = present.sum(axis=1)
    sums = np.where(present, rows, 0.0).sum(axis=1)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def compute_row_medians(rows: FloatArray) -> FloatArray:
    """Return the median of each row over its numbers, shape (m,); NaN for a row without any."""
    ordered = np.sort(rows, axis=1)  # NaN sorts last
    counts = (~np.isnan(rows)).sum(axis=1)
    at = np.arange(len(rows))
    middle = ordered[at, np.maximum(counts - 1, 0) // 2] + ordered[at, counts // 2]
    return np.where(counts > 0, middle / 2, np.nan)


def smooth(values: FloatArray, reach: int) -> FloatArray:
    """Return the mean of each value and its `reach` neighbors on both sides that are numbers, shape (n,)."""
    present = np.concatenate([[0.0], np.cumsum(~np.isnan(values))])
    sums = np.concatenate([[0.0], np.cumsum(np.nan_to_num(values))])
    first = np.maximum(np.arange(len(values)) - reach, 0)
    last = np.minimum(np.arange(len(values)) + reach + 1, len(values))
    counts = present[last] - present[first]
    means = (sums[last] - sums[first]) / np.maximum(counts, 1.0)
    return np.where((counts > 0) & ~np.isnan(values), means, np.nan)
