"""WorkQueue: keys to process, each once, now or later (after client-go's workqueue)."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Hashable
from random import Random
from typing import Generic, TypeVar

from scheduler.kubernetes.flow_control import compute_backoff_s

K = TypeVar("K", bound=Hashable)


class WorkQueue(Generic[K]):
    """A thread-safe work queue.

    A key added several times is taken once. A key added while a worker holds it is requeued after `done`, so that two
    workers never hold the same key. A delayed key keeps its earliest time.
    """

    def __init__(
        self,
        *,
        base_s: float = 0.5,
        cap_s: float = 60.0,
        rng: Random | None = None,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._base_s = base_s
        self._cap_s = cap_s
        self._rng = rng or Random()
        self._monotonic_s = monotonic_s
        self._changed = threading.Condition()
        self._ready: dict[K, None] = {}
        self._working: set[K] = set()
        self._again: set[K] = set()
        self._due_s: dict[K, float] = {}
        self._later: list[tuple[float, int, K]] = []
        self._added = 0
        self._failures: dict[K, int] = {}
        self._is_closed = False

    def __len__(self) -> int:
        """Return the number of keys that are ready."""
        with self._changed:
            self._ripen()
            return len(self._ready)

    def add(self, key: K) -> None:
        with self._changed:
            self._add(key)
            self._changed.notify()

    def add_after(self, key: K, delay_s: float) -> None:
        with self._changed:
            due_s = self._monotonic_s() + delay_s
            if due_s < self._due_s.get(key, float("inf")):
                self._due_s[key] = due_s
                self._added += 1
                heapq.heappush(self._later, (due_s, self._added, key))
                self._changed.notify()

    def add_failed(self, key: K) -> float:
        """Add the key after a delay that doubles with each consecutive failure. Return the delay in seconds."""
        with self._changed:
            failures = self._failures[key] = self._failures.get(key, 0) + 1
        delay_s = compute_backoff_s(failures, base_s=self._base_s, cap_s=self._cap_s, rng=self._rng)
        self.add_after(key, delay_s)
        return delay_s

    def forget(self, key: K) -> None:
        """Reset the failure count of the key."""
        with self._changed:
            self._failures.pop(key, None)

    def take(self, timeout_s: float) -> K | None:
        """Return the key that has been ready longest, or None after `timeout_s` or `close`. Call `done` afterwards."""
        limit_s = self._monotonic_s() + timeout_s
        with self._changed:
            while not self._is_closed:
                self._ripen()
                if self._ready:
                    key = next(iter(self._ready))
                    del self._ready[key]
                    self._working.add(key)
                    return key
                now_s = self._monotonic_s()
                if now_s >= limit_s:
                    break
                next_due_s = self._later[0][0] if self._later else limit_s
                self._changed.wait(max(0.0, min(limit_s, next_due_s) - now_s))
            return None

    def done(self, key: K) -> None:
        with self._changed:
            self._working.remove(key)
            if key in self._again:
                self._again.remove(key)
                self._add(key)
                self._changed.notify()

    def close(self) -> None:
        """Hand out no more keys, and wake all waiting workers."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _add(self, key: K) -> None:
        if key in self._working:
            self._again.add(key)
        else:
            self._ready.setdefault(key)

    def _ripen(self) -> None:
        now_s = self._monotonic_s()
        while self._later and self._later[0][0] <= now_s:
            due_s, _, key = heapq.heappop(self._later)
            # Entries replaced by an earlier one stay in the heap until their time.
            if self._due_s.get(key) == due_s:
                del self._due_s[key]
                self._add(key)
