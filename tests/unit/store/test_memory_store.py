"""MemoryStore: what the contract of all stores does not cover."""

from __future__ import annotations

from scheduler.domain.snapshot import Snapshot
from scheduler.store.memory_store import MemoryStore
from scheduler.store.protocol import Commit


def test_store_starts_from_a_given_snapshot() -> None:
    initial = Snapshot(generation=41, now_s=7.0)
    store = MemoryStore(initial)
    assert store.load().snapshot is initial
    store.commit(Commit(initial, Snapshot(generation=42, now_s=8.0), epoch=0))
    assert store.load().snapshot.generation == 42
