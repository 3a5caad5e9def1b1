"""Protocols of the store and of the run log, as the runtime and the executors need them.

MemoryStore and SqlStore pass the same contract tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from scheduler.domain.allocation_span import AllocationSpan, SpanEnding
from scheduler.domain.capacity_history import CapacityBin
from scheduler.domain.commands import Command
from scheduler.domain.decisions import Decision
from scheduler.domain.events import Event
from scheduler.domain.fleet import DemandReading, Loan
from scheduler.domain.job import Job
from scheduler.domain.job_queue import UsageEntry
from scheduler.domain.job_records import SlottedSample
from scheduler.domain.observation import AgentReport, BegunRun, KillOrder, Run
from scheduler.domain.reading_bins import ReadingBin
from scheduler.domain.recall_receipts import RecallReceipt
from scheduler.domain.snapshot import Snapshot


class ConflictError(Exception):
    """Another tick committed first. Discard the results and load again."""


class FencedError(Exception):
    """The lease has another epoch: this process no longer leads. Nothing was written."""


class UnavailableError(Exception):
    """The database does not respond, or is locked or full. The operation may have been executed and may be repeated."""


@dataclass(frozen=True, slots=True)
class LoadedState:
    """The newest snapshot, and the inbox in order of arrival."""

    snapshot: Snapshot
    inbox: tuple[Command, ...] = ()


@dataclass(frozen=True, slots=True)
class Commit:
    """The result of one tick, written in one transaction.

    Args:
        previous: the snapshot returned by `load`. Records that are the same object in `snapshot` are not written.
        ended_jobs: jobs that were removed from `snapshot`; `ended_loans` likewise. They are appended to history.
        usage: entries that are added to the stored sums.
        samples: each replaces the sample in its slot of its job.
        backfill: demand readings by pool, each time of a pool once; each replaces the stored readings of its time.
        receipts: complete receipts of recalls, which are appended to history.
        ended_spans: ends of open allocation spans. They apply before `begun_spans`.
        capacity: the narrowest bins of the use of pools since `previous`, which are added to the stored bins.
        fleet_change: what changed in the fleet as checkpoints show it, encoded; empty if nothing did.
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
    backfill: tuple[tuple[str, DemandReading], ...] = ()
    receipts: tuple[RecallReceipt, ...] = ()
    ended_spans: tuple[SpanEnding, ...] = ()
    begun_spans: tuple[AllocationSpan, ...] = ()
    capacity: tuple[CapacityBin, ...] = ()
    fleet_change: bytes = b""


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """An event with its row number. Numbers ascend and are never reused."""

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
class UsageSnapshot:
    """Recorded usage, and the snapshot from which the usage since then is computed. Both are from one transaction."""

    entries: tuple[UsageEntry, ...]
    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to commit. `epoch` increases with every change of holder. Names of holders must not be reused."""

    holder: str
    epoch: int
    expires_at_s: float


@dataclass(frozen=True, slots=True)
class Page:
    """Keyset page: up to `limit` rows with a number above `after`."""

    after: int = 0
    limit: int = 100


class Store(Protocol):
    """Every method except `close` may raise UnavailableError."""

    def load(self) -> LoadedState:
        """Return the newest snapshot and all pending commands. A new store has an empty snapshot of generation 0."""

    def commit(self, commit: Commit) -> None:
        """Write the result of a tick.

        Raises:
            ConflictError: the stored generation is not `commit.previous.generation`.
            FencedError: the epoch of the stored lease is not `commit.epoch`.
        """

    def send(self, command: Command) -> bool:
        """Append to the inbox. Return False, and change nothing, if a stored command has the same id.

        Retention deletes consumed commands, except for those that submit a job.
        """

    def get_command(self, command_id: str) -> Command | None:
        """Return the pending or consumed command with this id, or None."""

    def count_pending_commands(self) -> int:
        """Return the number of pending commands. Cheap: called several times a second."""

    def acquire_lease(self, holder: str, *, now_s: float, ttl_s: float) -> Lease | None:
        """Acquire or renew the lease. Return None while another holder has it."""

    def get_lease(self) -> Lease | None:
        """Return the lease, which may have expired, or None if it has no holder."""

    def release_lease(self, holder: str) -> None:
        """Release the lease if `holder` has it."""

    def list_events(self, page: Page, *, subject: str = "") -> tuple[StoredEvent, ...]:
        """Return events in ascending number, of one subject or of all."""

    def list_decisions(self, page: Page) -> tuple[StoredDecision, ...]:
        """Return decisions in ascending number."""

    def get_ended_job(self, job_id: str) -> Job | None:
        """Return an ended job that was removed from the snapshot."""

    def list_ended_jobs(self, *, limit: int) -> tuple[Job, ...]:
        """Return the most recently ended jobs, newest first."""

    def list_ended_loans(self, *, limit: int) -> tuple[Loan, ...]:
        """Return the most recently ended loans, newest first."""

    def list_readings(self, pool: str, *, since_s: float) -> tuple[DemandReading, ...]:
        """Return the demand readings of a pool since `since_s`, in order of time."""

    def list_reading_bins(self, pool: str, *, since_s: float, bin_s: float) -> tuple[ReadingBin, ...]:
        """Return the readings since `since_s` in bins of `bin_s` seconds, as `bin_readings` does."""

    def close(self) -> None:
        """Close files and connections."""


class RunLog(Protocol):
    """Begun runs, and the newest report of each agent, for executors whose ranks report over the network.

    A run is identified by job and generation. Ended runs are deleted, so that the log stays small. Every method may
    raise UnavailableError.
    """

    def begin_run(self, run: BegunRun, *, epoch: int) -> bool:
        """Record that the ranks of this generation may start. Return False if it was recorded before.

        Raises:
            FencedError: the lease has another epoch. Nothing was written.
        """

    def record_kill_order(self, job_id: str, generation: int, kill_order: KillOrder, *, epoch: int) -> None:
        """Set or replace the kill order of a run. Unknown runs are ignored.

        Raises:
            FencedError: as `begin_run`.
        """

    def record_end(self, run: Run, *, epoch: int) -> None:
        """Record the end of a run. The first record wins. Unknown runs are ignored.

        Raises:
            FencedError: as `begin_run`.
        """

    def list_begun_runs(self) -> tuple[BegunRun, ...]:
        """Return all begun runs, by job and generation."""

    def list_begun_runs_of(self, job_id: str) -> tuple[BegunRun, ...]:
        """Return the begun runs of one job, by generation."""

    def record_reports(self, *reports: AgentReport) -> None:
        """Replace the stored reports of the agents. Reports older than the stored ones are ignored."""

    def get_report(self, job_id: str, node: str) -> AgentReport | None:
        """Return the newest report of the job's agent on a node."""

    def list_reports(self) -> tuple[AgentReport, ...]:
        """Return the newest report of each agent, by job and node."""

    def delete_runs(self, job_id: str, *, up_to_generation: int, epoch: int) -> None:
        """Delete the runs up to a generation, and reports of agents about these runs.

        Raises:
            FencedError: as `begin_run`. A former leader does not know the runs that its successors have begun.
        """
