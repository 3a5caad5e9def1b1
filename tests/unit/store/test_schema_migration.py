"""Migrations: they build the tables of the code, keep existing rows, and may run repeatedly and concurrently."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import Script, ScriptDirectory
from sqlalchemy import JSON, Engine, TextClause, inspect, text
from sqlalchemy.types import TypeEngine

from scheduler.domain.codec import encode
from scheduler.domain.commands import Command, RecallAll
from scheduler.domain.fleet import Loan, LoanState, Pool, PoolKind
from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.job import Job, Progress
from scheduler.domain.job_spec import JobSpec
from scheduler.domain.job_state import JobState
from scheduler.domain.scaling_curve import ScalingCurve, build_data_parallel_plan
from scheduler.domain.snapshot import Snapshot
from scheduler.store.api_protocol import AuditEntry, LoanQuery, SortKey
from scheduler.store.database import METADATA, StoreError, open_engine
from scheduler.store.job_query import JobQuery
from scheduler.store.protocol import Commit
from scheduler.store.schema_migration import build_alembic_config, migrate
from scheduler.store.sql_store import SqlStore
from tests.postgres_server import PostgresServer


def _older_revisions() -> list[Script]:
    scripts = ScriptDirectory.from_config(build_alembic_config())
    return [script for script in scripts.walk_revisions() if script.revision not in scripts.get_heads()]


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / '100% state.sqlite'}"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.new_database(is_migrated=False)


# SQLAlchemy cannot read back an index on an expression of SQLite. tests/ended_jobs.py measures that it is used.
@pytest.mark.filterwarnings("ignore:.*expression-based index")
def test_migrations_build_the_tables_of_the_code(url: str) -> None:
    migrate(url)
    engine = open_engine(url)
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), METADATA) == []
        columns = {table: inspect(connection).get_columns(table) for table in METADATA.tables}
    engine.dispose()
    for name, table in METADATA.tables.items():
        assert {c["name"]: c["nullable"] for c in columns[name]} == {c.name: c.nullable for c in table.columns}


def test_repeated_migration_changes_nothing(url: str) -> None:
    migrate(url)
    store = SqlStore(url)
    snapshot = Snapshot(generation=1, now_s=5.0, pools={"train": Pool("train", PoolKind.TRAINING)})
    store.commit(Commit(Snapshot(), snapshot, epoch=0))
    waiting = Command("c", 1.0, RecallAll())
    store.send(waiting)
    migrate(url)
    store.close()
    again = SqlStore(url)
    assert (again.load().snapshot, again.load().inbox) == (snapshot, (waiting,))
    again.close()


def test_curves_of_revision_1_have_no_solver(url: str) -> None:
    migrate(url)
    curve = ScalingCurve({GpuShape.packed("a100-80g", 8, 8): build_data_parallel_plan("a100-80g", 8)})
    store = SqlStore(url)
    store.commit(Commit(Snapshot(), Snapshot(generation=1, curves={"c": curve}, solver="5f0e"), epoch=0))
    store.close()
    engine, config = open_engine(url), build_alembic_config()
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "0001")
    engine.dispose()
    migrate(url)
    store = SqlStore(url)
    assert (store.load().snapshot.curves, store.load().snapshot.solver) == ({"c": curve}, "")
    store.close()


def test_ended_jobs_and_loans_of_revision_4_can_be_queried(url: str) -> None:
    migrate(url)
    spec, loan = JobSpec("train", 1, 1, queue="blue"), Loan("l", "i0", "serve", LoanState.LOST, 5.0, 6.0)
    jobs = tuple(Job(f"j{at}", spec, JobState.FAILED, float(at), 9.0, Progress(9.0)) for at in range(1500))
    store = SqlStore(url)
    store.commit(Commit(Snapshot(), Snapshot(generation=1), epoch=0, ended_jobs=jobs, ended_loans=(loan,)))
    store.close()
    engine, config = open_engine(url), build_alembic_config()
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "0004")
    engine.dispose()
    migrate(url)
    store = SqlStore(url)
    wanted = JobQuery(frozenset({JobState.FAILED}), frozenset({"blue"}), name_prefix="tr", until_s=1499.0)
    assert store.find_ended_jobs(wanted, after=None, limit=2) == (jobs[1498], jobs[1497])
    assert store.find_ended_jobs(JobQuery(), after=SortKey(1.0, "j1"), limit=9) == jobs[:1]
    assert store.find_ended_loans(LoanQuery(pool="serve", node="i0"), after=None, limit=9) == (loan,)
    store.close()


@pytest.mark.parametrize("revision", [script.revision for script in _older_revisions()])
def test_migration_keeps_every_row(url: str, revision: str) -> None:
    migrate(url)
    engine, config = open_engine(url), build_alembic_config()
    with engine.begin() as connection:
        for table in METADATA.sorted_tables:
            if table.name not in ("state", "lease"):  # created with their only row
                row = {column.name: _value(column.type) for column in table.columns}
                connection.execute(table.insert(), row | _DECODED_BODIES.get(table.name, {}))
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, revision)
    before = _rows(engine)
    assert all(before.values())
    migrate(url)
    after = _rows(engine)
    engine.dispose()
    before.pop("schema_compatibility", None)  # written by each migration
    for name, rows in before.items():
        assert [{column: row[column] for column in rows[0]} for row in after[name]] == rows, name


_ENDED_JOB = Job("j", JobSpec("train", 1, 1), JobState.FAILED, 1.0, 9.0, Progress(9.0))
_DECODED_BODIES = {
    "ended_jobs": {"body": encode(_ENDED_JOB)},
    "ended_loans": {"body": encode(Loan("l", "i0", "serve", LoanState.LOST, 5.0, 6.0))},
}
"""Bodies that later revisions decode."""


def _value(kind: TypeEngine[Any]) -> Any:
    if isinstance(kind, JSON):
        return {"some": ["thing", 1.5]}
    samples: dict[type, Any] = {int: 7, bytes: b"1", bool: True}
    return samples.get(kind.python_type, kind.python_type("1") if kind.python_type in (str, float) else None)


def _rows(engine: Engine) -> dict[str, list[dict[str, Any]]]:
    """Return all rows by table."""
    with engine.connect() as connection:
        names = [name for name in inspect(connection).get_table_names() if name != "alembic_version"]
        selected = {name: connection.execute(text(f'SELECT * FROM "{name}"')).mappings().all() for name in names}
    return {name: [dict(row) for row in rows] for name, rows in selected.items()}


def test_owners_of_revision_14_keep_what_their_name_owned(url: str) -> None:
    migrate(url)
    engine, config = open_engine(url), build_alembic_config()
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "0014")
    with engine.begin() as connection:
        for number, owner in enumerate(("anna", "bert", "anybody", "namespace/ml", "")):
            job = replace(_ENDED_JOB, id=f"j{number}", owner=owner, submitted_at_s=float(number))
            body = {name: value for name, value in encode(job).items() if name != "owner_id"}
            columns = {"number": number + 1, "id": job.id, "generation": 1, "body": json.dumps(body)}
            columns |= {"owner": owner, "state": job.state}
            connection.execute(_build_insert("ended_jobs", columns), columns)
        token = {"id": "tok-1", "name": "anna", "prefix": "ebk_a", "digest": "d", "grants": "[]", "created_by": "root"}
        connection.execute(_build_insert("api_tokens", token | {"created_at_s": 1.0}), token | {"created_at_s": 1.0})
    migrate(url)
    store = SqlStore(url)
    jobs = store.find_ended_jobs(JobQuery(), after=None, limit=9)
    assert {job.owner: job.owner_key for job in jobs} == {
        "anna": "name:anna", "bert": "name:bert", "anybody": "local", "namespace/ml": "namespace:ml", "": "",
    }  # fmt: skip
    for job in jobs:
        if job.owner:
            assert store.find_ended_jobs(JobQuery(owner_id=job.owner_key), after=None, limit=9) == (job,)
    old = store.tokens.find_by_id("tok-1")
    assert old is not None
    store.tokens.add(
        replace(old, id="tok-2", digest="d2", stored_owner_id=""), AuditEntry(1.0, "", "", "", "", None, None, "")
    )
    new = store.tokens.find_by_id("tok-2")
    assert new is not None
    assert (old.owner_id, new.owner_id) == ("name:anna", "token:tok-2"), "later tokens of the name do not inherit"
    store.close()
    engine.dispose()


def _build_insert(table: str, columns: Iterable[str]) -> TextClause:
    return text(f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join(f':{name}' for name in columns)})")


def test_threads_can_migrate_databases_concurrently(tmp_path: Path) -> None:
    failures: list[BaseException] = []

    def run(url: str) -> None:
        try:
            migrate(url)
        except BaseException as failed:
            failures.append(failed)

    urls = [f"sqlite:///{tmp_path / f'{at % 2}.sqlite'}" for at in range(6)]
    threads = [threading.Thread(target=run, args=(url,)) for url in urls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    for url in urls:
        SqlStore(url).close()


def test_processes_can_migrate_one_database_concurrently(url: str) -> None:
    program = f"from scheduler.store.schema_migration import migrate; migrate({url!r})"
    runs = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(3)]
    assert [run.wait(timeout=60) for run in runs] == [0, 0, 0]
    SqlStore(url).close()


def test_database_of_a_newer_version_is_refused(url: str) -> None:
    migrate(url)
    engine = open_engine(url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
        connection.execute(text("UPDATE schema_compatibility SET oldest_revision = '9999'"))
    with pytest.raises(StoreError, match="revision 9999"):
        migrate(url)
    with pytest.raises(StoreError, match=r"revision 9999"):
        SqlStore(url)
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE schema_compatibility"))
    engine.dispose()
    with pytest.raises(StoreError, match=r"revision 9999"):
        SqlStore(url)


def test_database_of_a_newer_version_that_only_added_to_it_is_used(url: str) -> None:
    migrate(url)
    engine = open_engine(url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    migrate(url)
    SqlStore(url).close()
    with engine.connect() as connection:
        assert connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one() == "9999"
    engine.dispose()


def test_migrations_can_be_reverted(url: str) -> None:
    migrate(url)
    engine, config = open_engine(url), build_alembic_config()
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "base")
        assert inspect(connection).get_table_names() == ["alembic_version"]
    engine.dispose()
    migrate(url)
    SqlStore(url).close()


def test_consumed_commands_of_revision_8_get_the_time_of_the_last_tick(url: str) -> None:
    migrate(url)
    store = SqlStore(url)
    for name in ("done", "waiting"):
        store.send(Command(name, 1.0, RecallAll()))
    store.commit(Commit(Snapshot(), Snapshot(generation=1, now_s=5.0), epoch=0, consumed_command_ids=("done",)))
    store.close()
    engine, config = open_engine(url), build_alembic_config()
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "0008")
    migrate(url)
    with engine.begin() as connection:
        rows = connection.execute(text("SELECT id, consumed_at_s FROM inbox ORDER BY number")).all()
    engine.dispose()
    assert [tuple(row) for row in rows] == [("done", 5.0), ("waiting", None)]
