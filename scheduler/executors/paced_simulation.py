"""PacedSimulation: a simulated world that follows a clock, for services that show simulated nodes."""

from __future__ import annotations

from collections.abc import Callable

from scheduler.domain.observation import Observation
from scheduler.domain.snapshot import Snapshot
from scheduler.executors.simulated_executor import SimulatedExecutor


class PacedSimulation:
    """A simulated executor whose time is that of `now`. Its inference follows the demand in the desired state.

    `on_observe` is called with the time of each observation.
    """

    def __init__(
        self,
        executor: SimulatedExecutor,
        *,
        now: Callable[[], float],
        on_observe: Callable[[float], None] = lambda now_s: None,
    ) -> None:
        self._executor = executor
        self._now = now
        self._on_observe = on_observe

    def observe(self) -> Observation:
        self._advance()
        self._on_observe(self._executor.now_s)
        return self._executor.observe()

    def converge(self, desired: Snapshot) -> None:
        self._advance()
        for pool, reading in desired.demand.items():
            self._executor.set_demand(pool, reading.gpus)
        self._executor.converge(desired)

    def has_pending_changes(self) -> bool:
        """Return whether something has changed that a tick has not observed."""
        return self._executor.next_event_s() <= self._now()

    def close(self) -> None:
        self._executor.close()

    def _advance(self) -> None:
        self._executor.advance_to(max(self._now(), self._executor.now_s))
