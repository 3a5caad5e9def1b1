"""MemoryStore: the store of simulations, dry runs and tests. Nothing is persisted."""

from __future__ import annotations

import threading
from bisect import bisect_left, insort_right
from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import islice
from operator import attrgetter

from scheduler.domain.commands import Command
from scheduler.domain.fleet import DemandReading, Loan
from scheduler.domain.job import Job
from scheduler.domain.job_queue import HOUR_S, UsageEntry, UsageKey
from scheduler.domain.job_records import Sample
from scheduler.domain.machine import EstimatedGpu, JoinToken, Machine
from scheduler.domain.reading_bins import ReadingBin, bin_readings
from scheduler.domain.recall_receipts import RecallReceipt
from scheduler.domain.snapshot import Snapshot
from scheduler.store.allocation_history import MemoryAllocationHistory
from scheduler.store.api_protocol import (
    AuditEntry,
    AuditFilter,
    HistoryLog,
    IdempotencyKey,
    IdempotencyKeyUsedError,
    JoinTokenSpentError,
    LoanQuery,
    MachineNameTakenError,
    SortKey,
    StoredAuditEntry,
    get_job_sort_key,
    get_loan_sort_key,
    take_page,
)
from scheduler.store.audit_chain import ChainReport
from scheduler.store.capacity_history import MemoryCapacityHistory
from scheduler.store.credentials import ApiToken
from scheduler.store.job_query import JobQuery
from scheduler.store.lending_history import ReceiptQuery, get_receipt_sort_key
from scheduler.store.memory_secrets import MemorySecrets
from scheduler.store.newest_history import MemoryNewestHistory
from scheduler.store.problem_history import MemoryProblemHistory
from scheduler.store.protocol import (
    Commit,
    ConflictError,
    FencedError,
    Lease,
    LoadedState,
    Page,
    StoredDecision,
    StoredEvent,
    UsageSnapshot,
)
from scheduler.store.sessions import ConsoleSession, LoginCode


class MemoryAuditLog:
    """AuditLog in memory."""

    def __init__(self) -> None:
        self._entries: list[StoredAuditEntry] = []
        self._lock = threading.Lock()

    def append(self, entry: AuditEntry) -> None:
        with self._lock:
            self._entries.append(StoredAuditEntry(len(self._entries) + 1, entry))

    def list_entries(self, page: Page, filters: AuditFilter) -> tuple[StoredAuditEntry, ...]:
        with self._lock:
            after = self._entries[page.after :]
        return tuple(islice((each for each in after if filters.matches(each.entry)), page.limit))

    def list_newest(self, before: int, limit: int, filters: AuditFilter) -> tuple[StoredAuditEntry, ...]:
        with self._lock:
            older = self._entries[: max(0, before - 1)]
        return tuple(islice((each for each in reversed(older) if filters.matches(each.entry)), limit))

    def verify_chain(self, expected: str = "") -> ChainReport:
        del expected  # entries in memory are not chained
        return ChainReport()


class MemoryIdempotencyKeys:
    """IdempotencyKeyStore in memory."""

    def __init__(self) -> None:
        self._used: dict[str, tuple[IdempotencyKey, str]] = {}

    def find(self, key_id: str) -> tuple[IdempotencyKey, str] | None:
        return self._used.get(key_id)

    def use(self, key: IdempotencyKey, created_id: str) -> None:
        """Store the key. Raises IdempotencyKeyUsedError."""
        if self._used.setdefault(key.id, (key, created_id))[1] != created_id:
            raise IdempotencyKeyUsedError(key.id)


