"""Delivery of events to webhooks: which events a webhook gets, the message, retries, and the background deliverer."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from threading import Event as Flag
from typing import ParamSpec, TypeVar

from api.identity.authorization import Visibility
from api.identity.principals import Grant, Principal, Role
from api.webhooks.sender import HTTP_GONE, DeliveryOutcome, WebhookSender
from api.webhooks.signature import derive_webhook_secret, sign_message
from api.webhooks.vetoes import VetoSender, read_veto
from scheduler.domain.commands import VetoLoan
from scheduler.domain.events import TEST_CODE, Delivery, DeliveryState, Event, EventCode, Webhook
from scheduler.domain.job import Job
from scheduler.domain.snapshot import Snapshot
from scheduler.runtime.clock import Clock
from scheduler.store.api_protocol import ServiceStore
from scheduler.store.protocol import Page, StoredEvent, UnavailableError
from scheduler.store.webhooks import ClaimLostError
from scheduler.telemetry.metrics import record_delivery, record_webhook_lag

JobLookup = Callable[[str], Job | None]


def webhook_visibility(webhook: Webhook, snapshot: Snapshot, ended_job: JobLookup) -> Visibility:
    """Return the visibility of a webhook: that of a queue-admin of its queue, whoever created the webhook."""
    grants = (Grant(Role.QUEUE_ADMIN, webhook.queue),)
    return Visibility(Principal(webhook.owner, grants, subject=webhook.owner_id), snapshot, ended_job)


def build_delivery(webhook: Webhook, stored: StoredEvent, visibility: Visibility, *, now_s: float) -> Delivery | None:
    """Return the delivery of an event to the webhook, or None if the webhook does not get it.

    The filters run before jobs are looked up and hidden job ids are replaced.
    """
    event = stored.event
    if webhook.codes and event.code.value not in webhook.codes:
        return None
    if webhook.subject not in ("", event.subject):
        return None
    job = visibility.snapshot.jobs.get(event.subject) or visibility.ended_job(event.subject)
    if webhook.queue and not _concerns_queue(webhook.queue, event, job):
        return None
    return _new_delivery(
        webhook, event.code.value, visibility.redact(_event_body(event, stored.number, job)), stored.number, now_s
    )


def build_test_delivery(webhook: Webhook, *, requested_by: str, now_s: float) -> Delivery:
    text = f"{requested_by} requested a test message"
    body = {"code": TEST_CODE, "subject": webhook.id, "message": text, "at_s": now_s, "numbers": {}, "job": None}
    return _new_delivery(webhook, TEST_CODE, {"event_number": None, **body}, 0, now_s)


def _concerns_queue(queue: str, event: Event, job: Job | None) -> bool:
    if event.code is EventCode.QUEUE_CHANGED:
        return event.subject == queue
    return job is not None and job.spec.queue == queue


def _event_body(event: Event, number: int, job: Job | None) -> dict[str, object]:
    return {
        "event_number": number,
        "code": event.code.value,
        "subject": event.subject,
        "message": event.message,
        "at_s": event.at_s,
        "numbers": dict(event.numbers),
        "job": None if job is None else _job_summary(job),
    }


def _job_summary(job: Job) -> dict[str, object]:
    """Return the job's state when the message is built, which may be slightly later than the event."""
    return {
        "id": job.id,
        "name": job.spec.name,
        "queue": job.spec.queue,
        "owner": job.owner,
        "owner_id": job.owner_key,
        "state": job.state.value,
        "gpus": {"min": job.spec.min_gpus, "max": job.spec.max_gpus, "target": job.allocation.target_gpus},
    }


def _new_delivery(webhook: Webhook, code: str, body: dict[str, object], event_number: int, now_s: float) -> Delivery:
    """Return a delivery. The id is the same whenever the same event is read again."""
    delivery_id = f"msg_{webhook.id}_{event_number or secrets.token_hex(6)}"
    text = json.dumps({"id": delivery_id, **body}, separators=(",", ":"))
    return Delivery(delivery_id, webhook.id, event_number, code, str(body["subject"]), now_s, text, next_at_s=now_s)


DEAD_IN_A_ROW_MAX = 5
"""A webhook is disabled after this many consecutive dead deliveries."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Delays between the attempts of a delivery.

    `delay_s` precedes the second attempt; it grows by `factor` for each later one, up to `delay_s_max`. Up to `jitter`
    of it is added at random. A longer Retry-After of the receiver wins, up to `retry_after_s_max`. Ten attempts take
    3.5 to 4.4 hours.
    """

    attempts: int = 10
    delay_s: float = 5.0
    factor: float = 3.0
    delay_s_max: float = 3600.0
    jitter: float = 0.25
    retry_after_s_max: float = 6 * 3600.0

    def compute_delay_s(self, attempts: int, *, random_fraction: float, retry_after_s: float = 0.0) -> float:
        """Return the delay after `attempts` attempts. `random_fraction` is uniform in [0, 1)."""
        pause_s = min(self.delay_s * self.factor ** (attempts - 1), self.delay_s_max)
        return max(pause_s * (1.0 + self.jitter * random_fraction), min(retry_after_s, self.retry_after_s_max))


