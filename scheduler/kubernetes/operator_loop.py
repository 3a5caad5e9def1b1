"""How an operator fares: what probes and metrics tell of it.

Operator: custom resources in, ticks as ever, custom resources out. It makes no choices of its own.

One loop, as a controller's: what resources and nodes ask for goes into the inbox, the controller ticks, and what the
snapshot says then is written back. Only the holder of the Lease does any of it, and only on mirrors that are whole and
fresh: a resource that a mirror lacks counts as deleted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from scheduler.domain.decisions import Reason
from scheduler.domain.fleet import Loan
from scheduler.domain.job import Job
from scheduler.domain.tick_report import TickReport
from scheduler.kubernetes.cluster_cache import ClusterCache
from scheduler.kubernetes.demand_sources import DemandSources, with_demand
from scheduler.kubernetes.event_recorder import EventRecorder
from scheduler.kubernetes.leader_election import LeaderElector
from scheduler.kubernetes.resource_sync import compute_resource_writes, find_unreported_jobs, find_unreported_loans
from scheduler.kubernetes.resource_writer import ActionPool, ResourceWriter
from scheduler.kubernetes.resource_writes import PublishState
from scheduler.kubernetes.spec_commands import ClusterResources, SpecCommands, compute_spec_commands
from scheduler.runtime.clock import Clock
from scheduler.runtime.controller import Controller, DatabaseOutage
from scheduler.store.protocol import FencedError, LoadedState, Store, UnavailableError

LIVENESS_TIMEOUT_S = 120.0
"""Longer than any round may take: that of a large cluster, or one whose calls all wait for an API server that hangs."""


class OperatorState(Enum):
    LEADING = "leading"
    WAITING = "waiting"
    """Another replica has the Lease, or nobody has one to give."""
    BLIND = "blind"
    """It was elected, and does not see the cluster as it is: a kind was never listed, or not heard of for long."""
    NO_DATABASE = "no-database"


@dataclass(frozen=True, slots=True)
class LoopIteration:
    """One look of the operator's loop: how it stood then, and how long ago the API server was heard, by resource."""

    state: OperatorState
    seconds_since_contact: Mapping[str, float]


