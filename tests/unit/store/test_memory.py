"""MemoryStore beyond the contract."""

from __future__ import annotations

from scheduler.domain.snapshot import Snapshot
from scheduler.store.memory_store import MemoryStore
from scheduler.store.protocol import Commit


def test_a_dry_run_starts_from_a_snapshot_taken_elsewhere() -> None:
    taken = Snapshot(generation=41, now_s=7.0)
    store = MemoryStore(taken)
    assert store.load().snapshot is taken
    store.commit(Commit(taken, Snapshot(generation=42, now_s=8.0), epoch=0))
    assert store.load().snapshot.generation == 42
