"""SqlSweep: takes old rows out of what only grows, a slice in each transaction, for the leader alone.

A mark says up to which number a log has been swept, so that a reader whose cursor lies before it can be told. The
newest row of a log always stays: SQLite would give its number out again.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from sqlalchemy import Connection, Engine, Select, Table, delete, func, insert, select, update

from scheduler.domain.codec import decode
from scheduler.domain.commands import Command, SubmitJob
from scheduler.store import sql_state
from scheduler.store.api_protocol import AuditEntry, HistoryLog
from scheduler.store.database import make_autocommit_engine, transaction
from scheduler.store.sql_api_tables import AUDIT_LOG, insert_audit_entries
from scheduler.store.sql_history import AnyRow
from scheduler.store.sql_webhooks import DELIVERIES
from scheduler.store.tables import DECISIONS, EVENTS, INBOX, RETENTION_MARKS

RETENTION_ACTOR, RETENTION_ACTION = "ebbtide", "SweepHistory"


@dataclass(frozen=True, slots=True)
class DeletedBatch:
    """What one step has come to: the rows it removed, and whether nothing is left that is old enough."""

    rows: int
    is_complete: bool


class SqlRetention:
    """`engine` is a store's, whose database has been migrated. Everything that writes raises FencedError where `epoch`
    leads no more."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._read_engine = make_autocommit_engine(engine)

    def get_mark(self, log: HistoryLog) -> int:
        """The number up to which rows are gone; 0: none is."""
        return next(
            (
                row.up_to_number
                for row in self._fetch_rows(select(RETENTION_MARKS).where(RETENTION_MARKS.c.log == log.value))
            ),
            0,
        )

    def delete_old_rows(self, log: HistoryLog, *, before_s: float, rows_max: int, epoch: int) -> DeletedBatch:
        """Take the oldest rows out that are from before that time."""
        if log is HistoryLog.DELIVERIES:
            return self._delete_deliveries(before_s, rows_max, epoch)
        table, at_s = _LOG_TABLES[log]
        newest = select(func.max(table.c.number)).scalar_subquery()
        following = select(table).where(table.c.number > self.get_mark(log), table.c.number < newest)
        found = self._fetch_rows(following.order_by(table.c.number).limit(rows_max))
        rows = list(takewhile(lambda row: (since_s := getattr(row, at_s)) is not None and since_s < before_s, found))
        if rows:
            doomed = [row.number for row in rows if log is not HistoryLog.COMMANDS or not _is_submission(row)]
            with transaction(self._engine) as connection:
                sql_state.fence(connection, epoch)
                last = rows[-1]
                _advance_mark(connection, log, up_to=last.number, up_to_s=getattr(last, at_s), rows=len(doomed))
                connection.execute(delete(table).where(table.c.number.in_(doomed)))
            return DeletedBatch(len(doomed), len(rows) < rows_max)
        return DeletedBatch(0, is_complete=True)

    def audit_deletions(self, *, now_s: float, epoch: int) -> None:
        """One entry in the audit log of all that was removed since the last."""
        rows = self._fetch_rows(
            select(RETENTION_MARKS).where(RETENTION_MARKS.c.rows_untold > 0).order_by(RETENTION_MARKS.c.log)
        )
        if not rows:
            return
        told = {row.log: {"rows": row.rows_untold, "up_to_s": row.up_to_s} for row in rows}
        with transaction(self._engine) as connection:
            sql_state.fence(connection, epoch)
            insert_audit_entries(
                connection, [AuditEntry(now_s, RETENTION_ACTOR, "", RETENTION_ACTION, "history", None, told, "")]
            )
            connection.execute(update(RETENTION_MARKS).values(rows_untold=0))

    def _delete_deliveries(self, before_s: float, rows_max: int, epoch: int) -> DeletedBatch:
        """They end in another order than they begin, so that the mark says nothing of their numbers."""
        is_old = DELIVERIES.c.ended_at_s < before_s
        found = self._fetch_rows(select(DELIVERIES.c.number).where(is_old).limit(rows_max))
        if not found:
            return DeletedBatch(0, is_complete=True)
        doomed = DELIVERIES.c.number.in_([row.number for row in found])
        with transaction(self._engine) as connection:
            sql_state.fence(connection, epoch)
            rows = connection.execute(delete(DELIVERIES).where(doomed, is_old)).rowcount  # one may be tried again
            _advance_mark(connection, HistoryLog.DELIVERIES, up_to=0, up_to_s=before_s, rows=rows)
        return DeletedBatch(rows, len(found) < rows_max)

    def _fetch_rows(self, query: Select[*tuple[Any, ...]]) -> list[AnyRow]:
        with transaction(self._read_engine) as connection:
            return list(connection.execute(query).all())


def _advance_mark(connection: Connection, log: HistoryLog, *, up_to: int, up_to_s: float, rows: int) -> None:
    """Before the rows go: the database lets nobody remove an audit entry above the mark."""
    values = {"up_to_number": up_to, "up_to_s": up_to_s}
    more = values | {"rows_untold": RETENTION_MARKS.c.rows_untold + rows}
    if not connection.execute(update(RETENTION_MARKS).where(RETENTION_MARKS.c.log == log.value).values(more)).rowcount:
        connection.execute(insert(RETENTION_MARKS), {"log": log.value, **values, "rows_untold": rows})


def _is_submission(row: AnyRow) -> bool:
    """Submissions stay: an Idempotency-Key or an ElasticJob that comes again must never make a second job."""
    return isinstance(decode(Command, row.body).body, SubmitJob)


_LOG_TABLES: dict[HistoryLog, tuple[Table[Any], str]] = {
    HistoryLog.EVENTS: (EVENTS, "at_s"),
    HistoryLog.DECISIONS: (DECISIONS, "at_s"),
    HistoryLog.AUDIT: (AUDIT_LOG, "at_s"),
    HistoryLog.COMMANDS: (INBOX, "consumed_at_s"),
}
