"""SqlStore beyond the contract: transactions, what is written, what is kept, and who may open it."""

from __future__ import annotations

import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import func, select, update
from sqlalchemy.engine import make_url
from sqlalchemy.schema import CreateTable

from scheduler.domain.codec import CodecError
from scheduler.domain.commands import Command, RecallAll
from scheduler.domain.events import Event, EventCode
from scheduler.domain.fleet import Node, Pool, PoolKind
from scheduler.domain.snapshot import Snapshot
from scheduler.store.database import METADATA, StoreError, StoreUnreachableError, make_snapshot_engine, open_engine
from scheduler.store.protocol import Commit, Lease, Page, UnavailableError
from scheduler.store.schema_migration import migrate
from scheduler.store.sql_store import SqlStore
from tests.postgres_server import PostgresServer

NODES = METADATA.tables["nodes"]
EVENT = Event(1.0, EventCode.NODE_CHANGED, "t0", "up")


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgresql":
        server: PostgresServer = request.getfixturevalue("postgres")
        return server.new_database()
    url = f"sqlite:///{tmp_path / 'state.sqlite'}"
    migrate(url)
    return url


@pytest.fixture
def store(url: str) -> Iterator[SqlStore]:
    store = SqlStore(url)
    yield store
    store.close()


def _nodes(count: int) -> dict[str, Node]:
    return {f"t{at}": Node(f"t{at}", "train", "a100-80g", 8, 80 * 2**30) for at in range(count)}


def _with_nodes(previous: Snapshot, nodes: dict[str, Node]) -> Commit:
    return Commit(previous, replace(previous, generation=previous.generation + 1, nodes=nodes), epoch=0)


def _stored_nodes(url: str) -> dict[str, int]:
    """Return the generation of each node's row, including tombstones."""
    engine = open_engine(url)
    with engine.connect() as connection:
        rows = connection.execute(select(NODES.c.key, NODES.c.generation)).all()
    engine.dispose()
    return {row.key: row.generation for row in rows}


def test_failed_commit_writes_nothing(store: SqlStore) -> None:
    store.send(Command("c", 1.0, RecallAll()))
    unwritable = replace(EVENT, at_s=None)  # type: ignore[arg-type]  # written after the nodes, and refused
    broken = replace(_with_nodes(Snapshot(), _nodes(2)), consumed_command_ids=("c",), events=(EVENT, unwritable))
    with pytest.raises(Exception, match=r"(?i)not.?null"):
        store.commit(broken)
    assert store.load().snapshot == Snapshot()
    assert (store.count_pending_commands(), store.list_events(Page())) == (1, ())
    store.commit(replace(broken, events=(EVENT,)))
    assert len(store.load().snapshot.nodes) == 2


def test_process_killed_in_mid_commit_writes_nothing(url: str, store: SqlStore) -> None:
    program = f"""
import os
from dataclasses import replace
from scheduler.domain.fleet import Pool, PoolKind
from scheduler.domain.snapshot import Snapshot
from scheduler.store import sql_inbox
from scheduler.store.protocol import Commit
from scheduler.store.sql_store import SqlStore
sql_inbox.mark_consumed = lambda *arguments, **options: os._exit(9)
pools = {{"train": Pool("train", PoolKind.TRAINING)}}
SqlStore({url!r}).commit(Commit(Snapshot(), Snapshot(generation=1, pools=pools), epoch=0))
"""
    killed = subprocess.run([sys.executable, "-c", program], check=False, timeout=60)
    assert killed.returncode == 9
    assert store.load().snapshot == Snapshot()
    store.commit(_with_nodes(Snapshot(), _nodes(1)))


def test_only_changed_records_are_written(url: str, store: SqlStore) -> None:
    store.commit(_with_nodes(Snapshot(), _nodes(3)))
    previous = store.load().snapshot
    nodes = {**previous.nodes, "t1": replace(previous.nodes["t1"], cordoned=True)}
    store.commit(_with_nodes(previous, nodes))
    assert _stored_nodes(url) == {"t0": 1, "t1": 2, "t2": 1}


def test_writer_keeps_the_snapshot_object_it_committed(store: SqlStore) -> None:
    commit = _with_nodes(Snapshot(), _nodes(1))
    store.commit(commit)
    assert store.load().snapshot is commit.snapshot


def test_reader_older_than_the_deleted_tombstones_reads_everything(url: str) -> None:
    writer, reader = SqlStore(url, tombstone_generations=2), SqlStore(url)
    writer.commit(_with_nodes(Snapshot(), _nodes(2)))
    assert len(reader.load().snapshot.nodes) == 2
    for _ in range(3):
        writer.commit(_with_nodes(writer.load().snapshot, _nodes(1)))
    assert _stored_nodes(url) == {"t0": 4}
    assert reader.load().snapshot == writer.load().snapshot
    writer.close()
    reader.close()


