"""Retention in the database: deletes old rows of the logs, one batch per transaction, on behalf of the leader.

A mark records up to which row number a log was deleted, so that readers with an older cursor get an error. The newest
row of a log always stays, because SQLite would reuse its number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    Double,
    Engine,
    Named,
    String,
    Table,
    TypedColumns,
    and_,
    delete,
    func,
    insert,
    select,
    true,
    update,
)

from scheduler.domain.capacity_history import HOURS, MINUTES, TEN_MINUTES
from scheduler.domain.codec import decode_stored
from scheduler.domain.commands import Command, SubmitJob
from scheduler.domain.job_queue import HOUR_S
from scheduler.store import sql_state
from scheduler.store.api_protocol import AuditEntry, HistoryLog
from scheduler.store.database import METADATA, AnyRow, fetch_rows, make_autocommit_engine, transaction
from scheduler.store.sql_allocations import ALLOCATION_SPANS
from scheduler.store.sql_api_tables import AUDIT_LOG, insert_audit_entries, move_chain_anchor
from scheduler.store.sql_capacity_history import CAPACITY_BINS, FLEET_CHANGES, FLEET_CHECKPOINTS
from scheduler.store.sql_history import DECISIONS, ENDED_JOBS, ENDED_LOANS, EVENTS, JOB_SAMPLES, READINGS
from scheduler.store.sql_inbox import INBOX
from scheduler.store.sql_job_labels import delete_labels
from scheduler.store.sql_lending_history import RECALL_RECEIPTS
from scheduler.store.sql_problems import PROBLEM_EPISODES
from scheduler.store.sql_simulations import DAILY_COMPARISONS
from scheduler.store.sql_usage import MODEL_USAGE, USAGE
from scheduler.store.sql_webhooks import DELIVERIES


class RetentionMarkColumns(TypedColumns):
    """One row per log from which rows were deleted. `rows_untold` counts those without an audit entry."""

    log: Named[str] = Column(String, primary_key=True)
    up_to_number: Named[int] = Column(BigInteger)
    up_to_s: Named[float] = Column(Double)
    rows_untold: Named[int] = Column(BigInteger)


RETENTION_MARKS = Table("swept", METADATA, RetentionMarkColumns)
RETENTION_ACTOR, RETENTION_ACTION = "ebbtide", "SweepHistory"

_TIME_COLUMNS: dict[HistoryLog, tuple[Table[Any], str]] = {
    HistoryLog.EVENTS: (EVENTS, "at_s"),
    HistoryLog.DECISIONS: (DECISIONS, "at_s"),
    HistoryLog.AUDIT: (AUDIT_LOG, "at_s"),
    HistoryLog.COMMANDS: (INBOX, "consumed_at_s"),
    HistoryLog.READINGS: (READINGS, "at_s"),
    HistoryLog.RECALL_RECEIPTS: (RECALL_RECEIPTS, "closed_at_s"),
}
_END_COLUMNS: dict[HistoryLog, tuple[Table[Any], str]] = {
    HistoryLog.DELIVERIES: (DELIVERIES, "ended_at_s"),
    HistoryLog.ALLOCATIONS: (ALLOCATION_SPANS, "end_s"),
}
_ENDED_TABLES: dict[HistoryLog, Table[Any]] = {
    HistoryLog.ENDED_JOBS: ENDED_JOBS,
    HistoryLog.ENDED_LOANS: ENDED_LOANS,
}
"""Tables whose rows have the time of their end in their body."""
_BIN = CAPACITY_BINS.c
_SHARED_TABLES: dict[HistoryLog, tuple[Table[Any], Column[Any], ColumnElement[bool]]] = {
    HistoryLog.CAPACITY_MINUTES: (CAPACITY_BINS, _BIN.at_s, _BIN.step_s == MINUTES.step_s),
    HistoryLog.CAPACITY_TEN_MINUTES: (CAPACITY_BINS, _BIN.at_s, _BIN.step_s == TEN_MINUTES.step_s),
    HistoryLog.CAPACITY_HOURS: (CAPACITY_BINS, _BIN.at_s, _BIN.step_s == HOURS.step_s),
    HistoryLog.CHECKPOINTS: (FLEET_CHECKPOINTS, FLEET_CHECKPOINTS.c.at_s, FLEET_CHECKPOINTS.c.is_hourly.is_(False)),
    HistoryLog.HOURLY_CHECKPOINTS: (
        FLEET_CHECKPOINTS, FLEET_CHECKPOINTS.c.at_s, FLEET_CHECKPOINTS.c.is_hourly.is_(True)
    ),
    HistoryLog.FLEET_CHANGES: (FLEET_CHANGES, FLEET_CHANGES.c.at_s, true()),
    HistoryLog.PROBLEMS: (PROBLEM_EPISODES, PROBLEM_EPISODES.c.end_s, PROBLEM_EPISODES.c.is_closed),
    HistoryLog.COMPARISONS: (DAILY_COMPARISONS, DAILY_COMPARISONS.c.day_s, true()),
}  # fmt: skip
"""Tables without row numbers: the column of their time, and the condition of the log's rows."""
_END_FIELD = "state_since_s"


