"""The demand of a pool's inference over time, and a rolling array for its newest values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
MISSING_BELOW = 0.01


@dataclass(frozen=True, slots=True, eq=False)
class DemandHistory:
    """A step function: demand `gpus[i]` applies from `times_s[i]` until the next time; the last one still applies.

    Both are float64 arrays of shape (n,), copied and read-only. Times ascend strictly and may be irregular.

    Raises:
        ValueError: lengths differ, a value is not finite, times do not ascend, or a demand is negative.
    """

    times_s: FloatArray
    gpus: FloatArray

    def __post_init__(self) -> None:
        times_s, gpus = _copy_readonly("times_s", self.times_s), _copy_readonly("gpus", self.gpus)
        if len(times_s) != len(gpus):
            raise ValueError(f"times_s and gpus must be equally long, got {len(times_s)} and {len(gpus)}")
        invalid = np.flatnonzero(np.diff(times_s) <= 0)
        if len(invalid):
            raise ValueError(f"times_s must ascend, got {times_s[invalid[0] + 1]} after {times_s[invalid[0]]}")
        if len(gpus) and gpus.min() < 0:
            raise ValueError(f"gpus must not be negative, got {gpus.min()} at index {gpus.argmin()}")
        object.__setattr__(self, "times_s", times_s)
        object.__setattr__(self, "gpus", gpus)

    @classmethod
    def from_sequences(cls, times_s: Sequence[float] | FloatArray, gpus: Sequence[float] | FloatArray) -> DemandHistory:
        """Create a history from two sequences of numbers; raises ValueError as the class does."""
        return cls(np.asarray(times_s, dtype=np.float64), np.asarray(gpus, dtype=np.float64))

    def __len__(self) -> int:
        return len(self.times_s)

    def append(self, time_s: float, gpus: float, *, retention_s: float | None = None) -> DemandHistory:
        """Return the history with one more reading.

        Args:
            retention_s: drop readings that ceased to apply more than this before `time_s`.

        Raises:
            ValueError: the reading is not later than the last one, negative or not finite.
        """
        first = 0
        if retention_s is not None and len(self):
            first = max(0, int(np.searchsorted(self.times_s, time_s - retention_s, side="right")) - 1)
        return DemandHistory(np.append(self.times_s[first:], time_s), np.append(self.gpus[first:], gpus))

    def resample(self, step_s: float) -> DemandHistory:
        """Return the demand at every multiple of `step_s`, from that of the first reading to the last one.

        The first point is at or before the first reading and has its value.

        Raises:
            ValueError: `step_s` is not a positive number.
        """
        if not step_s > 0:
            raise ValueError(f"step_s must be positive, got {step_s}")
        if not len(self):
            return self
        first, last = np.floor(self.times_s[[0, -1]] / step_s).astype(np.int64)
        grid_s = np.arange(first, last + 1) * step_s
        in_force = np.maximum(np.searchsorted(self.times_s, grid_s, side="right") - 1, 0)
        return DemandHistory(grid_s, self.gpus[in_force])


def fill_gaps(load: ArrayLike, *, missing_below: float = MISSING_BELOW) -> FloatArray:
    """Return demand of shape (n,) with each missing value replaced by the last value before it.

    NaN, or a value below `missing_below` times the median, is a gap in the recording and not a quiet hour. If the
    median is zero, zero is normal and only NaN is missing. Leading gaps take the first known value.

    Raises:
        ValueError: `missing_below` is not in [0, 1), a value is negative or infinite, or every value is missing.
    """
    if not 0 <= missing_below < 1:
        raise ValueError(f"missing_below must be in [0, 1), got {missing_below}")
    values = np.array(load, dtype=np.float64)
    known = ~np.isnan(values)
    if np.isinf(values).any() or (values[known] < 0).any():
        raise ValueError("load must hold finite numbers of at least 0, got a negative or infinite one")
    if not len(values):
        return values
    if not known.any():
        raise ValueError(f"load must have a known value, but all {len(values)} are missing")
    known[known] = values[known] >= missing_below * np.median(values[known])
    source = np.maximum.accumulate(np.where(known, np.arange(len(values)), -1))
    return np.asarray(values[np.where(source < 0, known.argmax(), source)])


def _copy_readonly(field: str, values: FloatArray) -> FloatArray:
    array = np.array(values, dtype=np.float64)
    if array.ndim != 1:
        raise ValueError(f"{field} must have one dimension, got shape {array.shape}")
    if not np.isfinite(array).all():
        invalid = int(np.flatnonzero(~np.isfinite(array))[0])
        raise ValueError(f"{field} must be finite, got {array[invalid]} at index {invalid}")
    array.setflags(write=False)
    return array


class RollingArray:
    """At least the last `capacity` numbers of a series, as one contiguous array. Appending is amortised O(1).

    `start_index` is the position of `values[0]` in the whole series; it grows as old numbers are dropped.
    """

    def __init__(self, capacity: int, *, start_index: int = 0) -> None:
        assert capacity > 0
        self.capacity = capacity
        self._buffer = np.empty(2 * capacity, dtype=np.float64)
        self._start = 0
        self._end = 0
        self._first = start_index

    @property
    def start_index(self) -> int:
        return self._first

    @property
    def end_index(self) -> int:
        """The position of the next number in the whole series."""
        return self._first + self._end - self._start

    @property
    def values(self) -> FloatArray:
        """A view, shape (at most 2 x capacity,), valid until the next change."""
        return self._buffer[self._start : self._end]

    def extend(self, numbers: FloatArray) -> None:
        for begin in range(0, len(numbers), self.capacity):
            part = numbers[begin : begin + self.capacity]
            self._reserve(len(part))
            self._buffer[self._end : self._end + len(part)] = part
            self._end += len(part)

    def append_repeated(self, number: float, count: int) -> None:
        """Append `number` `count` times, in time that does not grow with counts above the capacity."""
        kept = min(count, self.capacity)
        if count > kept:
            self._first = self.end_index + count - kept
            self._start = self._end = 0
        self._reserve(kept)
        self._buffer[self._end : self._end + kept] = number
        self._end += kept

    def raise_last(self, number: float) -> None:
        """Raise the last number to `number` if that is larger."""
        self._buffer[self._end - 1] = max(self._buffer[self._end - 1], number)

    def latest(self) -> FloatArray:
        """Return a view of the last `capacity` numbers, or of all if there are fewer."""
        return self._buffer[max(self._start, self._end - self.capacity) : self._end]

    def _reserve(self, count: int) -> None:
        if self._end + count <= len(self._buffer):
            return
        kept = self.latest().copy()
        self._first = self.end_index - len(kept)
        self._start, self._end = 0, len(kept)
        self._buffer[: len(kept)] = kept
