"""One host of a campaign: a controller with its own clock, store and executor. It pauses, crashes and starts again."""

from __future__ import annotations

from collections.abc import Callable

from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import TickReport
from scheduler.executors.simulated_executor import SimulatedExecutor
from scheduler.runtime.controller import Controller, ControllerConfig
from scheduler.runtime.curve_builder import CurveBuilder
from scheduler.runtime.demand_forecasts import DemandForecaster
from scheduler.scheduling.policy_sets import PolicySet
from scheduler.simulator.campaign.faulty_parts import (
    ExecutorError,
    FaultyExecutor,
    FaultyStore,
    HostFaults,
    JumpingClock,
    LeaveDeadlines,
    PersistenceForecaster,
)
from scheduler.simulator.campaign.stand_in_solver import InlineExecutor, solve_stand_in
from scheduler.store.protocol import Store, UnavailableError

LEASE_S = 10.0
POLL_S = 60.0
"""Longest time between two steps of a host. Real ones poll ten times a second; here, each change causes a step."""
RETRY_S = 5.0
_HISTORY_S = 86_400.0
_SHAPES_MAX = 4
"""Shapes that are solved between two ticks."""


class HostDiedError(Exception):
    """The process of the controller was killed at a point of its tick."""


class Host:
    """A host that runs a controller whenever it is neither paused nor down."""

    def __init__(
        self,
        name: str,
        store: Store,
        world: SimulatedExecutor,
        policies: PolicySet,
        faults: HostFaults,
        *,
        fail_transaction: Callable[[], bool],
        put_into_effect: Callable[[Snapshot], bool],
        deadlines: LeaveDeadlines,
        on_report: Callable[[TickReport], None],
        stage_hook: Callable[[Host, str], None],
    ) -> None:
        self.name, self.faults = name, faults
        self.clock = JumpingClock(world)
        self.available_at_s = world.now_s
        self.next_step_s = world.now_s
        self._world, self._policies = world, policies
        self._store = FaultyStore(store, world, faults, fail_transaction)
        self._executor = FaultyExecutor(world, self.clock, faults, put_into_effect, deadlines)
        self._on_report, self._stage_hook = on_report, stage_hook
        self._starts = 0
        self.controller = self._start()

    @property
    def is_available(self) -> bool:
        return self._world.now_s >= self.available_at_s

    def step(self) -> bool:
        """Let the controller do what is due. Return whether a tick completed."""
        try:
            report = self.controller.step()
        except UnavailableError:
            self.next_step_s = self._world.now_s + RETRY_S
            return False
        except (ExecutorError, HostDiedError):
            self.crash(down_s=RETRY_S)
            return False
        now_s = self._world.now_s
        wake_s = now_s + POLL_S if report is None else self.clock.to_world_s(report.next_wake_s)
        self.next_step_s = min(wake_s, now_s + POLL_S)
        return report is not None

    def crash(self, *, down_s: float) -> None:
        """End the process without releasing its lease. Another one starts after `down_s`."""
        self.pause(down_s)
        self.controller = self._start()

    def pause(self, seconds: float) -> None:
        self.available_at_s = max(self.available_at_s, self._world.now_s + seconds)
        self.next_step_s = self.available_at_s

    def _start(self) -> Controller:
        self._starts += 1
        return Controller(
            holder=f"{self.name}-{self._starts}",
            store=self._store,
            executor=self._executor,
            clock=self.clock,
            policies=self._policies,
            curves=CurveBuilder(InlineExecutor(), in_flight_max=_SHAPES_MAX, solve=solve_stand_in),
            demand=DemandForecaster(self._store, PersistenceForecaster, history_s=_HISTORY_S, fits=InlineExecutor()),
            on_report=self._on_report,
            has_changes=lambda: self._world.next_event_s() <= self._world.now_s,
            config=ControllerConfig(tick_s_max=POLL_S, lease_s=LEASE_S, commands_max=64),
            stage_hook=lambda point: self._stage_hook(self, point),
        )
