"""The simulation: the real tick on a virtual clock, called when something happens and never in between.

What happens: a submission, a change of demand, an event of the simulated world, a fault, the wake-up that the
last tick asked for. Everything that falls on one instant costs one tick.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from scheduler.core.course import next_full_pass_s
from scheduler.domain.command import (
    AddNode,
    Command,
    CommandBody,
    CreatePool,
    CreateQueue,
    ReportDemand,
    SubmitJob,
)
from scheduler.domain.fleet import Node, Pool
from scheduler.domain.job_queue import JobQueue
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import Breach, TickReport
from scheduler.executors.protocol import Executor
from scheduler.executors.simulated import SimulatedExecutor
from scheduler.executors.simulated_delays import Delays
from scheduler.policies.policy_set import PolicySet
from scheduler.runtime.clock import ManualClock
from scheduler.runtime.reconciler import tick
from scheduler.simulator.curves import CurveBook
from scheduler.simulator.faults import ControllerDiedError, Faults, NoFaults
from scheduler.simulator.forecasts import FORECASTERS, SEASONAL, Forecasts
from scheduler.simulator.pending import Pending
from scheduler.simulator.ticked import Ticked, Watcher
from scheduler.simulator.traces import DemandChange, DemandTrace, demand_changes
from scheduler.simulator.truth import AS_TOLD, Truth
from scheduler.simulator.workloads import Submission
from scheduler.store.memory import MemoryStore
from scheduler.store.protocol import ConflictError, Store

GIVEN_UP_AFTER_S = 14 * 86_400.0
"""Jobs that nothing has happened to for so long, while nothing runs, never will run."""
_TICKS_AT_ONCE_MAX = 1_000


class StuckError(AssertionError):
    """The control loop asks for tick after tick at one instant: a bug of ours."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything that a simulation is made of, policies and faults apart."""

    pools: tuple[Pool, ...]
    nodes: tuple[Node, ...]
    submissions: tuple[Submission, ...]
    demand: tuple[DemandTrace, ...]
    delays: Delays
    seed: int
    forecast: str = SEASONAL
    truth: Truth = AS_TOLD
    queues: tuple[JobQueue, ...] = ()

    @property
    def start_s(self) -> float:
        return self.submissions[0].at_s if self.submissions else 0.0


