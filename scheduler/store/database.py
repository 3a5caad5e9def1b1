"""Database engines, transactions and bulk writes. Only this module distinguishes SQL dialects."""

from __future__ import annotations

import json
import math
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    Connection,
    Engine,
    Integer,
    MetaData,
    Row,
    Select,
    String,
    Table,
    bindparam,
    cast,
    create_engine,
    event,
    func,
    select,
    text,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, DisconnectionError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as NoConnectionError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.pool import ConnectionPoolEntry
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import GenericFunction
from sqlalchemy.types import Double, TypeEngine

from scheduler.store.protocol import UnavailableError

METADATA = MetaData(
    naming_convention={"pk": "pk_%(table_name)s", "ix": "ix_%(table_name)s_%(column_0_N_name)s"},
)
ROW_NUMBER = BigInteger().with_variant(Integer(), "sqlite")
"""Type of automatically numbered primary keys. SQLite numbers rows only in columns of type INTEGER, with 64 bits."""

CODE_POINT_ORDERED = String().with_variant(String(collation="C"), "postgresql")
"""Text that is sorted by code points in every database, as in Python."""

Rows = Sequence[dict[str, Any]]
AnyRow = Row[*tuple[Any, ...]]

CONNECTION_ERRORS = (OperationalError, InterfaceError, NoConnectionError)
_PRAGMAS = (
    "busy_timeout = 10000",
    # Each commit is on disk before it returns, so that an accepted job survives a power failure.
    "synchronous = FULL",
)
# Defaults for PostgreSQL; parameters of the URL take precedence. In seconds, except for the timeouts in ms at the end.
# Without them, a statement to an unreachable host waits for 15 minutes. The idle timeout makes the server end the
# session of a leader that is suspended in mid-commit: it would hold the row lock of the lease forever.
_POSTGRESQL_LIMITS = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
    "options": "-c idle_in_transaction_session_timeout=5000 -c statement_timeout=30000",
}
_WAL_TIMEOUT_S, _WAL_RETRY_S = 10.0, 0.05
_PING_AFTER_IDLE_S = 1.0
_WRITER_LOCK_ID = 0x7E8B71DE  # an arbitrary number; no other application may use it in this database


class StateSince(GenericFunction[float]):
    """The `state_since_s` of a body. It contains no parameter, so an index can hold it."""

    type = Double()
    inherit_cache = True


@compiles(StateSince, "sqlite")
def _extract_with_sqlite(each: StateSince, compiler: SQLCompiler, **options: Any) -> str:
    return f"json_extract({compiler.process(each.clauses, **options)}, '$.state_since_s')"


@compiles(StateSince, "postgresql")
def _extract_with_postgresql(each: StateSince, compiler: SQLCompiler, **options: Any) -> str:
    return f"CAST({compiler.process(each.clauses, **options)} ->> 'state_since_s' AS double precision)"


class BinNumber(GenericFunction[int]):
    """The largest whole number up to a number of at least -1, also in an SQLite without mathematical functions."""

    type = BigInteger()
    inherit_cache = True


@compiles(BinNumber, "sqlite")
def _floor_with_sqlite(each: BinNumber, compiler: SQLCompiler, **options: Any) -> str:
    return f"CAST({compiler.process(each.clauses, **options)} + 1 AS INTEGER) - 1"


@compiles(BinNumber, "postgresql")
def _floor_with_postgresql(each: BinNumber, compiler: SQLCompiler, **options: Any) -> str:
    return f"CAST(floor({compiler.process(each.clauses, **options)}) AS bigint)"


class Contains(GenericFunction[bool]):
    """Whether a column, with ASCII letters in lower case, contains a text."""

    type = Boolean()
    inherit_cache = True


@compiles(Contains, "sqlite")
def _contains_with_sqlite(each: Contains, compiler: SQLCompiler, **options: Any) -> str:
    column, text = (compiler.process(clause, **options) for clause in each.clauses)
    return f"instr(lower({column}), {text}) > 0"


@compiles(Contains, "postgresql")
def _contains_with_postgresql(each: Contains, compiler: SQLCompiler, **options: Any) -> str:
    """Under the collation "C", `lower` changes ASCII letters only, as in SQLite."""
    column, text = (compiler.process(clause, **options) for clause in each.clauses)
    return f'strpos(lower({column} COLLATE "C"), {text}) > 0'


