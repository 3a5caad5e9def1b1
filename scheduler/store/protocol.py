"""What the runtime needs of a store, and nothing else. MemoryStore and SqlStore keep the same contract suite."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from scheduler.domain.command import Command
from scheduler.domain.decision import Decision
from scheduler.domain.event import Event
from scheduler.domain.fleet import DemandReading
from scheduler.domain.job import Job
from scheduler.domain.loan import Loan
from scheduler.domain.sample import PlacedSample
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.usage import UsageEntry


class ConflictError(Exception):
    """Another tick committed first: the snapshot's generation moved on. Drop everything and load again."""


class FencedError(Exception):
    """The lease's epoch is no longer this leader's: somebody else leads. Nothing was written."""


class UnavailableError(Exception):
    """The database does not answer: locked for too long, gone, full. What was asked may or may not have been done, and
    may be asked again."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The newest snapshot, and the inbox in order of arrival."""

    snapshot: Snapshot
    inbox: tuple[Command, ...] = ()


@dataclass(frozen=True, slots=True)
class Commit:
    """One tick's outcome, written in one transaction or not at all.

    `previous` is the snapshot that `load` gave; records that are the same object in both are not written.
    Ended jobs and loans have left `snapshot` and go into history; `usage` is added to what is booked.
    A sample takes the place of the one that was in its place of its job's series.
    """

    previous: Snapshot
    snapshot: Snapshot
    epoch: int
    consumed: tuple[str, ...] = ()
    events: tuple[Event, ...] = ()
    decisions: tuple[Decision, ...] = ()
    ended_jobs: tuple[Job, ...] = ()
    ended_loans: tuple[Loan, ...] = ()
    readings: tuple[tuple[str, DemandReading], ...] = ()
    usage: tuple[UsageEntry, ...] = ()
    samples: tuple[PlacedSample, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """An event with its place in the log: `number` ascends without end and never repeats."""

    number: int
    generation: int
    event: Event


@dataclass(frozen=True, slots=True)
class StoredDecision:
    number: int
    generation: int
    at_s: float
    decision: Decision


@dataclass(frozen=True, slots=True)
class Lease:
    """Who may commit. `epoch` grows with every change of holder, so holders need names that are never used again."""

    holder: str
    epoch: int
    expires_at_s: float


@dataclass(frozen=True, slots=True)
class Page:
    """Keyset page: up to `limit` rows after `after` (a row number)."""

    after: int = 0
    limit: int = 100


class Store(Protocol):
    """Everything but `close` may raise UnavailableError."""

    def load(self) -> Loaded:
        """The newest snapshot (an empty one of generation 0 at first) and the whole inbox."""

    def commit(self, commit: Commit) -> None:
        """Write one tick.

        Raises:
            ConflictError: the stored generation is not `commit.previous.generation`.
            FencedError: the stored lease has another epoch than `commit.epoch`.
        """

    def send(self, command: Command) -> bool:
        """Append to the inbox. False where a command of this id was sent before and is kept (nothing changes):
        one that submits a job is kept for ever."""

    def command(self, command_id: str) -> Command | None:
        """The command of this id, whether it waits or was consumed long ago; None if none is kept."""

    def inbox_size(self) -> int:
        """How many commands wait: cheap, asked several times a second."""

    def acquire(self, holder: str, *, now_s: float, ttl_s: float) -> Lease | None:
        """Take or renew the lease; None while another holder's has not expired."""

    def lease(self) -> Lease | None:
        """Who holds the lease, expired or not; None where nobody does. Takes nothing."""

    def release(self, holder: str) -> None:
        """Give the lease up at once, if `holder` has it."""

    def events(self, page: Page, *, subject: str = "") -> tuple[StoredEvent, ...]:
        """Events in ascending number, of one subject or of all."""

    def decisions(self, page: Page) -> tuple[StoredDecision, ...]:
        """Decisions in ascending number."""

    def ended_job(self, job_id: str) -> Job | None:
        """A job that has left the snapshot."""

    def ended_jobs(self, *, limit: int) -> tuple[Job, ...]:
        """The jobs that ended last, newest first."""

    def ended_loans(self, *, limit: int) -> tuple[Loan, ...]:
        """The loans that ended last, newest first."""

    def readings(self, pool: str, *, since_s: float) -> tuple[DemandReading, ...]:
        """The recorded demand of one pool from `since_s` on, in order of time."""

    def close(self) -> None:
        """Let go of files and connections."""
