"""Clocks. Below `runtime` nothing reads one: `now` is an argument."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now_s(self) -> float:
        """Seconds since the epoch, UTC; never goes back."""

    def elapsed_s(self) -> float:
        """A stopwatch for measuring how long something took; its zero means nothing."""


class RealClock:
    """Wall time that never goes back, even when the machine's clock is set."""

    def __init__(self) -> None:
        self._last_s = 0.0

    def now_s(self) -> float:
        self._last_s = max(self._last_s, time.time())
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
