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
from scheduler.domain.job_labels import parse_selector
from scheduler.domain.job_state import JobState
from scheduler.store.database import encode_compact_json, open_engine
from scheduler.store.job_query import JobQuery
from scheduler.store.protocol import Commit
from scheduler.store.sql_store import SqlStore
from tests.builders import a_job
from tests.postgres_server import PostgresServer

RARE = 50
"""Jobs with a rare owner, queue, state, name and id, which are the oldest. As many others ended recently."""
PAGE = 20
_PLACEHOLDER, _PLACEHOLDER_S, _ENDED_PLACEHOLDER_S = "id-of-the-job", 987654321.0, 123456789.0
_RECENT_S = 0.5 - RARE
"""The newest job ended at 0 s, and each other one a second before the next."""
_SERIES = {
    "sqlite": "(WITH RECURSIVE series(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM series WHERE n < :count) "
    "SELECT n FROM series)",
    "postgresql": "(SELECT n FROM generate_series(1, :count) AS n)",
}
_LABELS = (("team", "common", "TRUE"), ("tier", "rare", f"n <= {RARE}"), ("age", "older", "2 * n <= :count"))
"""Labels as key, value, and the condition of the jobs that have them."""
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
    "common owner id": JobQuery(owner_id="id-user-3"),
    "rare owner id": JobQuery(owner_id="id-rare"),
    "common id": JobQuery(id_prefix="job"),
    "rare id": JobQuery(id_prefix="rare"),
    "recently ended": JobQuery(ended_since_s=_RECENT_S),
    "recently ended in a common state": JobQuery(
        states=frozenset({JobState.SUCCEEDED, JobState.FAILED}), ended_since_s=_RECENT_S
    ),
    "common state that no job entered recently": JobQuery(
        states=frozenset({JobState.CANCELLED}), ended_since_s=_RECENT_S
    ),
    "ended long ago or later": JobQuery(ended_since_s=-1e9),
    "ended after all": JobQuery(ended_since_s=1.0),
    "recently ended if at all": JobQuery(recent_since_s=_RECENT_S),
    "common text": JobQuery(text="RAIN"),
    "common label": JobQuery(selector=parse_selector("team=common")),
    "common label in a common queue": JobQuery(
        selector=parse_selector("team=common"), queues=frozenset({"common", "rare"})
    ),
    "rare label": JobQuery(selector=parse_selector("tier=rare")),
    "rare label in a common state": JobQuery(
        selector=parse_selector("tier=rare,team"), states=frozenset({JobState.SUCCEEDED, JobState.FAILED})
    ),
    "label of older jobs": JobQuery(selector=parse_selector("age=older")),
    "without a rare label": JobQuery(selector=parse_selector("tier!=rare,!urgent")),
    "label that no job has": JobQuery(selector=parse_selector("team=unknown")),
}


def add_ended_jobs(url: str, count: int) -> None:
    """Insert ended jobs by one statement of the database, their labels by another, and update its statistics.

    All have a common label, the rare ones another one, and the older half a third one.
    """
    job = replace(
        a_job(_PLACEHOLDER),
        state=JobState.SUCCEEDED,
        submitted_at_s=_PLACEHOLDER_S,
        state_since_s=_ENDED_PLACEHOLDER_S,
    )
    body = encode_compact_json(encode(job))
    rare = f"CASE WHEN n <= {RARE} THEN"
    job_id, owner = f"({rare} 'rare-' ELSE 'job-' END || n)", f"({rare} 'rare' ELSE 'user-' || (n % 20) END)"
    common_state = f"CASE WHEN n % 3 = 0 AND n <= :count - {RARE} THEN 'cancelled' ELSE 'succeeded' END"
    statement = f"""
        INSERT INTO ended_jobs (id, generation, body, submitted_at_s, state, queue, owner, owner_id, name)
        SELECT {job_id}, 1, {{body}}, n, {rare} 'failed' ELSE {common_state} END, {rare} 'rare' ELSE 'common' END,
            {owner}, 'id-' || {owner}, {rare} 'rare-' || n ELSE 'train-' || n END
        FROM {{series}} AS numbers"""
    engine = open_engine(url, serialize_writes=True)
    replaced = f"replace(replace(:body, '{_PLACEHOLDER}', {job_id}), '{_PLACEHOLDER_S}', n || '.0')"
    replaced = f"replace({replaced}, '{_ENDED_PLACEHOLDER_S}', (n - :count) || '.0')"
    kind = engine.dialect.name
    with engine.begin() as connection:
        if kind == "postgresql":
            connection.execute(text("SET LOCAL statement_timeout = 0"))
            replaced = f"CAST({replaced} AS json)"
        filled = statement.format(body=replaced, series=_SERIES[kind])
        connection.execute(text(filled), {"body": body, "count": count})
        for key, value, chosen in _LABELS:
            connection.execute(
                text(
                    f"INSERT INTO ended_job_labels (job_id, key, value, submitted_at_s) SELECT {job_id}, '{key}', "
                    f"'{value}', n FROM {_SERIES[kind]} AS numbers WHERE {chosen}"
                ),
                {"count": count},
            )
    if kind == "postgresql":
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text("SET statement_timeout = 0"))
            connection.execute(text("VACUUM ANALYZE ended_jobs, ended_job_labels"))
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


def measure(
    few: str, many: str, *, repetitions: int, server: PostgresServer | None = None
) -> dict[str, tuple[float, float]]:
    """Return the mean CPU seconds of three pages of each list, and of a tick's commit, in two databases.

    The databases take turns, because what else the machine does changes the CPU time of the same work by up to twice.
    CPU time is also that of the database server.
    """
    stores = SqlStore(few), SqlStore(many)
    try:
        work: dict[str, Callable[[SqlStore], object]] = {
            name: partial(_list_all_pages, query) for name, query in QUERIES.items()
        }
        work["tick"] = end_a_job
        return {name: _measure_cpu_s(each, stores, repetitions, server) for name, each in work.items()}
    finally:
        for store in stores:
            store.close()


def _list_all_pages(query: JobQuery, store: SqlStore) -> list[list[str]]:
    return list(list_pages(store, query))


_TURNS = 5


def _measure_cpu_s(
    work: Callable[[SqlStore], object],
    stores: tuple[SqlStore, SqlStore],
    repetitions: int,
    server: PostgresServer | None,
) -> tuple[float, float]:
    """Return the mean CPU seconds in each store."""
    spent_s = [0.0, 0.0]
    for store in stores:
        work(store)
    for _ in range(_TURNS):
        for at, store in enumerate(stores):
            before_s = _read_cpu_s(server)
            for _ in range(repetitions):
                work(store)
            spent_s[at] += _read_cpu_s(server) - before_s
    return spent_s[0] / (_TURNS * repetitions), spent_s[1] / (_TURNS * repetitions)


def _read_cpu_s(server: PostgresServer | None) -> float:
    return time.process_time() + (0.0 if server is None else server.read_cpu_s())