class MemoryTokenStore:
    """TokenStore in memory."""

    def __init__(self, audit_log: MemoryAuditLog, keys: MemoryIdempotencyKeys) -> None:
        self._keys = keys
        self._tokens: dict[str, ApiToken] = {}
        self._audit_log = audit_log
        self._lock = threading.Lock()

    def add(self, token: ApiToken, audit: AuditEntry, key: IdempotencyKey | None = None) -> None:
        with self._lock:
            if key is not None:
                self._keys.use(key, token.id)
            self._tokens[token.id] = token
            self._audit_log.append(audit)

    def find_by_digest(self, digest: str) -> ApiToken | None:
        with self._lock:
            return next((token for token in self._tokens.values() if token.digest == digest), None)

    def find_by_id(self, token_id: str) -> ApiToken | None:
        with self._lock:
            return self._tokens.get(token_id)

    def list_tokens(self, *, after: str, limit: int) -> tuple[ApiToken, ...]:
        with self._lock:
            return tuple(self._tokens[each] for each in sorted(self._tokens) if each > after)[:limit]

    def revoke(self, token_id: str, now_s: float, audit: AuditEntry) -> ApiToken | None:
        with self._lock:
            token = self._tokens.get(token_id)
            if token is not None and token.revoked_at_s is None:
                token = self._tokens[token_id] = replace(token, revoked_at_s=now_s)
                self._audit_log.append(audit)
            return token

    def record_use(self, token_id: str, now_s: float) -> None:
        with self._lock:
            self._tokens[token_id] = replace(self._tokens[token_id], last_used_at_s=now_s)


class MemorySessionStore:
    """SessionStore in memory."""

    def __init__(self, audit_log: MemoryAuditLog) -> None:
        self._codes: dict[str, LoginCode] = {}
        self._sessions: dict[str, ConsoleSession] = {}
        self._audit_log = audit_log
        self._lock = threading.Lock()

    def add_code(self, code: LoginCode, *, now_s: float, audit: AuditEntry | None = None) -> None:
        with self._lock:
            self._codes = {each.digest: each for each in self._codes.values() if each.expires_at_s > now_s}
            self._codes[code.digest] = code
            if audit is not None:
                self._audit_log.append(audit)

    def take_code(self, digest: str, *, browser: str, now_s: float) -> LoginCode | None:
        with self._lock:
            code = self._codes.get(digest)
            if code is None or code.expires_at_s <= now_s or code.browser not in ("", browser):
                return None
            return self._codes.pop(digest)

    def add(self, session: ConsoleSession, audit: AuditEntry) -> None:
        with self._lock:
            live = [each for each in self._sessions.values() if each.expires_at_s > session.created_at_s]
            self._sessions = {each.digest: each for each in (*live, session)}
            self._audit_log.append(audit)

    def find(self, digest: str) -> ConsoleSession | None:
        with self._lock:
            return self._sessions.get(digest)

    def delete(self, session_id: str, audit: AuditEntry) -> None:
        with self._lock:
            left = {digest: each for digest, each in self._sessions.items() if each.id != session_id}
            if len(left) < len(self._sessions):
                self._sessions = left
                self._audit_log.append(audit)


