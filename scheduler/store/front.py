"""What the API needs of a store besides Store: tokens, the log of what people changed, lists of what ended, usage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from scheduler.domain.command import Command
from scheduler.domain.job import Job
from scheduler.domain.loan import Loan
from scheduler.domain.sample import Sample
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.usage import UsageEntry
from scheduler.store.protocol import Page, Store, StoredEvent
from scheduler.store.queries import JobQuery, LoanQuery, Place


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
class StoredEntry:
    """`number` ascends without end and never repeats."""

    number: int
    entry: AuditEntry


@dataclass(frozen=True, slots=True)
class AuditFilter:
    """Only entries of this actor, of this subject, from `since_s` on; what is empty or None filters nothing."""

    actor: str = ""
    subject: str = ""
    since_s: float | None = None

    def takes(self, entry: AuditEntry) -> bool:
        return (
            self.actor in ("", entry.actor)
            and self.subject in ("", entry.subject)
            and (self.since_s is None or entry.at_s >= self.since_s)
        )


@dataclass(frozen=True, slots=True)
class Books:
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


class Tokens(Protocol):
    """Everything may raise UnavailableError."""

    def add(self, token: ApiToken, audit: AuditEntry) -> None:
        """Keep a new token, and log that in the same transaction."""

    def by_digest(self, digest: str) -> ApiToken | None: ...

    def by_id(self, token_id: str) -> ApiToken | None: ...

    def page(self, *, after: str, limit: int) -> tuple[ApiToken, ...]:
        """Tokens by id, those after the id `after`; revoked and expired ones too."""

    def revoke(self, token_id: str, now_s: float, audit: AuditEntry) -> ApiToken | None:
        """End a token and log that in the same transaction; None where there is none. Again, it changes nothing."""

    def touch(self, token_id: str, now_s: float) -> None:
        """Note that it was used now."""


class AuditLog(Protocol):
    """It only grows, and only the sweep shortens it. Everything may raise UnavailableError."""

    def append(self, entry: AuditEntry) -> None: ...

    def page(self, page: Page, wanted: AuditFilter) -> tuple[StoredEntry, ...]:
        """Entries in ascending number."""


class FrontStore(Store, Protocol):
    @property
    def tokens(self) -> Tokens: ...

    @property
    def audit_log(self) -> AuditLog: ...

    def newest_event(self) -> int:
        """The number of the last event; 0 before the first."""

    def last_events(self, subject: str, *, limit: int) -> tuple[StoredEvent, ...]:
        """The newest events of one subject, in ascending number."""

    def samples(self, job_id: str) -> tuple[Sample, ...]:
        """The series of a job that lives or has ended, in order of time."""

    def find_ended_jobs(self, wanted: JobQuery, *, after: Place | None, limit: int) -> tuple[Job, ...]:
        """Up to `limit` ended jobs that come after `after` in lists (None: from the start), in their order."""

    def find_ended_loans(self, wanted: LoanQuery, *, after: Place | None, limit: int) -> tuple[Loan, ...]:
        """Likewise for loans."""

    def usage(self, *, from_s: float, to_s: float) -> Books:
        """What is booked of the hours that touch this time span, in order of hour, queue, owner and kind of GPU."""

    def swept_up_to(self, swept: HistoryLog) -> int:
        """The number up to which rows are gone because they were old; 0: none is."""

    def send(self, command: Command, *, audit: AuditEntry | None = None) -> bool:
        """As Store.send; where the command is new, `audit` is logged in the same transaction."""
