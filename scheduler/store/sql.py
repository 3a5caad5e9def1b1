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
from scheduler.domain.command import Command
from scheduler.domain.fleet import DemandReading
from scheduler.domain.job import Job
from scheduler.domain.loan import Loan
from scheduler.domain.sample import Sample
from scheduler.domain.snapshot import Snapshot
from scheduler.store import history, inbox, leadership, live_state
from scheduler.store.bulk import insert_rows, replace_rows
from scheduler.store.engine import StoreError, for_glancing, for_reading, open_engine, transaction
from scheduler.store.front import AuditEntry, Books
from scheduler.store.protocol import Commit, Lease, Loaded, Page, StoredDecision, StoredEvent
from scheduler.store.queries import JobQuery, LoanQuery, Place
from scheduler.store.revision import require_head
from scheduler.store.sql_audit import SqlAudit
from scheduler.store.sql_keys import SqlKeys
from scheduler.store.sql_run_log import SqlRunLog
from scheduler.store.sql_samples import put_samples, sample, select_samples
from scheduler.store.sql_simulations import SqlSimulations
from scheduler.store.sql_sweep import SqlSweep
from scheduler.store.sql_tokens import SqlTokens
from scheduler.store.sql_usage import add_usage, read_usage
from scheduler.store.sql_webhooks import SqlWebhooks
from scheduler.store.tables import ENDED_JOBS, ENDED_LOANS, EVENTS, INBOX

_NEWEST_EVENT = select(func.max(EVENTS.c.number))