class MemoryMachineStore:
    """MachineStore in memory."""

    def __init__(self, audit_log: MemoryAuditLog) -> None:
        self._machines: dict[str, Machine] = {}
        self._tokens: dict[str, JoinToken] = {}
        self._estimates: dict[str, EstimatedGpu] = {}
        self._audit_log = audit_log
        self._lock = threading.Lock()

    def add_token(self, token: JoinToken, audit: AuditEntry) -> None:
        with self._lock:
            self._tokens[token.id] = token
            self._audit_log.append(audit)

    def find_token(self, digest: str) -> JoinToken | None:
        with self._lock:
            return next((token for token in self._tokens.values() if token.digest == digest), None)

    def get_token(self, token_id: str) -> JoinToken | None:
        with self._lock:
            return self._tokens.get(token_id)

    def list_tokens(self, *, after: str, limit: int) -> tuple[JoinToken, ...]:
        with self._lock:
            return tuple(self._tokens[each] for each in sorted(self._tokens) if each > after)[:limit]

    def delete_token(self, token_id: str, audit: AuditEntry) -> None:
        with self._lock:
            if self._tokens.pop(token_id, None) is not None:
                self._audit_log.append(audit)

    def join(self, machine: Machine, token_id: str, audit: AuditEntry, *, now_s: float) -> None:
        with self._lock:
            token, existing = self._tokens.get(token_id), self._machines.get(machine.name)
            if token is None or token.uses_left < 1 or token.expires_at_s <= now_s:
                raise JoinTokenSpentError(token_id)
            if existing is not None and existing.is_live:
                raise MachineNameTakenError(machine.name)
            self._tokens[token_id] = replace(token, uses_left=token.uses_left - 1)
            self._machines[machine.name] = machine
            self._audit_log.append(audit)

    def register_service(self, machine: Machine) -> None:
        with self._lock:
            existing = self._machines.get(machine.name)
            if existing is not None and existing.is_live and not existing.is_service:
                raise MachineNameTakenError(machine.name)
            self._machines[machine.name] = machine

    def get_machine(self, name: str) -> Machine | None:
        with self._lock:
            return self._machines.get(name)

    def find_machine(self, digest: str) -> Machine | None:
        return next((machine for machine in self.list_machines() if machine.digest == digest), None)

    def list_machines(self) -> tuple[Machine, ...]:
        with self._lock:
            return tuple(self._machines[name] for name in sorted(self._machines))

    def update_machine(self, machine: Machine, audit: AuditEntry | None = None) -> None:
        with self._lock:
            stored = self._machines.get(machine.name)
            if stored is not None and stored.digest == machine.digest:
                self._machines[machine.name] = replace(
                    machine,
                    joined_at_s=stored.joined_at_s,
                    seen_at_s=stored.seen_at_s,
                    revoked_at_s=stored.revoked_at_s,
                )
                if audit is not None:
                    self._audit_log.append(audit)

    def revoke_machine(self, name: str, now_s: float, audit: AuditEntry) -> Machine | None:
        with self._lock:
            machine = self._machines.get(name)
            if machine is not None and machine.is_live:
                machine = self._machines[name] = replace(machine, revoked_at_s=now_s)
                self._audit_log.append(audit)
            return machine

    def record_seen(self, seen_at_s: Mapping[str, float]) -> None:
        with self._lock:
            for name, at_s in seen_at_s.items():
                machine = self._machines.get(name)
                if machine is not None and (machine.seen_at_s is None or machine.seen_at_s < at_s):
                    self._machines[name] = replace(machine, seen_at_s=at_s)

    def add_estimated_gpu(self, estimate: EstimatedGpu) -> None:
        with self._lock:
            self._estimates.setdefault(estimate.name, estimate)

    def list_estimated_gpus(self) -> tuple[EstimatedGpu, ...]:
        with self._lock:
            return tuple(self._estimates[name] for name in sorted(self._estimates))


class MemoryLendingHistory:
    """LendingHistory in memory, of the loans and receipts that were appended."""

    def __init__(self) -> None:
        self.loans: list[Loan] = []
        self.receipts: list[RecallReceipt] = []
        self._lock = threading.Lock()

    def append(self, commit: Commit) -> None:
        with self._lock:
            self.loans.extend(commit.ended_loans)
            self.receipts.extend(commit.receipts)

    def find_receipts(self, query: ReceiptQuery, *, after: SortKey | None, limit: int) -> tuple[RecallReceipt, ...]:
        with self._lock:
            found = list(filter(query.matches, self.receipts))
        return take_page(found, get_receipt_sort_key, after=after, limit=limit)

    def find_loan_receipts(self, loan_ids: Collection[str]) -> Mapping[str, RecallReceipt]:
        wanted = set(loan_ids)
        with self._lock:
            return {each.loan_id: each for each in self.receipts if each.loan_id in wanted}

    def list_pool_loans(self, pool: str, *, ended_since_s: float, offered_before_s: float) -> tuple[Loan, ...]:
        with self._lock:
            found = [loan for loan in self.loans if loan.pool == pool and loan.offered_at_s < offered_before_s]
        return tuple(sorted((each for each in found if each.state_since_s >= ended_since_s), key=get_loan_sort_key))


_NO_LEASE = Lease(holder="", epoch=0, expires_at_s=float("-inf"))


