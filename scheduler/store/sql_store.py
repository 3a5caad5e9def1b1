"""SqlStore: the store in a SQL database. One process commits; any number of them read and send.

Every writing transaction begins with a write, so that it queues for its turn at once and never works on old facts.
Rows are built before a transaction opens, and decoded after it has closed.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Select, func, select

from scheduler.domain.codec import decode
from scheduler.domain.commands import Command
from scheduler.domain.fleet import DemandReading, Loan
from scheduler.domain.job import Job
from scheduler.domain.job_records import Sample
from scheduler.domain.snapshot import Snapshot
from scheduler.store import sql_history, sql_inbox, sql_state
from scheduler.store.api_protocol import AuditEntry, JobQuery, LoanQuery, SortKey, UsageSnapshot
from scheduler.store.database import (
    StoreError,
    insert_rows,
    make_autocommit_engine,
    make_snapshot_engine,
    open_engine,
    replace_rows,
    require_current_revision,
    transaction,
)
from scheduler.store.protocol import Commit, Lease, LoadedState, Page, StoredDecision, StoredEvent
from scheduler.store.sql_api_tables import SqlAuditLog, SqlIdempotencyKeys, SqlTokenStore
from scheduler.store.sql_history import (
    add_usage_entries,
    decode_sample_row,
    fetch_usage_entries,
    select_samples,
    upsert_samples,
)
from scheduler.store.sql_retention import SqlRetention
from scheduler.store.sql_run_log import SqlRunLog
from scheduler.store.sql_simulations import SqlSimulations
from scheduler.store.sql_webhooks import SqlWebhooks
from scheduler.store.tables import ENDED_JOBS, ENDED_LOANS, EVENTS, INBOX

_LAST_EVENT_NUMBER = select(func.max(EVENTS.c.number))

ENDED_JOB_CACHE_MAX = 4096
"""How many ended jobs are kept decoded: to decode the hundred of a page takes longer than all else of its request."""


class SqlStore:
    """Safe to use from several threads and processes at once.

    Args:
        url: a SQLAlchemy URL; the database has to be migrated already.
        tombstones_kept: for how many generations the removal of a record stays on file. A reader that lags
            further behind reads everything again.

    Raises:
        StoreError: the database cannot be opened, or has to be migrated.
    """

    def __init__(self, url: str, *, tombstone_generations: int = 1000) -> None:
        self._engine = open_engine(url)
        try:
            require_current_revision(self._engine)
        except StoreError:
            self._engine.dispose()
            raise
        self._snapshot_engine, self._autocommit_engine = (
            make_snapshot_engine(self._engine),
            make_autocommit_engine(self._engine),
        )
        self._tombstone_generations = tombstone_generations
        self.run_log = SqlRunLog(self._engine)
        self.webhooks = SqlWebhooks(self._engine)
        self.simulations = SqlSimulations(self._engine)
        self.idempotency_keys = SqlIdempotencyKeys(self._engine)
        self.tokens = SqlTokenStore(self._engine)
        self.audit_log = SqlAuditLog(self._engine)
        self.retention = SqlRetention(self._engine)
        self.get_retention_mark = self.retention.get_mark
        self._lock = threading.Lock()
        self._ended_job_cache: dict[
            tuple[Any, ...], Job
        ] = {}  # ended jobs by number, id and generation: they never change
        self._latest_snapshot = Snapshot()  # guarded by the lock: the newest snapshot that this process read or wrote
        self._pending, self._pending_generation = (
            sql_inbox.PendingCommands(),
            -1,
        )  # likewise: what waited at a generation
        self._command_writer = sql_inbox.CommandWriter(self._engine)

    def load(self) -> LoadedState:
        with self._lock:
            with transaction(self._autocommit_engine) as connection:
                seen = sql_inbox.fetch_inbox_delta(connection, after=self._pending.last_number)
            sent = self._command_writer.recent
            waiting = (
                sql_inbox.merge_pending(self._pending, seen, sent)
                if seen.generation == self._pending_generation
                else None
            )
            if waiting is None:
                with transaction(self._snapshot_engine) as connection:
                    newer = sql_state.fetch_snapshot_delta(connection, self._latest_snapshot)
                    seen = sql_inbox.fetch_inbox_delta(connection, after=0)
                self._latest_snapshot = sql_state.apply_snapshot_delta(newer)
                known = {command.id: command for command in self._pending.commands}
                waiting = sql_inbox.merge_pending(sql_inbox.PendingCommands(), seen, {**sent, **known})
                assert waiting is not None, "one moment, all rows"
            self._pending, self._pending_generation = waiting, seen.generation
            return LoadedState(self._latest_snapshot, waiting.commands)

    def commit(self, commit: Commit) -> None:
        generation = commit.snapshot.generation
        assert generation == commit.previous.generation + 1, "a commit moves on by one generation"
        changes, appended = (
            sql_state.build_changed_rows(commit.previous, commit.snapshot),
            sql_history.build_appended_rows(commit),
        )
        with transaction(self._engine) as connection:
            sql_state.fence(connection, commit.epoch)
            sql_state.advance_generation(connection, commit.previous, commit.snapshot)
            for table, rows in changes:
                replace_rows(connection, table, rows)
            sql_history.mark_consumed(connection, commit)
            for table, rows in appended:
                insert_rows(connection, table, rows)
            add_usage_entries(connection, commit.usage)
            upsert_samples(connection, commit.samples)
            if generation % self._tombstone_generations == 0:
                sql_state.delete_tombstones(connection, up_to_generation=generation - self._tombstone_generations)
        with self._lock:
            if self._latest_snapshot.generation <= generation:
                self._latest_snapshot = commit.snapshot

    def send(self, command: Command, *, audit: AuditEntry | None = None) -> bool:
        return self._command_writer.send(command, audit=audit)

    def get_command(self, command_id: str) -> Command | None:
        rows = self._fetch_rows(select(INBOX).where(INBOX.c.id == command_id))
        return next((decode(Command, row.body) for row in rows), None)

    def count_pending_commands(self) -> int:
        with transaction(self._autocommit_engine) as connection:
            return connection.execute(sql_inbox.PENDING_COUNT).scalar_one()

    def acquire_lease(self, holder: str, *, now_s: float, ttl_s: float) -> Lease | None:
        assert holder, "the lease needs a holder with a name"
        with transaction(self._engine) as connection:
            return sql_state.acquire_lease(connection, holder, now_s=now_s, expires_at_s=now_s + ttl_s)

    def get_lease(self) -> Lease | None:
        with transaction(self._autocommit_engine) as connection:
            return sql_state.read_lease(connection)

    def release_lease(self, holder: str) -> None:
        with transaction(self._engine) as connection:
            sql_state.release_lease(connection, holder)

    def list_events(self, page: Page, *, subject: str = "") -> tuple[StoredEvent, ...]:
        return tuple(map(sql_history.decode_event_row, self._fetch_rows(sql_history.select_events(page, subject))))

    def list_last_events(self, subject: str, *, limit: int) -> tuple[StoredEvent, ...]:
        newest = self._fetch_rows(sql_history.select_last_events(subject, limit))
        return tuple(map(sql_history.decode_event_row, reversed(newest)))

    def get_last_event_number(self) -> int:
        return int(self._fetch_rows(_LAST_EVENT_NUMBER)[0][0] or 0)

    def list_decisions(self, page: Page) -> tuple[StoredDecision, ...]:
        return tuple(map(sql_history.decode_decision_row, self._fetch_rows(sql_history.select_decisions(page))))

    def get_ended_job(self, job_id: str) -> Job | None:
        of_job = sql_history.select_last_ended(ENDED_JOBS, limit=1).where(ENDED_JOBS.c.id == job_id)
        return next((decode(Job, row.body) for row in self._fetch_rows(of_job)), None)

    def list_ended_jobs(self, *, limit: int) -> tuple[Job, ...]:
        return tuple(
            decode(Job, row.body) for row in self._fetch_rows(sql_history.select_last_ended(ENDED_JOBS, limit=limit))
        )

    def find_ended_jobs(self, query: JobQuery, *, after: SortKey | None, limit: int) -> tuple[Job, ...]:
        listed = [tuple(row) for row in self._fetch_rows(sql_history.select_ended_job_keys(query, after, limit))]
        jobs = {key: job for key in listed if (job := self._ended_job_cache.get(key)) is not None}
        if missing := [key[0] for key in listed if key not in jobs]:
            found = self._fetch_rows(sql_history.select_ended_job_rows(missing))
            jobs |= {(row.number, row.id, row.generation): decode(Job, row.body) for row in found}
        if len(self._ended_job_cache) > ENDED_JOB_CACHE_MAX:
            self._ended_job_cache = {}
        self._ended_job_cache.update(jobs)
        return tuple(jobs[key] for key in listed if key in jobs)

    def list_ended_loans(self, *, limit: int) -> tuple[Loan, ...]:
        return tuple(
            decode(Loan, row.body) for row in self._fetch_rows(sql_history.select_last_ended(ENDED_LOANS, limit=limit))
        )

    def find_ended_loans(self, query: LoanQuery, *, after: SortKey | None, limit: int) -> tuple[Loan, ...]:
        return tuple(
            decode(Loan, row.body) for row in self._fetch_rows(sql_history.select_ended_loans(query, after, limit))
        )

    def list_readings(self, pool: str, *, since_s: float) -> tuple[DemandReading, ...]:
        return tuple(map(sql_history.decode_reading_row, self._fetch_rows(sql_history.select_readings(pool, since_s))))

    def list_samples(self, job_id: str) -> tuple[Sample, ...]:
        return tuple(map(decode_sample_row, self._fetch_rows(select_samples(job_id))))

    def load_usage(self, *, from_s: float, to_s: float) -> UsageSnapshot:
        with self._lock:
            with transaction(self._snapshot_engine) as connection:
                newer = sql_state.fetch_snapshot_delta(connection, self._latest_snapshot)
                entries = fetch_usage_entries(connection, from_s=from_s, to_s=to_s)
            self._latest_snapshot = snapshot = sql_state.apply_snapshot_delta(newer)
        return UsageSnapshot(entries, snapshot)

    def close(self) -> None:
        self._engine.dispose()

    def _fetch_rows(self, query: Select[*tuple[Any, ...]]) -> Sequence[sql_history.AnyRow]:
        with transaction(self._autocommit_engine) as connection:
            return connection.execute(query).all()