@dataclass(frozen=True, slots=True)
class DeletedBatch:
    """How many rows a step deleted, and whether no old rows are left."""

    rows: int
    is_complete: bool


class SqlRetention:
    """Deletion of rows for the leader. Every write raises FencedError if the lease has another epoch."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._read_engine = make_autocommit_engine(engine)

    def get_mark(self, log: HistoryLog) -> int:
        """Return the row number up to which the log was deleted; 0 if nothing was."""
        marks = fetch_rows(self._read_engine, select(RETENTION_MARKS).where(RETENTION_MARKS.c.log == log.value))
        return next((row.up_to_number for row in marks), 0)

    def delete_old_rows(self, log: HistoryLog, *, before_s: float, rows_max: int, epoch: int) -> DeletedBatch:
        """Delete up to `rows_max` of the oldest rows from before that time."""
        if log in _END_COLUMNS:
            return self._delete_ended(log, before_s, rows_max, epoch)
        if log is HistoryLog.USAGE:
            return self._delete_usage(before_s, rows_max, epoch)
        if log in _SHARED_TABLES:
            return self._delete_from_shared_table(log, before_s, rows_max, epoch)
        table, find_time_s = _find_table(log)
        newest = select(func.max(table.c.number)).scalar_subquery()
        candidates = select(table).where(table.c.number > self.get_mark(log), table.c.number < newest)
        rows, times_s = list[AnyRow](), list[float]()
        for row in fetch_rows(self._read_engine, candidates.order_by(table.c.number).limit(rows_max)):
            at_s = find_time_s(row)
            if at_s is None or at_s >= before_s:
                break
            rows.append(row)
            times_s.append(at_s)
        if not rows:
            return DeletedBatch(0, is_complete=True)
        numbers = [row.number for row in rows if log is not HistoryLog.COMMANDS or not _is_submission(row)]
        with transaction(self._engine) as connection:
            sql_state.fence(connection, epoch)
            up_to_s = times_s[-1]
            _advance_mark(connection, log, up_to=rows[-1].number, up_to_s=up_to_s, rows=len(numbers))
            connection.execute(delete(table).where(table.c.number.in_(numbers)))
            if log is HistoryLog.ENDED_JOBS:
                job_ids = [row.id for row in rows]
                connection.execute(delete(JOB_SAMPLES).where(JOB_SAMPLES.c.job_id.in_(job_ids)))
                delete_labels(connection, job_ids)
            if log is HistoryLog.AUDIT:
                move_chain_anchor(connection, rows[-1].digest)
        return DeletedBatch(len(numbers), is_complete=len(rows) < rows_max)

    def audit_deletions(self, *, now_s: float, epoch: int) -> None:
        """Write one audit entry for all rows deleted since the last one."""
        unaudited = select(RETENTION_MARKS).where(RETENTION_MARKS.c.rows_untold > 0).order_by(RETENTION_MARKS.c.log)
        rows = fetch_rows(self._read_engine, unaudited)
        if not rows:
            return
        deleted = {row.log: {"rows": row.rows_untold, "up_to_s": row.up_to_s} for row in rows}
        entry = AuditEntry(now_s, RETENTION_ACTOR, "", RETENTION_ACTION, "history", None, deleted, "")
        with transaction(self._engine) as connection:
            sql_state.fence(connection, epoch)
            insert_audit_entries(connection, [entry])
            connection.execute(update(RETENTION_MARKS).values(rows_untold=0))

    def _delete_usage(self, before_s: float, rows_max: int, epoch: int) -> DeletedBatch:
        """Delete usage of the oldest hours, whole hours at a time. Its rows have no numbers, so the mark has none."""
        is_old = USAGE.c.hour_s < int(before_s - HOUR_S)
        oldest = select(USAGE.c.hour_s).where(is_old).order_by(USAGE.c.hour_s).limit(rows_max)
        found = fetch_rows(self._read_engine, oldest)
        if not found:
            return DeletedBatch(0, is_complete=True)
        with transaction(self._engine) as connection:
            sql_state.fence(connection, epoch)
            last_hour_s = found[-1].hour_s
            rows = connection.execute(delete(USAGE).where(is_old, USAGE.c.hour_s <= last_hour_s)).rowcount
            connection.execute(delete(MODEL_USAGE).where(MODEL_USAGE.c.hour_s <= last_hour_s))
            _advance_mark(connection, HistoryLog.USAGE, up_to=0, up_to_s=before_s, rows=rows)
        return DeletedBatch(rows, is_complete=len(found) < rows_max)

    def _delete_from_shared_table(self, log: HistoryLog, before_s: float, rows_max: int, epoch: int) -> DeletedBatch:
        """Delete rows of the oldest times, all rows of a time at once. They have no numbers, so the mark has none."""
        table, at_s, is_of_log = _SHARED_TABLES[log]
        is_old = and_(is_of_log, at_s < int(before_s))
        oldest = select(at_s.label("at_s")).where(is_old).order_by(at_s).limit(rows_max)
        found = fetch_rows(self._read_engine, oldest)
        if not found:
            return DeletedBatch(0, is_complete=True)
        with transaction(self._engine) as connection:
            sql_state.fence(connection, epoch)
            rows = connection.execute(delete(table).where(is_old, at_s <= found[-1][0])).rowcount
            _advance_mark(connection, log, up_to=0, up_to_s=before_s, rows=rows)
        return DeletedBatch(rows, is_complete=len(found) < rows_max)

    def _delete_ended(self, log: HistoryLog, before_s: float, rows_max: int, epoch: int) -> DeletedBatch:
        """Delete rows by their end. They do not end in the order of their numbers, so that the mark has no number."""
        table, end_column = _END_COLUMNS[log]
        is_old = table.c[end_column] < before_s
        found = fetch_rows(self._read_engine, select(table.c.number).where(is_old).limit(rows_max))
        if not found:
            return DeletedBatch(0, is_complete=True)
        is_found = table.c.number.in_([row.number for row in found])
        with transaction(self._engine) as connection:
            sql_state.fence(connection, epoch)
            # A delivery may have been made pending again since it was found, which clears its end.
            rows = connection.execute(delete(table).where(is_found, is_old)).rowcount
            _advance_mark(connection, log, up_to=0, up_to_s=before_s, rows=rows)
        return DeletedBatch(rows, is_complete=len(found) < rows_max)


def _advance_mark(connection: Connection, log: HistoryLog, *, up_to: int, up_to_s: float, rows: int) -> None:
    """Write the mark. Call before deleting: a trigger of the database protects audit entries above the mark."""
    values = {"up_to_number": up_to, "up_to_s": up_to_s}
    changes = values | {"rows_untold": RETENTION_MARKS.c.rows_untold + rows}
    updated = connection.execute(update(RETENTION_MARKS).where(RETENTION_MARKS.c.log == log.value).values(changes))
    if not updated.rowcount:
        connection.execute(insert(RETENTION_MARKS), {"log": log.value, **values, "rows_untold": rows})


def _find_table(log: HistoryLog) -> tuple[Table[Any], Callable[[AnyRow], float | None]]:
    """Return the table of a log, and a function that returns the time of a row."""
    if log in _ENDED_TABLES:
        return _ENDED_TABLES[log], _get_end_s
    table, time_column = _TIME_COLUMNS[log]
    return table, attrgetter(time_column)


def _get_end_s(row: AnyRow) -> float:
    return float(row.body[_END_FIELD])


def _is_submission(row: AnyRow) -> bool:
    """Tell whether a command submits a job. These stay, so that a repeated submission never creates a second job."""
    return isinstance(decode_stored(Command, row.body).body, SubmitJob)
