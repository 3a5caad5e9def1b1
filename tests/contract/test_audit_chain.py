"""The hash chain of the audit log: intact after concurrent writers and retention, and broken by every manipulation."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from sqlalchemy import create_engine, text

from scheduler.domain.commands import Command, PauseLending
from scheduler.store.api_protocol import AuditEntry, HistoryLog
from scheduler.store.audit_chain import ChainReport
from scheduler.store.sql_store import SqlStore

ENTRY = AuditEntry(5.0, "anna", "tok-1", "ScaleJob", "job-1", {"gpus": {"min": 1}, "b": 0.1}, {"a": [1, None]}, "r-1")
_COLUMNS = "at_s, actor, token_id, action, subject, before, after, request_id, outcome"


@pytest.fixture
def chained(database_url: str) -> Iterator[SqlStore]:
    store = SqlStore(database_url, chains_audit=True)
    yield store
    store.close()


def append(store: SqlStore, *numbers: int) -> None:
    for number in numbers:
        store.audit_log.append(replace(ENTRY, at_s=float(number), subject=f"job-{number}"))


def manipulate(url: str, statement: str) -> None:
    """Run a statement as somebody who may remove the triggers that protect the log."""
    engine = create_engine(url)
    try:
        with engine.begin() as connection:
            if connection.dialect.name == "postgresql":
                guards = ["ALTER TABLE audit_log DISABLE TRIGGER USER"]
            else:
                triggers = connection.execute(text("SELECT name FROM sqlite_master WHERE type = 'trigger'")).all()
                guards = [f'DROP TRIGGER "{name}"' for (name,) in triggers if "audit_log" in name]
            for each in (*guards, statement):
                connection.execute(text(each))
    finally:
        engine.dispose()


def broken_at(report: ChainReport) -> set[int]:
    return {problem.number for problem in report.problems}


def test_untouched_chain_is_intact(chained: SqlStore) -> None:
    assert chained.audit_log.verify_chain() == ChainReport()
    append(chained, 1, 2)
    chained.send(Command("c1", 5.0, PauseLending(), actor="anna"), audit=ENTRY)
    report = chained.audit_log.verify_chain()
    assert (report.is_chained, report.entries, report.first_number, report.last_number) == (True, 3, 1, 3)
    assert report.problems == ()
    append(chained, 4)
    assert chained.audit_log.verify_chain(report.digest).problems == ()
    assert broken_at(chained.audit_log.verify_chain("0" * 64)) == {0}


@pytest.mark.parametrize(
    ("statement", "number"),
    [
        ("UPDATE audit_log SET actor = 'eve' WHERE number = 2", 2),
        ("UPDATE audit_log SET after = NULL WHERE number = 2", 2),
        ("DELETE FROM audit_log WHERE number = 1", 2),
        ("DELETE FROM audit_log WHERE number = 2", 3),
        ("DELETE FROM audit_log WHERE number = 4", 3),
        (f"INSERT INTO audit_log (number, {_COLUMNS}) SELECT 9, {_COLUMNS} FROM audit_log WHERE number = 1", 9),
        ("UPDATE audit_log SET number = CASE number WHEN 2 THEN 30 ELSE 2 END WHERE number IN (2, 3)", 2),
        ("UPDATE audit_log SET digest = NULL WHERE number = 2", 2),
        ("UPDATE audit_chain SET digest = 'x'", 4),
    ],
)
def test_manipulation_is_found(chained: SqlStore, database_url: str, statement: str, number: int) -> None:
    append(chained, 1, 2, 3, 4)
    manipulate(database_url, statement)
    assert number in broken_at(chained.audit_log.verify_chain())


def test_concurrent_processes_write_one_chain(database_url: str) -> None:
    stores = [SqlStore(database_url, chains_audit=True) for _ in range(3)]
    threads = [threading.Thread(target=append, args=(store, *range(15))) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    report = stores[0].audit_log.verify_chain()
    for store in stores:
        store.close()
    assert (report.entries, report.problems) == (45, ())


def test_chain_survives_retention_and_finds_what_it_did_not_delete(chained: SqlStore, database_url: str) -> None:
    append(chained, 1, 2, 3, 4, 5)
    lease = chained.acquire_lease("me", now_s=1.0, ttl_s=100.0)
    assert lease is not None
    chained.retention.delete_old_rows(HistoryLog.AUDIT, before_s=3.0, rows_max=10, epoch=lease.epoch)
    report = chained.audit_log.verify_chain()
    assert (report.entries, report.first_number, report.problems) == (3, 3, ())
    manipulate(database_url, "DELETE FROM audit_log WHERE number = 3")
    assert broken_at(chained.audit_log.verify_chain()) == {4}


def test_chain_begins_after_entries_without_digest(database_url: str) -> None:
    plain, chained = SqlStore(database_url), SqlStore(database_url, chains_audit=True)
    append(plain, 1)
    append(chained, 2)
    assert chained.audit_log.verify_chain().problems == ()
    append(plain, 3)
    assert broken_at(chained.audit_log.verify_chain()) == {3}
    plain.close()
    chained.close()
