"""Asker: makes calls at the pace allowed, again and again while that may help, and has them counted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar

from scheduler.k8s.api_error import ApiError
from scheduler.k8s.calls import Call
from scheduler.k8s.connection import Connection, Lines
from scheduler.k8s.pace import TokenBucket, backoff_s
from scheduler.store.protocol import FencedError

BACKOFF_BASE_S = 0.2
BACKOFF_CAP_S = 5.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Limits:
    """`read_s` bounds the wait for one answer, `patience_s` one call with all its repetitions."""

    rate_per_s: float = 50.0
    burst: int = 100
    connect_s: float = 5.0
    read_s: float = 30.0
    patience_s: float = 15.0


@dataclass(frozen=True, slots=True)
class Asked:
    """One request as it ended, for counting. `status` 0: no answer."""

    verb: str
    resource: str
    status: int
    took_s: float


class Asker:
    """Thread-safe. `may_write` is asked right before each attempt of a call that changes something: a process that was
    stopped for a while, or a call that waited for its turn, must not write what another leader has overtaken."""

    def __init__(
        self,
        connection: Connection,
        *,
        limits: Limits,
        on_asked: Callable[[Asked], None],
        may_write: Callable[[], bool],
        rng: Random,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connection = connection
        self._patience_s = limits.patience_s
        self._on_asked = on_asked
        self._may_write = may_write
        self._rng = rng
        self._monotonic_s = monotonic_s
        self._closing = threading.Event()
        self._bucket = TokenBucket(
            rate_per_s=limits.rate_per_s, burst=limits.burst, monotonic_s=monotonic_s, sleep=self._closing.wait
        )

    def close(self) -> None:
        """Wake whoever waits between two attempts, and drop the connections."""
        self._closing.set()
        self._connection.close()

    def ask(self, call: Call, *, patience_s: float | None = None) -> Any:
        """The answer. The ApiError raised says whether an earlier attempt left a doubt.

        Raises:
            FencedError: the call would change something, and this process may write no more.
        """
        limit_s = self._monotonic_s() + (self._patience_s if patience_s is None else patience_s)
        failures, in_doubt = 0, False
        while True:
            self._bucket.take()
            if call.method != "GET" and not self._may_write():
                raise FencedError(f"no {call.verb} of {call.resource}: this process does not lead")
            try:
                return self._counted(call, lambda: self._connection.exchange(call))
            except ApiError as error:
                failures += 1
                own_s = backoff_s(failures, base_s=BACKOFF_BASE_S, cap_s=BACKOFF_CAP_S, rng=self._rng)
                wait_s = own_s + (error.retry_after_s or 0.0)
                error.in_doubt = in_doubt
                may_repeat = error.is_passing and (call.repeatable or not error.may_have_happened)
                if not may_repeat or self._monotonic_s() + wait_s > limit_s or self._closing.wait(wait_s):
                    raise
                in_doubt = in_doubt or error.may_have_happened

    def stream(self, call: Call, *, silence_s: float) -> Lines:
        """Asked once: whoever reads a stream has a way of its own to begin again."""
        self._bucket.take()
        return self._counted(call, lambda: self._connection.stream(call, silence_s=silence_s))

    def _counted(self, call: Call, ask: Callable[[], T]) -> T:
        began_s = self._monotonic_s()
        status = 200
        try:
            return ask()
        except ApiError as error:
            status = error.status
            raise
        finally:
            self._on_asked(Asked(call.verb, call.resource, status, self._monotonic_s() - began_s))
