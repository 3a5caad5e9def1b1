"""Event lists of callers with few rights: what they read of the store, and that no visible event is left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from api.http.paging import KEYS_SCANNED_PER_ITEM
from scheduler.domain.events import Event, EventCode
from scheduler.domain.job import Job
from scheduler.domain.job_queue import JobQueue
from scheduler.domain.job_state import JobState
from scheduler.domain.snapshot import Snapshot
from scheduler.store.memory_store import MemoryStore
from scheduler.store.protocol import Commit, Page, StoredEvent
from tests.api.authenticated_service import AuthenticatedService
from tests.builders import a_job

JOBS, EVENTS, LIMIT = 40, 2_000, 50


class CountingStore(MemoryStore):
    """A store that counts reads of whole events, of subjects, and lookups of ended jobs."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[str] = Counter()

    def list_events(self, page: Page, *, subject: str = "") -> tuple[StoredEvent, ...]:
        found = super().list_events(page, subject=subject)
        self.reads["events"] += len(found)
        return found

    def list_event_subjects(self, page: Page) -> tuple[tuple[int, str], ...]:
        found = tuple((each.number, each.event.subject) for each in super().list_events(page))
        self.reads["subjects"] += len(found)
        return found

    def get_events(self, numbers: Collection[int]) -> tuple[StoredEvent, ...]:
        self.reads["events"] += len(numbers)
        return super().get_events(numbers)

    def get_ended_job(self, job_id: str) -> Job | None:
        self.reads["lookups"] += 1
        return super().get_ended_job(job_id)

    def find_ended_job_queues(self, job_ids: Collection[str]) -> Mapping[str, str]:
        self.reads["lookups"] += 1
        return super().find_ended_job_queues(job_ids)


def test_a_caller_with_one_queue_reads_little_and_misses_nothing() -> None:
    store = CountingStore()
    jobs = [replace(a_job(f"train-{at}", queue=f"team-{at % 20}"), state=JobState.SUCCEEDED) for at in range(JOBS)]
    events = tuple(
        Event(0.0, EventCode.JOB_STATE, jobs[at % JOBS].id, f"waits for {jobs[(at + 1) % JOBS].id}, re-planned")
        for at in range(EVENTS)
    )
    lease = store.acquire_lease("test", now_s=0.0, ttl_s=1e9)
    assert lease is not None
    queues = {name: JobQueue(name) for name in (f"team-{at}" for at in range(20))}
    after = Snapshot(generation=1, queues=queues)
    store.commit(Commit(Snapshot(), after, epoch=lease.epoch, events=events, ended_jobs=tuple(jobs)))
    with (guarded := AuthenticatedService(store)).http:
        viewer = guarded.token("ada", "viewer:team-3")
        found: list[dict[str, Any]] = []
        cursor: str | None = ""
        pages = 0
        while cursor is not None:
            store.reads.clear()
            page = guarded.request("GET", f"/v1/events?limit={LIMIT}&cursor={cursor}", viewer).json()
            assert store.reads["events"] <= LIMIT
            assert store.reads["subjects"] <= KEYS_SCANNED_PER_ITEM * LIMIT + 1
            assert store.reads["lookups"] <= 2
            found += page["items"]
            cursor, pages = page["next"], pages + 1
        own = [at + 1 for at in range(EVENTS) if at % JOBS in (3, 23)]
        assert [each["number"] for each in found] == own
        assert {each["message"] for each in found} == {"waits for a job of another queue, re-planned"}
        assert pages <= EVENTS // LIMIT, "no more requests than an admin's"
