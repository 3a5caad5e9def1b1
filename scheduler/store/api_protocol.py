"""Store interfaces of the API beyond `protocol.Store`: queries, tokens, audit log, machines, usage, webhooks and
simulations.

The API and the background workers of the service depend on these protocols only. `ApiStore` is implemented by
MemoryStore and SqlStore, `ServiceStore` by SqlStore alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from heapq import nlargest
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from scheduler.domain.commands import Command
from scheduler.domain.fleet import LIVE_LOAN_STATES, Loan, LoanState
from scheduler.domain.job import Job
from scheduler.domain.job_records import Sample
from scheduler.domain.machine import EstimatedGpu, JoinToken, Machine
from scheduler.store.audit_chain import ChainReport
from scheduler.store.credentials import ApiToken, ServiceAccount
from scheduler.store.protocol import Page, Store, StoredEvent, UsageSnapshot
from scheduler.store.sealed_secrets import SecretStore
from scheduler.store.simulations import DailyComparisonStore, SimulationStore
from scheduler.store.webhooks import WebhookStore

if TYPE_CHECKING:
    from scheduler.store.allocation_history import AllocationHistory
    from scheduler.store.capacity_history import CapacityHistory
    from scheduler.store.job_query import JobQuery
    from scheduler.store.lending_history import LendingHistory
    from scheduler.store.newest_history import NewestHistory
    from scheduler.store.problem_history import ProblemHistory
    from scheduler.store.sessions import SessionStore


class SortKey(NamedTuple):
    """Position of a job, loan or receipt in lists, which are sorted by it in descending order.

    It never changes, not even when the job or loan ends: a client that pages through a list meets each row once.
    """

    at_s: float
    id: str


@dataclass(frozen=True, slots=True)
class LoanQuery:
    """Filter for lists of loans. None and the empty string match everything.

    Loans match that were live at any time from `since_s` to `until_s`.
    """

    states: frozenset[LoanState] | None = None
    pool: str = ""
    node: str = ""
    since_s: float = -math.inf
    until_s: float = math.inf

    @property
    def includes_ended(self) -> bool:
        return self.states is None or not self.states <= LIVE_LOAN_STATES

    def matches(self, loan: Loan) -> bool:
        matches_state = self.states is None or loan.state in self.states
        matches_time = loan.created_at_s < self.until_s and (loan.is_live or loan.state_since_s > self.since_s)
        return matches_state and matches_time and self.pool in ("", loan.pool) and self.node in ("", loan.node)


def get_job_sort_key(job: Job) -> SortKey:
    return SortKey(job.submitted_at_s, job.id)


def get_loan_sort_key(loan: Loan) -> SortKey:
    return SortKey(loan.created_at_s, loan.id)


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One requested change.

    Args:
        action: the command's name or, for a refused request, its method and path.
        actor: display name of the caller; `actor_id`: its stable id, which entries of older releases lack.
        token_id: empty for callers that did not use an API token.
        before: the changed fields before the change; `after`: the same fields after it.
    """

    at_s: float
    actor: str
    token_id: str
    action: str
    subject: str
    before: Mapping[str, Any] | None
    after: Mapping[str, Any] | None
    request_id: str
    outcome: str = "accepted"
    actor_id: str = ""


@dataclass(frozen=True, slots=True)
class StoredAuditEntry:
    """An audit entry with its row number. Numbers ascend and are never reused."""

    number: int
    entry: AuditEntry


@dataclass(frozen=True, slots=True)
class AuditFilter:
    """Filter for the audit log. None and the empty string match everything."""

    actor: str = ""
    subject: str = ""
    since_s: float | None = None
    actor_id: str = ""

    def matches(self, entry: AuditEntry) -> bool:
        return (
            self.actor in ("", entry.actor)
            and self.actor_id in ("", entry.actor_id)
            and self.subject in ("", entry.subject)
            and (self.since_s is None or entry.at_s >= self.since_s)
        )


class HistoryLog(StrEnum):
    """Logs that only grow, except for retention, which deletes rows older than their retention period."""

    EVENTS = "events"
    DECISIONS = "decisions"
    AUDIT = "audit"
    COMMANDS = "commands"
    DELIVERIES = "deliveries"
    ENDED_JOBS = "ended_jobs"
    ENDED_LOANS = "ended_loans"
    READINGS = "readings"
    USAGE = "usage"
    RECALL_RECEIPTS = "recall_receipts"
    ALLOCATIONS = "allocations"
    CAPACITY_MINUTES = "capacity_minutes"
    CAPACITY_TEN_MINUTES = "capacity_ten_minutes"
    CAPACITY_HOURS = "capacity_hours"
    CHECKPOINTS = "checkpoints"
    HOURLY_CHECKPOINTS = "hourly_checkpoints"
    FLEET_CHANGES = "fleet_changes"
    PROBLEMS = "problems"
    COMPARISONS = "comparisons"


