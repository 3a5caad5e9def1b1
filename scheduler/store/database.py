"""Many rows at once. SQLite takes row by row at the price of a function call; a server is asked once for all of them,
with an array a column, because each statement costs both sides more than what most rows hold.

Opening a database: the one place that knows which dialect it speaks to.

Which form a database has, and which one this version of the program needs. Alembic, which changes it, is not asked:
it takes longer to import than a store to open.
"""

from __future__ import annotations

import json
import math
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from sqlalchemy import (
    JSON,
    Column,
    ColumnElement,
    Connection,
    Engine,
    MetaData,
    Select,
    String,
    Table,
    bindparam,
    cast,
    create_engine,
    event,
    func,
    inspect,
    select,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import (
    ArgumentError,
    DBAPIError,
    DisconnectionError,
    InterfaceError,
    OperationalError,
    SQLAlchemyError,
)
from sqlalchemy.exc import TimeoutError as NoConnectionError
from sqlalchemy.pool import ConnectionPoolEntry
from sqlalchemy.types import TypeEngine

from scheduler.store.protocol import UnavailableError

Rows = Sequence[dict[str, Any]]

encode_compact_json = json.JSONEncoder(separators=(",", ":")).encode


def insert_rows(connection: Connection, table: Table[Any], rows: Rows) -> None:
    """Append rows that all have the same columns, in this order."""
    _write_rows(connection, table, rows, replace=False)


def replace_rows(connection: Connection, table: Table[Any], rows: Rows) -> None:
    """Put rows, each of another primary key, in the place of those with the same one."""
    _write_rows(connection, table, rows, replace=True)


def _write_rows(connection: Connection, table: Table[Any], rows: Rows, *, replace: bool) -> None:
    if not rows:
        return
    columns = tuple(table.c[name] for name in rows[0])
    if connection.dialect.name == "sqlite":
        connection.execute(_build_row_insert(table, columns, replace), list(rows))
        return
    arrays = {column.name: format_array_literal(_format_values(column, rows)) for column in columns}
    connection.execute(_build_array_insert(table, columns, replace), arrays)


def format_array_literal(items: Iterable[Any]) -> str:
    """As PostgreSQL writes an array of numbers or texts. Its driver would quote sign by sign, which takes longer than
    all else of a commit."""
    return "{" + ",".join(["NULL" if item is None else _quote(str(item)) for item in items]) + "}"


def bind_array(name: str, kind: TypeEngine[Any]) -> ColumnElement[Any]:
    """The parameter of this name, given by `array`."""
    return cast(bindparam(name, type_=String()), postgresql.ARRAY(kind))


def _quote(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _format_values(column: Column[Any], rows: Rows) -> Iterator[Any]:
    values = (row[column.name] for row in rows)
    if not isinstance(column.type, JSON):
        return values
    return (None if body is None else encode_compact_json(body) for body in values)


@cache
def _build_row_insert(table: Table[Any], columns: tuple[Column[Any], ...], replace: bool) -> Any:
    return _add_upsert(sqlite.insert(table), table, columns) if replace else sqlite.insert(table)


@cache
def _build_array_insert(table: Table[Any], columns: tuple[Column[Any], ...], replace: bool) -> Any:
    adding = postgresql.insert(table).from_select([column.name for column in columns], _select_unnested(columns))
    return _add_upsert(adding, table, columns) if replace else adding


def _select_unnested(columns: Sequence[Column[Any]]) -> Select[*tuple[Any, ...]]:
    texts = {column.name for column in columns if isinstance(column.type, JSON | String)}
    arrays = [bind_array(column.name, String() if column.name in texts else column.type) for column in columns]
    given = func.unnest(*arrays).table_valued(*(column.name for column in columns)).render_derived()
    return select(*(cast(given.c[column.name], column.type) for column in columns))


def _add_upsert(statement: Any, table: Table[Any], columns: Sequence[Column[Any]]) -> Any:
    keys = [column.name for column in table.primary_key]
    others = {column.name: statement.excluded[column.name] for column in columns if column.name not in keys}
    return statement.on_conflict_do_update(index_elements=keys, set_=others)


_PRAGMAS = (
    "busy_timeout = 10000",
    # Each commit reaches the disk before it counts: a job that was accepted survives a power failure.
    "synchronous = FULL",
)
# A host that has vanished answers nothing at all: without limits, a statement waits for a quarter of an hour. What the
# URL says comes before these. In s, but for those in ms at the end. A leader that was stopped in mid-commit would hold
# the row of the lease for ever: the server ends its session before the lease is over.
_POSTGRESQL_LIMITS = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
    "options": "-c idle_in_transaction_session_timeout=5000 -c statement_timeout=30000",
}
_WAL_LIMIT_S, _WAL_RETRY_S = 10.0, 0.05
_PING_AFTER_IDLE_S = 1.0
_WRITER_LOCK_ID = 0x7E8B71DE  # any number that nobody else in this database takes for something else
CONNECTION_ERRORS = (OperationalError, InterfaceError, NoConnectionError)


class StoreError(ValueError):
    """The database cannot be used as it is; the message says which one, why, and what to do."""


class StoreUnreachableError(StoreError, UnavailableError):
    """It does not answer now, and may do so later."""


def open_engine(url: str, *, serialize_writes: bool = False) -> Engine:
    """An engine for a SQLAlchemy URL. `writes_at_once` lets one transaction at a time begin of all that ask for it.

    Raises:
        StoreError: the URL is malformed, or names a database that there is no driver for.
    """
    try:
        engine = create_engine(
            make_url(url),
            json_serializer=encode_compact_json,
            **_build_connect_options(make_url(url)),
        )
    except (ArgumentError, ModuleNotFoundError) as refused:
        allowed = "a URL like sqlite:////var/lib/ebbtide/state.sqlite or postgresql+psycopg://user@host/ebbtide"
        raise StoreError(f"database url: cannot open {_mask_url(url)!r} ({refused}); give {allowed}") from None
    if engine.dialect.name == "sqlite":
        _set_up_sqlite(engine, "BEGIN IMMEDIATE" if serialize_writes else "BEGIN")
        return engine
    _ping_idle_connections(engine)
    if serialize_writes:
        _serialize_transactions(engine)
    return engine


def make_snapshot_engine(engine: Engine) -> Engine:
    """The same pool of connections, with every SELECT of a transaction seeing one and the same moment."""
    if engine.dialect.name == "sqlite":
        return engine  # its transactions always read from one moment
    return engine.execution_options(isolation_level="REPEATABLE READ")


def make_autocommit_engine(engine: Engine) -> Engine:
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
        if not isinstance(failed, CONNECTION_ERRORS) and not getattr(failed, "connection_invalidated", False):
            raise
        raise UnavailableError(f"database {redact_url(engine)}: {getattr(failed, 'orig', None) or failed}") from failed


def redact_url(engine: Engine) -> str:
    """The URL for people, without its password."""
    return engine.url.render_as_string(hide_password=True)


def _build_connect_options(url: URL) -> dict[str, Any]:
    """How to go about a database that is a server."""
    if url.get_backend_name() != "postgresql":
        return {}
    limits = {name: limit for name, limit in _POSTGRESQL_LIMITS.items() if name not in url.query}
    return {"connect_args": limits}


def _ping_idle_connections(engine: Engine) -> None:
    """A server may have been restarted since a pooled connection was last used. Asking each time would double the work
    of a glance, so one that was used a moment ago is trusted: if wrongly, a request fails, and the pool is renewed."""

    @event.listens_for(engine, "checkin")
    def note(_connection: object, record: ConnectionPoolEntry) -> None:
        record.info["used_at_s"] = time.monotonic()

    @event.listens_for(engine, "checkout")
    def look(connection: Any, record: ConnectionPoolEntry, _proxy: object) -> None:
        if time.monotonic() - record.info.get("used_at_s", math.inf) > _PING_AFTER_IDLE_S:
            try:
                engine.dialect.do_ping(connection)
            except engine.dialect.loaded_dbapi.Error as gone:
                raise DisconnectionError from gone


def _serialize_transactions(engine: Engine) -> None:
    """For PostgreSQL: a transaction begins when those before it have ended."""

    @event.listens_for(engine, "begin")
    def take_turn(connection: Connection) -> None:
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_WRITER_LOCK_ID})")


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


