"""The control loop: calls `tick` while this process leads, and backs off while the database is unavailable."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from scheduler.demand.reports import PoolDemandReader
from scheduler.domain.commands import Command
from scheduler.domain.tick_report import Breach, TickReport
from scheduler.executors.executor import Executor
from scheduler.runtime.clock import Clock
from scheduler.runtime.curve_builder import CurveBuilder
from scheduler.runtime.demand_forecasts import DemandForecaster
from scheduler.runtime.reconciler import StageHook, ignore_stage, tick
from scheduler.scheduling.cycle import next_full_pass_s
from scheduler.scheduling.policy_sets import PolicySet
from scheduler.store.protocol import ConflictError, FencedError, Lease, Store, UnavailableError

RETRY_PAUSE_S_MIN, RETRY_PAUSE_S_MAX = 0.5, 8.0

T = TypeVar("T")

log = logging.getLogger(__name__)


class DatabaseOutage:
    """State of a database outage: exponential backoff, and one log line at its start and end.

    `elapsed_s` is a monotonic clock.
    """

    def __init__(self, elapsed_s: Callable[[], float]) -> None:
        self._elapsed_s = elapsed_s
        self._since_s: float | None = None
        self._failures = 0

    @property
    def duration_s(self) -> float:
        """Duration of the current outage in seconds; 0 if there is none."""
        return 0.0 if self._since_s is None else self._elapsed_s() - self._since_s

    def record_failure(self, error: UnavailableError) -> float:
        """Return the pause before the next attempt in seconds, which doubles each time."""
        if self._since_s is None:
            self._since_s = self._elapsed_s()
            log.error("the database is unavailable; no decisions are made until it recovers: %s", error)
        self._failures += 1
        return min(RETRY_PAUSE_S_MAX, RETRY_PAUSE_S_MIN * 2.0 ** (self._failures - 1))

    def record_recovery(self) -> None:
        if self._since_s is not None:
            log.warning("the database is available again after %.1f s", self.duration_s)
        self._since_s, self._failures = None, 0


def open_when_available(open_store: Callable[[], T], stop: threading.Event, elapsed_s: Callable[[], float]) -> T | None:
    """Call `open_store` until the database is available. Return None if `stop` is set before that."""
    outage = DatabaseOutage(elapsed_s)
    while not stop.is_set():
        try:
            opened = open_store()
        except UnavailableError as error:
            stop.wait(outage.record_failure(error))
        else:
            outage.record_recovery()
            return opened
    return None


@dataclass(frozen=True, slots=True)
class ControllerConfig:
    """Timing of the control loop.

    Args:
        poll_s: pause between two checks for work.
        tick_s_max: longest time between two ticks. Processes and nodes change without notification.
        lease_s: duration of the lease.
        commands_max: commands that one tick consumes. The others follow at the next poll. Without this limit, a slow
            tick would let more commands accumulate and make the next tick slower still. With it, the loop processes
            about 200 commands per second.
    """

    poll_s: float = 0.1
    tick_s_max: float = 1.0
    lease_s: float = 10.0
    commands_max: int = 64


class Controller:
    """Control loop, which runs in the calling thread.

    Args:
        has_changes: returns, at each poll, whether the executor has observed something that needs a tick now.
        may_lead: returns at each step whether this process won the election that precedes the lease of the store, if
            there is one. The lease is released otherwise.
        sources: polls the demand of pools that name a source; None: no pool does.
        on_leadership_lost: called when a step finds that this process no longer leads.
        on_report: called with the report of each tick.
    """

    def __init__(
        self,
        *,
        holder: str,
        store: Store,
        executor: Executor,
        clock: Clock,
        policies: PolicySet,
        curves: CurveBuilder,
        demand: DemandForecaster,
        on_report: Callable[[TickReport], None],
        on_leadership_lost: Callable[[], None] = lambda: None,
        has_changes: Callable[[], bool] = lambda: False,
        may_lead: Callable[[], bool] = lambda: True,
        sources: PoolDemandReader | None = None,
        config: ControllerConfig | None = None,
        stage_hook: StageHook = ignore_stage,
    ) -> None:
        self._holder = holder
        self._store = store
        self._executor = executor
        self._clock = clock
        self._policies = policies
        self._curves = curves
        self._demand = demand
        self._on_report = on_report
        self._on_leadership_lost = on_leadership_lost
        self._has_changes = has_changes
        self._may_lead = may_lead
        self._sources = sources or PoolDemandReader()
        self._config = config or ControllerConfig()
        self._stage_hook = stage_hook
        self._lease: Lease | None = None
        self._renew_at_s = float("-inf")
        self._wake_at_s = float("-inf")
        self._active_breaches: tuple[Breach, ...] = ()

    def run(self, stop: threading.Event) -> None:
        """Lead while this process has the lease, and wait for it otherwise, until `stop` is set.

        While the database is unavailable, running jobs continue and no decisions are made.
        """
        outage, is_frozen = DatabaseOutage(self._clock.elapsed_s), False
        try:
            while not stop.is_set():
                try:
                    if self.step() is not None and not is_frozen:
                        # Exempt everything that is loaded by now from garbage collection. A collection of all of it
                        # takes as long as two ticks.
                        gc.collect()
                        gc.freeze()
                        is_frozen = True
                except UnavailableError as error:
                    stop.wait(outage.record_failure(error))
                else:
                    outage.record_recovery()
                    stop.wait(self._config.poll_s)
        finally:
            self.close()

    def close(self) -> None:
        """Stop background work and release the lease."""
        self._executor.close()
        self._curves.close()
        self._demand.close()
        self._sources.close()
        try:
            self.step_down()
        except UnavailableError as error:
            log.warning("the lease was not released; the next leader must wait until it expires: %s", error)

    @property
    def is_leader(self) -> bool:
        """Whether this process had the lease at the last step."""
        return self._lease is not None

    @property
    def epoch(self) -> int:
        """The epoch of the lease; 0 without one. May be read by other threads."""
        return 0 if (lease := self._lease) is None else lease.epoch

    def step_down(self) -> None:
        """Release the lease. The next step tries to acquire it again. Raises UnavailableError."""
        self._lease = None
        self._store.release_lease(self._holder)

    def step(self) -> TickReport | None:
        """Renew the lease and tick, each if it is due.

        Raises:
            UnavailableError: the database does not respond. This controller no longer leads.
        """
        was_leader = self.is_leader
        try:
            return self._run_step()
        finally:
            if was_leader and not self.is_leader:
                self._on_leadership_lost()

    def _run_step(self) -> TickReport | None:
        now_s = self._clock.now_s()
        try:
            if not self._hold_lease(now_s) or not self._is_due(now_s):
                return None
            assert self._lease is not None
            self._send_polled_demand(now_s)
            report = tick(
                self._store,
                self._executor,
                self._clock,
                self._policies,
                epoch=self._lease.epoch,
                planning_inputs=self._collect_planning_inputs(now_s),
                active_breaches=self._active_breaches,
                commands_max=self._config.commands_max,
                stage_hook=self._stage_hook,
            )
        except ConflictError:
            log.warning("another tick committed first; this tick changed nothing")
            return None
        except FencedError:
            # If this process still has the lease, the store was restored from a backup and the executor knows a later
            # epoch. Each new lease has a later epoch, too.
            log.warning("the epoch of this controller has ended; it tries to acquire the lease again")
            self.step_down()
            return None
        except UnavailableError:
            self._lease = None
            raise
        self._active_breaches = report.breaches
        if report.wanted_shapes:
            self._curves.request_shapes(self._store.load().snapshot, report.wanted_shapes)
        self._wake_at_s = min(report.next_wake_s, now_s + self._config.tick_s_max)
        self._on_report(report)
        return report

    def _hold_lease(self, now_s: float) -> bool:
        """Acquire or renew the lease, and return whether this process leads.

        A new leader first converges to the stored state, because its predecessor may have ended after a commit.
        """
        if not self._may_lead():
            if self._lease is not None:
                self.step_down()
            return False
        if self._lease is not None and now_s < self._renew_at_s:
            return True
        before = self._lease
        self._lease = self._store.acquire_lease(self._holder, now_s=now_s, ttl_s=self._config.lease_s)
        self._renew_at_s = now_s + self._config.lease_s / 3
        if self._lease is None:
            return False
        if before is None or before.epoch != self._lease.epoch:
            log.info("leading with epoch %d", self._lease.epoch)
            self._executor.converge(self._store.load().snapshot)
        return True

    def _is_due(self, now_s: float) -> bool:
        return (
            self._curves.has_finished
            or self._has_changes()
            or now_s >= self._wake_at_s
            or self._store.count_pending_commands() > 0
        )

    def _send_polled_demand(self, now_s: float) -> None:
        """Send polled demand through the inbox, so that none is lost with a tick that fails."""
        for command in self._sources.read(self._store.load().snapshot, now_s):
            self._store.send(command)

    def _collect_planning_inputs(self, now_s: float) -> tuple[Command, ...]:
        """Return finished curve points and, if a full pass is due, forecasts: only a full pass lends nodes."""
        snapshot = self._store.load().snapshot
        points = (*self._curves.list_solver_changes(snapshot, now_s), *self._curves.collect_finished(now_s))
        if now_s < next_full_pass_s(snapshot.full_pass_at_s, self._policies.settings.full_pass_period_s):
            return points
        return (*points, *self._demand.make_forecasts(snapshot, now_s))
