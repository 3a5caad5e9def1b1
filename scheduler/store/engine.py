"""Opening a database: the one place that knows which dialect it speaks to."""

from __future__ import annotations

import math
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, DisconnectionError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as NoConnectionError
from sqlalchemy.pool import ConnectionPoolEntry

from scheduler.store.bulk import compact
from scheduler.store.protocol import UnavailableError

_PRAGMAS = (
    "busy_timeout = 10000",
    # Each commit reaches the disk before it counts: a job that was accepted survives a power failure.
    "synchronous = FULL",
)
# A host that has vanished answers nothing at all: without limits, a statement waits for a quarter of an hour. What the
# URL says comes before these. In s, but for those in ms at the end. A leader that was stopped in mid-commit would hold
# the row of the lease for ever: the server ends its session before the lease is over.
_POSTGRESQL = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
    "options": "-c idle_in_transaction_session_timeout=5000 -c statement_timeout=30000",
}
_WAL_LIMIT_S, _WAL_RETRY_S = 10.0, 0.05
_TRUSTED_S = 1.0
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
        engine = create_engine(
            make_url(url),
            json_serializer=compact,
            **_served(make_url(url)),
        )
    except (ArgumentError, ModuleNotFoundError) as refused:
        allowed = "a URL like sqlite:////var/lib/ebbtide/state.sqlite or postgresql+psycopg://user@host/ebbtide"
        raise StoreError(f"database url: cannot open {_masked(url)!r} ({refused}); give {allowed}") from None
    if engine.dialect.name == "sqlite":
        _set_up_sqlite(engine, "BEGIN IMMEDIATE" if writes_at_once else "BEGIN")
        return engine
    _look_after_rest(engine)
    if writes_at_once:
        _queue_up(engine)
    return engine


def for_reading(engine: Engine) -> Engine:
    """The same pool of connections, with every SELECT of a transaction seeing one and the same moment."""
    if engine.dialect.name == "sqlite":
        return engine  # its transactions always read from one moment
    return engine.execution_options(isolation_level="REPEATABLE READ")


def for_glancing(engine: Engine) -> Engine:
    """The same pool of connections, for one SELECT at a time: a server is then asked once, not three times."""
    if engine.dialect.name == "sqlite":
        return engine
    return engine.execution_options(isolation_level="AUTOCOMMIT")


@contextmanager
def transaction(engine: Engine) -> Iterator[Connection]:
    """One transaction: committed at the end, rolled back where anything is raised.

    Raises:
        UnavailableError: the database did not answer, or not in time.
    """
    try:
        with engine.begin() as connection:
            yield connection
    except (DBAPIError, NoConnectionError) as failed:
        # A session that the server has ended, for having said nothing, is told of in an error of another kind.
        if not isinstance(failed, NO_ANSWER) and not getattr(failed, "connection_invalidated", False):
            raise
        raise UnavailableError(f"database {name_of(engine)}: {getattr(failed, 'orig', None) or failed}") from failed


def name_of(engine: Engine) -> str:
    """The URL for people, without its password."""
    return engine.url.render_as_string(hide_password=True)


def _served(url: URL) -> dict[str, Any]:
    """How to go about a database that is a server."""
    if url.get_backend_name() != "postgresql":
        return {}
    limits = {name: limit for name, limit in _POSTGRESQL.items() if name not in url.query}
    return {"connect_args": limits}


def _look_after_rest(engine: Engine) -> None:
    """A server may have been restarted since a pooled connection was last used. Asking each time would double the work
    of a glance, so one that was used a moment ago is trusted: if wrongly, a request fails, and the pool is renewed."""

    @event.listens_for(engine, "checkin")
    def note(_connection: object, record: ConnectionPoolEntry) -> None:
        record.info["used_at_s"] = time.monotonic()

    @event.listens_for(engine, "checkout")
    def look(connection: Any, record: ConnectionPoolEntry, _proxy: object) -> None:
        if time.monotonic() - record.info.get("used_at_s", math.inf) > _TRUSTED_S:
            try:
                engine.dialect.do_ping(connection)
            except engine.dialect.loaded_dbapi.Error as gone:
                raise DisconnectionError from gone


def _queue_up(engine: Engine) -> None:
    """For PostgreSQL: a transaction begins when those before it have ended."""

    @event.listens_for(engine, "begin")
    def take_turn(connection: Connection) -> None:
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_WRITERS_LOCK})")


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
