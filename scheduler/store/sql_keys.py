"""Idempotency keys in the database: what each of them has made, written in the transaction that made it.

Keys of jobs are not among them: those name the command in the inbox.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Column, Connection, Engine, Named, String, Table, TypedColumns, select
from sqlalchemy.dialects import postgresql, sqlite

from scheduler.store.engine import for_glancing, transaction
from scheduler.store.tables import METADATA

_INSERTS: dict[str, Any] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}


class KeyColumns(TypedColumns):
    id: Named[str] = Column(String, primary_key=True)
    document: Named[str] = Column(String)
    made: Named[str] = Column(String)


CREATION_KEYS = Table("creation_keys", METADATA, KeyColumns)


@dataclass(frozen=True, slots=True)
class CreationKey:
    """`id` is the digest of noun, principal and key, `document` that of what was asked for."""

    id: str
    document: str


class KeyTakenError(Exception):
    """Something was made with this key before. Nothing was written."""


class SqlKeys:
    """`engine` is a store's, whose database has been migrated."""

    def __init__(self, engine: Engine) -> None:
        self._reading = for_glancing(engine)

    def find(self, key_id: str) -> tuple[CreationKey, str] | None:
        """The key as it was taken, and the id of what it made; None where nobody has taken it."""
        with transaction(self._reading) as connection:
            row = connection.execute(select(CREATION_KEYS).where(CREATION_KEYS.c.id == key_id)).one_or_none()
        return None if row is None else (CreationKey(row.id, row.document), row.made)


def take_key(connection: Connection, key: CreationKey, made: str) -> None:
    """Take the key in the transaction of `connection`, which then is the only one. Raises KeyTakenError."""
    row = {"id": key.id, "document": key.document, "made": made}
    unless_taken = _INSERTS[connection.dialect.name](CREATION_KEYS).values(row).on_conflict_do_nothing()
    if connection.execute(unless_taken.returning(CREATION_KEYS.c.id)).one_or_none() is None:
        raise KeyTakenError(key.id)
