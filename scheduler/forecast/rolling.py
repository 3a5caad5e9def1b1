"""RollingArray: the newest numbers of an endless series, each with its place in the whole."""

from __future__ import annotations

import numpy as np

from scheduler.forecast.history import FloatArray


class RollingArray:
    """At least the last `capacity` numbers of a series, as one contiguous array; appending is amortised O(1).

    `first` is the place of `values[0]` in the whole series; it grows as old numbers are dropped.
    """

    def __init__(self, capacity: int, *, first: int = 0) -> None:
        assert capacity > 0
        self.capacity = capacity
        self._buffer = np.empty(2 * capacity, dtype=np.float64)
        self._start = 0
        self._end = 0
        self._first = first

    @property
    def first(self) -> int:
        return self._first

    @property
    def end(self) -> int:
        """The place that the next number will take."""
        return self._first + self._end - self._start

    @property
    def values(self) -> FloatArray:
        """A view, shape (at most 2 x capacity,); valid until the next change."""
        return self._buffer[self._start : self._end]

    def extend(self, numbers: FloatArray) -> None:
        for begin in range(0, len(numbers), self.capacity):
            part = numbers[begin : begin + self.capacity]
            self._make_room(len(part))
            self._buffer[self._end : self._end + len(part)] = part
            self._end += len(part)

    def hold(self, number: float, count: int) -> None:
        """Append `number` `count` times, in time that does not grow with a count above the capacity."""
        kept = min(count, self.capacity)
        if count > kept:
            self._first = self.end + count - kept
            self._start = self._end = 0
        self._make_room(kept)
        self._buffer[self._end : self._end + kept] = number
        self._end += kept

    def raise_last(self, number: float) -> None:
        """Replace the last number by `number` where that is larger."""
        self._buffer[self._end - 1] = max(self._buffer[self._end - 1], number)

    def newest(self) -> FloatArray:
        """A view of the last `capacity` numbers, fewer while there are fewer."""
        return self._buffer[max(self._start, self._end - self.capacity) : self._end]

    def _make_room(self, count: int) -> None:
        if self._end + count <= len(self._buffer):
            return
        kept = self.newest().copy()
        self._first = self.end - len(kept)
        self._start, self._end = 0, len(kept)
        self._buffer[: len(kept)] = kept
