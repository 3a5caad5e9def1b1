"""Webhooks as receivers see them: real API processes on one database, one of them killed, real servers on loopback."""

from __future__ import annotations

import base64
import hashlib
import hmac
import signal
import threading
from functools import partial
from pathlib import Path

import pytest

from api.client.administration import verify
from scheduler.domain.events import DeliveryState, EventCode
from tests.e2e.webhook_play import webhook_play
from tests.webhook_receiver import Answer, Received, Receiver, receiver, wait_for

pytestmark = pytest.mark.e2e


def is_signed(received: Received, secret: str) -> bool:
    """By the specification, without the code of the service."""
    given = {name.lower(): value for name, value in received.headers.items()}
    key = base64.b64decode(secret.removeprefix("whsec_"))
    signed = f"{given['webhook-id']}.{given['webhook-timestamp']}.".encode() + received.body
    expected = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
    return f"v1,{expected}" in given["webhook-signature"].split(" ")


def test_two_api_processes_share_the_work_and_one_that_is_killed_loses_nothing(tmp_path: Path) -> None:
    with webhook_play(tmp_path) as play, receiver() as first, receiver() as second:
        doomed, client = play.start_api()
        _, other = play.start_api()
        made = [client.create_webhook({"url": each.url}) for each in (first, second)]
        slow = threading.Event()
        slow.set()
        first.answer = lambda number: Answer(after_s=0.05 if slow.is_set() else 0.0)
        numbers = play.happen(60)
        wait_for(lambda: len(first.received) > 10)
        doomed.send_signal(signal.SIGKILL)
        doomed.wait()
        numbers += play.happen(20)
        slow.clear()
        for each, kept in ((first, made[0]), (second, made[1])):
            wait_for(partial(_has_heard, each, numbers), partial(getattr, each, "numbers"))
            # Nothing is lost, nothing overtakes; only what was on its way at the kill may come twice.
            assert sorted(set(each.numbers)) == numbers
            assert each.numbers == sorted(each.numbers)
            assert len(each.numbers) <= len(numbers) + 1
            assert all(is_signed(one, kept["secret"]) for one in each.received)
            ids = {one.headers["webhook-id"] for one in each.received}
            assert ids == {f"msg_{kept['id']}_{number}" for number in numbers}
        verify(first.received[-1].headers, first.received[-1].body, made[0]["secret"])
        wait_for(lambda: play.store.webhooks.get_oldest_pending_at_s() is None)
        listed = list(other.webhook_deliveries(made[0]["id"], limit=50))
        assert {one["state"] for one in listed} == {"delivered"}
        assert [one["event_number"] for one in listed] == numbers[::-1]


def test_failures_are_tried_again_in_order_die_are_redelivered_and_disable(tmp_path: Path) -> None:
    with webhook_play(tmp_path) as play, receiver() as hook, receiver() as slow:
        _, client = play.start_api()
        made = client.create_webhook({"url": hook.url, "codes": ["JobStarted"], "subject": "job-1"})
        client.create_webhook({"url": slow.url})
        slow.answer = lambda number: Answer(after_s=30.0)  # longer than anybody waits; the other is not held up
        hook.answer = lambda number: Answer(503 if number < 2 else 204, {"Retry-After": "0"})
        play.happen(1, EventCode.JOB_GROWN)
        play.happen(1, subject="job-2")
        numbers = play.happen(2)
        wait_for(lambda: len(hook.received) == 4)
        assert hook.numbers == [numbers[0]] * 3 + numbers[1:]
        tried = list(client.webhook_deliveries(made["id"]))[-1]
        wait_for(lambda: next(client.webhook_deliveries(made["id"]))["state"] == "delivered")
        assert (tried["attempts"], tried["status"]) == (3, 204)

        hook.answer = lambda number: Answer(302, {"Location": slow.url})
        dead = play.happen(5)
        wait_for(lambda: not client.webhook(made["id"])["enabled"], lambda: client.webhook(made["id"]))
        told = client.webhook(made["id"])
        assert told["dead_in_a_row"] == 5
        assert "HTTP 302: redirects are not followed" in told["disabled_reason"]
        missed = play.happen(1)
        assert [one["event_number"] for one in client.webhook_deliveries(made["id"], state="dead")] == dead[::-1]

        hook.answer = lambda number: Answer()
        before = len(hook.received)
        first = list(client.webhook_deliveries(made["id"], state="dead"))[-1]
        client.redeliver(made["id"], first["id"])
        client.change_webhook(made["id"], {"enabled": True})
        wait_for(lambda: len(hook.received) == before + 2)
        assert hook.numbers[before:] == [dead[0], *missed]
        tried_slow = play.store.webhooks.list_webhooks(after=0, limit=9)[1]
        assert play.store.webhooks.list_deliveries(tried_slow.id, limit=9, state=DeliveryState.DELIVERED) == ()


def test_a_rotated_secret_is_signed_with_beside_the_old_one(tmp_path: Path) -> None:
    with webhook_play(tmp_path) as play, receiver() as hook:
        _, client = play.start_api()
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
