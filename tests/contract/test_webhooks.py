"""What is kept of webhooks, in SQLite and in a real PostgreSQL: one works on a webhook at a time, and in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from scheduler.domain.events import Delivery, DeliveryState, Event, EventCode, Webhook
from scheduler.domain.snapshot import Snapshot
from scheduler.store.api_protocol import ClaimLostError
from scheduler.store.protocol import Commit
from scheduler.store.sql_store import SqlStore
from scheduler.store.sql_webhooks import SqlWebhooks

WEBHOOK = Webhook("wh_a", "ada", "https://a.example/", 5.0, codes=("JobStarted",), queue="vision")


@pytest.fixture
def store(database_url: str) -> Iterator[SqlStore]:
    made = SqlStore(database_url)
    yield made
    made.close()


@pytest.fixture
def kept(store: SqlStore) -> SqlWebhooks:
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


def test_a_webhook_is_kept_as_it_was_made_and_begins_after_the_newest_event(store: SqlStore) -> None:
    assert store.load().snapshot == Snapshot()
    commit_event(store)
    made = store.webhooks.create(WEBHOOK)
    assert replace(made, number=0) == replace(WEBHOOK, cursor=1)
    assert store.webhooks.get_webhook("wh_a") == made
    assert store.webhooks.get_webhook("wh_b") is None


def test_webhooks_are_listed_in_pages_and_by_queue(kept: SqlWebhooks) -> None:
    made = [kept.create(replace(WEBHOOK, id=f"wh_{number}", queue=f"q{number % 2}")) for number in range(5)]
    assert kept.list_webhooks(after=0, limit=2) == tuple(made[:2])
    assert kept.list_webhooks(after=made[1].number, limit=9) == tuple(made[2:])
    assert kept.list_webhooks(after=0, limit=9, queues={"q1"}) == (made[1], made[3])
    assert kept.list_webhooks(after=0, limit=9, queues=()) == ()


def test_only_one_works_on_a_webhook_until_the_claim_ends(kept: SqlWebhooks) -> None:
    kept.create(WEBHOOK)
    assert kept.claim("wh_a", "first", now_s=10.0, until_s=20.0)
    assert not kept.claim("wh_a", "second", now_s=19.0, until_s=30.0)
    kept.add_event_deliveries("wh_a", "first", [delivery(1)], cursor=7, until_s=25.0)
    assert not kept.claim("wh_a", "second", now_s=24.0, until_s=30.0)
    assert kept.claim("wh_a", "second", now_s=25.0, until_s=30.0)
    with pytest.raises(ClaimLostError):
        kept.add_event_deliveries("wh_a", "first", [delivery(2)], cursor=9, until_s=40.0)
    with pytest.raises(ClaimLostError):
        kept.record_attempt(WEBHOOK, "first", delivery(1, state=DeliveryState.DELIVERED), until_s=40.0)
    found = kept.get_webhook("wh_a")
    assert found is not None
    assert found.cursor == 7
    assert without_number(kept.get_first_pending("wh_a")) == delivery(1)
    kept.release("wh_a", "second", now_s=26.0)
    assert kept.claim("wh_a", "first", now_s=26.0, until_s=30.0)


def test_what_is_due_follows_events_attempts_and_claims(store: SqlStore) -> None:
    kept = store.webhooks
    kept.create(WEBHOOK)
    assert kept.list_due_webhooks(10.0, limit=9) == ()
    commit_event(store)
    assert kept.list_due_webhooks(10.0, limit=9) == ("wh_a",)
    kept.claim("wh_a", "me", now_s=10.0, until_s=20.0)
    assert kept.list_due_webhooks(10.0, limit=9) == ()
    kept.add_event_deliveries("wh_a", "me", [delivery(1, next_at_s=50.0)], cursor=1, until_s=20.0)
    kept.release("wh_a", "me", now_s=11.0)
    assert (kept.list_due_webhooks(49.0, limit=9), kept.list_due_webhooks(50.0, limit=9)) == ((), ("wh_a",))
    kept.update_webhook("wh_a", enabled=False)
    assert kept.list_due_webhooks(50.0, limit=9) == ()
    assert not kept.claim("wh_a", "me", now_s=50.0, until_s=60.0)


def test_a_dead_delivery_is_revived_before_those_that_came_later(kept: SqlWebhooks) -> None:
    kept.create(WEBHOOK)
    for number in (1, 2):
        kept.add_delivery(delivery(number))
    kept.claim("wh_a", "me", now_s=10.0, until_s=20.0)
    dead = delivery(1, state=DeliveryState.DEAD, attempts=10, ended_at_s=15.0, status=500, error="HTTP 500")
    kept.record_attempt(replace(WEBHOOK, dead_in_a_row=1), "me", dead, until_s=20.0)
    assert without_number(kept.get_first_pending("wh_a")) == delivery(2)
    assert kept.redeliver("wh_a", "msg_2", now_s=30.0) is None
    revived = kept.redeliver("wh_a", "msg_1", now_s=30.0)
    assert kept.get_first_pending("wh_a") == revived
    assert revived is not None
    assert (revived.attempts, revived.next_at_s, revived.ended_at_s) == (0, 30.0, None)
    assert kept.redeliver("wh_a", "msg_1", now_s=31.0) is None
    assert [each.id for each in kept.list_deliveries("wh_a", limit=9)] == ["msg_2", "msg_1"]
    assert [each.id for each in kept.list_deliveries("wh_a", limit=9, before=revived.number + 1)] == ["msg_1"]
    assert kept.list_deliveries("wh_a", limit=9, state=DeliveryState.DEAD) == ()


def test_a_webhook_that_a_person_disables_during_an_attempt_stays_disabled(kept: SqlWebhooks) -> None:
    kept.create(WEBHOOK)
    kept.add_delivery(delivery(1))
    kept.claim("wh_a", "me", now_s=10.0, until_s=20.0)
    kept.update_webhook("wh_a", enabled=False)
    kept.record_attempt(WEBHOOK, "me", delivery(1, state=DeliveryState.DELIVERED, ended_at_s=11.0), until_s=20.0)
    found = kept.get_webhook("wh_a")
    assert found is not None
    assert not found.enabled


def test_a_deleted_webhook_takes_its_deliveries_along(kept: SqlWebhooks) -> None:
    kept.create(WEBHOOK)
    kept.add_delivery(delivery(1, state=DeliveryState.DELIVERED, ended_at_s=11.0))
    kept.add_delivery(delivery(2, created_at_s=7.0))
    assert kept.get_oldest_pending_at_s() == 7.0
    kept.delete("wh_a")
    assert kept.get_webhook("wh_a") is None
    assert kept.list_deliveries("wh_a", limit=9) == ()
    with pytest.raises(ClaimLostError):
        kept.add_delivery(delivery(3))


def test_a_rotated_secret_has_the_next_number(kept: SqlWebhooks) -> None:
    kept.create(WEBHOOK)
    rotated = kept.rotate_secret("wh_a", old_until_s=99.0)
    assert rotated is not None
    assert (rotated.secret_number, rotated.old_secret_until_s) == (2, 99.0)
    assert kept.rotate_secret("wh_b", old_until_s=99.0) is None
