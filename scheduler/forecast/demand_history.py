"""Arrays of a pool's demand over time: gaps in recordings, and a rolling array for the newest values."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
MISSING_BELOW = 0.01


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
    return np.asarray(values[find_known_before(known)])


def find_known_before(known: BoolArray) -> IntArray:
    """Return the position of the last known value up to each one, or of the first known value, (n,)."""
    source = np.maximum.accumulate(np.where(known, np.arange(len(known)), -1))
    return np.where(source < 0, known.argmax(), source)


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