class MemoryStore:
    """ApiStore in memory. Safe to use from several threads. It may start from a given snapshot."""

    def __init__(self, snapshot: Snapshot | None = None) -> None:
        self._lock = threading.Lock()
        self._snapshot = snapshot or Snapshot()
        self._inbox: dict[str, Command] = {}
        self._commands: dict[str, Command] = {}
        self._lease = _NO_LEASE
        self._events: list[StoredEvent] = []
        self._decisions: list[StoredDecision] = []
        self._ended_jobs: list[Job] = []
        self._readings: dict[str, list[DemandReading]] = {}
        self._samples: dict[str, dict[int, Sample]] = {}
        self._usage: dict[UsageKey, UsageEntry] = {}
        self.audit_log = MemoryAuditLog()
        self.idempotency_keys = MemoryIdempotencyKeys()
        self.tokens = MemoryTokenStore(self.audit_log, self.idempotency_keys)
        self.sessions = MemorySessionStore(self.audit_log)
        self.machines = MemoryMachineStore(self.audit_log)
        self.secrets = MemorySecrets(self.audit_log)
        self.lending = MemoryLendingHistory()
        self.allocations = MemoryAllocationHistory()
        self.capacity = MemoryCapacityHistory()
        self.problems = MemoryProblemHistory()
        self.newest = MemoryNewestHistory(self._events, self._decisions)

    def load(self) -> LoadedState:
        with self._lock:
            return LoadedState(self._snapshot, tuple(self._inbox.values()))

    def commit(self, commit: Commit) -> None:
        assert commit.snapshot.generation == commit.previous.generation + 1, "a commit advances by one generation"
        with self._lock:
            if self._lease.epoch != commit.epoch:
                raise FencedError(f"the lease no longer has epoch {commit.epoch}; nothing was written")
            if self._snapshot.generation != commit.previous.generation:
                raise ConflictError(
                    f"another tick committed first: the stored generation is no longer {commit.previous.generation}"
                )
            self._snapshot = commit.snapshot
            for command_id in commit.consumed_command_ids:
                self._inbox.pop(command_id, None)
            self._append_history(commit)

    def send(self, command: Command, *, audit: AuditEntry | None = None) -> bool:
        with self._lock:
            if command.id in self._commands:
                return False
            if audit is not None:
                self.audit_log.append(audit)
            self._commands[command.id] = self._inbox[command.id] = command
            return True

    def get_command(self, command_id: str) -> Command | None:
        with self._lock:
            return self._commands.get(command_id)

    def count_pending_commands(self) -> int:
        with self._lock:
            return len(self._inbox)

    def acquire_lease(self, holder: str, *, now_s: float, ttl_s: float) -> Lease | None:
        assert holder, "the holder of the lease needs a name"
        with self._lock:
            held = self._lease
            if held.holder not in ("", holder) and held.expires_at_s > now_s:
                return None
            epoch = held.epoch if held.holder == holder else held.epoch + 1
            self._lease = Lease(holder, epoch, now_s + ttl_s)
            return self._lease

    def get_lease(self) -> Lease | None:
        with self._lock:
            return self._lease if self._lease.holder else None

    def release_lease(self, holder: str) -> None:
        with self._lock:
            if self._lease.holder == holder:
                self._lease = Lease("", self._lease.epoch + 1, self._lease.expires_at_s)

    def list_events(self, page: Page, *, subject: str = "") -> tuple[StoredEvent, ...]:
        with self._lock:
            after = (self._events[at] for at in range(page.after, len(self._events)))
            return tuple(islice((each for each in after if subject in ("", each.event.subject)), page.limit))

    def list_event_subjects(self, page: Page) -> tuple[tuple[int, str], ...]:
        return tuple((each.number, each.event.subject) for each in self.list_events(page))

    def get_events(self, numbers: Collection[int]) -> tuple[StoredEvent, ...]:
        with self._lock:
            return tuple(self._events[number - 1] for number in sorted(numbers))

    def list_last_events(self, subject: str, *, limit: int) -> tuple[StoredEvent, ...]:
        with self._lock:
            newest = islice((each for each in reversed(self._events) if each.event.subject == subject), limit)
            return tuple(newest)[::-1]

    def get_last_event_number(self) -> int:
        with self._lock:
            return len(self._events)

    def list_decisions(self, page: Page) -> tuple[StoredDecision, ...]:
        with self._lock:
            return tuple(self._decisions[page.after : page.after + page.limit])

    def get_ended_job(self, job_id: str) -> Job | None:
        with self._lock:
            return next((job for job in reversed(self._ended_jobs) if job.id == job_id), None)

    def list_ended_jobs(self, *, limit: int) -> tuple[Job, ...]:
        with self._lock:
            return tuple(islice(reversed(self._ended_jobs), limit))

    def find_ended_jobs(self, query: JobQuery, *, after: SortKey | None, limit: int) -> tuple[Job, ...]:
        with self._lock:
            return take_page(list(filter(query.matches, self._ended_jobs)), get_job_sort_key, after=after, limit=limit)

    def list_ended_loans(self, *, limit: int) -> tuple[Loan, ...]:
        with self._lock:
            return tuple(islice(reversed(self.lending.loans), limit))

    def find_ended_job_queues(self, job_ids: Collection[str]) -> Mapping[str, str]:
        with self._lock:
            return {job.id: job.spec.queue for job in self._ended_jobs if job.id in job_ids}

    def find_ended_loans(self, query: LoanQuery, *, after: SortKey | None, limit: int) -> tuple[Loan, ...]:
        with self._lock:
            return take_page(
                list(filter(query.matches, self.lending.loans)), get_loan_sort_key, after=after, limit=limit
            )

    def list_readings(self, pool: str, *, since_s: float) -> tuple[DemandReading, ...]:
        with self._lock:
            recorded = self._readings.get(pool, [])
            return tuple(recorded[bisect_left(recorded, since_s, key=attrgetter("at_s")) :])

    def list_reading_bins(self, pool: str, *, since_s: float, bin_s: float) -> tuple[ReadingBin, ...]:
        return tuple(bin_readings(self.list_readings(pool, since_s=since_s), bin_s))

    def list_samples(self, job_id: str) -> tuple[Sample, ...]:
        with self._lock:
            return tuple(sorted(self._samples.get(job_id, {}).values(), key=attrgetter("at_s")))

    def load_usage(self, *, from_s: float, to_s: float) -> UsageSnapshot:
        with self._lock:
            entries = [
                entry for key, entry in self._usage.items() if from_s < key.hour_s + HOUR_S and key.hour_s < to_s
            ]
            return UsageSnapshot(tuple(sorted(entries)), self._snapshot)

    def get_retention_mark(self, log: HistoryLog) -> int:
        """Return 0: nothing is ever deleted."""
        return 0

    def close(self) -> None:
        """Do nothing: no files are open."""

    def _append_history(self, commit: Commit) -> None:
        generation, now_s = commit.snapshot.generation, commit.snapshot.now_s
        for event in commit.events:
            self._events.append(StoredEvent(len(self._events) + 1, generation, event))
        for decision in commit.decisions:
            self._decisions.append(StoredDecision(len(self._decisions) + 1, generation, now_s, decision))
        self._ended_jobs.extend(commit.ended_jobs)
        self.lending.append(commit)
        self.allocations.append(commit)
        self.capacity.add(commit)
        for entry in commit.usage:
            known = self._usage.get(entry.key, UsageEntry(entry.key, 0.0))
            gpu_s, lost_gpu_s = known.gpu_s + entry.gpu_s, known.lost_gpu_s + entry.lost_gpu_s
            self._usage[entry.key] = replace(entry, gpu_s=gpu_s, lost_gpu_s=lost_gpu_s)
        for placed in commit.samples:
            self._samples.setdefault(placed.job_id, {})[placed.slot] = placed.sample
        for pool in {pool for pool, _ in commit.backfill}:
            times_s = {reading.at_s for name, reading in commit.backfill if name == pool}
            self._readings[pool] = [each for each in self._readings.get(pool, []) if each.at_s not in times_s]
        for pool, reading in (*commit.backfill, *commit.readings):
            insort_right(self._readings.setdefault(pool, []), reading, key=attrgetter("at_s"))
