"""Webhooks as receivers see them: real API processes on one database, one of them killed, and servers on loopback."""

from __future__ import annotations

import base64
import hashlib
import hmac
import signal
import threading
from functools import partial
from pathlib import Path

import pytest

from ebbtide.client.webhook_signature import verify
from scheduler.domain.events import DeliveryState, EventCode
from tests.e2e.webhook_harness import run_webhooks
from tests.webhook_receiver import Answer, Received, Receiver, receiver, wait_for

pytestmark = pytest.mark.e2e


def is_signed(received: Received, secret: str) -> bool:
    """Verify the signature by the specification, without the service's code."""
    given = {name.lower(): value for name, value in received.headers.items()}
    key = base64.b64decode(secret.removeprefix("whsec_"))
    signed = f"{given['webhook-id']}.{given['webhook-timestamp']}.".encode() + received.body
    expected = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
    return f"v1,{expected}" in given["webhook-signature"].split(" ")


@pytest.mark.full
def test_two_api_processes_share_deliveries_and_a_kill_loses_none(tmp_path: Path) -> None:
    with run_webhooks(tmp_path) as harness, receiver() as first, receiver() as second:
        doomed, client = harness.start_api()
        _, other = harness.start_api()
        made = [client.create_webhook({"url": each.url}) for each in (first, second)]
        slow = threading.Event()
        slow.set()
        first.answer = lambda number: Answer(after_s=0.05 if slow.is_set() else 0.0)
        numbers = harness.happen(60)
        wait_for(lambda: len(first.received) > 10)
        doomed.send_signal(signal.SIGKILL)
        doomed.wait()
        numbers += harness.happen(20)
        slow.clear()
        for each, kept in ((first, made[0]), (second, made[1])):
            wait_for(partial(_has_heard, each, numbers), partial(getattr, each, "numbers"))
            # No delivery is lost or overtakes another. Only one in flight at the kill may arrive twice.
            assert sorted(set(each.numbers)) == numbers
            assert each.numbers == sorted(each.numbers)
            assert len(each.numbers) <= len(numbers) + 1
            assert all(is_signed(one, kept["secret"]) for one in each.received)
            ids = {one.headers["webhook-id"] for one in each.received}
            assert ids == {f"msg_{kept['id']}_{number}" for number in numbers}
        verify(first.received[-1].headers, first.received[-1].body, made[0]["secret"])
        wait_for(lambda: harness.store.webhooks.get_oldest_pending_at_s() is None)
        listed = list(other.webhook_deliveries(made[0]["id"], limit=50))
        assert {one["state"] for one in listed} == {"delivered"}
        assert [one["event_number"] for one in listed] == numbers[::-1]


def test_failed_deliveries_are_retried_in_order_then_disable_the_webhook_and_can_be_redelivered(tmp_path: Path) -> None:
    with run_webhooks(tmp_path) as harness, receiver() as hook, receiver() as slow:
        _, client = harness.start_api()
        made = client.create_webhook({"url": hook.url, "codes": ["JobStarted"], "subject": "job-1"})
        client.create_webhook({"url": slow.url})
        slow.answer = lambda number: Answer(after_s=30.0)  # longer than the timeout; must not delay the other webhook
        hook.answer = lambda number: Answer(503 if number < 2 else 204, {"Retry-After": "0"})
        harness.happen(1, EventCode.JOB_GROWN)
        harness.happen(1, subject="job-2")
        numbers = harness.happen(2)
        wait_for(lambda: len(hook.received) == 4)
        assert hook.numbers == [numbers[0]] * 3 + numbers[1:]
        tried = list(client.webhook_deliveries(made["id"]))[-1]
        wait_for(lambda: next(client.webhook_deliveries(made["id"]))["state"] == "delivered")
        assert (tried["attempts"], tried["status"]) == (3, 204)

        hook.answer = lambda number: Answer(302, {"Location": slow.url})
        dead = harness.happen(5)
        wait_for(lambda: not client.webhook(made["id"])["enabled"], lambda: client.webhook(made["id"]))
        disabled = client.webhook(made["id"])
        assert disabled["dead_in_a_row"] == 5
        assert "302" in disabled["disabled_reason"]
        missed = harness.happen(1)
        assert [one["event_number"] for one in client.webhook_deliveries(made["id"], state="dead")] == dead[::-1]

        hook.answer = lambda number: Answer()
        before = len(hook.received)
        first = list(client.webhook_deliveries(made["id"], state="dead"))[-1]
        client.redeliver(made["id"], first["id"])
        client.change_webhook(made["id"], {"enabled": True})
        wait_for(lambda: len(hook.received) == before + 2)
        assert hook.numbers[before:] == [dead[0], *missed]
        tried_slow = harness.store.webhooks.list_webhooks(after=0, limit=9)[1]
        assert harness.store.webhooks.list_deliveries(tried_slow.id, limit=9, state=DeliveryState.DELIVERED) == ()


@pytest.mark.full
def test_deliveries_are_signed_with_the_old_and_the_rotated_secret(tmp_path: Path) -> None:
    with run_webhooks(tmp_path) as harness, receiver() as hook:
        _, client = harness.start_api()
        made = client.create_webhook({"url": hook.url})
        rotated = client.rotate_webhook_secret(made["id"])
        asked = client.test_webhook(made["id"])
        wait_for(lambda: len(hook.received) == 1)
        (received,) = hook.received
        assert rotated["secret"] != made["secret"]
        assert is_signed(received, made["secret"])
        assert is_signed(received, rotated["secret"])
        assert received.document["code"] == "Test"
        assert received.document["id"] == asked["id"] == received.headers["webhook-id"]
        assert "secret" not in client.webhook(made["id"])


def _has_heard(receiver: Receiver, numbers: list[int]) -> bool:
    return set(receiver.numbers) >= set(numbers)
