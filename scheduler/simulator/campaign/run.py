"""Runs one fault case: two rival controllers on one store and one simulated world, checked after every step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import TypeVar

from scheduler.domain.commands import (
    AddNode,
    Command,
    CommandBody,
    CreatePool,
    CreateQueue,
    FreezeResizes,
    ReportDemand,
    ResumeJob,
    ResumeLending,
    SubmitJob,
    UncordonNode,
)
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import TickReport
from scheduler.executors.simulated_executor import SimulatedExecutor
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.simulator.campaign.case import CaseEventKind, CaseJob, DemandLevel, FaultCase
from scheduler.simulator.campaign.case_store import CaseStore, open_case_store
from scheduler.simulator.campaign.checks import CaseChecks, CaseViolation
from scheduler.simulator.campaign.faulty_parts import HostFaults, LeaveDeadlines
from scheduler.simulator.campaign.host import LEASE_S, Host, HostDiedError
from scheduler.simulator.campaign.injection import CaseInjector
from scheduler.store.protocol import UnavailableError

T = TypeVar("T")
AFTER_FAULTS_S_MAX = 7 * 86_400.0
"""Time after the last fault in which every job must end."""
UNOBSERVED_POLL_S = 2.0
_STEPS_MAX = 60_000
_STEPS_AT_INSTANT_MAX = 500


@dataclass(frozen=True, slots=True)
class CaseResult:
    """Violations of one run, how often each fault had an effect, and the number of ticks."""

    violations: tuple[CaseViolation, ...]
    counts: Counter[CaseEventKind]
    ticks: int


def run_case(case: FaultCase) -> CaseResult:
    """Run the case to its end, or to its first violation."""
    with open_case_store(case) as opened:
        return CaseRun(case, opened).run()


class CaseRun:
    """The agenda of one case, its hosts and its world."""

    def __init__(self, case: FaultCase, opened: CaseStore) -> None:
        self.case, self.store = case, opened.store
        self.counts = Counter[CaseEventKind]()
        self.checks = CaseChecks()
        self.world = SimulatedExecutor(
            (*case.nodes, *case.spares), delays=case.delays, true_steps={job.id: job.true_steps for job in case.jobs}
        )
        policies, deadlines = load_policy_set(case.policy, case.settings), LeaveDeadlines()
        self.hosts = tuple(
            Host(
                name,
                self.store,
                self.world,
                policies,
                HostFaults(self.counts),
                fail_transaction=opened.fail_transaction,
                put_into_effect=self._put_into_effect,
                deadlines=deadlines,
                on_report=self._on_report,
                stage_hook=self._on_stage,
            )
            for name in ("a", "b")
        )
        self.sent: list[Command] = []
        self.submitted = Counter[str]()
        self._injector = CaseInjector(self)
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = count()
        self._snapshot = Snapshot()
        self._effective_generation = -1
        self._ticks = 0
        self._is_nested = False
        self._has_ticked = False
        self._plan()

    def at(self, at_s: float, action: Callable[[], None]) -> None:
        heappush(self._agenda, (at_s, next(self._sequence), action))

    def send(self, body: CommandBody, *, actor: str = "") -> None:
        command = Command(f"case-{len(self.sent) + 1}", self.world.now_s, body, actor)
        self.sent.append(command)
        self.ask(lambda: self.store.send(command))

    def ask(self, request: Callable[[], T]) -> T:
        """Ask the store as a client does, which tries again when a transaction failed."""
        try:
            return request()
        except UnavailableError:
            return request()

    @property
    def snapshot(self) -> Snapshot:
        """The last committed snapshot."""
        return self._snapshot

    def run(self) -> CaseResult:
        steps, at_instant, last_s = 0, 0, -1.0
        while not self.checks.violations and not self._is_finished():
            self._advance()
            steps += 1
            at_instant = at_instant + 1 if self.world.now_s == last_s else 0
            last_s = self.world.now_s
            if steps > _STEPS_MAX or at_instant > _STEPS_AT_INSTANT_MAX:
                self.checks.record(last_s, "livelock", f"{steps} steps, {at_instant} of them at one instant")
        if not self.checks.violations:
            fallible = self._injector.fallible_jobs
            now_s = self.world.now_s
            self.ask(lambda: self.checks.check_end(self.store, self.submitted, fallible=fallible, now_s=now_s))
        return CaseResult(self.checks.violations, self.counts, self._ticks)

    def _plan(self) -> None:
        case = self.case
        for pool in case.pools:
            self.send(CreatePool(pool))
        for node in case.nodes:
            self.send(AddNode(node))
        for queue in case.queues:
            self.send(CreateQueue(queue))
        for level in case.demand:
            self.at(level.at_s, partial(self._set_demand, level))
        for job in case.jobs:
            self.at(job.at_s, partial(self._submit, job))
        for event in case.events:
            self.at(event.at_s, partial(self._injector.inject, event))
        self.at(case.faults_end_s, self._end_faults)

    def _set_demand(self, level: DemandLevel) -> None:
        self.world.set_demand(level.pool, level.gpus)
        self.send(ReportDemand(level.pool, level.gpus))

    def _submit(self, job: CaseJob) -> None:
        self.submitted[job.id] += 1
        self.send(SubmitJob(job.id, job.spec), actor=job.owner)

    def _end_faults(self) -> None:
        """Undo everything that could keep a job from ending."""
        for host in self.hosts:
            host.faults.reset()
            host.available_at_s = host.next_step_s = self.world.now_s
        for node in (*self.case.nodes, *self.case.spares):
            self.world.restore_node(node.name)
            self.send(UncordonNode(node.name))
        for node in self.case.nodes:
            self.send(AddNode(node))
        for job in self.case.jobs:
            self.send(ResumeJob(job.id))
        self.send(FreezeResizes(False))
        self.send(ResumeLending())

    def _is_finished(self) -> bool:
        now_s = self.world.now_s
        if now_s > self.case.faults_end_s + AFTER_FAULTS_S_MAX:
            return True
        if self._agenda:
            return False
        if self.ask(self.store.count_pending_commands) > 0:
            return False
        recalled = any(loan.return_by_s is not None for loan in self._snapshot.loans.values())
        return not self._snapshot.jobs and not recalled and not self.world.list_live_runs()

    def _advance(self) -> None:
        """Move to the next event, let it happen, and let each host do what is due, the leader first."""
        steps_s = (host.next_step_s for host in self.hosts)
        agenda_s = (self._agenda[0][0],) if self._agenda else ()
        self._move_to(min((*steps_s, *agenda_s, self._next_world_event_s())))
        while self._agenda and self._agenda[0][0] <= self.world.now_s:
            heappop(self._agenda)[2]()
        ticks = self._ticks
        for host in sorted(self.hosts, key=lambda host: not host.controller.is_leader):
            self._step(host)
        self._has_ticked = self._ticks > ticks

    def _next_world_event_s(self) -> float:
        """Return the time of the next event in the world, or of the next poll for one that nobody could observe yet."""
        at_s, now_s = self.world.next_event_s(), self.world.now_s
        return at_s if at_s > now_s or self._has_ticked else now_s + UNOBSERVED_POLL_S

    def _move_to(self, at_s: float) -> None:
        self.world.advance_to(max(at_s, self.world.now_s))
        self.checks.check_world(self.world, self._snapshot)

    def _step(self, host: Host) -> None:
        if not host.is_available:
            return
        host.step()
        self.checks.check_world(self.world, self._snapshot)

    def _on_report(self, report: TickReport) -> None:
        self._ticks += 1
        self.checks.check_report(report)
        if report.committed:
            self._snapshot = self.ask(self.store.load).snapshot

    def _put_into_effect(self, desired: Snapshot) -> bool:
        if desired.generation < self._effective_generation:
            return False
        self._effective_generation = desired.generation
        if desired.generation > self._snapshot.generation:
            self._snapshot = desired
        return True

    def _on_stage(self, host: Host, point: str) -> None:
        """Let faults happen in the middle of a tick: a kill, or a pause in which the other host takes over."""
        if point == "after-commit" and host.faults.take(CaseEventKind.LEADER_CRASH):
            raise HostDiedError
        kind = {
            "before-commit": CaseEventKind.PAUSE_BEFORE_COMMIT,
            "after-commit": CaseEventKind.PAUSE_AFTER_COMMIT,
        }.get(point)
        if kind is None or self._is_nested or kind not in host.faults.armed:
            return
        self._is_nested = True
        rival = next(other for other in self.hosts if other is not host)
        self._move_to(self.world.now_s + 2.0 * LEASE_S)
        self._step(rival)
        self._move_to(self.world.now_s + 1.0)
        self._step(rival)
        self._is_nested = False
        host.faults.armed.discard(kind)
        if rival.controller.is_leader:
            self.counts[kind] += 1