def test_restored_database_is_read_completely(url: str, store: SqlStore) -> None:
    for at in range(3):
        store.commit(_with_nodes(store.load().snapshot, _nodes(at)))
    engine = open_engine(url)
    with engine.begin() as connection:
        connection.execute(update(METADATA.tables["state"]).values(generation=1))
        connection.execute(NODES.delete())
    engine.dispose()
    assert (store.load().snapshot.generation, store.load().snapshot.nodes) == (1, {})


def test_error_names_a_row_that_cannot_be_decoded(url: str, store: SqlStore) -> None:
    other = SqlStore(url)
    other.commit(_with_nodes(Snapshot(), _nodes(1)))
    engine = open_engine(url)
    with engine.begin() as connection:
        connection.execute(update(NODES).values(body={"name": "t0"}))
    engine.dispose()
    other.close()
    with pytest.raises(CodecError, match=r"nodes\[t0\]: \$: field 'pool' is missing"):
        store.load()


def test_only_one_of_two_processes_gets_the_lease(url: str) -> None:
    program = f"""
import sys
from scheduler.store.sql_store import SqlStore

store = SqlStore({url!r})
print("ready", flush=True)
sys.stdin.readline()
print(store.acquire_lease(sys.argv[1], now_s=100.0, ttl_s=10.0))
"""
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", program, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for name in ("a", "b")
    ]
    for run in runs:
        assert run.stdout is not None
        assert run.stdout.readline() == "ready\n"
    for run in runs:
        assert run.stdin is not None
        run.stdin.write("go\n")
        run.stdin.flush()
    answers = sorted(run.communicate(timeout=60)[0].strip() for run in runs)
    leases = {str(Lease(name, 1, 110.0)) for name in ("a", "b")}
    assert answers[1] == "None"
    assert answers[0] in leases


def test_snapshot_transaction_does_not_see_later_commits(url: str, store: SqlStore) -> None:
    engine = make_snapshot_engine(open_engine(url))
    count = select(func.count()).select_from(NODES)
    with engine.begin() as connection:
        assert connection.execute(count).scalar_one() == 0
        store.commit(_with_nodes(Snapshot(), _nodes(2)))
        assert connection.execute(count).scalar_one() == 0
    with engine.begin() as connection:
        assert connection.execute(count).scalar_one() == 2
    engine.dispose()


def test_every_table_compiles_for_postgresql() -> None:
    dialect = make_url("postgresql+psycopg://").get_dialect()()
    statements = [str(CreateTable(table).compile(dialect=dialect)) for table in METADATA.sorted_tables]
    assert any("body JSON" in statement for statement in statements)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("nonsense", "'nonsense'"),
        ("flatfile://me:secret@host/x", "'flatfile://...'"),
        ("sqlite:////nowhere/at/all.sqlite", "sqlite:////nowhere/at/all.sqlite"),
    ],
)
def test_error_names_a_database_that_cannot_be_opened_without_its_password(url: str, shown: str) -> None:
    with pytest.raises(StoreError) as refused:
        SqlStore(url)
    assert shown in str(refused.value)
    assert "secret" not in str(refused.value)


def test_unmigrated_database_is_refused_with_the_command_to_run(tmp_path: Path) -> None:
    file = tmp_path / "new.sqlite"
    file.touch()
    with pytest.raises(StoreError, match=r"revision none.*\d{4}.*`ebbtide migrate`"):
        SqlStore(f"sqlite:///{file}")


def test_missing_database_file_is_not_created(tmp_path: Path) -> None:
    file = tmp_path / "missing.sqlite"
    with pytest.raises(StoreError, match=r"missing\.sqlite.*`ebbtide migrate`"):
        SqlStore(f"sqlite:///{file}")
    assert not file.exists()


def test_file_of_another_format_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("These are notes. " * 50)
    with pytest.raises(StoreError, match=r"notes\.txt.*file is not a database"):
        SqlStore(f"sqlite:///{file}")


def test_commit_must_advance_by_one_generation(store: SqlStore) -> None:
    skipping = Snapshot(generation=2, pools={"train": Pool("train", PoolKind.TRAINING)})
    with pytest.raises(AssertionError, match="one generation"):
        store.commit(Commit(Snapshot(), skipping, epoch=0))


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_failing_database_is_unavailable_and_recovers(store: SqlStore, url: str) -> None:
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as other:
        other.execute("ALTER TABLE inbox RENAME TO hidden")
        with pytest.raises(UnavailableError, match="no such table: inbox"):
            store.load()
        other.execute("ALTER TABLE hidden RENAME TO inbox")
    assert store.load().inbox == ()


def test_silent_server_is_unreachable_after_the_timeout_and_its_password_is_hidden() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(StoreUnreachableError) as caught:
            SqlStore(f"postgresql+psycopg://user:hunter2@{address}/ebbtide?connect_timeout=2")
    assert isinstance(caught.value, UnavailableError)
    assert address in str(caught.value)
    assert "hunter2" not in str(caught.value)
