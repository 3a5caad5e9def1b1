"""Many rows at once. SQLite takes row by row at the price of a function call; a server is asked once for all of them,
with an array a column, because each statement costs both sides more than what most rows hold."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

from sqlalchemy import JSON, Column, ColumnElement, Connection, Select, String, Table, bindparam, cast, func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.types import TypeEngine

Rows = Sequence[dict[str, Any]]

compact = json.JSONEncoder(separators=(",", ":")).encode


def insert_rows(connection: Connection, table: Table[Any], rows: Rows) -> None:
    """Append rows that all have the same columns, in this order."""
    _write(connection, table, rows, replaces=False)


def replace_rows(connection: Connection, table: Table[Any], rows: Rows) -> None:
    """Put rows, each of another primary key, in the place of those with the same one."""
    _write(connection, table, rows, replaces=True)


def _write(connection: Connection, table: Table[Any], rows: Rows, *, replaces: bool) -> None:
    if not rows:
        return
    columns = tuple(table.c[name] for name in rows[0])
    if connection.dialect.name == "sqlite":
        connection.execute(_one_by_one(table, columns, replaces), list(rows))
        return
    arrays = {column.name: array(_texts(column, rows)) for column in columns}
    connection.execute(_all_at_once(table, columns, replaces), arrays)


def array(items: Iterable[Any]) -> str:
    """As PostgreSQL writes an array of numbers or texts. Its driver would quote sign by sign, which takes longer than
    all else of a commit."""
    return "{" + ",".join(["NULL" if item is None else _quoted(str(item)) for item in items]) + "}"


def array_of(name: str, kind: TypeEngine[Any]) -> ColumnElement[Any]:
    """The parameter of this name, given by `array`."""
    return cast(bindparam(name, type_=String()), postgresql.ARRAY(kind))


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _texts(column: Column[Any], rows: Rows) -> Iterator[Any]:
    values = (row[column.name] for row in rows)
    if not isinstance(column.type, JSON):
        return values
    return (None if body is None else compact(body) for body in values)


@cache
def _one_by_one(table: Table[Any], columns: tuple[Column[Any], ...], replaces: bool) -> Any:
    return _replacing(sqlite.insert(table), table, columns) if replaces else sqlite.insert(table)


@cache
def _all_at_once(table: Table[Any], columns: tuple[Column[Any], ...], replaces: bool) -> Any:
    adding = postgresql.insert(table).from_select([column.name for column in columns], _unnested(columns))
    return _replacing(adding, table, columns) if replaces else adding


def _unnested(columns: Sequence[Column[Any]]) -> Select[*tuple[Any, ...]]:
    texts = {column.name for column in columns if isinstance(column.type, JSON | String)}
    arrays = [array_of(column.name, String() if column.name in texts else column.type) for column in columns]
    given = func.unnest(*arrays).table_valued(*(column.name for column in columns)).render_derived()
    return select(*(cast(given.c[column.name], column.type) for column in columns))


def _replacing(adding: Any, table: Table[Any], columns: Sequence[Column[Any]]) -> Any:
    keys = [column.name for column in table.primary_key]
    others = {column.name: adding.excluded[column.name] for column in columns if column.name not in keys}
    return adding.on_conflict_do_update(index_elements=keys, set_=others)
