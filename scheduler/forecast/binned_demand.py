"""Demand of a pool in bins of equal length, as forecasts read it."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from statistics import median_low

import numpy as np

from scheduler.domain.reading_bins import ReadingBin, find_bin
from scheduler.forecast.demand_history import MISSING_BELOW, BoolArray, FloatArray, RollingArray, find_known_before

COARSE_FACTORS = (1, 2, 3, 4, 6, 12)
_INTERVALS_KEPT, _INTERVALS_MIN = 32, 3
_GAP_S_MIN = 3_600.0
_GAP_INTERVALS = 3.0
_NEAR_ZERO_SHARE_MAX = 0.1


@dataclass(frozen=True, slots=True, eq=False)
class BinnedDemand:
    """Demand in n consecutive bins, of which the last one is still open.

    Args:
        first_bin: number of the first bin; bin k begins at k x `step_s`.
        step_s: length of a bin in seconds.
        opens: (n,), demand in GPUs when each bin began; for the last one, the demand now.
        peaks: (n,), the largest demand of each bin; for the last one, the largest so far.
        known: (n,), whether a reading covers the bin. The others repeat the last known demand.
    """

    first_bin: int
    step_s: float
    opens: FloatArray
    peaks: FloatArray
    known: BoolArray

    def __len__(self) -> int:
        return len(self.opens)

    def coarsen(self, factor: int) -> BinnedDemand:
        """Return the demand in bins that are `factor` times as long. A leading incomplete bin is dropped."""
        if factor == 1:
            return self
        skipped = -self.first_bin % factor
        starts = np.arange(skipped, len(self), factor)
        if not len(starts):
            starts = np.array([len(self) - 1])
        opens = self.opens[starts].copy()
        opens[-1] = self.opens[-1]
        return BinnedDemand(
            (self.first_bin + int(starts[0])) // factor,
            self.step_s * factor,
            opens,
            np.maximum.reduceat(self.peaks, starts),
            np.logical_and.reduceat(self.known, starts),
        )

    def keep_newest(self, count: int) -> BinnedDemand:
        """Return the last `count` bins, or all if there are fewer."""
        first = max(0, len(self) - count)
        return BinnedDemand(
            self.first_bin + first, self.step_s, self.opens[first:], self.peaks[first:], self.known[first:]
        )

    def mark_missing(self) -> BinnedDemand:
        """Return the demand with near-zero bins taken for gaps in the recording, if they are rare.

        Near zero is below `MISSING_BELOW` times the median of the known bins. If that is zero, or if more than a tenth
        of the bins are near zero, then zero is normal.
        """
        if not self.known.any():
            return self
        floor = MISSING_BELOW * float(np.median(self.peaks[self.known]))
        known = self.known & (self.peaks >= floor)
        if known.all() or np.count_nonzero(self.known & ~known) > _NEAR_ZERO_SHARE_MAX * np.count_nonzero(self.known):
            return self
        source = find_known_before(known)
        return BinnedDemand(self.first_bin, self.step_s, self.opens[source], self.peaks[source], known)


class DemandWindow:
    """Rolling window of a pool's demand: at least the last `capacity` bins of `step_s` seconds."""

    def __init__(self, step_s: float, capacity: int) -> None:
        self.step_s = step_s
        self.gpus = 0.0
        self.observed_at_s = float("-inf")
        self._capacity = capacity
        self._bins: tuple[RollingArray, RollingArray, RollingArray] | None = None
        self._intervals_s: list[float] = []

    @property
    def is_empty(self) -> bool:
        return self._bins is None

    @property
    def interval_s(self) -> float:
        """The usual time between two readings, in seconds; 0 before there are several."""
        return median_low(self._intervals_s) if len(self._intervals_s) >= _INTERVALS_MIN else 0.0

    def observe(self, time_s: float, gpus: float) -> None:
        """Record that demand is `gpus` from `time_s` on.

        Raises:
            ValueError: a value is not finite, `gpus` is negative, or `time_s` is before the last reading.
        """
        if not isfinite(time_s):
            raise ValueError(f"time_s must be finite, got {time_s}")
        if not (isfinite(gpus) and gpus >= 0):
            raise ValueError(f"gpus must be finite and not negative, got {gpus}")
        if time_s < self.observed_at_s:
            raise ValueError(f"time_s must not be before the last reading's {self.observed_at_s}, got {time_s}")
        number = find_bin(time_s, self.step_s)
        if self._bins is None:
            opens, peaks, known = (RollingArray(self._capacity, start_index=number) for _ in range(3))
            self._bins = opens, peaks, known
        else:
            self._intervals_s = [*self._intervals_s[1 - _INTERVALS_KEPT :], time_s - self.observed_at_s]
        opens, peaks, known = self._bins
        if number >= opens.end_index:
            starts_bin = time_s - number * self.step_s <= 1e-9 * self.step_s or not len(opens.values)
            self._open_bins(number if starts_bin else number + 1)
            if starts_bin:
                opens.append_repeated(gpus, 1)
                peaks.append_repeated(gpus, 1)
                known.append_repeated(1.0, 1)
        peaks.raise_last(gpus)
        known.raise_last(1.0)
        self.gpus, self.observed_at_s = gpus, time_s

    def observe_bin(self, readings: ReadingBin) -> None:
        """Record the readings of one bin of `step_s`, with the same effect as `observe` of each of them.

        Raises ValueError as `observe` does.
        """
        self.observe(readings.first_at_s, readings.first_gpus)
        if readings.readings == 1:
            return
        # Intervals matter if they are longer than a bin. Those inside of one are not, so their mean stands for them.
        count = readings.readings - 1
        inside = [(readings.last_at_s - readings.first_at_s) / count] * min(count, _INTERVALS_KEPT)
        self._intervals_s = [*self._intervals_s, *inside][-_INTERVALS_KEPT:]
        self.gpus, self.observed_at_s = readings.last_gpus, readings.last_at_s
        assert self._bins is not None
        self._bins[1].raise_last(readings.peak_gpus)

    def _open_bins(self, end: int) -> None:
        """Open all bins before number `end`, with the last demand still in force.

        A bin that begins long after the last reading, as readings usually follow each other, is not known.
        """
        assert self._bins is not None
        opens, peaks, known = self._bins
        missing = end - opens.end_index
        if missing <= 0:
            return
        covered_until_s = self.observed_at_s + max(_GAP_S_MIN, _GAP_INTERVALS * self.interval_s)
        covered = min(missing, max(0, int(covered_until_s / self.step_s) + 1 - opens.end_index))
        opens.append_repeated(self.gpus, missing)
        peaks.append_repeated(self.gpus, missing)
        known.append_repeated(1.0, covered)
        known.append_repeated(0.0, missing - covered)

    def read(self, now_s: float) -> BinnedDemand:
        """Return the demand until `now_s`, in bins as long as readings are apart, if that is longer than a bin.

        Raises:
            ValueError: there is no reading yet, or `now_s` is before the last one.
        """
        if self._bins is None:
            raise ValueError("a forecast needs at least one demand reading, got none")
        if not self.observed_at_s <= now_s < float("inf"):
            raise ValueError(f"now_s must not be before the last reading's {self.observed_at_s}, got {now_s}")
        self._open_bins(find_bin(now_s, self.step_s) + 1)
        opens, peaks, known = (each.latest().copy() for each in self._bins)
        opens[-1] = self.gpus
        end = self._bins[0].end_index
        demand = BinnedDemand(end - len(opens), self.step_s, opens, peaks, known > 0)
        return demand.coarsen(self._coarse_factor)

    @property
    def bin_s(self) -> float:
        """Length in seconds of the bins that `read` returns."""
        return self.step_s * self._coarse_factor

    @property
    def _coarse_factor(self) -> int:
        wanted = self.interval_s / self.step_s
        return next((each for each in COARSE_FACTORS if each >= wanted - 0.5), COARSE_FACTORS[-1])
