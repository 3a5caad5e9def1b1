"""Clocks. Below `runtime` nothing reads one: `now` is an argument."""

from __future__ import annotations

import threading
import time
from typing import Protocol

CATCH_UP_RATE = 0.9
"""How fast a real clock goes while the machine's clock is behind it: deadlines then come a little late, and it is
caught up with after ten times the time by which that was set back."""


class Clock(Protocol):
    def now_s(self) -> float:
        """Seconds since the epoch, UTC; never goes back."""

    def elapsed_s(self) -> float:
        """A stopwatch for measuring how long something took; its zero means nothing."""


class RealClock:
    """Wall time that never goes back and never stands still, even when the machine's clock is set back: what has to
    leave a node by a time must not have until the machine gets there once more. It begins at `from_s` at least."""

    def __init__(self, from_s: float = 0.0) -> None:
        self._last_s, self._last_elapsed_s = from_s, time.monotonic()
        self._lock = threading.Lock()

    def now_s(self) -> float:
        with self._lock:
            elapsed_s = time.monotonic()
            crept_s = self._last_s + CATCH_UP_RATE * (elapsed_s - self._last_elapsed_s)
            self._last_s, self._last_elapsed_s = max(crept_s, time.time()), elapsed_s
            return self._last_s

    def elapsed_s(self) -> float:
        return time.perf_counter()


class ManualClock:
    """A clock that stands where it was put; `elapsed_s` is real, so that a simulation can report its speed."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def now_s(self) -> float:
        return self._now_s

    def move_to(self, now_s: float) -> None:
        if now_s < self._now_s:
            raise ValueError(f"a clock does not go back: it stands at {self._now_s}, asked for {now_s}")
        self._now_s = now_s

    def elapsed_s(self) -> float:
        return time.perf_counter()