class Heartbeat:
    """Whether a loop goes round, whatever it achieves there. `depends_on` names what the loop cannot do without and
    that has died. Thread-safe."""

    def __init__(
        self, find_dead_threads: Callable[[], tuple[str, ...]], *, monotonic_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._depends_on = find_dead_threads
        self._monotonic_s = monotonic_s
        self._lock = threading.Lock()
        self._beat_at_s = monotonic_s()

    def record(self) -> None:
        """It has gone round."""
        with self._lock:
            self._beat_at_s = self._monotonic_s()

    def liveness_error(self) -> str:
        """Why the process should be started anew; empty where it is alive."""
        with self._lock:
            since_s = self._monotonic_s() - self._beat_at_s
        if since_s > LIVENESS_TIMEOUT_S:
            return f"the loop has not gone round for {since_s:.0f} s"
        died = self._depends_on()
        return f"has died: {', '.join(died)}" if died else ""


log = logging.getLogger(__name__)

ENDED_LOANS_MAX = 1000
"""Of those that have ended, so many are looked through for what became of a Loan."""


@dataclass(frozen=True, slots=True)
class LoopIntervals:
    """`poll_s` between two looks for something to do. Between two rounds of reading and writing resources `round_s` at
    most, and `calm_s` at least where something is heard: of a thousand pods there is always news. Who leads and cannot
    reach the database for `outage_s` leaves the Lease to others for as long: it may be this replica alone that cannot.
    """

    poll_s: float = 0.1
    min_round_s: float = 0.5
    max_round_s: float = 5.0
    step_down_s: float = 10.0


class Operator:
    """Mutable on purpose: it remembers what it saw last, and nothing that it could not see again."""

    def __init__(
        self,
        *,
        cache: ClusterCache,
        election: LeaderElector,
        controller: Controller,
        store: Store,
        clock: Clock,
        demand: DemandSources,
        writer: ResourceWriter,
        event_recorder: EventRecorder,
        actions: ActionPool,
        job_namespace: str,
        on_iteration: Callable[[LoopIteration], None] = lambda done: None,
        intervals: LoopIntervals | None = None,
    ) -> None:
        self._mirrors = cache
        self._election = election
        self._controller = controller
        self._store = store
        self._clock = clock
        self._demand = demand
        self._writer = writer
        self._story = event_recorder
        self._effects = actions
        self._job_namespace = job_namespace
        self._on_round = on_iteration
        self._pace = intervals or LoopIntervals()
        self._outage = DatabaseOutage(time.monotonic)
        self._voting: threading.Thread | None = None
        self._pulse = Heartbeat(self._find_dead_threads)
        self._waiting: Mapping[str, Reason] = {}
        self._seen = -1
        self._rounded_at_s = float("-inf")

    def run(self, stop: threading.Event) -> None:
        """Until `stop` is set: lead while elected, wait for it otherwise. Hands over at once when it ends."""
        self._mirrors.start()
        self._demand.start()
        self._voting = threading.Thread(target=self._election.run, args=(stop,), name="election", daemon=True)
        self._voting.start()
        try:
            while not stop.is_set():
                stop.wait(self._run_iteration())
        finally:
            self._controller.close()
            self._election.release()
            self._demand.stop()
            self._mirrors.stop()
            self._effects.close()

    @property
    def may_lead(self) -> bool:
        """It was elected, and sees the cluster as it is."""
        return self._election.is_leading and self._mirrors.has_synced and not self._mirrors.stale_kinds

    @property
    def epoch(self) -> int:
        """That of the store's lease, 0 without one."""
        return self._controller.epoch

    def liveness_error(self) -> str:
        """Why this process should be started anew; empty where it goes on. That the API server or the database does
        not answer is no reason: another process would fare no better."""
        return self._pulse.liveness_error()

    def readiness_error(self) -> str:
        """What it still waits for before it could lead; empty where it could."""
        unlisted = self._mirrors.unlisted_kinds
        return f"not listed yet: {', '.join(kind.plural for kind in unlisted)}" if unlisted else ""

    def _run_iteration(self) -> float:
        """One look, whatever the database does; how long to wait before the next, in s."""
        pause_s = self._pace.poll_s
        try:
            self.step()
            self._check_database()
        except UnavailableError as error:
            pause_s = self._outage.record_failure(error)
            if self._outage.duration_s > self._pace.step_down_s:
                self._election.step_down_for(self._pace.step_down_s)
        self._pulse.record()
        self._on_round(LoopIteration(self._current_state(), self._mirrors.seconds_since_contact))
        return pause_s

    def _check_database(self) -> None:
        """After an outage, see whether it is over: who does not lead asks nothing of the database otherwise."""
        if not self._outage.duration_s:
            return
        if not self._controller.is_leader:
            self._controller.step_down()  # a write that changes nothing
            self._store.load()
        self._outage.record_recovery()
        self._election.resume_candidacy()

    def _current_state(self) -> OperatorState:
        if self._outage.duration_s:
            return OperatorState.NO_DATABASE
        if self._controller.is_leader:
            return OperatorState.LEADING
        return OperatorState.BLIND if self._election.is_leading and not self.may_lead else OperatorState.WAITING

    def _find_dead_threads(self) -> tuple[str, ...]:
        """Threads without which this operator will never lead again."""
        watches = tuple(f"the watch of {kind.plural}" for kind in self._mirrors.kinds_with_dead_watch)
        has_voted = self._voting is not None and not self._voting.is_alive()
        return (*watches, "the election") if has_voted else watches

    def step(self) -> TickReport | None:
        """One look: read what resources ask for, tick, write back what is; each only where there may be something."""
        if not self.may_lead:
            return self._controller.step()  # which gives up leading, if it did
        changes, since_s = self._mirrors.change_count, time.monotonic() - self._rounded_at_s
        is_due = since_s >= (self._pace.max_round_s if changes == self._seen else self._pace.min_round_s)
        taken, settled = self._send_spec_commands() if is_due else (None, frozenset[str]())
        report = self._controller.step()
        if report is not None:
            self._waiting = report.waiting
        has_changed = report is not None and report.committed
        if not self._controller.is_leader or (taken is None and not has_changed):
            return report
        if taken is None:
            taken, settled = self._send_spec_commands()
        self._seen, self._rounded_at_s = changes, time.monotonic()
        self._write_resources(taken, settled)
        return report

    def _send_spec_commands(self) -> tuple[SpecCommands, frozenset[str]]:
        """Send what differs; which of those commands have gone into the snapshot already."""
        loaded, now_s = self._store.load(), self._clock.now_s()
        taken = compute_spec_commands(self._mirrors.list_resources(), loaded, now_s, job_namespace=self._job_namespace)
        taken = with_demand(taken, self._demand.read(taken.fleet.pools, now_s), loaded.snapshot)
        waiting = {command.id for command in loaded.inbox}
        repeated = [command.id for command in taken.commands if not self._store.send(command)]
        return taken, frozenset(repeated) - waiting

    def _write_resources(self, spec_commands: SpecCommands, applied_command_ids: frozenset[str]) -> None:
        """Make resources say what the snapshot says, and tell what has happened."""
        loaded, resources = self._store.load(), spec_commands.resources
        world = PublishState(
            snapshot=loaded.snapshot,
            spec_commands=spec_commands,
            now_s=self._clock.now_s(),
            epoch=self._controller.epoch,
            job_namespace=self._job_namespace,
            waiting_reasons=self._waiting,
            ended_jobs=self._find_ended_jobs(resources, loaded),
            ended_loans=self._find_ended_loans(resources, loaded),
            applied_command_ids=applied_command_ids,
            jobs_with_pods=self._mirrors.jobs_with_pods,
        )
        try:
            self._effects.run_all(self._writer.build_actions(compute_resource_writes(world)))
            self._effects.run_all(self._writer.build_actions(self._story.build_writes(world)))
        except FencedError as later:
            log.warning("a later leader has written already: %s", later)
            self._controller.step_down()

    def _find_ended_jobs(self, resources: ClusterResources, loaded: LoadedState) -> dict[str, Job]:
        found = (
            (job_id, self._store.get_ended_job(job_id)) for job_id in find_unreported_jobs(resources, loaded.snapshot)
        )
        return {job_id: job for job_id, job in found if job is not None}

    def _find_ended_loans(self, resources: ClusterResources, loaded: LoadedState) -> dict[str, Loan]:
        unknown = set(find_unreported_loans(resources, loaded.snapshot))
        if not unknown:
            return {}
        return {loan.id: loan for loan in self._store.list_ended_loans(limit=ENDED_LOANS_MAX) if loan.id in unknown}
