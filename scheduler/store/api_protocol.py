"""What lists of jobs and loans may ask for, live or ended alike, and where a page of them begins.

What the API needs of a store besides Store: tokens, the log of what people changed, lists of what ended, usage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from heapq import nlargest
from typing import Any, NamedTuple, Protocol, TypeVar

from scheduler.domain.commands import Command
from scheduler.domain.fleet import LIVE_LOAN_STATES, Loan, LoanState
from scheduler.domain.job import Job
from scheduler.domain.job_queue import UsageEntry
from scheduler.domain.job_records import Sample
from scheduler.domain.job_state import ENDED_STATES, JobState
from scheduler.domain.snapshot import Snapshot
from scheduler.store.protocol import Page, Store, StoredEvent

Row = TypeVar("Row")


class SortKey(NamedTuple):
    """Where a job or loan stands in lists, which are in descending order of it. It never changes: not even when the
    job or loan ends, so that whoever goes from page to page meets each one once."""

    at_s: float
    id: str


@dataclass(frozen=True, slots=True)
class JobQuery:
    """Jobs with all of these traits. `states` and `queues`: any of them, None: all. `since_s` is the first second of
    submission, `until_s` the first after."""

    states: frozenset[JobState] | None = None
    queues: frozenset[str] | None = None
    owner: str = ""
    name_prefix: str = ""
    since_s: float = -math.inf
    until_s: float = math.inf

    @property
    def includes_ended(self) -> bool:
        return self.states is None or bool(self.states & ENDED_STATES)

    def restrict_to_queues(self, queues: frozenset[str] | None) -> JobQuery:
        """The same of these queues alone; None: of all."""
        if queues is None:
            return self
        return replace(self, queues=queues if self.queues is None else queues & self.queues)

    def matches(self, job: Job) -> bool:
        spec = job.spec
        return (
            (self.states is None or job.state in self.states)
            and (self.queues is None or spec.queue in self.queues)
            and self.owner in ("", job.owner)
            and spec.name.startswith(self.name_prefix)
            and self.since_s <= job.submitted_at_s < self.until_s
        )


@dataclass(frozen=True, slots=True)
class LoanQuery:
    """Loans with all of these traits. `states`: any of them, None: all."""

    states: frozenset[LoanState] | None = None
    pool: str = ""
    node: str = ""

    @property
    def includes_ended(self) -> bool:
        return self.states is None or not self.states <= LIVE_LOAN_STATES

    def matches(self, loan: Loan) -> bool:
        wanted = self.states is None or loan.state in self.states
        return wanted and self.pool in ("", loan.pool) and self.node in ("", loan.node)


def get_job_sort_key(job: Job) -> SortKey:
    return SortKey(job.submitted_at_s, job.id)


def get_loan_sort_key(loan: Loan) -> SortKey:
    return SortKey(loan.offered_at_s, loan.id)


def take_page(
    rows: list[Row], get_sort_key: Callable[[Row], SortKey], *, after: SortKey | None, limit: int
) -> tuple[Row, ...]:
    """Up to `limit` rows that come after the place `after` in lists, in the order of lists."""
    following = rows if after is None else [row for row in rows if get_sort_key(row) < after]
    return tuple(nlargest(limit, following, key=get_sort_key))


@dataclass(frozen=True, slots=True)
class ApiToken:
    """A token without its secret. `digest` is the secret's SHA-256 in hexadecimal, `prefix` its first characters, by
    which people know it again. `grants`: texts such as "submitter:research". Times in seconds since 1970 (UTC)."""

    id: str
    name: str
    prefix: str
    digest: str
    grants: tuple[str, ...]
    created_at_s: float
    created_by: str
    expires_at_s: float | None = None
    last_used_at_s: float | None = None
    revoked_at_s: float | None = None

    def is_live(self, now_s: float) -> bool:
        return self.revoked_at_s is None and (self.expires_at_s is None or now_s < self.expires_at_s)


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One change that was asked for. `action` is a command's name or, where it was refused, method and path. `before`
    and `after` hold what it changed; `token_id` is empty for who came without an API token."""

    at_s: float
    actor: str
    token_id: str
    action: str
    subject: str
    before: Mapping[str, Any] | None
    after: Mapping[str, Any] | None
    request_id: str
    outcome: str = "accepted"


