"""Idempotency keys in SQLite and PostgreSQL: the second request with a key creates nothing."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from scheduler.domain.events import Webhook
from scheduler.domain.simulation_task import SimulationFiles, SimulationTask
from scheduler.store.api_protocol import IdempotencyKey, IdempotencyKeyUsedError
from scheduler.store.sql_store import SqlStore

KEY = IdempotencyKey("key", "document")
WEBHOOK = Webhook("wh_a", "ada", "https://a.example/", 5.0)
TASK = SimulationTask("sim-a", "ada", 5.0, ("fifo",), 7, 20)


@pytest.fixture
def store(database_url: str) -> Iterator[SqlStore]:
    made = SqlStore(database_url)
    yield made
    made.close()


def test_key_is_stored_together_with_its_resource(store: SqlStore) -> None:
    assert store.idempotency_keys.find("key") is None
    store.webhooks.create(WEBHOOK, KEY)
    assert store.idempotency_keys.find("key") == (KEY, "wh_a")
    with pytest.raises(IdempotencyKeyUsedError):
        store.webhooks.create(replace(WEBHOOK, id="wh_b"), replace(KEY, document="other"))
    with pytest.raises(IdempotencyKeyUsedError):
        store.simulations.create(TASK, SimulationFiles("", "", ""), KEY)
    assert [webhook.id for webhook in store.webhooks.list_webhooks(after=0, limit=9)] == ["wh_a"]
    assert store.simulations.list_tasks(limit=9) == ()
    assert store.idempotency_keys.find("key") == (KEY, "wh_a")


def test_one_of_many_concurrent_requests_creates_a_resource(store: SqlStore) -> None:
    def make(at: int) -> bool:
        try:
            store.webhooks.create(replace(WEBHOOK, id=f"wh_{at}"), KEY)
        except IdempotencyKeyUsedError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(make, range(16))) == 1
    (made,) = store.webhooks.list_webhooks(after=0, limit=20)
    assert store.idempotency_keys.find("key") == (KEY, made.id)
