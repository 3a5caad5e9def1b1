"""SqlStore: the store in a SQL database. One process commits; any number of processes read and send commands.

Every writing transaction begins with a write, which makes it wait for earlier ones, so that it never acts on old data.
Rows are encoded before a transaction begins and decoded after it has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from typing import Any

from sqlalchemy import func, select

from scheduler.domain.codec import decode_stored
from scheduler.domain.commands import Command
from scheduler.domain.fleet import DemandReading, Loan
from scheduler.domain.job import Job
from scheduler.domain.job_records import Sample
from scheduler.domain.reading_bins import ReadingBin
from scheduler.domain.snapshot import Snapshot
from scheduler.store import sql_history, sql_inbox, sql_job_search, sql_state, sql_usage
from scheduler.store.api_protocol import AuditEntry, HistoryLog, LoanQuery, SortKey
from scheduler.store.database import (
    StoreError,
    fetch_rows,
    insert_rows,
    make_autocommit_engine,
    make_snapshot_engine,
    open_engine,
    replace_rows,
    transaction,
)
from scheduler.store.job_query import JobQuery
from scheduler.store.machines import SqlMachines
from scheduler.store.protocol import Commit, Lease, LoadedState, Page, StoredDecision, StoredEvent, UsageSnapshot
from scheduler.store.schema_migration import require_current_revision
from scheduler.store.sql_allocations import SqlAllocationHistory, write_span_changes
from scheduler.store.sql_api_tables import CHAIN_OPTION, SqlAuditLog, SqlIdempotencyKeys
from scheduler.store.sql_capacity_history import SqlCapacityHistory, write_capacity
from scheduler.store.sql_credentials import SqlAccountStore, SqlTokenStore
from scheduler.store.sql_history import ENDED_JOBS, ENDED_LOANS, EVENTS
from scheduler.store.sql_inbox import INBOX
from scheduler.store.sql_job_labels import insert_labels
from scheduler.store.sql_lending_history import SqlLendingHistory, build_receipt_rows
from scheduler.store.sql_newest_history import SqlNewestHistory
from scheduler.store.sql_problems import SqlProblemHistory
from scheduler.store.sql_retention import SqlRetention
from scheduler.store.sql_run_log import SqlRunLog
from scheduler.store.sql_secrets import SqlSecrets
from scheduler.store.sql_sessions import SqlSessionStore
from scheduler.store.sql_simulations import SqlDailyComparisons, SqlSimulations
from scheduler.store.sql_webhooks import SqlWebhooks

ENDED_JOB_CACHE_MAX = 4096
ENDED_JOB_QUEUES_MAX = 200_000
_IDS_PER_QUERY = 500
"""How many decoded ended jobs are cached: decoding the jobs of a page takes longer than the rest of its request."""

_LAST_EVENT_NUMBER = select(func.max(EVENTS.c.number))


class SqlStore:
    """ServiceStore in SQL. Safe to use from several threads and processes at once.

    Args:
        url: a SQLAlchemy URL of a migrated database.
        tombstone_generations: for how many generations tombstones of removed records are kept. A reader whose
            snapshot is older fetches everything again.
        chains_audit: give each audit entry a digest that covers the one before it.

    Raises:
        StoreError: the database cannot be opened, or must be migrated.
    """

    def __init__(self, url: str, *, tombstone_generations: int = 1000, chains_audit: bool = False) -> None:
        self._engine = open_engine(url)
        try:
            require_current_revision(self._engine)
        except StoreError:
            self._engine.dispose()
            raise
        if chains_audit:
            self._engine = self._engine.execution_options(**{CHAIN_OPTION: True})
        self._snapshot_engine = make_snapshot_engine(self._engine)
        self._autocommit_engine = make_autocommit_engine(self._engine)
        self._tombstone_generations = tombstone_generations
        self.run_log = SqlRunLog(self._engine)
        self.webhooks = SqlWebhooks(self._engine)
        self.simulations = SqlSimulations(self._engine)
        self.comparisons = SqlDailyComparisons(self._engine)
        self.idempotency_keys = SqlIdempotencyKeys(self._engine)
        self.tokens = SqlTokenStore(self._engine)
        self.accounts = SqlAccountStore(self._engine)
        self.sessions = SqlSessionStore(self._engine)
        self.audit_log = SqlAuditLog(self._engine)
        self.machines = SqlMachines(self._engine)
        self.secrets = SqlSecrets(self._engine)
        self.retention = SqlRetention(self._engine)
        self.lending = SqlLendingHistory(self._autocommit_engine)
        self.allocations = SqlAllocationHistory(self._autocommit_engine)
        self.capacity = SqlCapacityHistory(self._engine)
        self.problems = SqlProblemHistory(self._engine)
        self.newest = SqlNewestHistory(self._autocommit_engine)
        self._command_writer = sql_inbox.CommandWriter(self._engine)
        self._ended_job_queues: dict[str, str] = {}
        self._ended_job_cache: dict[tuple[Any, ...], Job] = {}  # by number, id and generation; ended jobs never change
        # The lock guards the newest snapshot that this process has read or written, and the pending commands of the
        # generation beside them.
        self._lock = threading.Lock()
        self._latest_snapshot = Snapshot()
        self._pending = sql_inbox.PendingCommands()
        self._pending_generation = -1

    def load(self) -> LoadedState:
        with self._lock:
            with transaction(self._autocommit_engine) as connection:
                delta = sql_inbox.fetch_inbox_delta(connection, after=self._pending.last_number)
            recent = self._command_writer.recent
            pending = None
            if delta.generation == self._pending_generation:
                pending = sql_inbox.merge_pending(self._pending, delta, recent)
            if pending is None:
                with transaction(self._snapshot_engine) as connection:
                    newer = sql_state.fetch_snapshot_delta(connection, self._latest_snapshot)
                    delta = sql_inbox.fetch_inbox_delta(connection, after=0)
                self._latest_snapshot = sql_state.apply_snapshot_delta(newer)
                decoded = {command.id: command for command in self._pending.commands}
                pending = sql_inbox.merge_pending(sql_inbox.PendingCommands(), delta, {**recent, **decoded})
                assert pending is not None, "one statement returned all pending rows and their count"
            self._pending, self._pending_generation = pending, delta.generation
            return LoadedState(self._latest_snapshot, pending.commands)

    def commit(self, commit: Commit) -> None:
        generation = commit.snapshot.generation
        assert generation == commit.previous.generation + 1, "a commit advances by one generation"
        changed = sql_state.build_changed_rows(commit.previous, commit.snapshot)
        appended = [*sql_history.build_appended_rows(commit), build_receipt_rows(commit)]
        with transaction(self._engine) as connection:
            sql_state.fence(connection, commit.epoch)
            sql_state.advance_generation(connection, commit.previous, commit.snapshot)
            for table, rows in changed:
                replace_rows(connection, table, rows)
            sql_inbox.mark_consumed(connection, commit)
            sql_history.delete_replaced_readings(connection, commit.backfill)
            for table, rows in appended:
                insert_rows(connection, table, rows)
            insert_labels(connection, commit.ended_jobs)
            write_span_changes(connection, commit)
            sql_usage.add_usage_entries(connection, commit.usage)
            write_capacity(connection, commit)
            sql_history.upsert_samples(connection, commit.samples)
            if generation % self._tombstone_generations == 0:
                sql_state.delete_tombstones(connection, up_to_generation=generation - self._tombstone_generations)
        with self._lock:
            if self._latest_snapshot.generation <= generation:
                self._latest_snapshot = commit.snapshot

    def send(self, command: Command, *, audit: AuditEntry | None = None) -> bool:
        return self._command_writer.send(command, audit=audit)

    def get_command(self, command_id: str) -> Command | None:
        rows = fetch_rows(self._autocommit_engine, select(INBOX).where(INBOX.c.id == command_id))
        return next((decode_stored(Command, row.body) for row in rows), None)

    def count_pending_commands(self) -> int:
        with transaction(self._autocommit_engine) as connection:
            return connection.execute(sql_inbox.PENDING_COUNT).scalar_one()

    def acquire_lease(self, holder: str, *, now_s: float, ttl_s: float) -> Lease | None:
        assert holder, "the holder of the lease needs a name"
        with transaction(self._engine) as connection:
            return sql_state.acquire_lease(connection, holder, now_s=now_s, expires_at_s=now_s + ttl_s)

    def get_lease(self) -> Lease | None:
        with transaction(self._autocommit_engine) as connection:
            return sql_state.read_lease(connection)

    def release_lease(self, holder: str) -> None:
        with transaction(self._engine) as connection:
            sql_state.release_lease(connection, holder)

    def list_events(self, page: Page, *, subject: str = "") -> tuple[StoredEvent, ...]:
        rows = fetch_rows(self._autocommit_engine, sql_history.select_events(page, subject))
        return tuple(map(sql_history.decode_event_row, rows))

    def list_event_subjects(self, page: Page) -> tuple[tuple[int, str], ...]:
        rows = fetch_rows(self._autocommit_engine, sql_history.select_event_subjects(page))
        return tuple((row[0], row[1]) for row in rows)

    def get_events(self, numbers: Collection[int]) -> tuple[StoredEvent, ...]:
        rows = fetch_rows(self._autocommit_engine, sql_history.select_events_by_number(numbers)) if numbers else ()
        return tuple(map(sql_history.decode_event_row, rows))

    def list_last_events(self, subject: str, *, limit: int) -> tuple[StoredEvent, ...]:
        rows = fetch_rows(self._autocommit_engine, sql_history.select_last_events(subject, limit))
        return tuple(map(sql_history.decode_event_row, reversed(rows)))

    def get_last_event_number(self) -> int:
        return int(fetch_rows(self._autocommit_engine, _LAST_EVENT_NUMBER)[0][0] or 0)

    def list_decisions(self, page: Page) -> tuple[StoredDecision, ...]:
        rows = fetch_rows(self._autocommit_engine, sql_history.select_decisions(page))
        return tuple(map(sql_history.decode_decision_row, rows))

    def get_ended_job(self, job_id: str) -> Job | None:
        query = sql_history.select_last_ended(ENDED_JOBS, limit=1).where(ENDED_JOBS.c.id == job_id)
        return next((decode_stored(Job, row.body) for row in fetch_rows(self._autocommit_engine, query)), None)

    def list_ended_jobs(self, *, limit: int) -> tuple[Job, ...]:
        rows = fetch_rows(self._autocommit_engine, sql_history.select_last_ended(ENDED_JOBS, limit=limit))
        return tuple(decode_stored(Job, row.body) for row in rows)

    def find_ended_jobs(self, query: JobQuery, *, after: SortKey | None, limit: int) -> tuple[Job, ...]:
        rows = sql_job_search.find_ended_job_keys(self._autocommit_engine, query, after, limit)
        keys = [(row.number, row.id, row.generation) for row in rows]
        jobs = {key: job for key in keys if (job := self._ended_job_cache.get(key)) is not None}
        if missing := [key[0] for key in keys if key not in jobs]:
            rows = fetch_rows(self._autocommit_engine, sql_job_search.select_ended_job_rows(missing))
            jobs |= {(row.number, row.id, row.generation): decode_stored(Job, row.body) for row in rows}
        if len(self._ended_job_cache) > ENDED_JOB_CACHE_MAX:
            self._ended_job_cache = {}
        self._ended_job_cache.update(jobs)
        return tuple(jobs[key] for key in keys if key in jobs)

    def list_ended_loans(self, *, limit: int) -> tuple[Loan, ...]:
        rows = fetch_rows(self._autocommit_engine, sql_history.select_last_ended(ENDED_LOANS, limit=limit))
        return tuple(decode_stored(Loan, row.body) for row in rows)

    def find_ended_job_queues(self, job_ids: Collection[str]) -> Mapping[str, str]:
        known = self._ended_job_queues  # an ended job never changes its queue
        missing = [job_id for job_id in job_ids if job_id not in known]
        for start in range(0, len(missing), _IDS_PER_QUERY):
            query = sql_history.select_ended_job_queues(missing[start : start + _IDS_PER_QUERY])
            known.update((row[0], row[1]) for row in fetch_rows(self._autocommit_engine, query))
        found = {job_id: known[job_id] for job_id in job_ids if job_id in known}
        if len(known) > ENDED_JOB_QUEUES_MAX:
            self._ended_job_queues = {}
        return found

    def find_ended_loans(self, query: LoanQuery, *, after: SortKey | None, limit: int) -> tuple[Loan, ...]:
        rows = fetch_rows(self._autocommit_engine, sql_history.select_ended_loans(query, after, limit))
        return tuple(decode_stored(Loan, row.body) for row in rows)

    def list_readings(self, pool: str, *, since_s: float) -> tuple[DemandReading, ...]:
        rows = fetch_rows(self._autocommit_engine, sql_history.select_readings(pool, since_s))
        return tuple(map(sql_history.decode_reading_row, rows))

    def list_reading_bins(self, pool: str, *, since_s: float, bin_s: float) -> tuple[ReadingBin, ...]:
        rows = fetch_rows(self._autocommit_engine, sql_history.select_reading_bins(pool, since_s, bin_s))
        return tuple(ReadingBin(*row) for row in rows)

    def list_samples(self, job_id: str) -> tuple[Sample, ...]:
        rows = fetch_rows(self._autocommit_engine, sql_history.select_samples(job_id))
        return tuple(map(sql_history.decode_sample_row, rows))

    def load_usage(self, *, from_s: float, to_s: float) -> UsageSnapshot:
        with self._lock:
            with transaction(self._snapshot_engine) as connection:
                delta = sql_state.fetch_snapshot_delta(connection, self._latest_snapshot)
                entries = sql_usage.fetch_usage_entries(connection, from_s=from_s, to_s=to_s)
            self._latest_snapshot = snapshot = sql_state.apply_snapshot_delta(delta)
        return UsageSnapshot(entries, snapshot)

    def get_retention_mark(self, log: HistoryLog) -> int:
        return self.retention.get_mark(log)

    def close(self) -> None:
        self._engine.dispose()
