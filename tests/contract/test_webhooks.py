"""Webhooks in SQLite and PostgreSQL: one process delivers at a time, and in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from scheduler.domain.events import Delivery, DeliveryState, Event, EventCode, Webhook
from scheduler.domain.snapshot import Snapshot
from scheduler.store.protocol import Commit
from scheduler.store.sql_store import SqlStore
from scheduler.store.sql_webhooks import SqlWebhooks
from scheduler.store.webhooks import ClaimLostError

WEBHOOK = Webhook(
    "wh_a", "ada", "https://a.example/", 5.0, codes=("JobStarted",), queue="vision", owner_id="token:ada", may_veto=True
)


@pytest.fixture
def store(database_url: str) -> Iterator[SqlStore]:
    made = SqlStore(database_url)
    yield made
    made.close()


@pytest.fixture
def webhooks(store: SqlStore) -> SqlWebhooks:
    return store.webhooks


def delivery(number: int, **changes: Any) -> Delivery:
    made = Delivery(f"msg_{number}", "wh_a", number, "JobStarted", "job-1", 10.0, "{}", next_at_s=10.0)
    return replace(made, **changes)


def without_number(found: Delivery | Webhook | None) -> Delivery | Webhook | None:
    return found and replace(found, number=0)


def commit_event(store: SqlStore) -> None:
    lease = store.acquire_lease("test", now_s=0.0, ttl_s=1e9)
    assert lease is not None
    previous = store.load().snapshot
    event = Event(1.0, EventCode.JOB_STARTED, "job-1", "it started")
    store.commit(Commit(previous, replace(previous, generation=previous.generation + 1), lease.epoch, events=(event,)))


def test_new_webhook_starts_after_the_newest_event(store: SqlStore) -> None:
    assert store.load().snapshot == Snapshot()
    commit_event(store)
    made = store.webhooks.create(WEBHOOK)
    assert replace(made, number=0) == replace(WEBHOOK, cursor=1)
    assert store.webhooks.get_webhook("wh_a") == made
    assert store.webhooks.get_webhook("wh_b") is None


def test_webhooks_are_listed_in_pages_and_by_queue(webhooks: SqlWebhooks) -> None:
    made = [webhooks.create(replace(WEBHOOK, id=f"wh_{number}", queue=f"q{number % 2}")) for number in range(5)]
    assert webhooks.list_webhooks(after=0, limit=2) == tuple(made[:2])
    assert webhooks.list_webhooks(after=made[1].number, limit=9) == tuple(made[2:])
    assert webhooks.list_webhooks(after=0, limit=9, queues={"q1"}) == (made[1], made[3])
    assert webhooks.list_webhooks(after=0, limit=9, queues=()) == ()


def test_claim_is_exclusive_until_it_expires(webhooks: SqlWebhooks) -> None:
    webhooks.create(WEBHOOK)
    assert webhooks.claim("wh_a", "first", now_s=10.0, until_s=20.0)
    assert not webhooks.claim("wh_a", "second", now_s=19.0, until_s=30.0)
    webhooks.add_event_deliveries("wh_a", "first", [delivery(1)], cursor=7, until_s=25.0)
    assert not webhooks.claim("wh_a", "second", now_s=24.0, until_s=30.0)
    assert webhooks.claim("wh_a", "second", now_s=25.0, until_s=30.0)
    with pytest.raises(ClaimLostError):
        webhooks.add_event_deliveries("wh_a", "first", [delivery(2)], cursor=9, until_s=40.0)
    with pytest.raises(ClaimLostError):
        webhooks.record_attempt(WEBHOOK, "first", delivery(1, state=DeliveryState.DELIVERED), until_s=40.0)
    found = webhooks.get_webhook("wh_a")
    assert found is not None
    assert found.cursor == 7
    assert without_number(webhooks.get_first_pending("wh_a")) == delivery(1)
    webhooks.release("wh_a", "second", now_s=26.0)
    assert webhooks.claim("wh_a", "first", now_s=26.0, until_s=30.0)


def test_due_webhooks_follow_events_attempts_and_claims(store: SqlStore) -> None:
    webhooks = store.webhooks
    webhooks.create(WEBHOOK)
    assert webhooks.list_due_webhooks(10.0, limit=9) == ()
    commit_event(store)
    assert webhooks.list_due_webhooks(10.0, limit=9) == ("wh_a",)
    webhooks.claim("wh_a", "me", now_s=10.0, until_s=20.0)
    assert webhooks.list_due_webhooks(10.0, limit=9) == ()
    webhooks.add_event_deliveries("wh_a", "me", [delivery(1, next_at_s=50.0)], cursor=1, until_s=20.0)
    webhooks.release("wh_a", "me", now_s=11.0)
    assert (webhooks.list_due_webhooks(49.0, limit=9), webhooks.list_due_webhooks(50.0, limit=9)) == ((), ("wh_a",))
    webhooks.update_webhook("wh_a", {"enabled": False})
    assert webhooks.list_due_webhooks(50.0, limit=9) == ()
    assert not webhooks.claim("wh_a", "me", now_s=50.0, until_s=60.0)


def test_redelivery_comes_before_later_deliveries(webhooks: SqlWebhooks) -> None:
    webhooks.create(WEBHOOK)
    for number in (1, 2):
        webhooks.add_delivery(delivery(number))
    webhooks.claim("wh_a", "me", now_s=10.0, until_s=20.0)
    dead = delivery(1, state=DeliveryState.DEAD, attempts=10, ended_at_s=15.0, status=500, error="HTTP 500")
    webhooks.record_attempt(replace(WEBHOOK, dead_in_a_row=1), "me", dead, until_s=20.0)
    assert without_number(webhooks.get_first_pending("wh_a")) == delivery(2)
    assert webhooks.redeliver("wh_a", "msg_2", now_s=30.0) is None
    revived = webhooks.redeliver("wh_a", "msg_1", now_s=30.0)
    assert webhooks.get_first_pending("wh_a") == revived
    assert revived is not None
    assert (revived.attempts, revived.next_at_s, revived.ended_at_s) == (0, 30.0, None)
    assert webhooks.redeliver("wh_a", "msg_1", now_s=31.0) is None
    assert [each.id for each in webhooks.list_deliveries("wh_a", limit=9)] == ["msg_2", "msg_1"]
    assert [each.id for each in webhooks.list_deliveries("wh_a", limit=9, before=revived.number + 1)] == ["msg_1"]
    assert webhooks.list_deliveries("wh_a", limit=9, state=DeliveryState.DEAD) == ()


def test_webhook_disabled_during_an_attempt_stays_disabled(webhooks: SqlWebhooks) -> None:
    webhooks.create(WEBHOOK)
    webhooks.add_delivery(delivery(1))
    webhooks.claim("wh_a", "me", now_s=10.0, until_s=20.0)
    webhooks.update_webhook("wh_a", {"enabled": False})
    webhooks.record_attempt(WEBHOOK, "me", delivery(1, state=DeliveryState.DELIVERED, ended_at_s=11.0), until_s=20.0)
    found = webhooks.get_webhook("wh_a")
    assert found is not None
    assert not found.enabled


def test_deleting_a_webhook_deletes_its_deliveries(webhooks: SqlWebhooks) -> None:
    webhooks.create(WEBHOOK)
    webhooks.add_delivery(delivery(1, state=DeliveryState.DELIVERED, ended_at_s=11.0))
    webhooks.add_delivery(delivery(2, created_at_s=7.0))
    assert webhooks.get_oldest_pending_at_s() == 7.0
    webhooks.delete("wh_a")
    assert webhooks.get_webhook("wh_a") is None
    assert webhooks.list_deliveries("wh_a", limit=9) == ()
    with pytest.raises(ClaimLostError):
        webhooks.add_delivery(delivery(3))


def test_rotated_secret_has_the_next_number(webhooks: SqlWebhooks) -> None:
    webhooks.create(WEBHOOK)
    rotated = webhooks.rotate_secret("wh_a", old_until_s=99.0)
    assert rotated is not None
    assert (rotated.secret_number, rotated.old_secret_until_s) == (2, 99.0)
    assert webhooks.rotate_secret("wh_b", old_until_s=99.0) is None
