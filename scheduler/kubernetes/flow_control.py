"""Client-side flow control: token bucket, exponential backoff, and a sender that retries transient failures."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from random import Random
from typing import Any, TypeVar

from scheduler.kubernetes.api_error import ApiError
from scheduler.kubernetes.api_requests import ApiRequest
from scheduler.kubernetes.connection import Connection, ResponseLines
from scheduler.store.protocol import FencedError


def compute_backoff_s(failures: int, *, base_s: float, cap_s: float, rng: Random) -> float:
    """Return the delay after the n-th consecutive failure (n >= 1): doubling up to `cap_s`, half of it random.

    The jitter keeps clients that failed together from retrying together.
    """
    full_s = min(cap_s, base_s * 2.0 ** min(failures - 1, 60))
    return full_s * (0.5 + 0.5 * rng.random())


class TokenBucket:
    """Rate limiter: `burst` tokens at once, `rate_per_s` on average. Thread-safe and fair.

    Each caller reserves the next free slot under the lock and sleeps without it.
    """

    def __init__(
        self,
        *,
        rate_per_s: float,
        burst: int,
        monotonic_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        if rate_per_s <= 0 or burst < 1:
            raise ValueError(
                f"rate_per_s is {rate_per_s} and burst is {burst}; rate_per_s must be above 0 and burst at least 1"
            )
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._monotonic_s = monotonic_s
        self._sleep = sleep
        self._lock = threading.Lock()
        self._tokens = float(burst)
        self._filled_at_s = monotonic_s()

    def acquire(self) -> None:
        """Take one token, waiting for it if necessary. Callers that wait make the level negative."""
        with self._lock:
            self._fill()
            self._tokens -= 1.0
            wait_s = max(0.0, -self._tokens / self._rate_per_s)
        if wait_s:
            self._sleep(wait_s)

    def level(self) -> float:
        """Return how many tokens can be taken at once, negative while callers wait."""
        with self._lock:
            self._fill()
            return self._tokens

    def _fill(self) -> None:
        now_s = self._monotonic_s()
        filled = self._tokens + (now_s - self._filled_at_s) * self._rate_per_s
        self._tokens, self._filled_at_s = min(float(self._burst), filled), now_s


@dataclass(frozen=True, slots=True)
class _BackoffEntry:
    failures: int
    retry_at_s: float
    last_checked_at_s: float


class KeyedBackoff:
    """Exponential backoff per key. Thread-safe."""

    def __init__(self, *, base_s: float, cap_s: float, rng: Random, monotonic_s: Callable[[], float]) -> None:
        self._base_s = base_s
        self._cap_s = cap_s
        self._rng = rng
        self._monotonic_s = monotonic_s
        self._lock = threading.Lock()
        self._entries: dict[Hashable, _BackoffEntry] = {}

    def record_failure(self, key: Hashable) -> None:
        with self._lock:
            failures = self._entries[key].failures + 1 if key in self._entries else 1
            pause_s = compute_backoff_s(failures, base_s=self._base_s, cap_s=self._cap_s, rng=self._rng)
            now_s = self._monotonic_s()
            self._entries[key] = _BackoffEntry(failures, now_s + pause_s, now_s)

    def record_success(self, key: Hashable) -> None:
        with self._lock:
            self._entries.pop(key, None)

    def get_retry_at_s(self, key: Hashable) -> float | None:
        """Return when the key may be retried, on the monotonic clock, or None if it has no recorded failure."""
        with self._lock:
            if key not in self._entries:
                return None
            self._entries[key] = entry = replace(self._entries[key], last_checked_at_s=self._monotonic_s())
            return entry.retry_at_s

    def prune(self) -> None:
        """Drop keys that were not queried for `cap_s`."""
        oldest_s = self._monotonic_s() - self._cap_s
        with self._lock:
            self._entries = {key: entry for key, entry in self._entries.items() if entry.last_checked_at_s >= oldest_s}


BACKOFF_BASE_S = 0.2
BACKOFF_CAP_S = 5.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Limits of a client. `read_timeout_s` bounds one response, `retry_timeout_s` one request with all retries."""

    qps: float = 200.0
    burst: int = 400
    connect_timeout_s: float = 5.0
    read_timeout_s: float = 30.0
    retry_timeout_s: float = 15.0


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One completed request, for metrics. `status` is 0 without a response."""

    verb: str
    resource: str
    status: int
    duration_s: float


class RequestSender:
    """Sender of requests that keeps the rate limit and retries transient failures. Thread-safe.

    `may_write` is checked before each attempt of a write, because a process that was paused or queued may have lost
    leadership meanwhile.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        limits: ClientLimits,
        on_request: Callable[[RequestRecord], None],
        may_write: Callable[[], bool],
        rng: Random,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connection = connection
        self._retry_timeout_s = limits.retry_timeout_s
        self._on_request = on_request
        self._may_write = may_write
        self._rng = rng
        self._monotonic_s = monotonic_s
        self._closing = threading.Event()
        self._bucket = TokenBucket(
            rate_per_s=limits.qps, burst=limits.burst, monotonic_s=monotonic_s, sleep=self._closing.wait
        )

    def close(self) -> None:
        """Cancel retries that are waiting, and close all connections."""
        self._closing.set()
        self._connection.close()

    def count_available_requests(self) -> float:
        """Return how many requests can be sent now without waiting, negative while others wait."""
        return self._bucket.level()

    def send(self, request: ApiRequest, *, retry_timeout_s: float | None = None) -> Any:
        """Return the response. The ApiError records whether an earlier attempt was ambiguous.

        Raises:
            FencedError: the request is a write, and this process is no longer the leader.
        """
        deadline_s = self._monotonic_s() + (self._retry_timeout_s if retry_timeout_s is None else retry_timeout_s)
        failures, ambiguous = 0, False
        while True:
            self._bucket.acquire()
            if request.method != "GET" and not self._may_write():
                raise FencedError(f"{request.verb} of {request.resource} was not sent: this process is not the leader")
            try:
                return self._send_recorded(request, lambda: self._connection.send(request))
            except ApiError as error:
                failures += 1
                backoff_s = compute_backoff_s(failures, base_s=BACKOFF_BASE_S, cap_s=BACKOFF_CAP_S, rng=self._rng)
                wait_s = backoff_s + (error.retry_after_s or 0.0)
                error.had_ambiguous_attempt = ambiguous
                may_retry = error.is_transient and (request.is_idempotent or not error.is_ambiguous)
                if not may_retry or self._monotonic_s() + wait_s > deadline_s or self._closing.wait(wait_s):
                    raise
                ambiguous = ambiguous or error.is_ambiguous

    def stream(self, request: ApiRequest, *, idle_timeout_s: float) -> ResponseLines:
        """Open a stream without retries: its reader knows how to resume."""
        self._bucket.acquire()
        return self._send_recorded(request, lambda: self._connection.stream(request, idle_timeout_s=idle_timeout_s))

    def _send_recorded(self, request: ApiRequest, send: Callable[[], T]) -> T:
        started_at_s = self._monotonic_s()
        status = 200
        try:
            return send()
        except ApiError as error:
            status = error.status
            raise
        finally:
            self._on_request(RequestRecord(request.verb, request.resource, status, self._monotonic_s() - started_at_s))
