"""Opening a database: the one place that knows which dialect it speaks to."""

from __future__ import annotations

import json
import sqlite3
import time
from functools import partial
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

_PRAGMAS = (
    "busy_timeout = 10000",
    # Each commit reaches the disk before it counts: a job that was accepted survives a power failure.
    "synchronous = FULL",
)
_WAL_TRIES, _WAL_RETRY_S = 200, 0.05


class StoreError(ValueError):
    """The database cannot be used as it is; the message says which one, why, and what to do."""


def open_engine(url: str, *, writes_at_once: bool = False) -> Engine:
    """An engine for a SQLAlchemy URL. `writes_at_once` takes SQLite's write lock when a transaction begins.

    Raises:
        StoreError: the URL is malformed, or names a database that there is no driver for.
    """
    try:
        engine = create_engine(make_url(url), json_serializer=partial(json.dumps, separators=(",", ":")))
    except (ArgumentError, ModuleNotFoundError) as refused:
        allowed = "a URL like sqlite:////var/lib/ebbtide/state.sqlite or postgresql+psycopg://user@host/ebbtide"
        raise StoreError(f"database url: cannot open {_masked(url)!r} ({refused}); give {allowed}") from None
    if engine.dialect.name == "sqlite":
        _set_up_sqlite(engine, "BEGIN IMMEDIATE" if writes_at_once else "BEGIN")
    return engine


def for_reading(engine: Engine) -> Engine:
    """The same pool of connections, with every SELECT of a transaction seeing one and the same moment."""
    if engine.dialect.name == "sqlite":
        return engine  # its transactions always read from one moment
    return engine.execution_options(isolation_level="REPEATABLE READ")


def name_of(engine: Engine) -> str:
    """The URL for people, without its password."""
    return engine.url.render_as_string(hide_password=True)


def _set_up_sqlite(engine: Engine, begin: str) -> None:
    """Python's driver opens no transaction before a SELECT, so that two SELECTs may see two states: begin here."""

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, _record: object) -> None:
        connection.isolation_level = None
        for pragma in _PRAGMAS:
            connection.execute(f"PRAGMA {pragma}")
        _switch_to_wal(connection)

    @event.listens_for(engine, "begin")
    def begin_transaction(connection: Connection) -> None:
        connection.exec_driver_sql(begin)


def _switch_to_wal(connection: Any) -> None:
    """The file stays in this mode. SQLite does not wait its `busy_timeout` when two switch a new file at once."""
    for tries_left in reversed(range(_WAL_TRIES)):
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as refused:
            if refused.sqlite_errorcode != sqlite3.SQLITE_BUSY or not tries_left:
                raise
        time.sleep(_WAL_RETRY_S)


def _masked(url: str) -> str:
    """What may stand in an error: everything after the scheme could hold a password."""
    scheme, separator, _ = url.partition("://")
    return f"{scheme}://..." if separator else url
