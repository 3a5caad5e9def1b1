"""What a policy set does wrong in a simulation: decisions that break a law, and errors of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import extract_tb
from typing import TYPE_CHECKING

from scheduler.simulator.ticked import Ticked
from scheduler.simulator.traces import DemandChange

if TYPE_CHECKING:
    from scheduler.domain.tick_report import Law, Violation
    from scheduler.runtime.clock import Clock


class PolicyError(RuntimeError):
    """A policy set raised an error; the message names it, the time, the error and the line of code. `__cause__` is
    the error itself where it was raised in this process."""


class Violations:
    """Counts the decisions that were dropped because they broke a law, and keeps the first that broke each."""

    def __init__(self) -> None:
        self._first: dict[Law, tuple[float, Violation]] = {}
        self._counts: dict[Law, int] = {}

    def ticked(self, tick: Ticked) -> None:
        for violation in tick.report.violations:
            self._first.setdefault(violation.law, (tick.report.now_s, violation))
            self._counts[violation.law] = self._counts.get(violation.law, 0) + 1

    def demand_changed(self, change: DemandChange) -> None:
        """Demand breaks no law."""

    @property
    def count(self) -> int:
        return sum(self._counts.values())

    def told(self) -> tuple[str, ...]:
        """A sentence a law: whom it was broken with first, when and how, and how often in all."""
        return tuple(
            f"{law}: {self._counts[law]} dropped, first at {at_s:g} s that of {one.subject}: {one.detail}"
            for law, (at_s, one) in self._first.items()
        )


@contextmanager
def naming(policy: str, clock: Clock) -> Iterator[None]:
    """Within it, whatever is raised is told of the policy set, with the clock's time.

    Raises:
        PolicyError: for every error.
    """
    try:
        yield
    except Exception as wrong:
        place = extract_tb(wrong.__traceback__)[-1]
        raise PolicyError(
            f"policy {policy} failed at {clock.now_s():g} s: {type(wrong).__name__}: {wrong} "
            f"({Path(place.filename).name} line {place.lineno}, in {place.name})"
        ) from wrong
