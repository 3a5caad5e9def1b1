"""Contract of all stores for API tokens and the audit log."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import DBAPIError

from scheduler.domain.commands import Command, PauseLending
from scheduler.store.api_protocol import ApiStore, AuditEntry, AuditFilter, StoredAuditEntry
from scheduler.store.credentials import ApiToken
from scheduler.store.protocol import Page

ENTRY = AuditEntry(5.0, "anna", "tok-1", "ScaleJob", "job-1", {"gpus": {"min": 1}}, {"gpus": {"min": 2}}, "r-1")
TOKEN = ApiToken("tok-b", "ci", "ebk_abc", "d1", ("viewer", "submitter:research"), 1.0, "root")
ALL = AuditFilter()


def list_entries(store: ApiStore, wanted: AuditFilter = ALL, page: Page | None = None) -> list[AuditEntry]:
    return [stored.entry for stored in store.audit_log.list_entries(page or Page(), wanted)]


def test_command_is_audited_once(store: ApiStore) -> None:
    command = Command("c1", 5.0, PauseLending(), actor="anna")
    assert store.send(command, audit=ENTRY)
    assert not store.send(command, audit=replace(ENTRY, request_id="r-2"))
    assert list_entries(store) == [ENTRY]
    assert store.count_pending_commands() == 1


def test_audit_log_is_paged_and_filtered(store: ApiStore) -> None:
    later = replace(ENTRY, at_s=9.0, before=None, outcome="forbidden")
    other = replace(ENTRY, actor="bert", actor_id="token:tok-2", subject="job-2", after=None)
    for entry in (ENTRY, other, later):
        store.audit_log.append(entry)
    assert [each.number for each in store.audit_log.list_entries(Page(), ALL)] == [1, 2, 3]
    assert store.audit_log.list_entries(Page(1, 1), ALL) == (StoredAuditEntry(2, other),)
    assert list_entries(store, AuditFilter(actor="anna")) == [ENTRY, later]
    assert list_entries(store, AuditFilter(actor_id="token:tok-2")) == [other]
    assert list_entries(store, AuditFilter(subject="job-2")) == [other]
    assert list_entries(store, AuditFilter(since_s=9.0)) == [later]


def test_audit_log_is_read_from_its_end(store: ApiStore) -> None:
    for subject in ("a", "b", "a", "a"):
        store.audit_log.append(replace(ENTRY, subject=subject))

    def list_numbers(before: int, limit: int, filters: AuditFilter = ALL) -> list[int]:
        return [each.number for each in store.audit_log.list_newest(before, limit, filters)]

    assert list_numbers(2**63 - 1, 3) == [4, 3, 2]
    assert list_numbers(2, 3) == [1]
    assert list_numbers(4, 9, AuditFilter(subject="a")) == [3, 1]
    assert list_numbers(1, 9) == list_numbers(0, 9) == []


def test_token_is_stored_and_its_creation_audited(store: ApiStore) -> None:
    store.tokens.add(TOKEN, ENTRY)
    assert store.tokens.find_by_digest("d1") == store.tokens.find_by_id("tok-b") == TOKEN
    assert (store.tokens.find_by_digest("d2"), store.tokens.find_by_id("tok-c")) == (None, None)
    assert list_entries(store) == [ENTRY]


def test_tokens_are_listed_by_id(store: ApiStore) -> None:
    for number in (2, 0, 1):
        store.tokens.add(replace(TOKEN, id=f"tok-{number}", digest=f"d{number}"), ENTRY)
    assert [token.id for token in store.tokens.list_tokens(after="", limit=2)] == ["tok-0", "tok-1"]
    assert [token.id for token in store.tokens.list_tokens(after="tok-1", limit=2)] == ["tok-2"]


def test_token_is_revoked_once(store: ApiStore) -> None:
    store.tokens.add(TOKEN, ENTRY)
    store.tokens.record_use("tok-b", 3.0)
    over = replace(TOKEN, last_used_at_s=3.0, revoked_at_s=7.0)
    assert store.tokens.revoke("tok-b", 7.0, ENTRY) == over
    assert store.tokens.revoke("tok-b", 8.0, ENTRY) == over
    assert store.tokens.revoke("tok-c", 8.0, ENTRY) is None
    assert len(list_entries(store)) == 2


@pytest.mark.parametrize("statement", ["UPDATE audit_log SET actor = 'eve'", "DELETE FROM audit_log"])
def test_database_refuses_changes_of_the_audit_log(store: ApiStore, store_url: str, statement: str) -> None:
    store.audit_log.append(ENTRY)
    if not store_url:
        return  # a log in memory has nobody else to guard against
    engine = create_engine(store_url)
    with pytest.raises(DBAPIError, match="append-only"), engine.begin() as connection:
        connection.execute(text(statement))
    engine.dispose()
    assert list_entries(store) == [ENTRY]
