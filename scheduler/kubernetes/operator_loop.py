"""Operator: the reconcile loop. Sends specs as commands, runs the controller's tick, and writes the results back.

The operator makes no scheduling decisions. Only the Lease holder acts, and only on complete and fresh caches, because a
resource missing in a cache counts as deleted.
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
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import TickReport
from scheduler.kubernetes.cluster_cache import ClusterCache
from scheduler.kubernetes.demand_sources import DemandSources, with_demand
from scheduler.kubernetes.leader_election import LeaderElector
from scheduler.kubernetes.replica_scaling import ReplicaScaler, with_scaling
from scheduler.kubernetes.resource_publisher import ResourcePublisher
from scheduler.kubernetes.resource_sync import find_unreported_jobs, find_unreported_loans
from scheduler.kubernetes.resource_writes import PublishState
from scheduler.kubernetes.spec_commands import ClusterResources, SpecCommands, compute_spec_commands
from scheduler.runtime.clock import Clock
from scheduler.runtime.controller import Controller, DatabaseOutage
from scheduler.store.protocol import FencedError, LoadedState, Store, UnavailableError

LIVENESS_TIMEOUT_S = 120.0
"""Longer than any iteration: a large cluster, or calls that all wait for a hanging API server."""


class OperatorState(Enum):
    LEADING = "leading"
    WAITING = "waiting"
    """Another replica holds the Lease, or no one can hold it."""
    BLIND = "blind"
    """Elected, but a cache is incomplete or stale."""
    NO_DATABASE = "no-database"


@dataclass(frozen=True, slots=True)
class LoopIteration:
    """One loop iteration: the operator's state, and the seconds since the last contact, by resource."""

    state: OperatorState
    seconds_since_contact: Mapping[str, float]


