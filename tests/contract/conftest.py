"""Stores of contract tests: in memory, in SQLite and in PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler.store.api_protocol import ApiStore
from scheduler.store.memory_store import MemoryStore
from scheduler.store.schema_migration import migrate
from scheduler.store.sql_store import SqlStore
from tests.contract.store_records import OpenStore


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of an empty, migrated database."""
    return _database(request, tmp_path)


@pytest.fixture(params=["memory", "sqlite", "postgresql"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of an empty, migrated database; an empty text for a store in memory."""
    return "" if request.param == "memory" else _database(request, tmp_path)


@pytest.fixture
def open_store(store_url: str) -> Iterator[OpenStore]:
    """Open the same store at every call; in SQL with a new connection, as another process would."""
    only, opened = MemoryStore(), list[SqlStore]()

    def open_again() -> ApiStore:
        if not store_url:
            return only
        opened.append(SqlStore(store_url))
        return opened[-1]

    yield open_again
    for each in opened:
        each.close()


@pytest.fixture
def store(open_store: OpenStore) -> ApiStore:
    return open_store()


def _database(request: pytest.FixtureRequest, folder: Path) -> str:
    if request.param == "postgresql":
        return str(request.getfixturevalue("postgres").new_database())
    url = f"sqlite:///{folder / 'state.sqlite'}"
    migrate(url)
    return url
