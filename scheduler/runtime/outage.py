"""Outage: the database does not answer. What a control loop says of it, and how long it waits."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from scheduler.store.protocol import UnavailableError

PAUSE_S_MIN, PAUSE_S_MAX = 0.5, 8.0

T = TypeVar("T")

log = logging.getLogger(__name__)


class Outage:
    """Told once when it begins and once when it is over. `elapsed_s` is a monotonic clock."""

    def __init__(self, elapsed_s: Callable[[], float]) -> None:
        self._elapsed_s = elapsed_s
        self._since_s: float | None = None
        self._failures = 0

    @property
    def lasts_s(self) -> float:
        """How long there has been one; 0 where there is none."""
        return 0.0 if self._since_s is None else self._elapsed_s() - self._since_s

    def note(self, error: UnavailableError) -> float:
        """The pause before the next attempt, in s: it doubles."""
        if self._since_s is None:
            self._since_s = self._elapsed_s()
            log.error("the database does not answer, nothing is decided until it does: %s", error)
        self._failures += 1
        return min(PAUSE_S_MAX, PAUSE_S_MIN * 2.0 ** (self._failures - 1))

    def end(self) -> None:
        """The database has answered."""
        if self._since_s is not None:
            log.warning("the database answers again, after %.1f s", self.lasts_s)
        self._since_s, self._failures = None, 0


def wait_for(open_it: Callable[[], T], stop: threading.Event, elapsed_s: Callable[[], float]) -> T | None:
    """What `open_it` opens, as soon as the database answers; None where `stop` came first."""
    outage = Outage(elapsed_s)
    while not stop.is_set():
        try:
            opened = open_it()
        except UnavailableError as error:
            stop.wait(outage.note(error))
        else:
            outage.end()
            return opened
    return None
