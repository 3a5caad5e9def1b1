"""Backup of a database in use, and restore: SQLite's backup API, and pg_dump with pg_restore."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from scheduler.domain.commands import Command, RecallAll
from scheduler.domain.events import Event, EventCode
from scheduler.domain.snapshot import Snapshot
from scheduler.store.protocol import Commit, FencedError, Lease, Page
from scheduler.store.schema_migration import adopt_restored_database, migrate
from scheduler.store.sql_store import SqlStore
from tests.builders import a_job
from tests.postgres_server import PostgresServer


@dataclass(frozen=True, slots=True)
class Site:
    url: str
    back_up: Callable[[], object]
    restore: Callable[[], None]


@pytest.fixture(params=["sqlite", "postgresql"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    if request.param == "sqlite":
        live, copy = tmp_path / "state.sqlite", tmp_path / "copy.sqlite"
        migrate(f"sqlite:///{live}")
        yield Site(f"sqlite:///{live}", lambda: _copy(live, copy), lambda: _copy(copy, live))
        return
    server: PostgresServer = request.getfixturevalue("postgres")
    url, dump = server.new_database(), tmp_path / "ebbtide.dump"
    yield Site(url, lambda: dump.write_bytes(server.dump(url)), lambda: server.restore(url, dump.read_bytes()))


def _copy(source: Path, target: Path) -> None:
    with closing(sqlite3.connect(source)) as read, closing(sqlite3.connect(target)) as written:
        read.backup(written)


def _commit(store: SqlStore, lease: Lease, job_id: str) -> None:
    """Commit a tick that adds a job."""
    before = store.load().snapshot
    jobs = {**before.jobs, job_id: a_job(job_id)}
    events = (Event(1.0, EventCode.JOB_STATE, job_id, "submitted"),)
    store.commit(
        Commit(before, replace(before, generation=before.generation + 1, jobs=jobs), lease.epoch, events=events)
    )


def _acquire(store: SqlStore, holder: str) -> Lease:
    lease = store.acquire_lease(holder, now_s=1e12, ttl_s=10.0)
    assert lease is not None
    return lease


def test_restore_brings_back_the_state_of_the_backup(site: Site) -> None:
    store, waiting = SqlStore(site.url), Command("c", 1.0, RecallAll())
    _commit(store, _acquire(store, "one"), "a")
    store.send(waiting)
    before, events = store.load(), store.list_events(Page())
    site.back_up()
    _commit(store, _acquire(store, "one"), "b")
    store.send(Command("d", 1.0, RecallAll()))
    site.restore()
    adopt_restored_database(site.url, now_s=1.0)
    found = SqlStore(site.url)
    assert (found.load().snapshot.jobs.keys(), found.load().inbox) == (before.snapshot.jobs.keys(), (waiting,))
    assert found.list_events(Page()) == events
    assert (found.send(waiting), found.send(Command("d", 1.0, RecallAll()))) == (False, True)
    found.close()
    store.close()


def test_leader_from_before_the_restore_is_fenced(site: Site) -> None:
    store = SqlStore(site.url)
    store.release_lease(_acquire(store, "one").holder)
    site.back_up()
    sleeper = _acquire(store, "sleeper")
    site.restore()
    adopt_restored_database(site.url, now_s=1.0)
    after = SqlStore(site.url)
    assert _acquire(after, "new").epoch > sleeper.epoch
    after.close()
    with pytest.raises(FencedError):
        store.commit(Commit(Snapshot(), Snapshot(generation=1), sleeper.epoch))
    store.close()


def test_reader_from_before_the_restore_reloads_everything(site: Site) -> None:
    store = SqlStore(site.url)
    lease = _acquire(store, "one")
    _commit(store, lease, "a")
    site.back_up()
    for number in range(3):
        _commit(store, lease, f"lost-{number}")
    reader = SqlStore(site.url)
    assert "lost-2" in reader.load().snapshot.jobs
    site.restore()
    adopt_restored_database(site.url, now_s=1.0)
    after = SqlStore(site.url)
    _commit(after, _acquire(after, "two"), "b")
    assert set(reader.load().snapshot.jobs) == {"a", "b"}
    for each in (store, reader, after):
        each.close()