def apply_outcome(
    webhook: Webhook,
    delivery: Delivery,
    outcome: DeliveryOutcome,
    backoff: Backoff,
    *,
    now_s: float,
    random_fraction: float,
) -> tuple[Webhook, Delivery]:
    """Return the webhook and the delivery after an attempt."""
    tried = replace(delivery, attempts=delivery.attempts + 1, status=outcome.status, error=outcome.error)
    if outcome.is_delivered:
        return replace(webhook, dead_in_a_row=0), replace(tried, state=DeliveryState.DELIVERED, ended_at_s=now_s)
    is_gone = outcome.status == HTTP_GONE
    if tried.attempts < backoff.attempts and not is_gone:
        pause_s = backoff.compute_delay_s(
            tried.attempts, random_fraction=random_fraction, retry_after_s=outcome.retry_after_s
        )
        return webhook, replace(tried, next_at_s=now_s + pause_s)
    dead = replace(tried, state=DeliveryState.DEAD, ended_at_s=now_s)
    failing = replace(webhook, dead_in_a_row=webhook.dead_in_a_row + 1)
    if is_gone:
        return replace(failing, enabled=False, disabled_reason="the receiver answered 410 Gone"), dead
    if failing.dead_in_a_row >= DEAD_IN_A_ROW_MAX:
        reason = f"{failing.dead_in_a_row} consecutive deliveries failed for good; last attempt: {outcome.error}"
        return replace(failing, enabled=False, disabled_reason=reason), dead
    return failing, dead


logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_STORE_THREADS = 4


@dataclass(frozen=True, slots=True)
class DeliveryTimings:
    """`poll_s`: interval between polls for due webhooks. `claim_ttl_s`: lifetime of a claim; each attempt renews it.
    `turn_s_max`: a turn starts no attempt after this time. `webhooks_at_once_max`: webhooks served concurrently; others
    wait for a turn to end. `page_size`: events read at once."""

    poll_s: float = 0.5
    claim_ttl_s: float = 60.0
    turn_s_max: float = 10.0
    webhooks_at_once_max: int = 64
    page_size: int = 200


