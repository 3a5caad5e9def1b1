"""Outage: the database does not answer. What a control loop says of it, and how long it waits.

Controller: the loop that calls tick, as long as it leads.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from scheduler.domain.commands import Command
from scheduler.domain.tick_report import Breach, TickReport
from scheduler.executors.executor import Executor
from scheduler.runtime.clock import Clock
from scheduler.runtime.planning_inputs import CurveBuilder, DemandForecaster
from scheduler.runtime.reconciler import StageHook, ignore_stage, tick
from scheduler.scheduling.cycle import next_full_pass_s
from scheduler.scheduling.policies.policy_set import PolicySet
from scheduler.store.protocol import ConflictError, FencedError, Lease, Store, UnavailableError

RETRY_PAUSE_S_MIN, RETRY_PAUSE_S_MAX = 0.5, 8.0

T = TypeVar("T")

outage_log = logging.getLogger(__name__)


class DatabaseOutage:
    """Told once when it begins and once when it is over. `elapsed_s` is a monotonic clock."""

    def __init__(self, elapsed_s: Callable[[], float]) -> None:
        self._elapsed_s = elapsed_s
        self._since_s: float | None = None
        self._failures = 0

    @property
    def duration_s(self) -> float:
        """How long there has been one; 0 where there is none."""
        return 0.0 if self._since_s is None else self._elapsed_s() - self._since_s

    def record_failure(self, error: UnavailableError) -> float:
        """The pause before the next attempt, in s: it doubles."""
        if self._since_s is None:
            self._since_s = self._elapsed_s()
            outage_log.error("the database does not answer, nothing is decided until it does: %s", error)
        self._failures += 1
        return min(RETRY_PAUSE_S_MAX, RETRY_PAUSE_S_MIN * 2.0 ** (self._failures - 1))

    def record_recovery(self) -> None:
        """The database has answered."""
        if self._since_s is not None:
            outage_log.warning("the database answers again, after %.1f s", self.duration_s)
        self._since_s, self._failures = None, 0


def open_when_available(open_store: Callable[[], T], stop: threading.Event, elapsed_s: Callable[[], float]) -> T | None:
    """What `open_it` opens, as soon as the database answers; None where `stop` came first."""
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


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ControllerConfig:
    """How often the loop looks for something to do, and how long its lease lasts. `tick_s_max` bounds the pause
    between two ticks, because processes and nodes change without telling anybody.

    A tick takes in `commands_max` commands at most, the first ones; the others come next, one `poll_s` later. Without
    that one late tick makes the next one longer, for more has come meanwhile, and so on. To let commands gather for
    longer instead, so that the loop takes a smaller part of a core, would do just that; with both bounded, it rests for
    `poll_s` after each tick of bounded length, and goes through some 200 commands a second."""

    poll_s: float = 0.1
    tick_s_max: float = 1.0
    lease_s: float = 10.0
    commands_max: int = 64


class Controller:
    """One thread, one loop. Hints merge: commands that wait together cost one tick, up to a bound. `has_news` tells, at
    each poll and cheaply, that the executor's world has changed in a way that a tick should not come late for.
    `may_lead` is asked at each step: where another election stands before the store's lease, who has lost that one
    gives the lease up. `on_rest` is called when a step finds that it leads no more."""

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
        self._config = config or ControllerConfig()
        self._stage_hook = stage_hook
        self._lease: Lease | None = None
        self._renew_at_s = float("-inf")
        self._wake_at_s = float("-inf")
        self._active_breaches: tuple[Breach, ...] = ()

    def run(self, stop: threading.Event) -> None:
        """Lead while the lease is ours, wait for it otherwise; returns when `stop` is set. While the database does not
        answer, what runs goes on, and nothing is decided."""
        outage, is_settled = DatabaseOutage(self._clock.elapsed_s), False
        try:
            while not stop.is_set():
                try:
                    if self.step() is not None and not is_settled:
                        # What is imported and loaded by now stays. To look for garbage in all of it took as long as
                        # two ticks, again and again in the middle of one.
                        gc.collect()
                        gc.freeze()
                        is_settled = True
                except UnavailableError as error:
                    stop.wait(outage.record_failure(error))
                else:
                    outage.record_recovery()
                    stop.wait(self._config.poll_s)
        finally:
            self.close()

    def close(self) -> None:
        """Come to rest, and let somebody else lead at once."""
        self._executor.close()
        self._curves.close()
        try:
            self.step_down()
        except UnavailableError as error:
            log.warning("the lease was not released, others have to wait for its end: %s", error)

    @property
    def is_leader(self) -> bool:
        """It held the store's lease at the last step."""
        return self._lease is not None

    @property
    def epoch(self) -> int:
        """That of the lease, 0 without one."""
        return 0 if (lease := self._lease) is None else lease.epoch  # other threads ask as well

    def step_down(self) -> None:
        """Give the lease up; the next step tries for it again. Raises UnavailableError."""
        self._lease = None
        self._store.release_lease(self._holder)

    def step(self) -> TickReport | None:
        """Renew the lease when it is time, tick when there is something to do.

        Raises:
            UnavailableError: the database does not answer. Until it does, this controller does not count as leading.
        """
        led = self.is_leader
        try:
            return self._run_step()
        finally:
            if led and not self.is_leader:
                self._on_leadership_lost()

    def _run_step(self) -> TickReport | None:
        now_s = self._clock.now_s()
        try:
            if not self._hold_lease(now_s) or not self._is_due(now_s):
                return None
            assert self._lease is not None
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
            log.warning("somebody else committed first; this tick changed nothing")
            return None
        except FencedError:
            # Where the lease is still ours, the world knows of a later epoch than the store, which was restored from a
            # back-up: each new lease has a later one.
            log.warning("this controller's epoch has ended; it tries for the lease again")
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
        """Hold the lease. A new leader first puts the stored state into effect: that heals what an earlier one
        committed and never did."""
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
        hinted = self._curves.has_finished or self._has_changes()
        return hinted or now_s >= self._wake_at_s or self._store.count_pending_commands() > 0

    def _collect_planning_inputs(self, now_s: float) -> tuple[Command, ...]:
        """Finished curve points always; forecasts once a full pass is due, because only that one lends."""
        snapshot = self._store.load().snapshot
        points = (*self._curves.list_solver_changes(snapshot, now_s), *self._curves.collect_finished(now_s))
        if now_s < next_full_pass_s(snapshot.full_pass_at_s, self._policies.settings.full_pass_period_s):
            return points
        return (*points, *self._demand.make_forecasts(snapshot, now_s))
