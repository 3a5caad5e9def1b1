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
from scheduler.domain.command import Command, SubmitJob
from scheduler.store import leadership
from scheduler.store.engine import for_glancing, transaction
from scheduler.store.front import AuditEntry, HistoryLog
from scheduler.store.history import AnyRow
from scheduler.store.sql_audit import AUDIT_LOG, log
from scheduler.store.tables import DECISIONS, EVENTS, INBOX, SWEPT
from scheduler.store.webhook_tables import DELIVERIES

ACTOR, ACTION = "ebbtide", "SweepHistory"


@dataclass(frozen=True, slots=True)
class Slice:
    """What one step has come to: the rows it removed, and whether nothing is left that is old enough."""

    rows: int
    is_last: bool


class SqlSweep:
    """`engine` is a store's, whose database has been migrated. Everything that writes raises FencedError where `epoch`
    leads no more."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._reading = for_glancing(engine)

    def up_to(self, swept: HistoryLog) -> int:
        """The number up to which rows are gone; 0: none is."""
        return next((row.up_to_number for row in self._rows(select(SWEPT).where(SWEPT.c.log == swept.value))), 0)

    def remove(self, old: HistoryLog, *, before_s: float, rows_max: int, epoch: int) -> Slice:
        """Take the oldest rows out that are from before that time."""
        if old is HistoryLog.DELIVERIES:
            return self._remove_deliveries(before_s, rows_max, epoch)
        table, at_s = _LOGS[old]
        newest = select(func.max(table.c.number)).scalar_subquery()
        following = select(table).where(table.c.number > self.up_to(old), table.c.number < newest)
        found = self._rows(following.order_by(table.c.number).limit(rows_max))
        rows = list(takewhile(lambda row: (since_s := getattr(row, at_s)) is not None and since_s < before_s, found))
        if rows:
            doomed = [row.number for row in rows if old is not HistoryLog.COMMANDS or not _submits(row)]
            with transaction(self._engine) as connection:
                leadership.fence(connection, epoch)
                last = rows[-1]
                _mark(connection, old, up_to=last.number, up_to_s=getattr(last, at_s), rows=len(doomed))
                connection.execute(delete(table).where(table.c.number.in_(doomed)))
            return Slice(len(doomed), len(rows) < rows_max)
        return Slice(0, is_last=True)

    def tell(self, *, now_s: float, epoch: int) -> None:
        """One entry in the audit log of all that was removed since the last."""
        rows = self._rows(select(SWEPT).where(SWEPT.c.rows_untold > 0).order_by(SWEPT.c.log))
        if not rows:
            return
        told = {row.log: {"rows": row.rows_untold, "up_to_s": row.up_to_s} for row in rows}
        with transaction(self._engine) as connection:
            leadership.fence(connection, epoch)
            log(connection, [AuditEntry(now_s, ACTOR, "", ACTION, "history", None, told, "")])
            connection.execute(update(SWEPT).values(rows_untold=0))

    def _remove_deliveries(self, before_s: float, rows_max: int, epoch: int) -> Slice:
        """They end in another order than they begin, so that the mark says nothing of their numbers."""
        is_old = DELIVERIES.c.ended_at_s < before_s
        found = self._rows(select(DELIVERIES.c.number).where(is_old).limit(rows_max))
        if not found:
            return Slice(0, is_last=True)
        doomed = DELIVERIES.c.number.in_([row.number for row in found])
        with transaction(self._engine) as connection:
            leadership.fence(connection, epoch)
            rows = connection.execute(delete(DELIVERIES).where(doomed, is_old)).rowcount  # one may be tried again
            _mark(connection, HistoryLog.DELIVERIES, up_to=0, up_to_s=before_s, rows=rows)
        return Slice(rows, len(found) < rows_max)

    def _rows(self, query: Select[*tuple[Any, ...]]) -> list[AnyRow]:
        with transaction(self._reading) as connection:
            return list(connection.execute(query).all())


def _mark(connection: Connection, swept: HistoryLog, *, up_to: int, up_to_s: float, rows: int) -> None:
    """Before the rows go: the database lets nobody remove an audit entry above the mark."""
    values = {"up_to_number": up_to, "up_to_s": up_to_s}
    more = values | {"rows_untold": SWEPT.c.rows_untold + rows}
    if not connection.execute(update(SWEPT).where(SWEPT.c.log == swept.value).values(more)).rowcount:
        connection.execute(insert(SWEPT), {"log": swept.value, **values, "rows_untold": rows})


def _submits(row: AnyRow) -> bool:
    """Submissions stay: an Idempotency-Key or an ElasticJob that comes again must never make a second job."""
    return isinstance(decode(Command, row.body).body, SubmitJob)


_LOGS: dict[HistoryLog, tuple[Table[Any], str]] = {
    HistoryLog.EVENTS: (EVENTS, "at_s"),
    HistoryLog.DECISIONS: (DECISIONS, "at_s"),
    HistoryLog.AUDIT: (AUDIT_LOG, "at_s"),
    HistoryLog.COMMANDS: (INBOX, "consumed_at_s"),
}