@dataclass(frozen=True, slots=True)
class IdempotencyKey:
    """An Idempotency-Key of a caller.

    Args:
        id: digest of resource kind, principal and key.
        document: digest of the request document.
    """

    id: str
    document: str


class IdempotencyKeyUsedError(Exception):
    """The key has created something before. Nothing was written."""


class IdempotencyKeyStore(Protocol):
    """Keys with which webhooks, simulations, tokens and service accounts were created.

    Keys of jobs are ids of commands in the inbox.
    """

    def find(self, key_id: str) -> tuple[IdempotencyKey, str] | None:
        """Return the stored key and the id of the resource it created; None for a new key."""


class TokenStore(Protocol):
    """API tokens. Every method may raise UnavailableError."""

    def add(self, token: ApiToken, audit: AuditEntry, key: IdempotencyKey | None = None) -> None:
        """Store a new token and its audit entry in one transaction. Raises IdempotencyKeyUsedError."""

    def find_by_digest(self, digest: str) -> ApiToken | None: ...

    def find_by_id(self, token_id: str) -> ApiToken | None: ...

    def list_tokens(self, *, after: str, limit: int) -> tuple[ApiToken, ...]:
        """Return tokens with an id above `after`, by id, including revoked and expired ones."""

    def revoke(self, token_id: str, now_s: float, audit: AuditEntry) -> ApiToken | None:
        """Revoke a token and write the audit entry in one transaction.

        Revoking a token again changes nothing. Returns None if there is no token with this id.
        """

    def record_use(self, token_id: str, now_s: float) -> None: ...


class AccountNameTakenError(Exception):
    """A service account of this name exists. Nothing was written."""


class AccountStore(Protocol):
    """Service accounts. Every method may raise UnavailableError. Audit entries are written in the same transaction."""

    def create(
        self, account: ServiceAccount, token: ApiToken, audit: AuditEntry, key: IdempotencyKey | None = None
    ) -> None:
        """Store an account with its first token. Raises AccountNameTakenError or IdempotencyKeyUsedError."""

    def get_account(self, name: str) -> ServiceAccount | None: ...

    def list_accounts(self, *, after: str, limit: int) -> tuple[ServiceAccount, ...]:
        """Return accounts with a name above `after`, by name."""

    def list_account_tokens(self, account_id: str) -> tuple[ApiToken, ...]:
        """Return all tokens of an account, oldest first, including revoked and expired ones."""

    def rotate(
        self, token: ApiToken, *, overlap_until_s: float, audit: AuditEntry, key: IdempotencyKey | None = None
    ) -> bool:
        """Store another token of an account, and let its live tokens expire at `overlap_until_s` at the latest.

        Returns False if the account does not exist. Raises IdempotencyKeyUsedError.
        """

    def update_account(self, account_id: str, changes: Mapping[str, Any], audit: AuditEntry) -> ServiceAccount | None:
        """Change the given fields and return the account; None if it does not exist."""

    def delete(self, account_id: str, now_s: float, audit: AuditEntry) -> bool:
        """Delete an account and revoke its tokens. Return False if it does not exist."""


class JoinTokenSpentError(Exception):
    """The join token was deleted, has no uses left, or has expired. Nothing was written."""


class MachineNameTakenError(Exception):
    """A machine of this name has joined and was not revoked. Nothing was written."""


class MachineStore(Protocol):
    """Joined machines, join tokens and estimated GPU profiles. Every method may raise UnavailableError."""

    def add_token(self, token: JoinToken, audit: AuditEntry) -> None:
        """Store a new token and its audit entry in one transaction."""

    def find_token(self, digest: str) -> JoinToken | None: ...

    def get_token(self, token_id: str) -> JoinToken | None: ...

    def list_tokens(self, *, after: str, limit: int) -> tuple[JoinToken, ...]:
        """Return tokens with an id above `after`, by id, including used and expired ones."""

    def delete_token(self, token_id: str, audit: AuditEntry) -> None:
        """Delete a token and write the audit entry in one transaction. An unknown id changes nothing."""

    def join(self, machine: Machine, token_id: str, audit: AuditEntry, *, now_s: float) -> None:
        """Use the token once and store the machine and its audit entry in one transaction.

        The machine replaces a revoked one of its name. Raises JoinTokenSpentError or MachineNameTakenError.
        """

    def register_service(self, machine: Machine) -> None:
        """Store the service's own machine. Raises MachineNameTakenError if another live machine has its name."""

    def get_machine(self, name: str) -> Machine | None: ...

    def find_machine(self, digest: str) -> Machine | None:
        """Return the machine whose credential has this digest, also if it was revoked."""

    def list_machines(self) -> tuple[Machine, ...]:
        """Return all machines by name, including revoked ones. Inventories are decoded once, so calls are cheap."""

    def update_machine(self, machine: Machine, audit: AuditEntry | None = None) -> None:
        """Replace what is stored of a machine, except times and credential, and write the audit entry with it.

        Ignored if the machine joined again since.
        """

    def revoke_machine(self, name: str, now_s: float, audit: AuditEntry) -> Machine | None:
        """Revoke a machine and write the audit entry in one transaction.

        Revoking it again changes nothing. Returns None if there is no machine of this name.
        """

    def record_seen(self, seen_at_s: Mapping[str, float]) -> None:
        """Record the times of the last reports by machine, in one transaction. Older times are ignored."""

    def add_estimated_gpu(self, estimate: EstimatedGpu) -> None:
        """Store an estimated GPU profile. The first one of a name stays."""

    def list_estimated_gpus(self) -> tuple[EstimatedGpu, ...]:
        """Return all estimated GPU profiles, by name."""


