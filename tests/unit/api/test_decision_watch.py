"""DecisionWatch: how many looks waiting requests cause, and when they wake."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from api.agent_state import AgentStateCache
from api.decision_watch import WATCH_PERIOD_S, DecisionWatch
from scheduler.domain.snapshot import Snapshot
from scheduler.runtime.clock import RealClock
from scheduler.store.memory_store import MemoryStore
from scheduler.store.protocol import Commit, LoadedState, UnavailableError
from tests.memory_run_log import MemoryRunLog

WAITING = 50


class CountingStore(MemoryStore):
    """A store that counts how often it is read, and that can fail."""

    def __init__(self) -> None:
        super().__init__(Snapshot())
        self.loads = 0
        self.error: Exception | None = None

    def load(self) -> LoadedState:
        self.loads += 1
        if self.error is not None:
            raise self.error
        return super().load()

    def commit_next(self) -> Snapshot:
        before = super().load().snapshot
        lease = self.acquire_lease("leader", now_s=0.0, ttl_s=60.0)
        assert lease is not None
        after = replace(before, generation=before.generation + 1)
        self.commit(Commit(before, after, epoch=lease.epoch))
        return after


@pytest.fixture
def store() -> CountingStore:
    return CountingStore()


@pytest.fixture
def watch(store: CountingStore) -> DecisionWatch:
    return DecisionWatch(AgentStateCache(store, MemoryRunLog()), RealClock())


def test_all_waiting_requests_share_the_looks_and_wake_at_a_commit(store: CountingStore, watch: DecisionWatch) -> None:
    async def run() -> list[Snapshot]:
        waits = [asyncio.create_task(watch.wait_for_change(Snapshot(), 30.0)) for _ in range(WAITING)]
        await asyncio.sleep(2 * WATCH_PERIOD_S)
        assert not any(wait.done() for wait in waits)
        store.commit_next()
        return await asyncio.gather(*waits)

    began_s = time.monotonic()
    assert {snapshot.generation for snapshot in asyncio.run(run())} == {1}
    assert time.monotonic() - began_s < 15.0
    assert store.loads < WAITING


def test_a_request_that_has_seen_an_older_snapshot_returns_at_once(store: CountingStore, watch: DecisionWatch) -> None:
    async def run() -> tuple[Snapshot, Snapshot]:
        first = await watch.wait_for_change(Snapshot(), 30.0)
        return first, await watch.wait_for_change(Snapshot(), 0.0)

    store.commit_next()
    first, second = asyncio.run(run())
    assert first is second
    assert first.generation == 1


def test_a_request_ends_its_wait_without_a_change(store: CountingStore, watch: DecisionWatch) -> None:
    assert asyncio.run(watch.wait_for_change(Snapshot(), 0.05)).generation == 0
    store.commit_next()
    assert asyncio.run(watch.wait_for_change(Snapshot(), 30.0)).generation == 1


def test_each_waiting_request_learns_that_the_store_does_not_respond(
    store: CountingStore, watch: DecisionWatch
) -> None:
    async def run() -> list[Snapshot | BaseException]:
        waits = [watch.wait_for_change(Snapshot(), 30.0) for _ in range(WAITING)]
        return await asyncio.gather(*waits, return_exceptions=True)

    store.error = UnavailableError("the database does not respond")
    assert asyncio.run(run()) == [store.error] * WAITING
    store.error = None
    store.commit_next()
    assert asyncio.run(watch.wait_for_change(Snapshot(), 30.0)).generation == 1