encode_compact_json = json.JSONEncoder(separators=(",", ":")).encode


class StoreError(ValueError):
    """The database cannot be used; the message names it, the cause and the remedy."""


class StoreRefusedError(StoreError):
    """The content of the database or its other users do not allow the operation."""


class StoreUnreachableError(StoreError, UnavailableError):
    """The database does not respond now. A later attempt may succeed."""


def open_engine(url: str, *, serialize_writes: bool = False) -> Engine:
    """Create an engine for a SQLAlchemy URL.

    Args:
        serialize_writes: run transactions one at a time, across all engines that were opened this way.

    Raises:
        StoreError: the URL is malformed, or no driver is installed for the database.
    """
    try:
        engine = create_engine(
            make_url(url),
            json_serializer=encode_compact_json,
            **_build_connect_options(make_url(url)),
        )
    except (ArgumentError, ModuleNotFoundError) as error:
        raise StoreError(
            f"database URL {_mask_url(url)!r} cannot be opened: {error}. "
            "Use a URL like sqlite:////var/lib/ebbtide/state.sqlite or postgresql+psycopg://user@host/ebbtide"
        ) from None
    if engine.dialect.name == "sqlite":
        _set_up_sqlite(engine, "BEGIN IMMEDIATE" if serialize_writes else "BEGIN")
        return engine
    _ping_idle_connections(engine)
    if serialize_writes:
        _serialize_transactions(engine)
    return engine


def make_snapshot_engine(engine: Engine) -> Engine:
    """Return an engine on the same connection pool whose transactions read from one snapshot."""
    if engine.dialect.name == "sqlite":
        return engine  # SQLite transactions always read from one snapshot
    return engine.execution_options(isolation_level="REPEATABLE READ")


def make_autocommit_engine(engine: Engine) -> Engine:
    """Return an engine on the same connection pool that runs single SELECTs without BEGIN and COMMIT."""
    if engine.dialect.name == "sqlite":
        return engine
    return engine.execution_options(isolation_level="AUTOCOMMIT")


@contextmanager
def transaction(engine: Engine) -> Iterator[Connection]:
    """Run the block in one transaction. It is rolled back if the block raises.

    Raises:
        UnavailableError: the database did not respond in time.
    """
    try:
        with engine.begin() as connection:
            yield connection
    except (DBAPIError, NoConnectionError) as error:
        # A session that the server ended because it was idle raises an error of another class.
        if not isinstance(error, CONNECTION_ERRORS) and not getattr(error, "connection_invalidated", False):
            raise
        raise UnavailableError(f"database {redact_url(engine)}: {getattr(error, 'orig', None) or error}") from error


def disable_timeouts(connection: Connection) -> None:
    """Let the transaction last as long as a migration or a copy of a large database takes."""
    if connection.dialect.name == "postgresql":
        for name in ("idle_in_transaction_session_timeout", "statement_timeout"):
            connection.execute(text(f"SET LOCAL {name} = 0"))


def fetch_rows(engine: Engine, query: Select[*tuple[Any, ...]]) -> list[AnyRow]:
    """Run a query in a transaction of its own. Raises UnavailableError."""
    with transaction(engine) as connection:
        return list(connection.execute(query).all())


def redact_url(engine: Engine) -> str:
    """Return the URL of the database without its password."""
    return engine.url.render_as_string(hide_password=True)


def _mask_url(url: str) -> str:
    """Hide everything after the scheme: in a URL that cannot be parsed, any part may be the password."""
    scheme, separator, _ = url.partition("://")
    return f"{scheme}://..." if separator else url


def _build_connect_options(url: URL) -> dict[str, Any]:
    if url.get_backend_name() != "postgresql":
        return {}
    limits = {name: limit for name, limit in _POSTGRESQL_LIMITS.items() if name not in url.query}
    return {"connect_args": limits}


def _ping_idle_connections(engine: Engine) -> None:
    """Ping a pooled connection before use if it was idle for a while: the server may have been restarted.

    A ping before every use would double the cost of a small read. If the server restarts within the idle limit, one
    request fails and the pool is renewed.
    """

    @event.listens_for(engine, "checkin")
    def record_use(_connection: object, record: ConnectionPoolEntry) -> None:
        record.info["used_at_s"] = time.monotonic()

    @event.listens_for(engine, "checkout")
    def ping(connection: Any, record: ConnectionPoolEntry, _proxy: object) -> None:
        if time.monotonic() - record.info.get("used_at_s", math.inf) > _PING_AFTER_IDLE_S:
            try:
                engine.dialect.do_ping(connection)
            except engine.dialect.loaded_dbapi.Error as error:
                raise DisconnectionError from error


