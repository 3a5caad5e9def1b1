"""Event lists of a caller who may read one queue of 20, compared with the lists of an admin.

The store has 40,000 events of 4,000 jobs, most of them ended, whose messages name jobs of other queues. Each pass
reads 20 pages from places all over the log, in one process and without HTTP.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace

from api.events import page_of_events
from api.http.paging import encode_cursor
from api.identity.principals import Grant, Principal, Role
from api.state import RequestContext, StateReader, load_request_context
from scheduler.domain.events import Event, EventCode
from scheduler.domain.job_queue import JobQueue
from scheduler.domain.job_state import JobState
from scheduler.store.protocol import Commit
from scheduler.store.schema_migration import migrate
from scheduler.store.sql_store import SqlStore
from tests.builders import a_job
from tests.postgres_server import PostgresServer

QUEUES, JOBS, LIVE_JOBS, EVENTS, COMMIT_EVENTS = 20, 4_000, 200, 40_000, 1_000
PAGES, PASSES = 20, 3
ADMIN = Principal("root", (Grant(Role.ADMIN),), subject="token:tok-1")
VIEWER = Principal("ada", (Grant(Role.VIEWER, "team-3"),), subject="token:tok-2")


def rows() -> Iterator[tuple[str, str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        yield from _rows_of("SQLite", f"sqlite:///{folder}/ebbtide.sqlite")
    server = PostgresServer()
    server.start()
    try:
        yield from _rows_of("PostgreSQL", server.new_database())
    finally:
        server.close()


def _rows_of(database: str, url: str) -> Iterator[tuple[str, str, str]]:
    migrate(url)
    store = SqlStore(url)
    try:
        fill(store)
        admin_ms, admin_items = measure_pages(store, ADMIN)
        viewer_ms, viewer_items = measure_pages(store, VIEWER)
    finally:
        store.close()
    yield f"{database}: a page of 100 events for an admin", "", f"{admin_ms:.2f} ms, {admin_items:.0f} items"
    yield f"{database}: for a caller with one queue of {QUEUES}", "", f"{viewer_ms:.2f} ms, {viewer_items:.0f} items"
    yield f"{database}: the caller's page, in multiples of the admin's", "at most 2", f"{viewer_ms / admin_ms:.2f}"


def fill(store: SqlStore) -> None:
    lease = store.acquire_lease("benchmark", now_s=0.0, ttl_s=1e9)
    assert lease is not None
    names = [f"train-{number:08x}" for number in range(JOBS)]
    jobs = [a_job(name, 1, 2, queue=f"team-{number % QUEUES}") for number, name in enumerate(names)]
    live = {job.id: job for job in jobs[-LIVE_JOBS:]}
    ended = tuple(replace(job, state=JobState.SUCCEEDED) for job in jobs[:-LIVE_JOBS])
    for start in range(0, EVENTS, COMMIT_EVENTS):
        before = store.load().snapshot
        queues = {name: JobQueue(name) for name in (f"team-{number}" for number in range(QUEUES))}
        after = replace(before, generation=before.generation + 1, jobs=live, queues=queues)
        events = tuple(_event(names, number) for number in range(start, start + COMMIT_EVENTS))
        first, last = (at * len(ended) // EVENTS for at in (start, start + COMMIT_EVENTS))
        store.commit(Commit(before, after, epoch=lease.epoch, events=events, ended_jobs=ended[first:last]))


def _event(names: list[str], number: int) -> Event:
    subject, other = names[number * 7919 % JOBS], names[number * 104_729 % JOBS]
    message = f"preempted to free 4 GPUs for {other}, which waits within its queue's guarantee; re-planned in 12 s"
    return Event(float(number), EventCode.JOB_STATE, subject, message, {"gpus": 4.0, "waited_s": 30.5}, "queued")


def measure_pages(store: SqlStore, principal: Principal) -> tuple[float, float]:
    """Return the median milliseconds and the mean items of a page, from the fastest of several passes."""
    reader = StateReader(store)
    medians_ms = []
    for _ in range(PASSES):
        items, times_ms = 0, []
        for number in range(PAGES):
            context = load_request_context(reader, store, 1e6, principal)
            started_s = time.perf_counter()
            items += _read_page(context, number * EVENTS // PAGES)
            times_ms.append(1e3 * (time.perf_counter() - started_s))
        medians_ms.append(statistics.median(times_ms))
    return min(medians_ms), items / PAGES


def _read_page(context: RequestContext, after: int) -> int:
    page = page_of_events(context, subject="", after=0, limit=100, cursor=encode_cursor("events", after))
    json.dumps(page)
    return len(page["items"])


if __name__ == "__main__":
    for what, bar, measured in rows():
        sys.stdout.write(f"{what}: {measured} {bar and f'({bar})'}\n")
