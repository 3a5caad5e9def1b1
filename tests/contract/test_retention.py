"""Retention in SQLite and PostgreSQL: deletes old rows in batches and audits it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import DBAPIError

from scheduler.domain.commands import Command, PauseLending, SubmitJob
from scheduler.domain.decisions import Reason, ReasonCode, RecallNode
from scheduler.domain.events import Delivery, DeliveryState, Event, EventCode, Webhook
from scheduler.domain.fleet import DemandReading
from scheduler.domain.job_queue import UsageEntry, UsageKey
from scheduler.domain.job_records import Sample, SlottedSample
from scheduler.domain.job_spec import JobSpec
from scheduler.domain.job_state import JobState
from scheduler.domain.snapshot import Snapshot
from scheduler.store.api_protocol import AuditEntry, AuditFilter, HistoryLog
from scheduler.store.protocol import Commit, FencedError, Page
from scheduler.store.sql_retention import DeletedBatch
from scheduler.store.sql_store import SqlStore
from tests.builders import a_job

ENTRY = AuditEntry(5.0, "anna", "tok-1", "ScaleJob", "job-1", None, {"gpus": {"min": 2}}, "r-1")
SUBMITTED = Command("api-key-1", 1.0, SubmitJob("job-1", JobSpec("train", 1, 1)))


@pytest.fixture
def store(database_url: str) -> Iterator[SqlStore]:
    made = SqlStore(database_url)
    yield made
    made.close()


def commit_at(store: SqlStore, now_s: float, *consumed: str) -> None:
    """Commit a tick at that time with one event and one decision."""
    previous = store.load().snapshot
    event = Event(now_s, EventCode.JOB_STATE, "job-1", f"at {now_s:g}")
    recall = RecallNode("i0", now_s, Reason(ReasonCode.INFERENCE_NEEDS_NODE, "soon"))
    snapshot = replace(previous, generation=previous.generation + 1, now_s=now_s)
    store.commit(
        Commit(previous, snapshot, epoch=0, consumed_command_ids=consumed, events=(event,), decisions=(recall,))
    )


def delete_rows(store: SqlStore, log: HistoryLog, *, before_s: float, rows_max: int = 100) -> DeletedBatch:
    return store.retention.delete_old_rows(log, before_s=before_s, rows_max=rows_max, epoch=0)


@pytest.mark.parametrize("log", [HistoryLog.EVENTS, HistoryLog.DECISIONS])
def test_old_rows_are_deleted_in_batches_up_to_a_mark(store: SqlStore, log: HistoryLog) -> None:
    for now_s in (1.0, 2.0, 3.0, 4.0, 5.0):
        commit_at(store, now_s)
    read = store.list_events if log is HistoryLog.EVENTS else store.list_decisions
    assert store.get_retention_mark(log) == 0
    assert delete_rows(store, log, before_s=4.0, rows_max=2) == DeletedBatch(2, is_complete=False)
    assert (store.get_retention_mark(log), [row.number for row in read(Page())]) == (2, [3, 4, 5])
    assert delete_rows(store, log, before_s=4.0, rows_max=2) == DeletedBatch(1, is_complete=True)
    assert delete_rows(store, log, before_s=4.0, rows_max=2) == DeletedBatch(0, is_complete=True)
    assert [row.number for row in read(Page())] == [4, 5]


def test_newest_row_stays_so_that_its_number_is_not_reused(store: SqlStore) -> None:
    for now_s in (1.0, 2.0):
        commit_at(store, now_s)
    assert delete_rows(store, HistoryLog.EVENTS, before_s=99.0).rows == 1
    commit_at(store, 3.0)
    assert [row.number for row in store.list_events(Page())] == [2, 3]


def test_consumed_commands_are_deleted_except_submissions(store: SqlStore) -> None:
    others = [Command(f"c{number}", 1.0, PauseLending()) for number in range(4)]
    for command in (SUBMITTED, *others):
        store.send(command)
    commit_at(store, 2.0, SUBMITTED.id, "c0", "c1")
    assert delete_rows(store, HistoryLog.COMMANDS, before_s=3.0) == DeletedBatch(2, is_complete=True)
    assert (store.get_command("c0"), store.get_command("c1")) == (None, None)
    assert store.load().inbox == (others[2], others[3])
    assert not store.send(SUBMITTED), "the key is the same job for ever"
    commit_at(store, 4.0, "c2", "c3")
    store.send(others[0])
    assert delete_rows(store, HistoryLog.COMMANDS, before_s=3.0).rows == 0
    assert delete_rows(store, HistoryLog.COMMANDS, before_s=5.0).rows == 2


def test_deliveries_are_deleted_by_their_end(store: SqlStore) -> None:
    store.webhooks.create(Webhook("wh_a", "ada", "https://a.example/", 5.0))
    message = Delivery("msg_1", "wh_a", 1, "JobStarted", "job-1", 10.0, "{}")
    store.webhooks.add_delivery(message)
    for number, ended_at_s in ((2, 30.0), (3, 20.0)):
        ended = replace(message, id=f"msg_{number}", state=DeliveryState.DELIVERED, ended_at_s=ended_at_s)
        store.webhooks.add_delivery(ended)
    assert delete_rows(store, HistoryLog.DELIVERIES, before_s=25.0) == DeletedBatch(1, is_complete=True)
    assert [each.id for each in store.webhooks.list_deliveries("wh_a", limit=9)] == ["msg_2", "msg_1"]


def test_only_retention_deletes_from_the_audit_log_and_logs_it(store: SqlStore, database_url: str) -> None:
    for at_s in (1.0, 2.0, 3.0):
        store.audit_log.append(replace(ENTRY, at_s=at_s))
        commit_at(store, at_s)
    assert delete_rows(store, HistoryLog.AUDIT, before_s=2.5, rows_max=1) == DeletedBatch(1, is_complete=False)
    assert delete_rows(store, HistoryLog.AUDIT, before_s=2.5).rows == 1
    assert delete_rows(store, HistoryLog.EVENTS, before_s=1.5).rows == 1
    store.retention.audit_deletions(now_s=9.0, epoch=0)
    store.retention.audit_deletions(now_s=9.5, epoch=0)
    after = {"audit": {"rows": 2, "up_to_s": 2.0}, "events": {"rows": 1, "up_to_s": 1.0}}
    entry = AuditEntry(9.0, "ebbtide", "", "SweepHistory", "history", None, after, "")
    assert [row.entry for row in store.audit_log.list_entries(Page(), AuditFilter())] == [
        replace(ENTRY, at_s=3.0),
        entry,
    ]
    engine = create_engine(database_url)
    for statement in ("DELETE FROM audit_log WHERE number = 3", "UPDATE audit_log SET actor = 'eve'"):
        with pytest.raises(DBAPIError, match="append-only"), engine.begin() as connection:
            connection.execute(text(statement))
    engine.dispose()


def test_fenced_leader_deletes_nothing(store: SqlStore) -> None:
    for now_s in (1.0, 2.0):
        commit_at(store, now_s)
    store.webhooks.create(Webhook("wh_a", "ada", "https://a.example/", 5.0))
    store.webhooks.add_delivery(
        Delivery("m", "wh_a", 1, "JobStarted", "j", 1.0, "{}", DeliveryState.DEAD, ended_at_s=1.0)
    )
    delete_rows(store, HistoryLog.DECISIONS, before_s=9.0)
    store.acquire_lease("another", now_s=5.0, ttl_s=5.0)
    for log in (HistoryLog.EVENTS, HistoryLog.DELIVERIES):
        with pytest.raises(FencedError):
            delete_rows(store, log, before_s=9.0)
    with pytest.raises(FencedError):
        store.retention.audit_deletions(now_s=9.0, epoch=0)
    assert (len(store.list_events(Page())), len(store.webhooks.list_deliveries("wh_a", limit=9))) == (2, 1)
    assert store.load().snapshot != Snapshot()


def test_records_of_jobs_that_ended_before_that_time_are_deleted_with_their_samples(store: SqlStore) -> None:
    previous = store.load().snapshot
    jobs = tuple(
        replace(a_job(f"job-{at_s}"), state=JobState.SUCCEEDED, state_since_s=float(at_s)) for at_s in (1, 2, 3, 4)
    )
    samples = tuple(SlottedSample(job.id, 0, Sample(1.0, 1.0, None, None, None)) for job in jobs)
    snapshot = replace(previous, generation=1)
    store.commit(Commit(previous, snapshot, epoch=0, ended_jobs=jobs, samples=samples))
    assert delete_rows(store, HistoryLog.ENDED_JOBS, before_s=2.5, rows_max=1) == DeletedBatch(1, is_complete=False)
    assert delete_rows(store, HistoryLog.ENDED_JOBS, before_s=2.5).rows == 1
    assert [job.id for job in store.list_ended_jobs(limit=9)] == ["job-4", "job-3"]
    assert [bool(store.list_samples(job.id)) for job in jobs] == [False, False, True, True]


def test_demand_readings_and_usage_of_earlier_hours_are_deleted(store: SqlStore) -> None:
    previous = store.load().snapshot
    readings = tuple(("serving", DemandReading(at_s, 1.0, 1.0)) for at_s in (1.0, 2.0, 3.0))
    usage = tuple(UsageEntry(UsageKey(hour * 3600, "q", "anna", "a100", False), 1.0, 0.0) for hour in (1, 2, 3))
    store.commit(Commit(previous, replace(previous, generation=1), epoch=0, readings=readings, usage=usage))
    assert delete_rows(store, HistoryLog.READINGS, before_s=2.5) == DeletedBatch(2, is_complete=True)
    assert [each.at_s for each in store.list_readings("serving", since_s=0.0)] == [3.0]
    assert delete_rows(store, HistoryLog.USAGE, before_s=3 * 3600.0).rows == 1
    assert [entry.key.hour_s for entry in store.load_usage(from_s=0.0, to_s=1e9).entries] == [7200, 10800]
