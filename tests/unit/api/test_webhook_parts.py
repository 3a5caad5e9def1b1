"""Webhooks without a network: signatures, addresses, backoff, and event filters."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.webhooks.deliverer import DEAD_IN_A_ROW_MAX, Backoff, apply_outcome, build_delivery, webhook_visibility
from api.webhooks.sender import (
    RESPONSE_BYTES_MAX,
    DeliveryOutcome,
    RefusedAddressError,
    check_host,
    parse_allowed_hosts,
    resolve_allowed,
)
from api.webhooks.signature import derive_webhook_secret, sign_message
from api.webhooks.vetoes import VetoSender, read_veto
from ebbtide.client.webhook_signature import SignatureError, verify
from scheduler.domain.commands import Command, VetoLoan
from scheduler.domain.events import Delivery, DeliveryState, Event, EventCode, Webhook
from scheduler.domain.job import Job
from scheduler.domain.snapshot import Snapshot
from scheduler.store.memory_store import MemoryStore
from scheduler.store.protocol import StoredEvent
from tests.builders import a_job

SECRET = derive_webhook_secret(b"s" * 32, "wh_a", 1)
WEBHOOK = Webhook("wh_a", "ada", "https://a.example/", 0.0)
DELIVERY = Delivery("msg_1", "wh_a", 1, "JobStarted", "job-1", 0.0, "{}")
NO_JOBS: dict[str, Job] = {}
FAILED = DeliveryOutcome(500, "HTTP 500")


def test_a_signature_follows_the_specification() -> None:
    headers = sign_message("msg_1", b'{"a":1}', [SECRET], now_s=1_760_000_000.9)
    key = base64.b64decode(SECRET.removeprefix("whsec_"))
    expected = hmac.new(key, b'msg_1.1760000000.{"a":1}', hashlib.sha256).digest()
    assert headers == {
        "webhook-id": "msg_1",
        "webhook-timestamp": "1760000000",
        "webhook-signature": f"v1,{base64.b64encode(expected).decode()}",
    }


def test_a_receiver_accepts_either_secret_during_a_rotation() -> None:
    old, new = (derive_webhook_secret(b"s" * 32, "wh_a", number) for number in (1, 2))
    headers = sign_message("msg_1", b"{}", [new, old], now_s=time.time() - 200.0)
    for secret in (old, new):
        verify({name.upper(): value for name, value in headers.items()}, "{}", secret)


def test_a_receiver_rejects_messages_that_were_not_signed_now_with_its_secret() -> None:
    now_s = time.time()
    headers = sign_message("msg_1", b"{}", [SECRET], now_s=now_s)
    other_secret = derive_webhook_secret(b"s" * 32, "wh_a", 3)
    rejected: list[tuple[dict[str, str], bytes, str]] = [
        (headers, b"{ }", SECRET),
        (headers, b"\xff", SECRET),
        (headers, b"{}", other_secret),
        (headers, b"{}", "whsec_!"),
        ({**headers, "webhook-id": "msg_2"}, b"{}", SECRET),
        (sign_message("msg_1", b"{}", [SECRET], now_s=now_s - 301.0), b"{}", SECRET),
        (sign_message("msg_1", b"{}", [SECRET], now_s=now_s + 310.0), b"{}", SECRET),
        ({**headers, "webhook-timestamp": "soon"}, b"{}", SECRET),
        ({**headers, "webhook-signature": "v1"}, b"{}", SECRET),
        ({**headers, "webhook-signature": "v1,x"}, b"{}", SECRET),
        ({**headers, "webhook-timestamp": "nan"}, b"{}", SECRET),
        (headers, b"{}", ""),
        ({"webhook-id": "msg_1"}, b"{}", SECRET),
        ({}, b"{}", SECRET),
    ]
    for given_headers, body, secret in rejected:
        with pytest.raises(SignatureError):
            verify(given_headers, body, secret)


def test_a_host_with_a_private_address_is_refused_unless_allowed() -> None:
    async def mixed(host: str, port: int) -> list[str]:
        return ["93.184.216.34", "10.0.0.7"]

    with pytest.raises(RefusedAddressError, match="EBBTIDE_WEBHOOK_HOSTS") as refused:
        asyncio.run(resolve_allowed("hooks.example", 443, frozenset(), mixed))
    assert "10.0.0.7" not in str(refused.value)
    named = parse_allowed_hosts(" Hooks.Example, [::1]")
    assert asyncio.run(resolve_allowed("HOOKS.example", 443, named, mixed)) == ["93.184.216.34", "10.0.0.7"]
    assert asyncio.run(resolve_allowed("[::1]", 443, named, mixed)) == ["::1"]
    for host in ("localhost", "localhost.", "a.localhost", "127.0.0.1", "[::1]", "169.254.169.254"):
        with pytest.raises(RefusedAddressError, match="EBBTIDE_WEBHOOK_HOSTS"):
            check_host(host, frozenset())
    check_host("hooks.example", frozenset())
    check_host("[::1]", named)


@given(attempts=st.integers(1, 30), drawn=st.floats(0, 1, exclude_max=True), asked_s=st.floats(0, 1e7))
def test_delays_grow_within_bounds_and_respect_retry_after(attempts: int, drawn: float, asked_s: float) -> None:
    backoff = Backoff()
    pause_s = backoff.compute_delay_s(attempts, random_fraction=drawn)
    assert 5.0 <= pause_s <= 3600.0 * 1.25
    assert backoff.compute_delay_s(attempts + 1, random_fraction=drawn) >= pause_s
    assert min(asked_s, 6 * 3600.0) <= backoff.compute_delay_s(attempts, random_fraction=drawn, retry_after_s=asked_s)


def test_ten_attempts_take_hours() -> None:
    backoff = Backoff()
    least_s, most_s = (
        sum(backoff.compute_delay_s(n, random_fraction=drawn) for n in range(1, backoff.attempts))
        for drawn in (0.0, 1.0)
    )
    assert 3.5 * 3600.0 <= least_s < most_s <= 4.4 * 3600.0


def test_a_delivery_dies_after_its_last_attempt_and_disables_a_failing_webhook() -> None:
    webhook = WEBHOOK
    for dead in range(1, DEAD_IN_A_ROW_MAX + 1):
        tried = replace(DELIVERY, attempts=9)
        webhook, tried = apply_outcome(webhook, tried, FAILED, Backoff(), now_s=5.0, random_fraction=0.0)
        assert (tried.state, tried.ended_at_s, tried.error) == (DeliveryState.DEAD, 5.0, "HTTP 500")
        assert (webhook.dead_in_a_row, webhook.enabled) == (dead, dead < DEAD_IN_A_ROW_MAX)
    assert webhook.disabled_reason == "5 consecutive deliveries failed for good; last attempt: HTTP 500"


def test_a_delivered_message_resets_the_dead_count() -> None:
    webhook, tried = apply_outcome(
        replace(WEBHOOK, dead_in_a_row=4), DELIVERY, DeliveryOutcome(204), Backoff(), now_s=5.0, random_fraction=0.5
    )
    assert (webhook.dead_in_a_row, tried.state, tried.attempts) == (0, DeliveryState.DELIVERED, 1)


def test_retry_after_delays_the_next_attempt() -> None:
    outcome = replace(FAILED, status=429, retry_after_s=120.0)
    webhook, tried = apply_outcome(WEBHOOK, DELIVERY, outcome, Backoff(), now_s=5.0, random_fraction=0.0)
    assert (webhook, tried.state, tried.next_at_s) == (WEBHOOK, DeliveryState.PENDING, 125.0)


def test_410_disables_the_webhook_at_once() -> None:
    webhook, tried = apply_outcome(
        WEBHOOK, DELIVERY, DeliveryOutcome(410, "HTTP 410"), Backoff(), now_s=5.0, random_fraction=0.0
    )
    assert (webhook.enabled, webhook.disabled_reason) == (False, "the receiver answered 410 Gone")
    assert tried.state is DeliveryState.DEAD


def test_events_are_filtered_by_code_subject_and_queue() -> None:
    job = a_job("job-1", 1, 2, queue="vision")
    started = StoredEvent(7, 1, Event(3.0, EventCode.JOB_STARTED, "job-1", "it started", {"gpus": 2.0}))
    of_queue = StoredEvent(8, 1, Event(3.0, EventCode.QUEUE_CHANGED, "vision", "it is new"))
    of_node = StoredEvent(9, 1, Event(3.0, EventCode.NODE_CHANGED, "n0", "it is gone"))

    snapshot = Snapshot(jobs={"job-1": job})

    def passed(**wanted: Any) -> list[int]:
        webhook = replace(WEBHOOK, **wanted)
        visibility = webhook_visibility(webhook, snapshot, NO_JOBS.get)
        found = (build_delivery(webhook, event, visibility, now_s=4.0) for event in (started, of_queue, of_node))
        return [each.event_number for each in found if each is not None]

    assert passed() == [7, 8, 9]
    assert passed(codes=("JobStarted", "NodeChanged")) == [7, 9]
    assert passed(subject="n0") == [9]
    assert passed(queue="vision") == [7, 8]
    assert passed(queue="vision", codes=("JobStarted",)) == [7]
    assert passed(queue="text") == []
    made, again = (
        build_delivery(WEBHOOK, started, webhook_visibility(WEBHOOK, snapshot, NO_JOBS.get), now_s=4.0)
        for _ in range(2)
    )
    assert made == again
    assert made is not None
    assert made.id == "msg_wh_a_7"
    assert '"job":{"id":"job-1","name":"job-1","queue":"vision"' in made.body


def test_job_ids_of_other_queues_are_redacted() -> None:
    jobs = {name: a_job(name, 1, 2, queue=queue) for name, queue in (("own-1", "vision"), ("secret-1", "text"))}
    ended = {"secret-2": a_job("secret-2", 1, 2, queue="text")}
    numbers = {"gpus": 1.0, "secret-1": 2.0}
    event = Event(3.0, EventCode.JOB_STATE, "own-1", "preempted: secret-1 and secret-2 need what own-1 has", numbers)

    def body(queue: str) -> str:
        webhook = replace(WEBHOOK, queue=queue)
        visibility = webhook_visibility(webhook, Snapshot(jobs=jobs), ended.get)
        made = build_delivery(webhook, StoredEvent(7, 1, event), visibility, now_s=4.0)
        assert made is not None
        return made.body

    assert "secret" not in body("vision")
    assert "a job of another queue need what own-1 has" in body("vision")
    assert "secret-1 and secret-2 need" in body("")


PROPOSED = Delivery("msg_2", "wh_a", 2, "LoanProposed", "i0-7", 0.0, "{}")
VETOED = VetoLoan("i0-7", "not today", "wh_a")


@pytest.mark.parametrize(
    ("delivery", "status", "body", "found"),
    [
        (PROPOSED, 200, b'{"veto": true, "reason": "not today"}', VETOED),
        (PROPOSED, 200, b' {"veto": true, "reason": "not today", "more": 1}\n', VETOED),
        (PROPOSED, 200, b'{"veto": false}', ""),
        (PROPOSED, 200, b"{}", ""),
        (PROPOSED, 200, b"ok", ""),
        (PROPOSED, 200, b"", ""),
        (PROPOSED, 202, b'{"veto": true, "reason": "not today"}', ""),
        (DELIVERY, 200, b'{"veto": true, "reason": "not today"}', ""),
    ],
)
def test_only_a_full_answer_to_a_proposal_is_a_veto(
    delivery: Delivery, status: int, body: bytes, found: VetoLoan | str
) -> None:
    assert read_veto(delivery, DeliveryOutcome(status, response_start=body)) == found


@pytest.mark.parametrize(
    "body",
    [
        b'{"veto": "yes", "reason": "not today"}',
        b'{"veto": true}',
        b'{"veto": true, "reason": " "}',
        b'{"veto": true, "reason": 7}',
        b'{"veto": true',
        b'{"veto": true, "reason": "' + b"x" * RESPONSE_BYTES_MAX,
    ],
)
def test_broken_answer_to_a_proposal_is_an_error(body: bytes) -> None:
    found = read_veto(PROPOSED, DeliveryOutcome(200, response_start=body[:RESPONSE_BYTES_MAX]))
    assert isinstance(found, str)
    assert found


def test_webhook_that_is_not_an_admins_vetoes_nothing() -> None:
    store = MemoryStore()
    assert VetoSender(store).send(WEBHOOK, PROPOSED, VETOED, now_s=1.0)
    assert store.count_pending_commands() == 0


def test_veto_that_was_sent_before_an_unrecorded_attempt_counts() -> None:
    store = MemoryStore()
    store.send(Command(f"veto-{PROPOSED.id}", 0.0, VETOED))
    assert VetoSender(store).send(replace(WEBHOOK, may_veto=True), PROPOSED, VETOED, now_s=1.0) == ""
    assert VetoSender(MemoryStore()).send(replace(WEBHOOK, may_veto=True), PROPOSED, VETOED, now_s=1.0)