@dataclass(frozen=True, slots=True)
class StoredAuditEntry:
    """`number` ascends without end and never repeats."""

    number: int
    entry: AuditEntry


@dataclass(frozen=True, slots=True)
class AuditFilter:
    """Only entries of this actor, of this subject, from `since_s` on; what is empty or None filters nothing."""

    actor: str = ""
    subject: str = ""
    since_s: float | None = None

    def matches(self, entry: AuditEntry) -> bool:
        return (
            self.actor in ("", entry.actor)
            and self.subject in ("", entry.subject)
            and (self.since_s is None or entry.at_s >= self.since_s)
        )


@dataclass(frozen=True, slots=True)
class UsageSnapshot:
    """What is booked of usage, and the snapshot from which to work out what is not booked yet: both of one moment."""

    entries: tuple[UsageEntry, ...]
    snapshot: Snapshot


class HistoryLog(StrEnum):
    """What only grows but for the sweep: it takes out what is older than it is to be kept."""

    EVENTS = "events"
    DECISIONS = "decisions"
    AUDIT = "audit"
    COMMANDS = "commands"
    DELIVERIES = "deliveries"


class TokenStore(Protocol):
    """Everything may raise UnavailableError."""

    def add(self, token: ApiToken, audit: AuditEntry) -> None:
        """Keep a new token, and log that in the same transaction."""

    def find_by_digest(self, digest: str) -> ApiToken | None: ...

    def find_by_id(self, token_id: str) -> ApiToken | None: ...

    def list_tokens(self, *, after: str, limit: int) -> tuple[ApiToken, ...]:
        """Tokens by id, those after the id `after`; revoked and expired ones too."""

    def revoke(self, token_id: str, now_s: float, audit: AuditEntry) -> ApiToken | None:
        """End a token and log that in the same transaction; None where there is none. Again, it changes nothing."""

    def record_use(self, token_id: str, now_s: float) -> None:
        """Note that it was used now."""


class AuditLog(Protocol):
    """It only grows, and only the sweep shortens it. Everything may raise UnavailableError."""

    def append(self, entry: AuditEntry) -> None: ...

    def list_entries(self, page: Page, filters: AuditFilter) -> tuple[StoredAuditEntry, ...]:
        """Entries in ascending number."""


class ApiStore(Store, Protocol):
    @property
    def tokens(self) -> TokenStore: ...

    @property
    def audit_log(self) -> AuditLog: ...

    def get_last_event_number(self) -> int:
        """The number of the last event; 0 before the first."""

    def list_last_events(self, subject: str, *, limit: int) -> tuple[StoredEvent, ...]:
        """The newest events of one subject, in ascending number."""

    def list_samples(self, job_id: str) -> tuple[Sample, ...]:
        """The series of a job that lives or has ended, in order of time."""

    def find_ended_jobs(self, query: JobQuery, *, after: SortKey | None, limit: int) -> tuple[Job, ...]:
        """Up to `limit` ended jobs that come after `after` in lists (None: from the start), in their order."""

    def find_ended_loans(self, query: LoanQuery, *, after: SortKey | None, limit: int) -> tuple[Loan, ...]:
        """Likewise for loans."""

    def load_usage(self, *, from_s: float, to_s: float) -> UsageSnapshot:
        """What is booked of the hours that touch this time span, in order of hour, queue, owner and kind of GPU."""

    def get_retention_mark(self, log: HistoryLog) -> int:
        """The number up to which rows are gone because they were old; 0: none is."""

    def send(self, command: Command, *, audit: AuditEntry | None = None) -> bool:
        """As Store.send; where the command is new, `audit` is logged in the same transaction."""
