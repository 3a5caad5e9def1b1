"""Tables that only the API writes: audit log and idempotency keys."""

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
    Select,
    String,
    Table,
    TypedColumns,
    insert,
    select,
)

from scheduler.store.api_protocol import (
    AuditEntry,
    AuditFilter,
    IdempotencyKey,
    IdempotencyKeyUsedError,
    StoredAuditEntry,
)
from scheduler.store.audit_chain import ChainedEntry, ChainEnds, ChainReport, chain_entries, verify_entries
from scheduler.store.database import (
    METADATA,
    ROW_NUMBER,
    AnyRow,
    build_insert,
    fetch_rows,
    make_autocommit_engine,
    make_snapshot_engine,
    transaction,
)
from scheduler.store.protocol import Page


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
    actor_id: Named[str] = Column(String, server_default="")
    digest: Named[str | None] = Column(String)


class AuditChainColumns(TypedColumns):
    """Digests at both ends of the chain: `head` is the newest entry, `anchor` the newest one that was deleted."""

    end: Named[str] = Column(String, primary_key=True)
    digest: Named[str] = Column(String)


AUDIT_LOG = Table("audit_log", METADATA, AuditColumns)
Index(None, AUDIT_LOG.c.actor, AUDIT_LOG.c.number)
Index(None, AUDIT_LOG.c.actor_id, AUDIT_LOG.c.number)
Index(None, AUDIT_LOG.c.subject, AUDIT_LOG.c.number)
AUDIT_CHAIN = Table("audit_chain", METADATA, AuditChainColumns)
CHAIN_OPTION = "audit_chain"
"""Execution option of an engine whose audit entries are chained."""
_VERIFY_ROWS = 1000
_HEAD, _ANCHOR = "head", "anchor"
_AUDIT_FIELDS = tuple(AuditEntry.__dataclass_fields__)


class SqlAuditLog:
    """AuditLog in SQL. A trigger of the database refuses changes of its rows."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._read_engine = make_autocommit_engine(engine)

    def append(self, entry: AuditEntry) -> None:
        with transaction(self._engine) as connection:
            insert_audit_entries(connection, [entry])

    def list_entries(self, page: Page, filters: AuditFilter) -> tuple[StoredAuditEntry, ...]:
        query = _select_entries(filters).where(AUDIT_LOG.c.number > page.after).order_by(AUDIT_LOG.c.number)
        return self._fetch_entries(query.limit(page.limit))

    def list_newest(self, before: int, limit: int, filters: AuditFilter) -> tuple[StoredAuditEntry, ...]:
        query = _select_entries(filters).where(AUDIT_LOG.c.number < before).order_by(AUDIT_LOG.c.number.desc())
        return self._fetch_entries(query.limit(limit))

    def verify_chain(self, expected: str = "") -> ChainReport:
        with transaction(make_snapshot_engine(self._engine)) as connection:
            ends = {row.end: row.digest for row in connection.execute(select(AUDIT_CHAIN))}
            rows = connection.execution_options(yield_per=_VERIFY_ROWS).execute(
                select(AUDIT_LOG).order_by(AUDIT_LOG.c.number)
            )
            entries = (ChainedEntry(row.number, _decode_audit_row(row), row.digest) for row in rows)
            return verify_entries(entries, ChainEnds(ends.get(_HEAD, ""), ends.get(_ANCHOR, "")), expected=expected)

    def _fetch_entries(self, query: Select[*tuple[Any, ...]]) -> tuple[StoredAuditEntry, ...]:
        rows = fetch_rows(self._read_engine, query)
        return tuple(StoredAuditEntry(row.number, _decode_audit_row(row)) for row in rows)


def _select_entries(filters: AuditFilter) -> Select[*tuple[Any, ...]]:
    query = select(AUDIT_LOG)
    if filters.actor:
        query = query.where(AUDIT_LOG.c.actor == filters.actor)
    if filters.actor_id:
        query = query.where(AUDIT_LOG.c.actor_id == filters.actor_id)
    if filters.subject:
        query = query.where(AUDIT_LOG.c.subject == filters.subject)
    if filters.since_s is not None:
        query = query.where(AUDIT_LOG.c.at_s >= filters.since_s)
    return query


def insert_audit_entries(connection: Connection, entries: Sequence[AuditEntry]) -> None:
    """Append to the audit log within the transaction of `connection`.

    Call it last: a chain makes other transactions with entries wait until this one ends.
    """
    if not entries:
        return
    rows = [{name: getattr(entry, name) for name in _AUDIT_FIELDS} for entry in entries]
    if connection.get_execution_options().get(CHAIN_OPTION):
        digests = chain_entries(_lock_chain_head(connection), entries)
        _write_chain_end(connection, _HEAD, digests[-1])
        rows = [row | {"digest": digest} for row, digest in zip(rows, digests, strict=True)]
    connection.execute(insert(AUDIT_LOG), rows)


def move_chain_anchor(connection: Connection, digest: str | None) -> None:
    """Record the digest of the newest entry that retention deletes. Entries without a digest are no part of a chain."""
    if digest is not None:
        _write_chain_end(connection, _ANCHOR, digest)


def _lock_chain_head(connection: Connection) -> str:
    """Return the digest of the newest entry, and keep other transactions from adding one. Empty for a new chain."""
    new_head = build_insert(connection, AUDIT_CHAIN).values(end=_HEAD, digest="")
    # An update of its own value locks the row in every database.
    locked = new_head.on_conflict_do_update(index_elements=["end"], set_={"digest": AUDIT_CHAIN.c.digest})
    return str(connection.execute(locked.returning(AUDIT_CHAIN.c.digest)).scalar_one())


def _write_chain_end(connection: Connection, end: str, digest: str) -> None:
    written = build_insert(connection, AUDIT_CHAIN).values(end=end, digest=digest)
    connection.execute(written.on_conflict_do_update(index_elements=["end"], set_={"digest": digest}))


def _decode_audit_row(row: AnyRow) -> AuditEntry:
    return AuditEntry(*(getattr(row, name) for name in _AUDIT_FIELDS))


class IdempotencyKeyColumns(TypedColumns):
    id: Named[str] = Column(String, primary_key=True)
    document: Named[str] = Column(String)
    made: Named[str] = Column(String)


IDEMPOTENCY_KEYS = Table("creation_keys", METADATA, IdempotencyKeyColumns)


class SqlIdempotencyKeys:
    """IdempotencyKeyStore in SQL."""

    def __init__(self, engine: Engine) -> None:
        self._read_engine = make_autocommit_engine(engine)

    def find(self, key_id: str) -> tuple[IdempotencyKey, str] | None:
        rows = fetch_rows(self._read_engine, select(IDEMPOTENCY_KEYS).where(IDEMPOTENCY_KEYS.c.id == key_id))
        return next(((IdempotencyKey(row.id, row.document), row.made) for row in rows), None)


def insert_idempotency_key(connection: Connection, key: IdempotencyKey, created_id: str) -> None:
    """Store the key within the transaction of `connection`.

    Raises:
        IdempotencyKeyUsedError: another transaction has stored the key.
    """
    row = {"id": key.id, "document": key.document, "made": created_id}
    insert_if_new = build_insert(connection, IDEMPOTENCY_KEYS).values(row).on_conflict_do_nothing()
    if connection.execute(insert_if_new.returning(IDEMPOTENCY_KEYS.c.id)).one_or_none() is None:
        raise IdempotencyKeyUsedError(key.id)
