"""The store of a fault case: in memory, or a database whose transactions can fail in their middle."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scheduler.simulator.campaign.case import FaultCase
from scheduler.store.api_protocol import ApiStore
from scheduler.store.memory_store import MemoryStore

if TYPE_CHECKING:
    from sqlalchemy import Connection

STATEMENTS_BEFORE_FAILURE = 4
"""A transaction that is to fail has executed this many statements by then: it has written rows, but not all."""


@dataclass(frozen=True, slots=True)
class CaseStore:
    """The store that everybody shares, and a function that lets the next transaction fail if it is a database."""

    store: ApiStore
    fail_transaction: Callable[[], bool]


@contextmanager
def open_case_store(case: FaultCase) -> Iterator[CaseStore]:
    """Open the empty store of a case, and delete it afterwards."""
    if not case.uses_sql:
        yield CaseStore(MemoryStore(), lambda: False)
        return
    from scheduler.store.sql_store import SqlStore

    with tempfile.TemporaryDirectory(prefix="ebbtide-case-") as folder:
        path = Path(folder) / "state.sqlite"
        shutil.copyfile(_migrated_database(), path)
        store = SqlStore(f"sqlite:///{path}")
        try:
            with _failing_statements(path) as arm:
                yield CaseStore(store, arm)
        finally:
            store.close()


@contextmanager
def _failing_statements(path: Path) -> Iterator[Callable[[], bool]]:
    """Yield a function that lets a later statement on the database fail as an input/output error does."""
    from sqlalchemy import Engine, event
    from sqlalchemy.exc import OperationalError

    left: list[int] = []

    def fail_when_due(connection: Connection, _cursor: Any, statement: str, *_rest: Any) -> None:
        if not left or connection.engine.url.database != str(path):
            return
        left[0] -= 1
        if left[0] <= 0:
            left.clear()
            raise OperationalError(statement, None, sqlite3.OperationalError("simulated: disk I/O error"))

    def arm() -> bool:
        left[:] = [STATEMENTS_BEFORE_FAILURE]
        return True

    event.listen(Engine, "before_cursor_execute", fail_when_due)
    try:
        yield arm
    finally:
        event.remove(Engine, "before_cursor_execute", fail_when_due)


_TEMPLATE = tempfile.TemporaryDirectory(prefix="ebbtide-campaign-")


@cache
def _migrated_database() -> Path:
    """Return an empty, migrated database that each case copies."""
    from scheduler.store.schema_migration import migrate

    path = Path(_TEMPLATE.name) / "empty.sqlite"
    migrate(f"sqlite:///{path}")
    return path
