"""Lists and ticks do not become slower with the number of ended jobs, and pages stay full."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import text

from api.http.paging import page_of_jobs
from scheduler.domain.job_labels import parse_selector
from scheduler.domain.job_state import JobState
from scheduler.store.database import open_engine
from scheduler.store.job_query import JobQuery
from scheduler.store.memory_store import MemoryStore
from scheduler.store.schema_migration import migrate
from scheduler.store.sql_store import SqlStore
from tests.builders import a_job
from tests.ended_jobs import PAGE, QUERIES, RARE, add_ended_jobs, list_pages, measure
from tests.postgres_server import PostgresServer

FULL = [PAGE, PAGE, PAGE]
SIZES = {name: [PAGE, PAGE, RARE - 2 * PAGE] for name in QUERIES if name.startswith("rare")} | {
    "rare state of a common owner": [0],
    "no match": [0],
    "label that no job has": [0],
    "recently ended": [PAGE, PAGE, RARE - 2 * PAGE],
    "recently ended in a common state": [PAGE, PAGE, RARE - 2 * PAGE],
    "common state that no job entered recently": [0],
    "ended after all": [0],
    "recently ended if at all": [PAGE, PAGE, RARE - 2 * PAGE],
}


def new_database(request: pytest.FixtureRequest, kind: str, folder: Path, count: int) -> str:
    if kind == "postgresql":
        server: PostgresServer = request.getfixturevalue("postgres")
        url = server.new_database()
    else:
        url = f"sqlite:///{folder / f'{count}.sqlite'}"
        migrate(url)
    add_ended_jobs(url, count)
    return url


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_pages_are_full_until_the_last_and_newest_first(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    store = SqlStore(new_database(request, kind, tmp_path, 3000))
    for name, query in QUERIES.items():
        pages = list(list_pages(store, query))
        assert [len(page) for page in pages] == SIZES.get(name, FULL), name
        ids = [int(job_id.rpartition("-")[2]) for page in pages for job_id in page]
        assert ids == sorted(set(ids), reverse=True), name
    store.close()


def test_job_that_has_ended_is_listed_while_its_gpus_are_released() -> None:
    job = replace(a_job("a"), state=JobState.SUCCEEDED)
    ending = replace(job, allocation=replace(job.allocation, releasing={"n0": (0,)}))
    for query, listed in ((JobQuery(), ["a"]), (JobQuery(states=frozenset({JobState.RUNNING})), [])):
        page = page_of_jobs((ending,), MemoryStore(), query, cursor="", limit=PAGE)
        assert [found.id for found in page["items"]] == listed


@pytest.mark.full
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_rare_text_is_found_among_many_ended_jobs(request: pytest.FixtureRequest, tmp_path: Path, kind: str) -> None:
    """Every entry of the index is read, at a cost of well under a second for 100,000 jobs."""
    store = SqlStore(new_database(request, kind, tmp_path, 100_000))
    started_s = time.perf_counter()
    page = page_of_jobs((), store, JobQuery(text="RARE"), cursor="", limit=RARE)
    assert len(page["items"]) == RARE
    assert time.perf_counter() - started_s < 1.0
    store.close()


@pytest.mark.full
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_common_labels_that_no_job_has_together_are_searched_without_statistics(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    """The other label is newer than the statistics of the database, and is looked up for each job with the first."""
    url = new_database(request, kind, tmp_path, 100_000)
    engine = open_engine(url, serialize_writes=True)
    with engine.begin() as connection:
        newer = "SELECT id, 'half', 'newer', submitted_at_s FROM ended_jobs WHERE submitted_at_s > 50000"
        connection.execute(text(f"INSERT INTO ended_job_labels (job_id, key, value, submitted_at_s) {newer}"))
    engine.dispose()
    store = SqlStore(url)
    started_s = time.perf_counter()
    query = JobQuery(selector=parse_selector("age=older,half=newer"))
    assert store.find_ended_jobs(query, after=None, limit=PAGE) == ()
    assert time.perf_counter() - started_s < 10.0
    store.close()


@pytest.mark.full
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_many_ended_jobs_cost_at_most_twice_as_much(request: pytest.FixtureRequest, tmp_path: Path, kind: str) -> None:
    server: PostgresServer | None = request.getfixturevalue("postgres") if kind == "postgresql" else None
    few, many = (new_database(request, kind, tmp_path, count) for count in (1_000, 100_000))
    measured = measure(few, many, repetitions=4, server=server)
    assert not {name: pair for name, pair in measured.items() if pair[1] > 2 * pair[0] + 0.001}
