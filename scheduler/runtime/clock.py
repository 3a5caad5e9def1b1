"""Clocks. Lower layers never read a clock: they get the time as an argument."""

from __future__ import annotations

import threading
import time
from typing import Protocol

CATCH_UP_RATE = 0.9
"""Rate of a RealClock after the system clock was set back, until the two agree again.

At 0.9 they agree after ten times the amount of the change. Deadlines are a little late meanwhile.
"""


class Clock(Protocol):
    def now_s(self) -> float:
        """Return Unix time in seconds. It never decreases."""

    def elapsed_s(self) -> float:
        """Return a monotonic time for measuring durations. Its zero is arbitrary."""


class RealClock:
    """System time that always advances, even if the system clock is set back.

    Otherwise, deadlines for leaving a node would be extended by the amount of the change. Starts at `from_s` or later.
    """

    def __init__(self, from_s: float = 0.0) -> None:
        self._last_s, self._last_elapsed_s = from_s, time.monotonic()
        self._lock = threading.Lock()

    def now_s(self) -> float:
        with self._lock:
            elapsed_s = time.monotonic()
            minimum_s = self._last_s + CATCH_UP_RATE * (elapsed_s - self._last_elapsed_s)
            self._last_s, self._last_elapsed_s = max(minimum_s, time.time()), elapsed_s
            return self._last_s

    def elapsed_s(self) -> float:
        return time.perf_counter()


class ManualClock:
    """A clock that only moves when told to. `elapsed_s` is real, so that simulations can report their speed."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def now_s(self) -> float:
        return self._now_s

    def move_to(self, now_s: float) -> None:
        if now_s < self._now_s:
            raise ValueError(f"the clock is at {self._now_s} and cannot go back to {now_s}")
        self._now_s = now_s

    def elapsed_s(self) -> float:
        return time.perf_counter()
