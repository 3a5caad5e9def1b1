"""Opening a database: the one place that knows which dialect it speaks to."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as NoConnectionError

from scheduler.store.protocol import UnavailableError

_PRAGMAS = (
    "busy_timeout = 10000",
    # Each commit reaches the disk before it counts: a job that was accepted survives a power failure.
    "synchronous = FULL",
)
_WAL_LIMIT_S, _WAL_RETRY_S = 10.0, 0.05
_CONNECT_S = 10
_WRITERS_LOCK = 0x7E8B71DE  # any number that nobody else in this database takes for something else
NO_ANSWER = (OperationalError, InterfaceError, NoConnectionError)


class StoreError(ValueError):
    """The database cannot be used as it is; the message says which one, why, and what to do."""


class UnreachableError(StoreError, UnavailableError):
    """It does not answer now, and may do so later."""


def open_engine(url: str, *, writes_at_once: bool = False) -> Engine:
    """An engine for a SQLAlchemy URL. `writes_at_once` lets one transaction at a time begin of all that ask for it.

    Raises:
        StoreError: the URL is malformed, or names a database that there is no driver for.
    """
    try:
        target = make_url(url)
        # A server may have been restarted since a pooled connection was last used.
        served = {} if target.get_backend_name() == "sqlite" else {"pool_pre_ping": True}
        engine = create_engine(target, json_serializer=partial(json.dumps, separators=(",", ":")), **served)
    except (ArgumentError, ModuleNotFoundError) as refused:
        allowed = "a URL like sqlite:////var/lib/ebbtide/state.sqlite or postgresql+psycopg://user@host/ebbtide"
        raise StoreError(f"database url: cannot open {_masked(url)!r} ({refused}); give {allowed}") from None
    if engine.dialect.name == "sqlite":
        _set_up_sqlite(engine, "BEGIN IMMEDIATE" if writes_at_once else "BEGIN")
    elif engine.dialect.name == "postgresql":
        _set_up_postgresql(engine, writes_at_once=writes_at_once)
    return engine


def for_reading(engine: Engine) -> Engine:
    """The same pool of connections, with every SELECT of a transaction seeing one and the same moment."""
    if engine.dialect.name == "sqlite":
        return engine  # its transactions always read from one moment
    return engine.execution_options(isolation_level="REPEATABLE READ")


@contextmanager
def transaction(engine: Engine) -> Iterator[Connection]:
    """One transaction: committed at the end, rolled back where anything is raised.

    Raises:
        UnavailableError: the database did not answer, or not in time.
    """
    try:
        with engine.begin() as connection:
            yield connection
    except NO_ANSWER as failed:
        raise UnavailableError(f"database {name_of(engine)}: {getattr(failed, 'orig', None) or failed}") from failed


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


def _set_up_postgresql(engine: Engine, *, writes_at_once: bool) -> None:
    """A server that cannot be reached is told of within seconds, not when TCP gives up."""

    @event.listens_for(engine, "do_connect")
    def limit(_dialect: object, _record: object, _arguments: object, parameters: dict[str, Any]) -> None:
        parameters.setdefault("connect_timeout", _CONNECT_S)

    if writes_at_once:

        @event.listens_for(engine, "begin")
        def queue_up(connection: Connection) -> None:
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_WRITERS_LOCK})")


def _switch_to_wal(connection: Any) -> None:
    """The file stays in this mode. SQLite does not wait its `busy_timeout` when two switch a new file at once."""
    limit_s = time.monotonic() + _WAL_LIMIT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as refused:
            if refused.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > limit_s:
                raise
        time.sleep(_WAL_RETRY_S)


def _masked(url: str) -> str:
    """What may stand in an error: everything after the scheme could hold a password."""
    scheme, separator, _ = url.partition("://")
    return f"{scheme}://..." if separator else url