class WebhookDeliverer:
    """Background delivery of events to webhooks in an API process.

    It serves a webhook in turns, each under a claim: it sends pending deliveries in order, then reads further events
    from the webhook's cursor. If the process is killed, another one continues once the claim has expired; a message
    that was sent but not recorded is sent again with the same id. `holder` must be unique among processes.
    `draw_fraction` returns uniform random numbers in [0, 1).
    """

    def __init__(
        self,
        store: ServiceStore,
        sender: WebhookSender,
        *,
        secret: bytes,
        holder: str,
        clock: Clock,
        draw_fraction: Callable[[], float],
        backoff: Backoff | None = None,
        timings: DeliveryTimings | None = None,
    ) -> None:
        self._store = store
        self._records = store.webhooks
        self._vetoes = VetoSender(store)
        self._sender = sender
        self._secret = secret
        self._holder = holder
        self._clock = clock
        self._draw_fraction = draw_fraction
        self._backoff = backoff or Backoff()
        self._timings = timings or DeliveryTimings()
        self._turns: dict[str, asyncio.Task[None]] = {}
        self._threads = ThreadPoolExecutor(_STORE_THREADS, thread_name_prefix="webhook-store")

    async def run(self, stop: Flag) -> None:
        """Deliver until `stop` is set. Attempts in progress are then abandoned, and repeated by another process."""
        # DNS lookups may be slow and use the default executor; store calls have threads of their own.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(self._timings.webhooks_at_once_max))
        while not stop.is_set():
            try:
                await self._poll()
            except UnavailableError as error:
                logger.warning("webhook delivery is waiting for the database: %s", error)
            except Exception:
                logger.exception("cannot read due webhooks")
            await asyncio.sleep(self._timings.poll_s)
        for turn in self._turns.values():
            turn.cancel()
        await asyncio.gather(*self._turns.values(), return_exceptions=True)
        self._threads.shutdown()

    async def _poll(self) -> None:
        now_s = self._clock.now_s()
        self._turns = {webhook_id: turn for webhook_id, turn in self._turns.items() if not turn.done()}
        free = self._timings.webhooks_at_once_max - len(self._turns)
        # The result may include webhooks that are being served here.
        due = (
            await self._run_in_store_thread(
                self._records.list_due_webhooks, now_s, limit=self._timings.webhooks_at_once_max
            )
            if free
            else ()
        )
        for webhook_id in [webhook_id for webhook_id in due if webhook_id not in self._turns][:free]:
            self._turns[webhook_id] = asyncio.create_task(self._run_turn(webhook_id))
        oldest_at_s = await self._run_in_store_thread(self._records.get_oldest_pending_at_s)
        record_webhook_lag(0.0 if oldest_at_s is None else max(0.0, now_s - oldest_at_s))

    async def _run_turn(self, webhook_id: str) -> None:
        try:
            if not await self._run_in_store_thread(self._claim, webhook_id):
                return
            try:
                await self._deliver_pending(webhook_id, until_s=self._clock.elapsed_s() + self._timings.turn_s_max)
            finally:
                await self._run_in_store_thread(
                    self._records.release, webhook_id, self._holder, now_s=self._clock.now_s()
                )
        except ClaimLostError as error:
            logger.info("%s", error)
        except UnavailableError as error:
            logger.warning("webhook %s is waiting for the database: %s", webhook_id, error)
        except Exception:
            logger.exception("cannot serve webhook %s", webhook_id)

    async def _deliver_pending(self, webhook_id: str, *, until_s: float) -> None:
        while self._clock.elapsed_s() < until_s:
            webhook, first = await self._run_in_store_thread(self._read_state, webhook_id)
            if webhook is None or not webhook.enabled:
                return
            if first is None:
                if not await self._run_in_store_thread(self._enqueue_events, webhook):
                    return
            elif first.next_at_s > self._clock.now_s():
                return
            else:
                await self._attempt(webhook, first)

    def _claim(self, webhook_id: str) -> bool:
        now_s = self._clock.now_s()
        return self._records.claim(webhook_id, self._holder, now_s=now_s, until_s=now_s + self._timings.claim_ttl_s)

    def _read_state(self, webhook_id: str) -> tuple[Webhook | None, Delivery | None]:
        return self._records.get_webhook(webhook_id), self._records.get_first_pending(webhook_id)

    def _enqueue_events(self, webhook: Webhook) -> bool:
        """Read further events and add their deliveries. Return False if there are none."""
        events = self._store.list_events(Page(webhook.cursor, self._timings.page_size))
        if not events:
            return False
        now_s = self._clock.now_s()
        visibility = webhook_visibility(webhook, self._store.load().snapshot, self._store.get_ended_job)
        candidates = (build_delivery(webhook, event, visibility, now_s=now_s) for event in events)
        deliveries = [delivery for delivery in candidates if delivery is not None]
        until_s = now_s + self._timings.claim_ttl_s
        self._records.add_event_deliveries(
            webhook.id, self._holder, deliveries, cursor=events[-1].number, until_s=until_s
        )
        return True

    async def _attempt(self, webhook: Webhook, delivery: Delivery) -> None:
        now_s, body = self._clock.now_s(), delivery.body.encode()
        headers = sign_message(delivery.id, body, self._signing_secrets(webhook, now_s), now_s=now_s)
        outcome = await self._sender.send(webhook.url, headers, body)
        now_s = self._clock.now_s()
        veto = read_veto(delivery, outcome)
        if isinstance(veto, VetoLoan):
            note = await self._run_in_store_thread(self._vetoes.send, webhook, delivery, veto, now_s=now_s)
        else:
            outcome, note = replace(outcome, error=outcome.error or veto), ""
        failing, tried = apply_outcome(
            webhook, delivery, outcome, self._backoff, now_s=now_s, random_fraction=self._draw_fraction()
        )
        tried = replace(tried, error=tried.error or note)
        record_delivery("failed" if tried.state is DeliveryState.PENDING else tried.state.value)
        until_s = now_s + self._timings.claim_ttl_s
        await self._run_in_store_thread(self._records.record_attempt, failing, self._holder, tried, until_s=until_s)
        if not failing.enabled:
            logger.warning("webhook %s to %s is disabled: %s", webhook.id, webhook.url, failing.disabled_reason)

    def _signing_secrets(self, webhook: Webhook, now_s: float) -> list[str]:
        numbers = [webhook.secret_number]
        if now_s < webhook.old_secret_until_s:
            numbers.append(webhook.secret_number - 1)
        return [derive_webhook_secret(self._secret, webhook.id, number) for number in numbers]

    async def _run_in_store_thread(self, call: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(call, *arguments, **named))