class Simulation:
    """One scenario under one policy set. `run` plays it to its end."""

    def __init__(
        self,
        scenario: Scenario,
        policies: PolicySet,
        *,
        watchers: Iterable[Watcher] = (),
        faults: Faults | None = None,
        curves: CurveBook | None = None,
    ) -> None:
        start_s = scenario.start_s
        lengths = {one.job_id: one.steps_true for one in scenario.submissions if one.steps_true is not None}
        self.executor = SimulatedExecutor(
            scenario.nodes,
            delays=scenario.delays,
            now_s=start_s,
            step_time_factor=scenario.truth.step_time_factor,
            steps_true=lengths,
        )
        self.memory = MemoryStore()
        self.clock = ManualClock(start_s)
        self._policies = policies
        self._scenario = scenario
        self._watchers = tuple(watchers)
        self._faults = faults or NoFaults()
        self._store: Store = self._faults.around_store(self.memory)
        self._seen: Executor = self._faults.around_executor(self.executor)
        lease = self.memory.acquire("simulator", now_s=start_s, ttl_s=math.inf)
        assert lease is not None, "nobody else leads a store that has just been made"
        self._epoch = lease.epoch
        make, period_s = FORECASTERS[scenario.forecast], policies.settings.full_pass_period_s
        foreseen = scenario.demand if policies.lends else ()
        self._forecasts = Forecasts(scenario.pools, foreseen, lambda trace: make(trace, scenario.seed, period_s))
        self._curves = curves or CurveBook()
        self._submissions = Pending(iter(scenario.submissions), lambda submission: submission.at_s)
        self._changes = Pending(demand_changes(scenario.demand, scenario.seed), lambda change: change.at_s)
        self._learned: tuple[Command, ...] = ()
        self._standing: tuple[Breach, ...] = ()
        self._wake_s = start_s
        self._moved_at_s = start_s
        self._ticks_at_once = 0
        self._commands = 0

    def watch(self, watcher: Watcher) -> None:
        """Show every tick from now on to one more watcher."""
        self._watchers = (*self._watchers, watcher)

    def run(self, progress: Callable[[int], None] = lambda ended: None) -> Snapshot:
        """Play until every job has ended and every recalled node is home, or nothing can happen any more.

        `progress` is told how many jobs have ended, each time the number grows.
        """
        self._open()
        snapshot, ended = self.memory.load().snapshot, 0
        while not self._is_over(snapshot):
            self._advance(self._next_s())
            snapshot = self._tick(snapshot)
            gone = self._submissions.taken - len(snapshot.jobs)
            if gone > ended:
                ended = gone
                progress(ended)
        return snapshot

    def _open(self) -> None:
        for pool in self._scenario.pools:
            self._send(CreatePool(pool))
        for node in self._scenario.nodes:
            self._send(AddNode(node))
        for queue in self._scenario.queues:
            self._send(CreateQueue(queue))
        while self._changes.next_s < self.clock.now_s():
            self._change_demand(self._changes.take())

    def _next_s(self) -> float:
        sources = (
            self._wake_s,
            self._submissions.next_s,
            self._changes.next_s,
            self.executor.next_event_s(),
            self._faults.next_event_s(),
        )
        return max(self.clock.now_s(), min(sources))

    def _advance(self, now_s: float) -> None:
        self._ticks_at_once = self._ticks_at_once + 1 if now_s == self.clock.now_s() else 0
        if self._ticks_at_once > _TICKS_AT_ONCE_MAX:
            raise StuckError(f"more than {_TICKS_AT_ONCE_MAX} ticks at {now_s} s")
        if self.executor.next_event_s() <= now_s:
            self._moved_at_s = now_s
        self.clock.move_to(now_s)
        self.executor.advance_to(now_s)
        while self._submissions.next_s <= now_s:
            submission = self._submissions.take()
            self._send(SubmitJob(submission.job_id, submission.spec), actor=submission.user)
            self._moved_at_s = now_s
        while self._changes.next_s <= now_s:
            self._change_demand(self._changes.take())
        self._faults.happen(now_s, self.executor)

    def _tick(self, before: Snapshot) -> Snapshot:
        """One tick, and what follows from how it ended."""
        started_s = self.clock.elapsed_s()
        learned = (*self._learned, *self._due_forecasts(before))
        try:
            report = tick(
                self._store,
                self._seen,
                self.clock,
                self._policies,
                epoch=self._epoch,
                learned=learned,
                standing=self._standing,
            )
        except ConflictError:
            self._wake_s = self.clock.now_s()
            return before
        except ControllerDiedError:
            self.executor.converge(self.memory.load().snapshot)
            self._wake_s = self.clock.now_s()
            return self.memory.load().snapshot
        wall_s = self.clock.elapsed_s() - started_s
        after = self.memory.load().snapshot
        self._learned = self._solved(after, report)
        self._standing = report.breaches
        self._wake_s = self.clock.now_s() if self._learned else report.next_wake_s
        seen = Ticked(before, after, report, self.executor.occupied_gpus, wall_s)
        for watcher in self._watchers:
            watcher.ticked(seen)
        return after

    def _due_forecasts(self, snapshot: Snapshot) -> tuple[Command, ...]:
        """Forecasts for a tick that will be a full pass; between those nobody lends."""
        now_s = self.clock.now_s()
        if now_s < next_full_pass_s(snapshot.full_pass_at_s, self._policies.settings.full_pass_period_s):
            return ()
        return tuple(self._command(body) for body in self._forecasts.made_at(now_s))

    def _solved(self, snapshot: Snapshot, report: TickReport) -> tuple[Command, ...]:
        """All points that the tick missed, of jobs that it has not ended itself."""
        if not report.wanted_shapes:
            return ()
        requests = snapshot.curve_requests()
        wanted = [(requests[one.curve_key], one.shape) for one in report.wanted_shapes if one.curve_key in requests]
        return tuple(self._command(self._curves.solved(*one)) for one in wanted)

    def _change_demand(self, change: DemandChange) -> None:
        self.executor.set_demand(change.pool, change.gpus)
        self._forecasts.observe(change)
        self._send(ReportDemand(change.pool, change.gpus))
        for watcher in self._watchers:
            watcher.demand_changed(change)

    def _is_over(self, snapshot: Snapshot) -> bool:
        if self._submissions.next_s < math.inf or self.memory.inbox_size():
            return False
        if not snapshot.jobs:
            return all(loan.return_by_s is None for loan in snapshot.loans.values())
        nothing_runs = self.executor.occupied_gpus == 0 and self._faults.next_event_s() == math.inf
        return nothing_runs and self.clock.now_s() - self._moved_at_s > GIVEN_UP_AFTER_S

    def _send(self, body: CommandBody, *, actor: str = "") -> None:
        self.memory.send(self._command(body, actor=actor))

    def _command(self, body: CommandBody, *, actor: str = "") -> Command:
        self._commands += 1
        return Command(f"simulated-{self._commands}", self.clock.now_s(), body, actor=actor or "simulator")
