"""What may go wrong in a simulation, and the wrappers through which it does. Which and when is drawn elsewhere."""

from __future__ import annotations

import math
from typing import Protocol

from scheduler.domain.command import Command
from scheduler.domain.fleet import DemandReading
from scheduler.domain.job import Job
from scheduler.domain.loan import Loan
from scheduler.domain.observation import Observation
from scheduler.domain.snapshot import Snapshot
from scheduler.executors.protocol import Executor
from scheduler.executors.simulated import SimulatedExecutor
from scheduler.store.protocol import (
    Commit,
    ConflictError,
    Lease,
    Loaded,
    Page,
    Store,
    StoredDecision,
    StoredEvent,
)


class ControllerDiedError(Exception):
    """The simulated controller died after its commit and before any effect. Another one takes over at once."""


class Faults(Protocol):
    def around_store(self, store: Store) -> Store:
        """The store that the control loop uses instead."""

    def around_executor(self, executor: Executor) -> Executor:
        """The executor that the control loop uses instead."""

    def next_event_s(self) -> float:
        """When the next fault strikes, or ends."""

    def happen(self, now_s: float, world: SimulatedExecutor) -> None:
        """Let every fault strike that is due by `now_s`."""


class NoFaults:
    """A world in which nothing goes wrong."""

    def around_store(self, store: Store) -> Store:
        return store

    def around_executor(self, executor: Executor) -> Executor:
        return executor

    def next_event_s(self) -> float:
        return math.inf

    def happen(self, now_s: float, world: SimulatedExecutor) -> None:
        """Nothing ever does."""


class StaleExecutor:
    """Shows the last observation again as often as it was told to, as a cache between it and the world would."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._last: Observation | None = None
        self.stale_left = 0
        self.shown_stale = 0

    def observe(self) -> Observation:
        if self.stale_left and self._last is not None:
            self.stale_left -= 1
            self.shown_stale += 1
            return self._last
        self._last = self._executor.observe()
        return self._last

    def converge(self, desired: Snapshot) -> None:
        self._executor.converge(desired)

    def close(self) -> None:
        self._executor.close()


class LossyStore:
    """Loses the next commits on demand: `conflicts` are refused, `deaths` are written and then kill the controller."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.conflicts = 0
        self.deaths = 0
        self.conflicted = 0
        self.died = 0

    def commit(self, commit: Commit) -> None:
        if self.conflicts:
            self.conflicts -= 1
            self.conflicted += 1
            raise ConflictError("a simulated rival committed first")
        self._store.commit(commit)
        if self.deaths:
            self.deaths -= 1
            self.died += 1
            raise ControllerDiedError

    def load(self) -> Loaded:
        return self._store.load()

    def send(self, command: Command) -> bool:
        return self._store.send(command)

    def command(self, command_id: str) -> Command | None:
        return self._store.command(command_id)

    def inbox_size(self) -> int:
        return self._store.inbox_size()

    def acquire(self, holder: str, *, now_s: float, ttl_s: float) -> Lease | None:
        return self._store.acquire(holder, now_s=now_s, ttl_s=ttl_s)

    def release(self, holder: str) -> None:
        self._store.release(holder)

    def lease(self) -> Lease | None:
        return self._store.lease()

    def events(self, page: Page, *, subject: str = "") -> tuple[StoredEvent, ...]:
        return self._store.events(page, subject=subject)

    def decisions(self, page: Page) -> tuple[StoredDecision, ...]:
        return self._store.decisions(page)

    def ended_job(self, job_id: str) -> Job | None:
        return self._store.ended_job(job_id)

    def ended_jobs(self, *, limit: int) -> tuple[Job, ...]:
        return self._store.ended_jobs(limit=limit)

    def ended_loans(self, *, limit: int) -> tuple[Loan, ...]:
        return self._store.ended_loans(limit=limit)

    def readings(self, pool: str, *, since_s: float) -> tuple[DemandReading, ...]:
        return self._store.readings(pool, since_s=since_s)

    def close(self) -> None:
        self._store.close()
