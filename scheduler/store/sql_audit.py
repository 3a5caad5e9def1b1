"""SqlAudit: the audit log in the database of a SqlStore. Nothing here changes rows, and the database refuses it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import (
    JSON,
    Column,
    Connection,
    Double,
    Engine,
    Index,
    Named,
    String,
    Table,
    TypedColumns,
    insert,
    select,
)

from scheduler.store.engine import for_glancing, transaction
from scheduler.store.front import AuditEntry, AuditFilter, StoredEntry
from scheduler.store.protocol import Page
from scheduler.store.tables import METADATA, ROW_NUMBER


class AuditColumns(TypedColumns):
    number: Named[int] = Column(ROW_NUMBER, primary_key=True)
    at_s: Named[float] = Column(Double)
    actor: Named[str] = Column(String)
    token_id: Named[str] = Column(String)
    action: Named[str] = Column(String)
    subject: Named[str] = Column(String)
    before: Named[Any] = Column(JSON(none_as_null=True), nullable=True)
    after: Named[Any] = Column(JSON(none_as_null=True), nullable=True)
    request_id: Named[str] = Column(String)
    outcome: Named[str] = Column(String)


AUDIT_LOG = Table("audit_log", METADATA, AuditColumns)
Index(None, AUDIT_LOG.c.actor, AUDIT_LOG.c.number)
Index(None, AUDIT_LOG.c.subject, AUDIT_LOG.c.number)
_FIELDS = tuple(AuditEntry.__dataclass_fields__)


class SqlAudit:
    """See AuditLog. `engine` is a store's, whose database has been migrated."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._reading = for_glancing(engine)

    def append(self, entry: AuditEntry) -> None:
        with transaction(self._engine) as connection:
            log(connection, [entry])

    def page(self, page: Page, wanted: AuditFilter) -> tuple[StoredEntry, ...]:
        query = select(AUDIT_LOG).where(AUDIT_LOG.c.number > page.after)
        if wanted.actor:
            query = query.where(AUDIT_LOG.c.actor == wanted.actor)
        if wanted.subject:
            query = query.where(AUDIT_LOG.c.subject == wanted.subject)
        if wanted.since_s is not None:
            query = query.where(AUDIT_LOG.c.at_s >= wanted.since_s)
        with transaction(self._reading) as connection:
            rows = connection.execute(query.order_by(AUDIT_LOG.c.number).limit(page.limit)).all()
        return tuple(StoredEntry(row.number, AuditEntry(*(getattr(row, name) for name in _FIELDS))) for row in rows)


def log(connection: Connection, entries: Sequence[AuditEntry]) -> None:
    """Append within a transaction that does more."""
    if entries:
        connection.execute(insert(AUDIT_LOG), [{name: getattr(entry, name) for name in _FIELDS} for entry in entries])
