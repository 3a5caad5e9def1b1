"""Contract of all stores for console sessions and login codes."""

from __future__ import annotations

from dataclasses import replace

from scheduler.store.api_protocol import ApiStore, AuditEntry, AuditFilter
from scheduler.store.protocol import Page
from scheduler.store.sessions import ConsoleSession, LoginCode, SignedInUser

ENTRY = AuditEntry(5.0, "anna", "tok-1", "SignIn", "ses-1", None, None, "r-1")
BY_TOKEN = SignedInUser("tok-1", {})
BY_ISSUER = SignedInUser("", {"name": "berta", "grants": ["viewer"]}, 900.0)
CODE = LoginCode("c1", BY_TOKEN, "", 100.0)
SESSION = ConsoleSession("ses-1", "s1", BY_ISSUER, 5.0, 100.0)


def count_entries(store: ApiStore) -> int:
    return len(store.audit_log.list_entries(Page(), AuditFilter()))


def test_login_code_is_taken_once(store: ApiStore) -> None:
    store.sessions.add_code(CODE, now_s=1.0, audit=ENTRY)
    assert store.sessions.take_code("c2", browser="", now_s=2.0) is None
    assert store.sessions.take_code("c1", browser="any", now_s=2.0) == CODE
    assert store.sessions.take_code("c1", browser="any", now_s=2.0) is None
    assert count_entries(store) == 1


def test_login_code_expires_and_belongs_to_one_browser(store: ApiStore) -> None:
    bound = replace(CODE, digest="c2", user=BY_ISSUER, browser="b")
    for code in (CODE, bound):
        store.sessions.add_code(code, now_s=1.0)
    assert store.sessions.take_code("c1", browser="", now_s=100.0) is None
    for other in ("", "x"):
        assert store.sessions.take_code("c2", browser=other, now_s=2.0) is None
    assert store.sessions.take_code("c2", browser="b", now_s=2.0) == bound


def test_expired_codes_and_sessions_are_deleted_by_new_ones(store: ApiStore) -> None:
    store.sessions.add_code(CODE, now_s=1.0)
    store.sessions.add_code(replace(CODE, digest="c2", expires_at_s=200.0), now_s=100.0)
    assert store.sessions.take_code("c1", browser="", now_s=2.0) is None
    store.sessions.add(SESSION, ENTRY)
    store.sessions.add(replace(SESSION, id="ses-2", digest="s2", created_at_s=100.0, expires_at_s=200.0), ENTRY)
    assert store.sessions.find("s1") is None
    assert store.sessions.find("s2") is not None


def test_session_is_found_until_it_is_deleted(store: ApiStore) -> None:
    store.sessions.add(SESSION, ENTRY)
    assert store.sessions.find("s1") == SESSION
    store.sessions.delete("ses-2", ENTRY)
    assert (store.sessions.find("s1"), count_entries(store)) == (SESSION, 1)
    for _ in range(2):
        store.sessions.delete("ses-1", ENTRY)
    assert (store.sessions.find("s1"), count_entries(store)) == (None, 2)
