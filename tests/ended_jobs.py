"""Databases with any number of ended jobs, and the lists and commits whose cost must not depend on that number."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from sqlalchemy import text

from api.http.paging import page_of_jobs
from scheduler.domain.codec import encode
from scheduler.domain.events import Event, EventCode
from scheduler.domain.job_state import JobState
from scheduler.store.api_protocol import JobQuery
from scheduler.store.database import encode_compact_json, open_engine
from scheduler.store.protocol import Commit
from scheduler.store.sql_store import SqlStore
from tests.builders import a_job
from tests.postgres_server import PostgresServer

RARE = 50
"""Jobs with a rare owner, queue, state and name, which are the oldest."""
PAGE = 20
_PLACEHOLDER, _PLACEHOLDER_S = "id-of-the-job", 987654321.0
_SERIES = {
    "sqlite": "(WITH RECURSIVE series(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM series WHERE n < :count) "
    "SELECT n FROM series)",
    "postgresql": "(SELECT n FROM generate_series(1, :count) AS n)",
}
QUERIES = {
    "all": JobQuery(),
    "common state": JobQuery(states=frozenset({JobState.SUCCEEDED})),
    "rare state": JobQuery(states=frozenset({JobState.FAILED})),
    "rare queue": JobQuery(queues=frozenset({"rare"})),
    "rare state in a common queue": JobQuery(states=frozenset({JobState.FAILED}), queues=frozenset({"common", "rare"})),
    "common owner": JobQuery(owner="user-3"),
    "rare owner": JobQuery(owner="rare"),
    "rare state of a common owner": JobQuery(owner="user-3", states=frozenset({JobState.FAILED})),
    "common name": JobQuery(name_prefix="train"),
    "rare name": JobQuery(name_prefix="rare"),
    "no match": JobQuery(name_prefix="nobody"),
}


def add_ended_jobs(url: str, count: int) -> None:
    """Insert ended jobs by one statement of the database, and update its statistics."""
    job = replace(a_job(_PLACEHOLDER), state=JobState.SUCCEEDED, submitted_at_s=_PLACEHOLDER_S)
    body = encode_compact_json(encode(job))
    rare = f"CASE WHEN n <= {RARE} THEN"
    statement = f"""
        INSERT INTO ended_jobs (id, generation, body, submitted_at_s, state, queue, owner, name)
        SELECT 'job-' || n, 1, {{body}}, n, {rare} 'failed' ELSE 'succeeded' END, {rare} 'rare' ELSE 'common' END,
            {rare} 'rare' ELSE 'user-' || (n % 20) END, {rare} 'rare-' || n ELSE 'train-' || n END
        FROM {{series}} AS numbers"""
    engine = open_engine(url, serialize_writes=True)
    replaced = f"replace(replace(:body, '{_PLACEHOLDER}', 'job-' || n), '{_PLACEHOLDER_S}', n || '.0')"
    kind = engine.dialect.name
    with engine.begin() as connection:
        if kind == "postgresql":
            connection.execute(text("SET LOCAL statement_timeout = 0"))
            replaced = f"CAST({replaced} AS json)"
        filled = statement.format(body=replaced, series=_SERIES[kind])
        connection.execute(text(filled), {"body": body, "count": count})
    if kind == "postgresql":
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text("SET statement_timeout = 0"))
            connection.execute(text("VACUUM ANALYZE ended_jobs"))
    engine.dispose()


def list_pages(store: SqlStore, query: JobQuery) -> Iterator[list[str]]:
    """Yield the ids of the first three pages."""
    cursor: str | None = ""
    for _ in range(3):
        if cursor is None:
            return
        page = page_of_jobs((), store, query, cursor=cursor, limit=PAGE)
        cursor = page["next"]
        yield [job.id for job in page["items"]]


def end_a_job(store: SqlStore) -> None:
    """Commit a tick in which a job ends, and load the state again."""
    before = store.load().snapshot
    generation = before.generation + 1
    job = replace(a_job(f"new-{generation}"), state=JobState.SUCCEEDED)
    event = Event(1.0, EventCode.JOB_STATE, job.id, "succeeded")
    after = replace(before, generation=generation)
    store.commit(Commit(before, after, epoch=0, ended_jobs=(job,), events=(event,)))
    store.load()


def measure(url: str, *, repetitions: int, server: PostgresServer | None = None) -> dict[str, float]:
    """Return the mean CPU seconds of three pages of each list, and of a tick's commit.

    CPU time, also that of the database server, does not depend on what else the machine does.
    """
    store = SqlStore(url)
    try:
        work: dict[str, Callable[[], object]] = {
            name: partial(_list_all_pages, store, query) for name, query in QUERIES.items()
        }
        work["tick"] = partial(end_a_job, store)
        return {name: _measure_cpu_s(each, repetitions, server) for name, each in work.items()}
    finally:
        store.close()


def _list_all_pages(store: SqlStore, query: JobQuery) -> list[list[str]]:
    return list(list_pages(store, query))


def _measure_cpu_s(work: Callable[[], object], repetitions: int, server: PostgresServer | None) -> float:
    work()
    before_s = _read_cpu_s(server)
    for _ in range(repetitions):
        work()
    return (_read_cpu_s(server) - before_s) / repetitions


def _read_cpu_s(server: PostgresServer | None) -> float:
    return time.process_time() + (0.0 if server is None else server.read_cpu_s())
