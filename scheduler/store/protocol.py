"""What the runtime needs of a store, and nothing else. MemoryStore and SqlStore keep the same contract suite.

What an executor whose ranks report over the network has to remember.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from scheduler.domain.commands import Command
from scheduler.domain.decisions import Decision
from scheduler.domain.events import Event
from scheduler.domain.fleet import DemandReading, Loan
from scheduler.domain.job import Job
from scheduler.domain.job_queue import UsageEntry
from scheduler.domain.job_records import SlottedSample
from scheduler.domain.observation import AgentReport, BegunRun, KillOrder, Run
from scheduler.domain.snapshot import Snapshot


class ConflictError(Exception):
    """Another tick committed first: the snapshot's generation moved on. Drop everything and load again."""


class FencedError(Exception):
    """The lease's epoch is no longer this leader's: somebody else leads. Nothing was written."""


class UnavailableError(Exception):
    """The database does not answer: locked for too long, gone, full. What was asked may or may not have been done, and
    may be asked again."""


@dataclass(frozen=True, slots=True)
class LoadedState:
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
    consumed_command_ids: tuple[str, ...] = ()
    events: tuple[Event, ...] = ()
    decisions: tuple[Decision, ...] = ()
    ended_jobs: tuple[Job, ...] = ()
    ended_loans: tuple[Loan, ...] = ()
    readings: tuple[tuple[str, DemandReading], ...] = ()
    usage: tuple[UsageEntry, ...] = ()
    samples: tuple[SlottedSample, ...] = ()


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

    def load(self) -> LoadedState:
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

    def get_command(self, command_id: str) -> Command | None:
        """The command of this id, whether it waits or was consumed long ago; None if none is kept."""

    def count_pending_commands(self) -> int:
        """How many commands wait: cheap, asked several times a second."""

    def acquire_lease(self, holder: str, *, now_s: float, ttl_s: float) -> Lease | None:
        """Take or renew the lease; None while another holder's has not expired."""

    def get_lease(self) -> Lease | None:
        """Who holds the lease, expired or not; None where nobody does. Takes nothing."""

    def release_lease(self, holder: str) -> None:
        """Give the lease up at once, if `holder` has it."""

    def list_events(self, page: Page, *, subject: str = "") -> tuple[StoredEvent, ...]:
        """Events in ascending number, of one subject or of all."""

    def list_decisions(self, page: Page) -> tuple[StoredDecision, ...]:
        """Decisions in ascending number."""

    def get_ended_job(self, job_id: str) -> Job | None:
        """A job that has left the snapshot."""

    def list_ended_jobs(self, *, limit: int) -> tuple[Job, ...]:
        """The jobs that ended last, newest first."""

    def list_ended_loans(self, *, limit: int) -> tuple[Loan, ...]:
        """The loans that ended last, newest first."""

    def list_readings(self, pool: str, *, since_s: float) -> tuple[DemandReading, ...]:
        """The recorded demand of one pool from `since_s` on, in order of time."""

    def close(self) -> None:
        """Let go of files and connections."""


class RunLog(Protocol):
    """Begun runs by job and generation, and the newest report of each agent. Small: ended runs are forgotten.
    Everything may raise UnavailableError."""

    def begin_run(self, run: BegunRun, *, epoch: int) -> bool:
        """From now on the ranks of this generation may be started. False where that was said before.

        Raises:
            FencedError: the lease has another epoch; nothing was written.
        """

    def record_kill_order(self, job_id: str, generation: int, kill_order: KillOrder, *, epoch: int) -> None:
        """From now on this stands for the run's doom, in place of an earlier one. Nothing where it is not known.

        Raises:
            FencedError: as `begin`.
        """

    def record_end(self, run: Run, *, epoch: int) -> None:
        """Keep how a begun run ended, once for all: what is said later changes nothing. Nothing where it is not known.

        Raises:
            FencedError: as `begin`.
        """

    def list_begun_runs(self) -> tuple[BegunRun, ...]:
        """All runs that were begun and not forgotten, by job and generation."""

    def list_begun_runs_of(self, job_id: str) -> tuple[BegunRun, ...]:
        """Those of one job, by generation."""

    def record_reports(self, *reports: AgentReport) -> None:
        """Each takes the place of its agent's report before; one that is older than that says nothing."""

    def get_report(self, job_id: str, node: str) -> AgentReport | None:
        """The newest report of the job's agent on that node."""

    def list_reports(self) -> tuple[AgentReport, ...]:
        """The newest report of each agent, by job and node."""

    def delete_runs(self, job_id: str, *, up_to_generation: int, epoch: int) -> None:
        """Drop the begun runs of these generations, and the reports of agents that have nothing newer to tell.

        Raises:
            FencedError: as `begin`. Who led once does not know of the runs that others have begun since.
        """
