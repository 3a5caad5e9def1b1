"""Faults of a simulation: wrappers that make store and executor fail, and their injection at random times by seed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from heapq import heappop, heappush
from random import Random
from typing import Protocol

from scheduler.domain.commands import Command
from scheduler.domain.fleet import DemandReading, Loan
from scheduler.domain.job import Job
from scheduler.domain.observation import Observation
from scheduler.domain.reading_bins import ReadingBin
from scheduler.domain.snapshot import Snapshot
from scheduler.executors.executor import Executor
from scheduler.executors.simulated_executor import SimulatedExecutor
from scheduler.store.protocol import (
    Commit,
    ConflictError,
    Lease,
    LoadedState,
    Page,
    Store,
    StoredDecision,
    StoredEvent,
)


class ControllerCrashError(Exception):
    """The simulated controller crashed after its commit and before converging. Another one takes over at once."""


class FaultInjector(Protocol):
    def wrap_store(self, store: Store) -> Store:
        """Return the store that the control loop uses."""

    def wrap_executor(self, executor: Executor) -> Executor:
        """Return the executor that the control loop uses."""

    def next_event_s(self) -> float:
        """Return the time at which the next fault begins or ends."""

    def inject_due(self, now_s: float, world: SimulatedExecutor) -> None:
        """Inject all faults that are due by `now_s`."""


class NoFaults:
    """Fault injector without faults."""

    def wrap_store(self, store: Store) -> Store:
        return store

    def wrap_executor(self, executor: Executor) -> Executor:
        return executor

    def next_event_s(self) -> float:
        return math.inf

    def inject_due(self, now_s: float, world: SimulatedExecutor) -> None:
        """Do nothing."""


class StaleExecutor:
    """Executor that repeats the last observation `stale_remaining` times, as a stale cache would."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._last: Observation | None = None
        self.stale_remaining = 0
        self.stale_observations = 0

    def observe(self) -> Observation:
        if self.stale_remaining and self._last is not None:
            self.stale_remaining -= 1
            self.stale_observations += 1
            return self._last
        self._last = self._executor.observe()
        return self._last

    def converge(self, desired: Snapshot) -> None:
        self._executor.converge(desired)

    def close(self) -> None:
        self._executor.close()