class AuditLog(Protocol):
    """Append-only log of requested changes; only retention deletes from it. May raise UnavailableError."""

    def append(self, entry: AuditEntry) -> None: ...

    def list_entries(self, page: Page, filters: AuditFilter) -> tuple[StoredAuditEntry, ...]:
        """Return entries in ascending number."""

    def list_newest(self, before: int, limit: int, filters: AuditFilter) -> tuple[StoredAuditEntry, ...]:
        """Return entries with a number below `before`, in descending number."""

    def verify_chain(self, expected: str = "") -> ChainReport:
        """Check the digests of all entries, and that one of them is `expected`, unless that is empty."""


class ApiStore(Store, Protocol):
    """The store of an API: `Store` plus lists, history and tokens."""

    @property
    def tokens(self) -> TokenStore: ...

    @property
    def sessions(self) -> SessionStore: ...

    @property
    def audit_log(self) -> AuditLog: ...

    @property
    def idempotency_keys(self) -> IdempotencyKeyStore: ...

    @property
    def machines(self) -> MachineStore: ...

    @property
    def secrets(self) -> SecretStore: ...

    @property
    def lending(self) -> LendingHistory: ...

    @property
    def allocations(self) -> AllocationHistory: ...

    @property
    def capacity(self) -> CapacityHistory: ...

    @property
    def newest(self) -> NewestHistory: ...

    @property
    def problems(self) -> ProblemHistory: ...

    def get_last_event_number(self) -> int:
        """Return the number of the newest event; 0 before the first."""

    def list_last_events(self, subject: str, *, limit: int) -> tuple[StoredEvent, ...]:
        """Return the newest events of one subject, in ascending number."""

    def list_samples(self, job_id: str) -> tuple[Sample, ...]:
        """Return the samples of a live or ended job, in order of time."""

    def find_ended_jobs(self, query: JobQuery, *, after: SortKey | None, limit: int) -> tuple[Job, ...]:
        """Return up to `limit` ended jobs that follow the key `after` (None: from the start), in list order."""

    def find_ended_job_queues(self, job_ids: Collection[str]) -> Mapping[str, str]:
        """Return the queues of those of the jobs that have ended and left the snapshot, by job id."""

    def list_event_subjects(self, page: Page) -> tuple[tuple[int, str], ...]:
        """Return number and subject of events, in ascending number. Cheaper than `list_events`."""

    def get_events(self, numbers: Collection[int]) -> tuple[StoredEvent, ...]:
        """Return the events with these numbers, in ascending number."""

    def find_ended_loans(self, query: LoanQuery, *, after: SortKey | None, limit: int) -> tuple[Loan, ...]:
        """Return up to `limit` ended loans that follow the key `after` (None: from the start), in list order."""

    def load_usage(self, *, from_s: float, to_s: float) -> UsageSnapshot:
        """Return the usage of all hours that overlap the time span, by hour, queue, owner and GPU model."""

    def get_retention_mark(self, log: HistoryLog) -> int:
        """Return the row number up to which retention has deleted the log; 0 if it has deleted nothing."""

    def send(self, command: Command, *, audit: AuditEntry | None = None) -> bool:
        """Append to the inbox as `Store.send` does. A new command's `audit` is written in the same transaction."""


@runtime_checkable
class ServiceStore(ApiStore, Protocol):
    """The store of a service: `ApiStore` plus webhooks, simulations and service accounts."""

    @property
    def webhooks(self) -> WebhookStore: ...

    @property
    def simulations(self) -> SimulationStore: ...

    @property
    def comparisons(self) -> DailyComparisonStore: ...

    @property
    def accounts(self) -> AccountStore: ...


Row = TypeVar("Row")


def take_page(
    rows: list[Row], get_sort_key: Callable[[Row], SortKey], *, after: SortKey | None, limit: int
) -> tuple[Row, ...]:
    """Return up to `limit` rows that follow the key `after`, in list order."""
    following = rows if after is None else [row for row in rows if get_sort_key(row) < after]
    return tuple(nlargest(limit, following, key=get_sort_key))
