"""Encrypted secrets of queues in the database."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Double, Engine, Named, String, Table, TypedColumns, delete, select, update

from scheduler.store.api_protocol import AuditEntry
from scheduler.store.database import METADATA, build_insert, fetch_rows, make_autocommit_engine, transaction
from scheduler.store.sealed_secrets import SealedSecret
from scheduler.store.sql_api_tables import insert_audit_entries


class SecretColumns(TypedColumns):
    queue: Named[str] = Column(String, primary_key=True)
    name: Named[str] = Column(String, primary_key=True)
    version: Named[int] = Column(BigInteger)
    master_key: Named[str] = Column(String)
    wrapped_key: Named[str] = Column(String)
    sealed_value: Named[str] = Column(String)
    created_at_s: Named[float] = Column(Double)
    changed_at_s: Named[float] = Column(Double)
    changed_by: Named[str] = Column(String)


SECRETS = Table("secrets", METADATA, SecretColumns)
_FIELDS = tuple(SealedSecret.__dataclass_fields__)


class SqlSecrets:
    """SecretStore in SQL."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._read_engine = make_autocommit_engine(engine)

    def put(self, secret: SealedSecret, audit: AuditEntry) -> SealedSecret:
        row = {name: getattr(secret, name) for name in _FIELDS}
        replaced = {name: row[name] for name in _FIELDS if name not in ("queue", "name", "version", "created_at_s")}
        with transaction(self._engine) as connection:
            upsert = build_insert(connection, SECRETS).values(row)
            upsert = upsert.on_conflict_do_update(
                index_elements=["queue", "name"], set_=replaced | {"version": SECRETS.c.version + 1}
            )
            stored = connection.execute(upsert.returning(SECRETS.c.version, SECRETS.c.created_at_s)).one()
            insert_audit_entries(connection, [audit])
        return SealedSecret(**row | {"version": stored.version, "created_at_s": stored.created_at_s})

    def find(self, queue: str, name: str) -> SealedSecret | None:
        query = select(SECRETS).where(SECRETS.c.queue == queue, SECRETS.c.name == name)
        rows = fetch_rows(self._read_engine, query)
        return next((SealedSecret(*(getattr(row, field) for field in _FIELDS)) for row in rows), None)

    def list_secrets(self, queue: str) -> tuple[SealedSecret, ...]:
        query = select(SECRETS).order_by(SECRETS.c.queue, SECRETS.c.name)
        if queue:
            query = query.where(SECRETS.c.queue == queue)
        rows = fetch_rows(self._read_engine, query)
        return tuple(SealedSecret(*(getattr(row, field) for field in _FIELDS)) for row in rows)

    def rewrap(self, secret: SealedSecret, audit: AuditEntry | None = None) -> bool:
        same = (SECRETS.c.queue == secret.queue) & (SECRETS.c.name == secret.name)
        values = {"master_key": secret.master_key, "wrapped_key": secret.wrapped_key}
        same &= (SECRETS.c.version == secret.version) & (SECRETS.c.sealed_value == secret.sealed_value)
        with transaction(self._engine) as connection:
            is_found = connection.execute(update(SECRETS).where(same).values(values)).rowcount == 1
            insert_audit_entries(connection, [audit] if audit and is_found else [])
        return is_found

    def remove(self, queue: str, name: str, audit: AuditEntry) -> bool:
        own = (SECRETS.c.queue == queue) & (SECRETS.c.name == name)
        with transaction(self._engine) as connection:
            is_found = connection.execute(delete(SECRETS).where(own)).rowcount == 1
            insert_audit_entries(connection, [audit] if is_found else [])
        return is_found
