"""How fast we ask: a token bucket over all calls, and the pause before a call that failed is made again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
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