def _serialize_transactions(engine: Engine) -> None:
    """Take a PostgreSQL advisory lock at the start of each transaction."""

    @event.listens_for(engine, "begin")
    def lock(connection: Connection) -> None:
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_WRITER_LOCK_ID})")


def _set_up_sqlite(engine: Engine, begin: str) -> None:
    """Begin transactions explicitly.

    Python's driver begins none for a SELECT, so two SELECTs could see different states.
    """

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
    """Switch the file to write-ahead logging. SQLite ignores `busy_timeout` if two processes do this at once."""
    deadline_s = time.monotonic() + _WAL_TIMEOUT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline_s:
                raise
        time.sleep(_WAL_RETRY_S)


def insert_rows(connection: Connection, table: Table[Any], rows: Rows) -> None:
    """Insert rows that all have the same columns in the same order."""
    _write_rows(connection, table, rows, replace=False)


def replace_rows(connection: Connection, table: Table[Any], rows: Rows) -> None:
    """Insert rows with distinct primary keys, replacing stored rows with the same keys."""
    _write_rows(connection, table, rows, replace=True)


def build_insert(connection: Connection, table: Table[Any]) -> Any:
    """Return the dialect's INSERT, which has ON CONFLICT clauses."""
    return (sqlite if connection.dialect.name == "sqlite" else postgresql).insert(table)


def format_array_literal(items: Iterable[Any]) -> str:
    """Format numbers or strings as a PostgreSQL array literal. The driver's own quoting would dominate a commit."""
    return "{" + ",".join(["NULL" if item is None else _quote(str(item)) for item in items]) + "}"


def bind_array(name: str, item_type: TypeEngine[Any]) -> ColumnElement[Any]:
    """Return a bound parameter that takes an array literal."""
    return cast(bindparam(name, type_=String()), postgresql.ARRAY(item_type))


def _write_rows(connection: Connection, table: Table[Any], rows: Rows, *, replace: bool) -> None:
    if not rows:
        return
    columns = tuple(table.c[name] for name in rows[0])
    if connection.dialect.name == "sqlite":
        connection.execute(_build_row_insert(table, columns, replace), list(rows))
        return
    # One statement with one array per column: a statement per row costs client and server more than the row itself.
    arrays = {column.name: format_array_literal(_format_values(column, rows)) for column in columns}
    connection.execute(_build_array_insert(table, columns, replace), arrays)


@cache
def _build_row_insert(table: Table[Any], columns: tuple[Column[Any], ...], replace: bool) -> Any:
    return _add_upsert(sqlite.insert(table), table, columns) if replace else sqlite.insert(table)


@cache
def _build_array_insert(table: Table[Any], columns: tuple[Column[Any], ...], replace: bool) -> Any:
    statement = postgresql.insert(table).from_select([column.name for column in columns], _select_unnested(columns))
    return _add_upsert(statement, table, columns) if replace else statement


def _select_unnested(columns: Sequence[Column[Any]]) -> Select[*tuple[Any, ...]]:
    text_columns = {column.name for column in columns if isinstance(column.type, JSON | String)}
    arrays = [bind_array(column.name, String() if column.name in text_columns else column.type) for column in columns]
    unnested = func.unnest(*arrays).table_valued(*(column.name for column in columns)).render_derived()
    return select(*(cast(unnested.c[column.name], column.type) for column in columns))


def _add_upsert(statement: Any, table: Table[Any], columns: Sequence[Column[Any]]) -> Any:
    keys = [column.name for column in table.primary_key]
    others = {column.name: statement.excluded[column.name] for column in columns if column.name not in keys}
    return statement.on_conflict_do_update(index_elements=keys, set_=others)


def _format_values(column: Column[Any], rows: Rows) -> Iterator[Any]:
    values = (row[column.name] for row in rows)
    if not isinstance(column.type, JSON):
        return values
    return (None if body is None else encode_compact_json(body) for body in values)


def _quote(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
