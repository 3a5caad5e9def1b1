"""Ended jobs are found by their labels in SQLite and PostgreSQL as a filter of the whole list finds them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import func, select

from api.http.paging import page_of_jobs
from scheduler.domain.job import Job
from scheduler.domain.job_labels import LabelOperator, LabelRequirement, parse_selector
from scheduler.domain.job_state import JobState
from scheduler.store import sql_job_search
from scheduler.store.api_protocol import HistoryLog, get_job_sort_key
from scheduler.store.database import open_engine
from scheduler.store.job_query import JobQuery
from scheduler.store.protocol import Commit
from scheduler.store.sql_job_labels import LABELS
from scheduler.store.sql_store import SqlStore
from tests.builders import a_job

JOBS = 60
KEYS, VALUES, QUEUES = ("team", "tier", "example.com/x"), ("", "a", "b"), ("q1", "q2")
STATES = (JobState.SUCCEEDED, JobState.FAILED)


def build_jobs() -> tuple[Job, ...]:
    random = Random(7)
    jobs = []
    for number in range(JOBS):
        labels = {key: random.choice(VALUES) for key in KEYS if random.random() < 0.6}
        job = a_job(f"job-{number:02}", now_s=float(number // 3), queue=random.choice(QUEUES), labels=labels)
        jobs.append(replace(job, state=random.choice(STATES), owner="ada", owner_id="id-ada"))
    return tuple(jobs)


@pytest.fixture
def store(database_url: str) -> Iterator[SqlStore]:
    opened = SqlStore(database_url)
    previous = opened.load().snapshot
    opened.commit(Commit(previous, replace(previous, generation=1), epoch=0, ended_jobs=build_jobs()))
    yield opened
    opened.close()


REQUIREMENTS = st.one_of(
    st.builds(
        LabelRequirement,
        st.sampled_from(KEYS),
        st.sampled_from([LabelOperator.IN, LabelOperator.NOT_IN]),
        st.sets(st.sampled_from(VALUES), min_size=1).map(lambda values: tuple(sorted(values))),
    ),
    st.builds(LabelRequirement, st.sampled_from(KEYS), st.sampled_from([LabelOperator.EXISTS, LabelOperator.ABSENT])),
)
QUERIES = st.builds(
    JobQuery,
    states=st.none() | st.frozensets(st.sampled_from(STATES)),
    queues=st.none() | st.frozensets(st.sampled_from(QUEUES)),
    owner_id=st.sampled_from(["", "id-ada"]),
    name_prefix=st.sampled_from(["", "job-1"]),
    since_s=st.sampled_from([-1.0, 10.0]),
    text=st.sampled_from(["", "3"]),
    selector=st.lists(REQUIREMENTS, min_size=1, max_size=3).map(tuple),
)


@given(query=QUERIES, sorted_max=st.sampled_from([3, 30, 2000]), limit=st.integers(1, 30))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_pages_hold_the_jobs_that_a_filter_keeps(store: SqlStore, query: JobQuery, sorted_max: int, limit: int) -> None:
    """`sorted_max` moves the border between few jobs, which are sorted, and many, which are read in order."""
    newest_first = sorted(build_jobs(), key=get_job_sort_key, reverse=True)
    wanted = [job.id for job in newest_first if query.matches(job)]
    found: list[str] = []
    cursor: str | None = ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sql_job_search, "SORTED_JOBS_MAX", sorted_max)
        while cursor is not None:
            page = page_of_jobs((), store, query, cursor=cursor, limit=limit)
            assert len(page["items"]) == limit or page["next"] is None
            found += [job.id for job in page["items"]]
            cursor = page["next"]
    assert found == wanted


def test_labels_are_deleted_with_the_records_of_their_jobs(store: SqlStore, database_url: str) -> None:
    assert store.retention.delete_old_rows(HistoryLog.ENDED_JOBS, before_s=10.0, rows_max=99, epoch=0).rows == 30
    kept = build_jobs()[30:]
    engine = open_engine(database_url)
    with engine.connect() as connection:
        rows = connection.execute(select(func.count()).select_from(LABELS)).scalar_one()
    engine.dispose()
    assert rows == sum(len(job.spec.labels) for job in kept)


def test_a_job_that_ends_twice_has_the_labels_of_its_last_record(store: SqlStore) -> None:
    first = build_jobs()[0]
    again = replace(first, spec=replace(first.spec, labels={"team": "z"}))
    previous = store.load().snapshot
    store.commit(Commit(previous, replace(previous, generation=2), epoch=0, ended_jobs=(again,)))
    found = store.find_ended_jobs(JobQuery(selector=parse_selector("team=z")), after=None, limit=9)
    assert {job.id for job in found} == {first.id}