LISTED_MAX = 4096
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

    def __init__(self, url: str, *, tombstones_kept: int = 1000) -> None:
        self._engine = open_engine(url)
        try:
            require_head(self._engine)
        except StoreError:
            self._engine.dispose()
            raise
        self._reading, self._glancing = for_reading(self._engine), for_glancing(self._engine)
        self._tombstones_kept = tombstones_kept
        self.run_log = SqlRunLog(self._engine)
        self.webhooks = SqlWebhooks(self._engine)
        self.simulations = SqlSimulations(self._engine)
        self.creation_keys = SqlKeys(self._engine)
        self.tokens = SqlTokens(self._engine)
        self.audit_log = SqlAudit(self._engine)
        self.sweep = SqlSweep(self._engine)
        self.swept_up_to = self.sweep.up_to
        self._lock = threading.Lock()
        self._listed: dict[tuple[Any, ...], Job] = {}  # ended jobs by number, id and generation: they never change
        self._newest = Snapshot()  # guarded by the lock: the newest snapshot that this process read or wrote
        self._waiting, self._waiting_at = inbox.Waiting(), -1  # likewise: what waited at a generation
        self._outbox = inbox.Outbox(self._engine)

    def load(self) -> Loaded:
        with self._lock:
            with transaction(self._glancing) as connection:
                seen = inbox.glance(connection, after=self._waiting.newest)
            sent = self._outbox.recent
            waiting = inbox.joined(self._waiting, seen, sent) if seen.generation == self._waiting_at else None
            if waiting is None:
                with transaction(self._reading) as connection:
                    newer = live_state.fetch_newer(connection, self._newest)
                    seen = inbox.glance(connection, after=0)
                self._newest = live_state.refresh(newer)
                known = {command.id: command for command in self._waiting.commands}
                waiting = inbox.joined(inbox.Waiting(), seen, {**sent, **known})
                assert waiting is not None, "one moment, all rows"
            self._waiting, self._waiting_at = waiting, seen.generation
            return Loaded(self._newest, waiting.commands)

    def commit(self, commit: Commit) -> None:
        generation = commit.snapshot.generation
        assert generation == commit.previous.generation + 1, "a commit moves on by one generation"
        changes, appended = live_state.changes(commit.previous, commit.snapshot), history.appended(commit)
        with transaction(self._engine) as connection:
            leadership.fence(connection, commit.epoch)
            live_state.advance(connection, commit.previous, commit.snapshot)
            for table, rows in changes:
                replace_rows(connection, table, rows)
            history.consume(connection, commit)
            for table, rows in appended:
                insert_rows(connection, table, rows)
            add_usage(connection, commit.usage)
            put_samples(connection, commit.samples)
            if generation % self._tombstones_kept == 0:
                live_state.sweep(connection, up_to_generation=generation - self._tombstones_kept)
        with self._lock:
            if self._newest.generation <= generation:
                self._newest = commit.snapshot

    def send(self, command: Command, *, audit: AuditEntry | None = None) -> bool:
        return self._outbox.send(command, audit=audit)

    def command(self, command_id: str) -> Command | None:
        rows = self._rows(select(INBOX).where(INBOX.c.id == command_id))
        return next((decode(Command, row.body) for row in rows), None)

    def inbox_size(self) -> int:
        with transaction(self._glancing) as connection:
            return connection.execute(inbox.COUNT).scalar_one()

    def acquire(self, holder: str, *, now_s: float, ttl_s: float) -> Lease | None:
        assert holder, "the lease needs a holder with a name"
        with transaction(self._engine) as connection:
            return leadership.acquire_lease(connection, holder, now_s=now_s, expires_at_s=now_s + ttl_s)

    def lease(self) -> Lease | None:
        with transaction(self._glancing) as connection:
            return leadership.read_lease(connection)

    def release(self, holder: str) -> None:
        with transaction(self._engine) as connection:
            leadership.release_lease(connection, holder)

    def events(self, page: Page, *, subject: str = "") -> tuple[StoredEvent, ...]:
        return tuple(map(history.stored_event, self._rows(history.select_events(page, subject))))

    def last_events(self, subject: str, *, limit: int) -> tuple[StoredEvent, ...]:
        newest = self._rows(history.select_last_events(subject, limit))
        return tuple(map(history.stored_event, reversed(newest)))

    def newest_event(self) -> int:
        return int(self._rows(_NEWEST_EVENT)[0][0] or 0)

    def decisions(self, page: Page) -> tuple[StoredDecision, ...]:
        return tuple(map(history.stored_decision, self._rows(history.select_decisions(page))))

    def ended_job(self, job_id: str) -> Job | None:
        of_job = history.select_ended(ENDED_JOBS, limit=1).where(ENDED_JOBS.c.id == job_id)
        return next((decode(Job, row.body) for row in self._rows(of_job)), None)

    def ended_jobs(self, *, limit: int) -> tuple[Job, ...]:
        return tuple(decode(Job, row.body) for row in self._rows(history.select_ended(ENDED_JOBS, limit=limit)))

    def find_ended_jobs(self, wanted: JobQuery, *, after: Place | None, limit: int) -> tuple[Job, ...]:
        listed = [tuple(row) for row in self._rows(history.select_ended_jobs(wanted, after, limit))]
        jobs = {key: job for key in listed if (job := self._listed.get(key)) is not None}
        if missing := [key[0] for key in listed if key not in jobs]:
            found = self._rows(history.select_ended_bodies(missing))
            jobs |= {(row.number, row.id, row.generation): decode(Job, row.body) for row in found}
        if len(self._listed) > LISTED_MAX:
            self._listed = {}
        self._listed.update(jobs)
        return tuple(jobs[key] for key in listed if key in jobs)

    def ended_loans(self, *, limit: int) -> tuple[Loan, ...]:
        return tuple(decode(Loan, row.body) for row in self._rows(history.select_ended(ENDED_LOANS, limit=limit)))

    def find_ended_loans(self, wanted: LoanQuery, *, after: Place | None, limit: int) -> tuple[Loan, ...]:
        return tuple(decode(Loan, row.body) for row in self._rows(history.select_ended_loans(wanted, after, limit)))

    def readings(self, pool: str, *, since_s: float) -> tuple[DemandReading, ...]:
        return tuple(map(history.reading, self._rows(history.select_readings(pool, since_s))))

    def samples(self, job_id: str) -> tuple[Sample, ...]:
        return tuple(map(sample, self._rows(select_samples(job_id))))

    def usage(self, *, from_s: float, to_s: float) -> Books:
        with self._lock:
            with transaction(self._reading) as connection:
                newer = live_state.fetch_newer(connection, self._newest)
                entries = read_usage(connection, from_s=from_s, to_s=to_s)
            self._newest = snapshot = live_state.refresh(newer)
        return Books(entries, snapshot)

    def close(self) -> None:
        self._engine.dispose()

    def _rows(self, query: Select[*tuple[Any, ...]]) -> Sequence[history.AnyRow]:
        with transaction(self._glancing) as connection:
            return connection.execute(query).all()
