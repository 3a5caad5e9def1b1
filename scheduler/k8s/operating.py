"""How an operator fares: what probes and metrics tell of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

LIVE_S = 120.0
"""Longer than any round may take: that of a large cluster, or one whose calls all wait for an API server that hangs."""


class Standing(Enum):
    LEADING = "leading"
    WAITING = "waiting"
    """Another replica has the Lease, or nobody has one to give."""
    BLIND = "blind"
    """It was elected, and does not see the cluster as it is: a kind was never listed, or not heard of for long."""
    NO_DATABASE = "no-database"


@dataclass(frozen=True, slots=True)
class Round:
    """One look of the operator's loop: how it stood then, and how long ago the API server was heard, by resource."""

    standing: Standing
    silent_s: Mapping[str, float]


class Pulse:
    """Whether a loop goes round, whatever it achieves there. `depends_on` names what the loop cannot do without and
    that has died. Thread-safe."""

    def __init__(
        self, depends_on: Callable[[], tuple[str, ...]], *, monotonic_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._depends_on = depends_on
        self._monotonic_s = monotonic_s
        self._lock = threading.Lock()
        self._beat_at_s = monotonic_s()

    def beat(self) -> None:
        """It has gone round."""
        with self._lock:
            self._beat_at_s = self._monotonic_s()

    def fault(self) -> str:
        """Why the process should be started anew; empty where it is alive."""
        with self._lock:
            since_s = self._monotonic_s() - self._beat_at_s
        if since_s > LIVE_S:
            return f"the loop has not gone round for {since_s:.0f} s"
        died = self._depends_on()
        return f"has died: {', '.join(died)}" if died else ""
