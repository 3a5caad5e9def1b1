"""Contract of all stores for encrypted secrets."""

from __future__ import annotations

from dataclasses import replace

from scheduler.store.api_protocol import ApiStore, AuditEntry, AuditFilter
from scheduler.store.protocol import Page
from scheduler.store.sealed_secrets import SealedSecret

ENTRY = AuditEntry(5.0, "anna", "tok-1", "SetSecret", "token", None, {"queue": "blue"}, "r-1")
SECRET = SealedSecret("blue", "token", 1, "key-1", "d3JhcHBlZA==", "c2VhbGVk", 5.0, 5.0, "anna")


def count_entries(store: ApiStore) -> int:
    return len(store.audit_log.list_entries(Page(), AuditFilter()))


def test_replaced_secret_keeps_its_creation_and_counts_versions(store: ApiStore) -> None:
    assert store.secrets.put(SECRET, ENTRY) == SECRET
    later = replace(SECRET, sealed_value="b3RoZXI=", created_at_s=9.0, changed_at_s=9.0, changed_by="bert")
    stored = store.secrets.put(later, ENTRY)
    assert stored == replace(later, version=2, created_at_s=5.0)
    assert store.secrets.find("blue", "token") == stored
    assert store.secrets.find("red", "token") is None
    assert count_entries(store) == 2


def test_secrets_are_listed_by_queue_and_name(store: ApiStore) -> None:
    for queue, name in (("red", "b"), ("blue", "b"), ("blue", "a")):
        store.secrets.put(replace(SECRET, queue=queue, name=name), ENTRY)
    assert [(each.queue, each.name) for each in store.secrets.list_secrets("")] == [
        ("blue", "a"), ("blue", "b"), ("red", "b"),
    ]  # fmt: skip
    assert [each.name for each in store.secrets.list_secrets("blue")] == ["a", "b"]


def test_rewrapping_never_replaces_a_newer_value(store: ApiStore) -> None:
    store.secrets.put(SECRET, ENTRY)
    rewrapped = replace(SECRET, master_key="key-2", wrapped_key="bmV3")
    assert store.secrets.rewrap(rewrapped)
    assert store.secrets.find("blue", "token") == rewrapped
    store.secrets.put(replace(SECRET, sealed_value="b3RoZXI="), ENTRY)
    assert not store.secrets.rewrap(rewrapped)
    found = store.secrets.find("blue", "token")
    assert found is not None
    assert found.wrapped_key == SECRET.wrapped_key


def test_secret_is_removed_once(store: ApiStore) -> None:
    store.secrets.put(SECRET, ENTRY)
    assert store.secrets.remove("blue", "token", ENTRY)
    assert not store.secrets.remove("blue", "token", ENTRY)
    assert count_entries(store) == 2
