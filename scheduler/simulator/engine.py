"""The simulation: runs the tick of the service on a virtual clock, as a discrete-event simulation.

Events are submissions, demand changes, events of the simulated executor, faults, and the wake-up that the last tick
requested. All events at one instant are handled by one tick.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from scheduler.domain.commands import (
    AddNode,
    Command,
    CommandBody,
    CreatePool,
    CreateQueue,
    GpuThroughputsChanged,
    ReportDemand,
    SubmitJob,
)
from scheduler.domain.fleet import Node, Pool, PoolKind
from scheduler.domain.job_queue import JobQueue
from scheduler.domain.relative_speed import choose_reference_gpu
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import Breach, TickReport
from scheduler.executors.executor import Executor
from scheduler.executors.simulated_executor import SimulatedExecutor
from scheduler.executors.simulated_run import Delays
from scheduler.runtime.clock import ManualClock
from scheduler.runtime.reconciler import tick
from scheduler.scheduling.cycle import next_full_pass_s
from scheduler.scheduling.policy_sets import PolicySet
from scheduler.simulator.demand import (
    COMBINED,
    FORECASTERS,
    DemandChange,
    DemandTrace,
    ForecastSource,
    LookaheadIterator,
    merge_demand_changes,
)
from scheduler.simulator.fault_injection import ControllerCrashError, FaultInjector, NoFaults
from scheduler.simulator.ground_truth import NOTHING_HIDDEN, GroundTruth
from scheduler.simulator.throughput_curves import CurveCache
from scheduler.simulator.true_step_times import TrueStepTimes
from scheduler.simulator.workloads import Submission
from scheduler.store.memory_store import MemoryStore
from scheduler.store.protocol import ConflictError, Store


@dataclass(frozen=True, slots=True)
class TickRecord:
    """A completed tick.

    `before` and `after` are the stored snapshots, `occupied_gpus` the GPUs with live workers after the tick, and
    `wall_s` its real duration.
    """

    before: Snapshot
    after: Snapshot
    report: TickReport
    occupied_gpus: int
    wall_s: float


class SimulationObserver(Protocol):
    def on_tick(self, tick: TickRecord) -> None:
        """Called after each completed tick."""

    def on_demand_change(self, change: DemandChange) -> None:
        """Called when the demand of a pool changes, before the next tick."""


STALL_LIMIT_S = 14 * 86_400.0
"""A simulation in which nothing runs ends after this time without progress: the pending jobs can never run."""
_TICKS_PER_INSTANT_MAX = 1_000


class LivelockError(AssertionError):
    """The control loop requests ticks without end at one instant, which is a bug."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """All inputs of a simulation except policies and faults.

    `gpu_throughputs` is the work per second of each GPU model in the simulated world, and in the policies' view of it.
    """

    pools: tuple[Pool, ...]
    nodes: tuple[Node, ...]
    submissions: tuple[Submission, ...]
    demand: tuple[DemandTrace, ...]
    delays: Delays
    seed: int
    forecast: str = COMBINED
    truth: GroundTruth = NOTHING_HIDDEN
    queues: tuple[JobQueue, ...] = ()
    gpu_throughputs: Mapping[str, float] = field(default_factory=dict)

    @property
    def start_s(self) -> float:
        return self.submissions[0].at_s if self.submissions else 0.0

    @property
    def reference_gpu(self) -> str:
        """The GPU model on which one step of a job without a model takes one GPU-second, unless it requests another."""
        training = {pool.name for pool in self.pools if pool.kind is PoolKind.TRAINING}
        counts = Counter[str]()
        for node in self.nodes:
            counts[node.gpu] += node.gpus if node.pool in training else 0
        return choose_reference_gpu(counts)


class Simulation:
    """One scenario under one policy set."""

    def __init__(
        self,
        scenario: Scenario,
        policies: PolicySet,
        *,
        observers: Iterable[SimulationObserver] = (),
        faults: FaultInjector | None = None,
        curves: CurveCache | None = None,
    ) -> None:
        start_s = scenario.start_s
        true_steps = {each.job_id: each.steps_true for each in scenario.submissions if each.steps_true is not None}
        true_times = TrueStepTimes(scenario.truth, scenario.nodes, scenario.reference_gpu, scenario.gpu_throughputs)
        self.executor = SimulatedExecutor(
            scenario.nodes,
            delays=scenario.delays,
            now_s=start_s,
            compute_step_s=true_times.compute_step_s,
            true_steps=true_steps,
        )
        self.memory_store = MemoryStore()
        self.clock = ManualClock(start_s)
        self._policies = policies
        self._scenario = scenario
        self._observers = tuple(observers)
        self._faults = faults or NoFaults()
        self._store: Store = self._faults.wrap_store(self.memory_store)
        self._wrapped_executor: Executor = self._faults.wrap_executor(self.executor)
        lease = self.memory_store.acquire_lease("simulator", now_s=start_s, ttl_s=math.inf)
        assert lease is not None, "a new store has no other leader"
        self._epoch = lease.epoch
        make_forecaster, period_s = FORECASTERS[scenario.forecast], policies.settings.full_pass_period_s
        forecast_demand = scenario.demand if policies.lends else ()
        self._forecast_source = ForecastSource(
            scenario.pools,
            forecast_demand,
            lambda trace, zone: make_forecaster(trace, zone, scenario.seed, period_s),
            period_s=period_s,
        )
        self._curves = curves or CurveCache()
        self._submissions = LookaheadIterator(iter(scenario.submissions), lambda submission: submission.at_s)
        self._demand_changes = LookaheadIterator(
            merge_demand_changes(scenario.demand, scenario.seed), lambda change: change.at_s
        )
        self._planning_inputs: tuple[Command, ...] = ()
        self._active_breaches: tuple[Breach, ...] = ()
        self._wake_s = start_s
        self._last_progress_s = start_s
        self._ticks_at_instant = 0
        self._command_count = 0

    def add_observer(self, observer: SimulationObserver) -> None:
        self._observers = (*self._observers, observer)

    def run(self, progress: Callable[[int], None] = lambda ended: None) -> Snapshot:
        """Run until all jobs have ended and all recalled nodes are returned, or nothing can happen any more.

        `progress` is called with the number of ended jobs when it grows.
        """
        self._create_cluster()
        snapshot, ended = self.memory_store.load().snapshot, 0
        while not self._is_finished(snapshot):
            self._advance(self._get_next_event_s())
            snapshot = self._run_tick(snapshot)
            ended_now = self._submissions.taken_count - len(snapshot.jobs)
            if ended_now > ended:
                ended = ended_now
                progress(ended)
        return snapshot

    def _create_cluster(self) -> None:
        for pool in self._scenario.pools:
            # The trace says when demand changes, so that demand is known in between, however long that lasts.
            self._send(CreatePool(replace(pool, lending=replace(pool.lending, demand_lost_s=math.inf))))
        for node in self._scenario.nodes:
            self._send(AddNode(node))
        for queue in self._scenario.queues:
            self._send(CreateQueue(queue))
        if self._scenario.gpu_throughputs:
            self._send(GpuThroughputsChanged(self._scenario.gpu_throughputs))
        while self._demand_changes.next_at_s < self.clock.now_s():
            self._apply_demand_change(self._demand_changes.take())

    def _get_next_event_s(self) -> float:
        sources = (
            self._wake_s,
            self._submissions.next_at_s,
            self._demand_changes.next_at_s,
            self.executor.next_event_s(),
            self._faults.next_event_s(),
        )
        return max(self.clock.now_s(), min(sources))

    def _advance(self, now_s: float) -> None:
        self._ticks_at_instant = self._ticks_at_instant + 1 if now_s == self.clock.now_s() else 0
        if self._ticks_at_instant > _TICKS_PER_INSTANT_MAX:
            raise LivelockError(f"more than {_TICKS_PER_INSTANT_MAX} ticks at {now_s} s")
        if self.executor.next_event_s() <= now_s:
            self._last_progress_s = now_s
        self.clock.move_to(now_s)
        self.executor.advance_to(now_s)
        while self._submissions.next_at_s <= now_s:
            submission = self._submissions.take()
            self._send(SubmitJob(submission.job_id, submission.spec), actor=submission.user)
            self._last_progress_s = now_s
        while self._demand_changes.next_at_s <= now_s:
            self._apply_demand_change(self._demand_changes.take())
        self._faults.inject_due(now_s, self.executor)

    def _run_tick(self, before: Snapshot) -> Snapshot:
        started_s = self.clock.elapsed_s()
        planning_inputs = (*self._planning_inputs, *self._make_due_forecasts(before))
        try:
            report = tick(
                self._store,
                self._wrapped_executor,
                self.clock,
                self._policies,
                epoch=self._epoch,
                planning_inputs=planning_inputs,
                active_breaches=self._active_breaches,
                records_history=False,
            )
        except ConflictError:
            self._wake_s = self.clock.now_s()
            return before
        except ControllerCrashError:
            self.executor.converge(self.memory_store.load().snapshot)
            self._wake_s = self.clock.now_s()
            return self.memory_store.load().snapshot
        wall_s = self.clock.elapsed_s() - started_s
        after = self.memory_store.load().snapshot
        self._planning_inputs = self._solve_missing_points(after, report)
        self._active_breaches = report.breaches
        self._wake_s = self.clock.now_s() if self._planning_inputs else report.next_wake_s
        record = TickRecord(before, after, report, self.executor.occupied_gpus, wall_s)
        for observer in self._observers:
            observer.on_tick(record)
        return after

    def _make_due_forecasts(self, snapshot: Snapshot) -> tuple[Command, ...]:
        """Return forecasts if the next tick is a full pass: only a full pass lends nodes.

        The first tick adds the nodes and has not seen the pods on them, so that it could lend a node in use.
        """
        now_s = self.clock.now_s()
        if not snapshot.nodes or now_s < next_full_pass_s(
            snapshot.full_pass_at_s, self._policies.settings.full_pass_period_s
        ):
            return ()
        return tuple(self._make_command(body) for body in self._forecast_source.make_forecasts(now_s, snapshot))

    def _solve_missing_points(self, snapshot: Snapshot, report: TickReport) -> tuple[Command, ...]:
        """Solve all points that the tick requested for jobs that are still live."""
        if not report.wanted_shapes:
            return ()
        requests = snapshot.curve_requests()
        wanted = [(requests[each.curve_key], each.shape) for each in report.wanted_shapes if each.curve_key in requests]
        return tuple(self._make_command(self._curves.get_point(request, shape)) for request, shape in wanted)

    def _apply_demand_change(self, change: DemandChange) -> None:
        self.executor.set_demand(change.pool, change.gpus)
        self._forecast_source.observe(change)
        self._send(ReportDemand(change.pool, change.gpus))
        for observer in self._observers:
            observer.on_demand_change(change)

    def _is_finished(self, snapshot: Snapshot) -> bool:
        if self._submissions.next_at_s < math.inf or self.memory_store.count_pending_commands():
            return False
        if not snapshot.jobs:
            return all(loan.return_by_s is None for loan in snapshot.loans.values())
        nothing_runs = self.executor.occupied_gpus == 0 and self._faults.next_event_s() == math.inf
        return nothing_runs and self.clock.now_s() - self._last_progress_s > STALL_LIMIT_S

    def _send(self, body: CommandBody, *, actor: str = "") -> None:
        self.memory_store.send(self._make_command(body, actor=actor))

    def _make_command(self, body: CommandBody, *, actor: str = "") -> Command:
        self._command_count += 1
        return Command(f"simulated-{self._command_count}", self.clock.now_s(), body, actor=actor or "simulator")
