"""How fast we ask: a token bucket over all calls, the pause before a call that failed is made again, and the pauses of
what is refused time and again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from random import Random


def backoff_s(failures: int, *, base_s: float, cap_s: float, rng: Random) -> float:
    """The pause after the n-th failure in a row (n >= 1): it doubles up to the cap, and half of it is drawn at
    random, so that those who failed together do not come back together."""
    full_s = min(cap_s, base_s * 2.0 ** min(failures - 1, 60))
    return full_s * (0.5 + 0.5 * rng.random())


class TokenBucket:
    """At most `burst` at once and `rate_per_s` in the long run. Thread-safe, and fair: each taker books the next free
    moment and sleeps until then, without the lock."""

    def __init__(
        self,
        *,
        rate_per_s: float,
        burst: int,
        monotonic_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        if rate_per_s <= 0 or burst < 1:
            raise ValueError(f"rate_per_s must be above 0 and burst at least 1, got {rate_per_s} and {burst}")
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._monotonic_s = monotonic_s
        self._sleep = sleep
        self._lock = threading.Lock()
        self._tokens = float(burst)
        self._filled_at_s = monotonic_s()

    def take(self) -> None:
        """Take one token; waits for it. The level goes below zero by those who already wait."""
        with self._lock:
            now_s = self._monotonic_s()
            filled = self._tokens + (now_s - self._filled_at_s) * self._rate_per_s
            self._tokens = min(float(self._burst), filled) - 1.0
            self._filled_at_s = now_s
            wait_s = max(0.0, -self._tokens / self._rate_per_s)
        if wait_s:
            self._sleep(wait_s)


@dataclass(frozen=True, slots=True)
class _Pause:
    times: int
    until_s: float
    asked_for_at_s: float


class Pauses:
    """Of what was refused, by its key: each time in a row it is left alone for longer. Thread-safe."""

    def __init__(self, *, base_s: float, cap_s: float, rng: Random, monotonic_s: Callable[[], float]) -> None:
        self._base_s = base_s
        self._cap_s = cap_s
        self._rng = rng
        self._monotonic_s = monotonic_s
        self._lock = threading.Lock()
        self._known: dict[Hashable, _Pause] = {}

    def begin(self, key: Hashable) -> None:
        """It was refused, once more."""
        with self._lock:
            times = self._known[key].times + 1 if key in self._known else 1
            pause_s = backoff_s(times, base_s=self._base_s, cap_s=self._cap_s, rng=self._rng)
            now_s = self._monotonic_s()
            self._known[key] = _Pause(times, now_s + pause_s, now_s)

    def end(self, key: Hashable) -> None:
        """It was taken."""
        with self._lock:
            self._known.pop(key, None)

    def until_s(self, key: Hashable) -> float | None:
        """The end of its pause, which may have passed, on the monotonic clock; None where it was not refused."""
        with self._lock:
            if key not in self._known:
                return None
            self._known[key] = known = replace(self._known[key], asked_for_at_s=self._monotonic_s())
            return known.until_s

    def forget_old(self) -> None:
        """Drop what nobody has asked for any more for as long as the longest pause."""
        oldest_s = self._monotonic_s() - self._cap_s
        with self._lock:
            self._known = {key: known for key, known in self._known.items() if known.asked_for_at_s >= oldest_s}