def _mask_url(url: str) -> str:
    """What may stand in an error: everything after the scheme could hold a password."""
    scheme, separator, _ = url.partition("://")
    return f"{scheme}://..." if separator else url


MIGRATIONS_FOLDER = Path(__file__).parent / "migrations"
_ALEMBIC_VERSION = Table("alembic_version", MetaData(), Column("version_num", String))


def require_current_revision(engine: Engine) -> None:
    """Refuse a database of another form than this version's.

    Raises:
        StoreError: it cannot be reached, or has to be migrated.
    """
    if (file := _find_missing_file(engine)) is not None:
        raise StoreError(f"database {redact_url(engine)}: there is no file {file}; `ebbtide migrate` makes one")
    found, needed = _read_revisions(engine), {max(_list_known_revisions())}
    if found != needed:
        raise StoreError(
            f"database {redact_url(engine)} is at revision {_format_revisions(found)}, this version needs {_format_revisions(needed)}: "
            "run `ebbtide migrate`"
        )


def reject_newer_revision(engine: Engine) -> None:
    """Refuse a database that this version cannot bring to its own form.

    Raises:
        StoreError: it cannot be reached, or was made by a newer version.
    """
    if newer := _read_revisions(engine) - _list_known_revisions():
        raise StoreError(
            f"database {redact_url(engine)} is at {_format_revisions(newer)}, which only a newer version knows"
        )


def _list_known_revisions() -> set[str]:
    """By the names of their scripts: rNNNN_what_it_does.py, one after the other."""
    return {path.name[1:].partition("_")[0] for path in (MIGRATIONS_FOLDER / "versions").glob("r*.py")}


def _find_missing_file(engine: Engine) -> Path | None:
    """The file that SQLite would make, empty, at the first look at a database that is not there."""
    file = engine.url.database if engine.dialect.name == "sqlite" else None
    if not file or file == ":memory:" or file.startswith("file:") or Path(file).exists():
        return None
    return Path(file)


def _read_revisions(engine: Engine) -> set[str]:
    try:
        with engine.connect() as connection:
            if not inspect(connection).has_table(_ALEMBIC_VERSION.name):
                return set()
            return set(connection.scalars(select(_ALEMBIC_VERSION.c.version_num)))
    except SQLAlchemyError as failed:
        cause = getattr(failed, "orig", None) or failed
        kind = StoreUnreachableError if isinstance(failed, CONNECTION_ERRORS) else StoreError
        raise kind(f"database {redact_url(engine)} cannot be opened: {cause}") from None


def _format_revisions(revisions: set[str]) -> str:
    return ", ".join(sorted(revisions)) or "none"
