"""`ebbtide backup` files: made of a database in use, restored to either kind of database, and refused when unsafe."""

from __future__ import annotations

import sqlite3
import stat
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from scheduler.domain.events import Event, EventCode
from scheduler.domain.machine import Machine
from scheduler.domain.observation import AgentReport
from scheduler.store.api_protocol import AuditEntry, AuditFilter
from scheduler.store.backup import read_backup, restore_backup, write_backup
from scheduler.store.database import StoreError
from scheduler.store.protocol import Commit, Page
from scheduler.store.schema_migration import GENERATION_LEAP, migrate
from scheduler.store.sql_store import SqlStore
from tests.builders import a_job
from tests.contract.test_run_log import RUN
from tests.postgres_server import PostgresServer

NOW_S = 1_000.0
ENTRY = AuditEntry(5.0, "anna", "tok-1", "ScaleJob", "job-1", None, {"gpus": {"min": 2}}, "r-1")
MACHINE = Machine("m", ("m",), "training", "cpu", "127.0.0.1", "0", 1.0, is_service=True)
NewDatabase = Callable[[str], str]


@pytest.fixture
def new_database(request: pytest.FixtureRequest, tmp_path: Path) -> NewDatabase:
    def make(kind: str) -> str:
        if kind == "postgresql":
            server: PostgresServer = request.getfixturevalue("postgres")
            return server.new_database()
        url = f"sqlite:///{tmp_path / f'{len(list(tmp_path.iterdir()))}.sqlite'}"
        migrate(url)
        return url

    return make


def fill(url: str) -> None:
    """Commit a job with its run, an event, an audit entry and a machine that was seen at 90 s."""
    store = SqlStore(url)
    lease = store.acquire_lease("one", now_s=0.0, ttl_s=1e9)
    assert lease is not None
    before = store.load().snapshot
    snapshot = replace(before, generation=before.generation + 1, now_s=100.0, jobs={"a": a_job("a")})
    events = tuple(Event(float(at_s), EventCode.JOB_STATE, "a", "it happened") for at_s in range(1500))
    store.commit(Commit(before, snapshot, lease.epoch, events=events))
    store.machines.register_service(MACHINE)
    store.machines.record_seen({"m": 90.0})
    store.audit_log.append(ENTRY)
    store.run_log.begin_run(RUN, epoch=lease.epoch)
    store.run_log.record_reports(AgentReport("a", "n0", "pod", 99.0))
    store.close()


@pytest.mark.parametrize("source", ["sqlite", "postgresql"])
@pytest.mark.parametrize("target", ["sqlite", "postgresql"])
def test_backup_of_either_database_restores_to_either(
    new_database: NewDatabase, tmp_path: Path, source: str, target: str
) -> None:
    url, restored_url, file = new_database(source), new_database(target), tmp_path / "backup"
    fill(url)
    write_backup(url, file, files={"secret": b"\x00key"}, now_s=NOW_S)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert (read_backup(file).files, read_backup(file).created_at_s) == ({"secret": b"\x00key"}, NOW_S)
    restore_backup(file, restored_url, now_s=NOW_S, is_forced=False)
    live, restored = SqlStore(url), SqlStore(restored_url)
    snapshot = restored.load().snapshot
    [job] = snapshot.jobs.values()
    assert job.allocation.next_generation > GENERATION_LEAP
    assert job.allocation.generation > GENERATION_LEAP  # its generation had not begun
    allocation = replace(job.allocation, generation=0, skipped_generation=0)
    assert {"a": replace(job, allocation=allocation)} == live.load().snapshot.jobs
    assert snapshot.generation > GENERATION_LEAP
    assert len(restored.list_events(Page(limit=2000))) == 1500
    assert [each.entry for each in restored.audit_log.list_entries(Page(), AuditFilter())] == [ENTRY]
    [run], [machine] = restored.run_log.list_begun_runs(), restored.machines.list_machines()
    assert (run.is_restored, run.may_start, restored.run_log.list_reports()) == (True, False, ())
    assert machine.seen_at_s == NOW_S
    lease = restored.acquire_lease("two", now_s=NOW_S, ttl_s=1.0)
    assert lease is not None
    assert lease.epoch > GENERATION_LEAP
    event = Event(1.0, EventCode.JOB_STATE, "a", "after the restore")
    restored.commit(
        Commit(snapshot, replace(snapshot, generation=snapshot.generation + 1), lease.epoch, events=(event,))
    )
    assert restored.get_last_event_number() == 1501
    for each in (live, restored):
        each.close()


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_database_that_holds_something_is_replaced_only_by_force(
    new_database: NewDatabase, tmp_path: Path, kind: str
) -> None:
    empty, url, file = new_database("sqlite"), new_database(kind), tmp_path / "backup"
    write_backup(empty, file, files={}, now_s=NOW_S)
    fill(url)
    with pytest.raises(StoreError, match="--force"):
        restore_backup(file, url, now_s=NOW_S, is_forced=False)
    restore_backup(file, url, now_s=NOW_S, is_forced=True)
    store = SqlStore(url)
    assert (store.load().snapshot.jobs, store.audit_log.list_entries(Page(), AuditFilter())) == ({}, ())
    store.close()


def test_backup_of_an_older_version_is_migrated(new_database: NewDatabase, tmp_path: Path) -> None:
    recorded, file = Path(__file__).parent / "recorded" / "database.sql", tmp_path / "old"
    with closing(sqlite3.connect(file)) as connection:
        connection.executescript(recorded.read_text(encoding="utf-8"))
        connection.execute("CREATE TABLE backup_facts (name TEXT, value TEXT)")
        connection.execute("CREATE TABLE backup_files (name TEXT, content BLOB)")
        connection.execute("INSERT INTO backup_facts VALUES ('format', '1'), ('created_at_s', '5.0')")
        connection.commit()
    assert read_backup(file).revision == "0012"
    url = new_database("postgresql")
    restore_backup(file, url, now_s=NOW_S, is_forced=False)
    store = SqlStore(url)
    assert store.load().snapshot.jobs
    store.close()


def test_file_that_is_no_backup_or_too_new_is_refused(new_database: NewDatabase, tmp_path: Path) -> None:
    url, file = new_database("sqlite"), tmp_path / "backup"
    (tmp_path / "text").write_text("hello")
    with pytest.raises(StoreError, match="not a backup"):
        read_backup(tmp_path / "text")
    write_backup(url, file, files={}, now_s=NOW_S)
    with pytest.raises(FileExistsError):
        write_backup(url, file, files={}, now_s=NOW_S)
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
        connection.commit()
    with pytest.raises(StoreError, match="newer version"):
        restore_backup(file, url, now_s=NOW_S, is_forced=True)