class Heartbeat:
    """Detector of a hanging loop, or of dead threads that the loop needs. Thread-safe."""

    def __init__(
        self, find_dead_threads: Callable[[], tuple[str, ...]], *, monotonic_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._find_dead_threads = find_dead_threads
        self._monotonic_s = monotonic_s
        self._lock = threading.Lock()
        self._recorded_at_s = monotonic_s()

    def record(self) -> None:
        with self._lock:
            self._recorded_at_s = self._monotonic_s()

    def liveness_error(self) -> str:
        """Return why the process must be restarted, or an empty string."""
        with self._lock:
            since_s = self._monotonic_s() - self._recorded_at_s
        if since_s > LIVENESS_TIMEOUT_S:
            return f"the loop has not completed an iteration for {since_s:.0f} s"
        dead = self._find_dead_threads()
        return f"dead threads: {', '.join(dead)}" if dead else ""


log = logging.getLogger(__name__)

ENDED_LOANS_MAX = 1000
"""Number of recently ended loans to search for the outcome of a Loan."""


@dataclass(frozen=True, slots=True)
class LoopIntervals:
    """Intervals of the loop.

    `poll_s`: between iterations. Resources are read and written at most every `min_round_s` while changes arrive, and
    at least every `max_round_s`. A leader without database for `step_down_s` leaves the Lease to others for as long,
    because only its own connection may be broken.
    """

    poll_s: float = 0.1
    min_round_s: float = 0.5
    max_round_s: float = 5.0
    step_down_s: float = 10.0


class Operator:
    """The loop of one operator replica. All its state can be recovered from the cluster and the store.

    Args:
        allows_undeclared_queues: whether jobs may name queues that do not exist.
        save_estimates: stores estimated GPU profiles, as JSON text by name, and makes them known to this process.
        load_hardware: makes the GPU profiles of a snapshot known to this process, before Pools and nodes name them.
    """

    def __init__(
        self,
        *,
        cache: ClusterCache,
        election: LeaderElector,
        controller: Controller,
        store: Store,
        clock: Clock,
        demand: DemandSources,
        scaler: ReplicaScaler,
        publisher: ResourcePublisher,
        job_namespace: str,
        allows_undeclared_queues: bool,
        save_estimates: Callable[[Mapping[str, str]], None],
        load_hardware: Callable[[Snapshot], None],
        on_iteration: Callable[[LoopIteration], None] = lambda iteration: None,
        intervals: LoopIntervals | None = None,
    ) -> None:
        self._cache = cache
        self._election = election
        self._controller = controller
        self._store = store
        self._clock = clock
        self._demand = demand
        self._scaler = scaler
        self._publisher = publisher
        self._job_namespace = job_namespace
        self._allows_undeclared_queues = allows_undeclared_queues
        self._save_estimates = save_estimates
        self._load_hardware = load_hardware
        self._on_iteration = on_iteration
        self._intervals = intervals or LoopIntervals()
        self._outage = DatabaseOutage(time.monotonic)
        self._election_thread: threading.Thread | None = None
        self._heartbeat = Heartbeat(self._find_dead_threads)
        self._waiting_reasons: Mapping[str, Reason] = {}
        self._synced_change_count = -1
        self._synced_at_s = float("-inf")
        self._has_unpublished = False

    def run(self, stop: threading.Event) -> None:
        """Run until `stop`: lead while elected, stand by otherwise. Releases the Lease on exit."""
        self._cache.start()
        self._demand.start()
        self._scaler.start()
        self._election_thread = threading.Thread(target=self._election.run, args=(stop,), name="election", daemon=True)
        self._election_thread.start()
        try:
            while not stop.is_set():
                stop.wait(self._run_iteration())
        finally:
            self._controller.close()
            self._election.release()
            self._demand.stop()
            self._scaler.stop()
            self._cache.stop()
            self._publisher.close()

    @property
    def may_lead(self) -> bool:
        """Whether it is elected and its caches are complete and fresh."""
        return self._election.is_leading and self._cache.has_synced and not self._cache.stale_kinds

    @property
    def epoch(self) -> int:
        """Epoch of the store's lease, 0 without one."""
        return self._controller.epoch

    def liveness_error(self) -> str:
        """Return why the process must be restarted, or an empty string.

        An unreachable API server or database is no reason: a new process could not reach it either.
        """
        return self._heartbeat.liveness_error()

    def readiness_error(self) -> str:
        """Return the reason why the replica cannot lead, or an empty string."""
        unlisted = self._cache.unlisted_kinds
        return f"not listed yet: {', '.join(kind.plural for kind in unlisted)}" if unlisted else ""

    def _run_iteration(self) -> float:
        """Run one iteration, with or without a database. Return the seconds to wait before the next one."""
        pause_s = self._intervals.poll_s
        try:
            self.step()
            self._check_database()
        except UnavailableError as error:
            pause_s = self._outage.record_failure(error)
            if self._outage.duration_s > self._intervals.step_down_s:
                self._election.step_down_for(self._intervals.step_down_s)
        self._heartbeat.record()
        self._on_iteration(LoopIteration(self._current_state(), self._cache.seconds_since_contact))
        return pause_s

    def _check_database(self) -> None:
        """End a database outage if the database responds. A standby does not use the database otherwise."""
        if not self._outage.duration_s:
            return
        if not self._controller.is_leader:
            self._controller.step_down()  # the cheapest write
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
        """Return the threads whose death keeps this replica from ever leading again."""
        watches = tuple(f"watch of {kind.plural}" for kind in self._cache.kinds_with_dead_watch)
        is_election_dead = self._election_thread is not None and not self._election_thread.is_alive()
        return (*watches, "election") if is_election_dead else watches

    def step(self) -> TickReport | None:
        """Run one iteration: send commands, tick, write resources. Each part runs only when needed."""
        if not self.may_lead:
            return self._controller.step()  # gives up leadership if it was held
        changes, since_s = self._cache.change_count, time.monotonic() - self._synced_at_s
        has_news = self._has_unpublished or changes != self._synced_change_count
        is_due = since_s >= (self._intervals.min_round_s if has_news else self._intervals.max_round_s)
        spec_commands, applied_ids = self._send_spec_commands() if is_due else (None, frozenset[str]())
        report = self._controller.step()
        if report is not None:
            self._waiting_reasons = report.waiting
        has_changed = report is not None and report.committed
        if not self._controller.is_leader or (spec_commands is None and not has_changed):
            return report
        if spec_commands is None:
            spec_commands, applied_ids = self._send_spec_commands()
        self._synced_change_count, self._synced_at_s = changes, time.monotonic()
        self._publish(spec_commands, applied_ids)
        return report

    def _send_spec_commands(self) -> tuple[SpecCommands, frozenset[str]]:
        """Send commands for all differences. Return also the ids that are already applied to the snapshot."""
        loaded, now_s = self._store.load(), self._clock.now_s()
        self._load_hardware(loaded.snapshot)
        spec_commands = compute_spec_commands(
            self._cache.list_resources(),
            loaded,
            now_s,
            job_namespace=self._job_namespace,
            allows_undeclared_queues=self._allows_undeclared_queues,
        )
        if spec_commands.fleet.estimated_gpus:
            self._save_estimates(spec_commands.fleet.estimated_gpus)
        known = loaded.snapshot
        readings = self._demand.read(spec_commands.fleet.pools, now_s, known.demand, known.forecasts)
        spec_commands = with_demand(spec_commands, readings, loaded.snapshot)
        spec_commands = with_scaling(spec_commands, self._scaler.follow(spec_commands.fleet.pools, loaded.snapshot))
        pending_ids = {command.id for command in loaded.inbox}
        known_ids = [command.id for command in spec_commands.commands if not self._store.send(command)]
        return spec_commands, frozenset(known_ids) - pending_ids

    def _publish(self, spec_commands: SpecCommands, applied_command_ids: frozenset[str]) -> None:
        """Write resources and Events for the current snapshot in the background, unless the last writes still run."""
        try:
            if self._publisher.is_ready():
                self._publisher.publish(self._build_publish_state(spec_commands, applied_command_ids))
                self._has_unpublished = self._publisher.has_more
            else:
                self._has_unpublished = True
        except FencedError as error:
            log.warning("stepping down: %s", error)
            self._controller.step_down()

    def _build_publish_state(self, spec_commands: SpecCommands, applied_command_ids: frozenset[str]) -> PublishState:
        loaded, resources = self._store.load(), spec_commands.resources
        return PublishState(
            snapshot=loaded.snapshot,
            spec_commands=spec_commands,
            now_s=self._clock.now_s(),
            epoch=self._controller.epoch,
            job_namespace=self._job_namespace,
            waiting_reasons=self._waiting_reasons,
            ended_jobs=self._find_ended_jobs(resources, loaded),
            ended_loans=self._find_ended_loans(resources, loaded),
            applied_command_ids=applied_command_ids,
            jobs_with_pods=self._cache.jobs_with_pods,
        )

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