class LossyStore:
    """Store that fails the next commits: armed conflicts are refused, armed crashes are written and then raise."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.armed_conflicts = 0
        self.armed_crashes = 0
        self.conflict_count = 0
        self.crash_count = 0

    def commit(self, commit: Commit) -> None:
        if self.armed_conflicts:
            self.armed_conflicts -= 1
            self.conflict_count += 1
            raise ConflictError("simulated conflict: another controller committed first")
        self._store.commit(commit)
        if self.armed_crashes:
            self.armed_crashes -= 1
            self.crash_count += 1
            raise ControllerCrashError

    def load(self) -> LoadedState:
        return self._store.load()

    def send(self, command: Command) -> bool:
        return self._store.send(command)

    def get_command(self, command_id: str) -> Command | None:
        return self._store.get_command(command_id)

    def count_pending_commands(self) -> int:
        return self._store.count_pending_commands()

    def acquire_lease(self, holder: str, *, now_s: float, ttl_s: float) -> Lease | None:
        return self._store.acquire_lease(holder, now_s=now_s, ttl_s=ttl_s)

    def release_lease(self, holder: str) -> None:
        self._store.release_lease(holder)

    def get_lease(self) -> Lease | None:
        return self._store.get_lease()

    def list_events(self, page: Page, *, subject: str = "") -> tuple[StoredEvent, ...]:
        return self._store.list_events(page, subject=subject)

    def list_decisions(self, page: Page) -> tuple[StoredDecision, ...]:
        return self._store.list_decisions(page)

    def get_ended_job(self, job_id: str) -> Job | None:
        return self._store.get_ended_job(job_id)

    def list_ended_jobs(self, *, limit: int) -> tuple[Job, ...]:
        return self._store.list_ended_jobs(limit=limit)

    def list_ended_loans(self, *, limit: int) -> tuple[Loan, ...]:
        return self._store.list_ended_loans(limit=limit)

    def list_readings(self, pool: str, *, since_s: float) -> tuple[DemandReading, ...]:
        return self._store.list_readings(pool, since_s=since_s)

    def list_reading_bins(self, pool: str, *, since_s: float, bin_s: float) -> tuple[ReadingBin, ...]:
        return self._store.list_reading_bins(pool, since_s=since_s, bin_s=bin_s)

    def close(self) -> None:
        self._store.close()


class FaultKind(StrEnum):
    NODE_LOSS = "node-loss"
    WORKER_CRASH = "worker-crash"
    SLOW_CHECKPOINT = "slow-checkpoint"
    STALE_OBSERVATION = "stale-observation"
    LOST_COMMIT = "lost-commit"


@dataclass(frozen=True, slots=True)
class FaultRates:
    """Rates of random faults.

    Args:
        until_s: the end of all faults. Lost nodes have returned by then.
        mean_gap_s: mean time between two faults, by kind.
        outage_s: mean outage of a lost node.
        slow_save_s: mean additional time of a slow checkpoint.
    """

    until_s: float
    mean_gap_s: Mapping[FaultKind, float]
    outage_s: float = 1800.0
    slow_save_s: float = 240.0


class SeededFaultInjector:
    """Fault injector for five kinds of faults at random times.

    Each kind has its own generator, so kinds are independent.
    """

    def __init__(self, seed: int, nodes: tuple[str, ...], rates: FaultRates, *, start_s: float = 0.0) -> None:
        self._fault_counts: Counter[FaultKind] = Counter()
        self._rates = rates
        self._nodes = nodes
        self._random = {kind: Random(f"faults/{seed}/{kind}") for kind in FaultKind}
        self._due: list[tuple[float, str, str]] = []
        self._down: set[str] = set()
        self._store: LossyStore | None = None
        self._executor: StaleExecutor | None = None
        for kind in FaultKind:
            self._draw_next(kind, start_s)

    def count_faults(self) -> Mapping[FaultKind, int]:
        """Return how often each kind had an effect. Armed faults that were never triggered do not count."""
        assert self._store is not None, "the control loop uses the wrapped store"
        assert self._executor is not None, "the control loop uses the wrapped executor"
        triggered = {
            FaultKind.STALE_OBSERVATION: self._executor.stale_observations,
            FaultKind.LOST_COMMIT: self._store.conflict_count + self._store.crash_count,
        }
        return {kind: triggered.get(kind, self._fault_counts[kind]) for kind in FaultKind}

    def wrap_store(self, store: Store) -> Store:
        self._store = LossyStore(store)
        return self._store

    def wrap_executor(self, executor: Executor) -> Executor:
        self._executor = StaleExecutor(executor)
        return self._executor

    def next_event_s(self) -> float:
        return self._due[0][0] if self._due else math.inf

    def inject_due(self, now_s: float, world: SimulatedExecutor) -> None:
        while self._due and self._due[0][0] <= now_s:
            at_s, kind, restored_node = heappop(self._due)
            if restored_node:
                self._down.discard(restored_node)
                world.restore_node(restored_node)
                continue
            self._inject(FaultKind(kind), at_s, world)
            self._draw_next(FaultKind(kind), at_s)

    def _inject(self, kind: FaultKind, at_s: float, world: SimulatedExecutor) -> None:
        assert self._store is not None, "the control loop uses the wrapped store"
        assert self._executor is not None, "the control loop uses the wrapped executor"
        random = self._random[kind]
        match kind:
            case FaultKind.NODE_LOSS:
                had_effect = self._lose_node(at_s, world)
            case FaultKind.WORKER_CRASH:
                victims = world.list_running_jobs()
                had_effect = bool(victims) and world.crash_job(random.choice(victims))
            case FaultKind.SLOW_CHECKPOINT:
                extra_s = random.expovariate(1.0 / self._rates.slow_save_s)
                victims = world.list_running_jobs()
                had_effect = bool(victims) and world.delay_save(random.choice(victims), extra_s)
            case FaultKind.STALE_OBSERVATION:
                self._executor.stale_remaining, had_effect = random.randint(1, 3), True
            case FaultKind.LOST_COMMIT:
                self._store.armed_conflicts, self._store.armed_crashes = random.choice(((1, 0), (0, 1)))
                had_effect = True
        if had_effect:
            self._fault_counts[kind] += 1

    def _lose_node(self, at_s: float, world: SimulatedExecutor) -> bool:
        random = self._random[FaultKind.NODE_LOSS]
        victim = random.choice(self._nodes)
        back_s = min(at_s + random.expovariate(1.0 / self._rates.outage_s), self._rates.until_s)
        if victim in self._down:
            return False
        self._down.add(victim)
        world.fail_node(victim)
        heappush(self._due, (back_s, FaultKind.NODE_LOSS, victim))
        return True

    def _draw_next(self, kind: FaultKind, now_s: float) -> None:
        gap_s = self._rates.mean_gap_s.get(kind, math.inf)
        if gap_s == math.inf:
            return
        at_s = now_s + self._random[kind].expovariate(1.0 / gap_s)
        if at_s < self._rates.until_s:
            heappush(self._due, (at_s, kind, ""))
