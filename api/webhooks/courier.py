"""Courier: delivers what webhooks are to be told, in the background of an API process.

It works on a webhook in turns, each under a claim: it delivers what is pending, in order, then reads further events
from where the webhook's cursor stands. Whatever a killed process had claimed, another takes up when the claim has
ended; a message that was sent but not yet noted is then sent again under its old id.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from threading import Event as Flag
from typing import ParamSpec, TypeVar

from api.webhooks.message import delivery_of, sight_of
from api.webhooks.retrying import Backoff, after_attempt
from api.webhooks.sender import Sender
from api.webhooks.signature import signed_headers, webhook_secret
from scheduler.domain.webhook import Delivery, DeliveryState, Webhook
from scheduler.runtime.clock import Clock
from scheduler.store.protocol import Page, UnavailableError
from scheduler.store.sql import SqlStore
from scheduler.store.sql_webhooks import ClaimLostError
from scheduler.telemetry.metrics import record_delivery, record_webhook_lag

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_STORE_THREADS = 4


@dataclass(frozen=True, slots=True)
class Rhythm:
    """`look_s`: between two looks for what is due. `claim_s`: a claim ends so long after it was last renewed, and each
    attempt renews it. `turn_s`: a turn begins no attempt after that. `at_once`: webhooks that are worked on at once;
    each other waits for no more than a turn of these. `page`: events that are read at once."""

    look_s: float = 0.5
    claim_s: float = 60.0
    turn_s: float = 10.0
    at_once: int = 64
    page: int = 200


class Courier:
    """`holder` is a name that no other process has. `draw` is even in [0, 1)."""

    def __init__(
        self,
        store: SqlStore,
        sender: Sender,
        *,
        secret: bytes,
        holder: str,
        clock: Clock,
        draw: Callable[[], float],
        backoff: Backoff | None = None,
        rhythm: Rhythm | None = None,
    ) -> None:
        self._store = store
        self._kept = store.webhooks
        self._sender = sender
        self._secret = secret
        self._holder = holder
        self._clock = clock
        self._draw = draw
        self._backoff = backoff or Backoff()
        self._rhythm = rhythm or Rhythm()
        self._turns: dict[str, asyncio.Task[None]] = {}
        self._threads = ThreadPoolExecutor(_STORE_THREADS, thread_name_prefix="courier-store")

    async def run(self, stop: Flag) -> None:
        """Deliver until `stop` is set. Attempts that are on their way then are given up, and made again by others."""
        # For names that are looked up, which may take long: they must not hold up what goes to the store.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(self._rhythm.at_once))
        while not stop.is_set():
            try:
                await self._look()
            except UnavailableError as failed:
                log.warning("webhooks wait for the database: %s", failed)
            except Exception:
                log.exception("what is due to webhooks could not be looked up")
            await asyncio.sleep(self._rhythm.look_s)
        for turn in self._turns.values():
            turn.cancel()
        await asyncio.gather(*self._turns.values(), return_exceptions=True)
        self._threads.shutdown()

    async def _look(self) -> None:
        now_s = self._clock.now_s()
        self._turns = {webhook_id: turn for webhook_id, turn in self._turns.items() if not turn.done()}
        free = self._rhythm.at_once - len(self._turns)
        # More than are free, because those that are worked on here may be among them.
        due = await self._in_store(self._kept.due, now_s, limit=self._rhythm.at_once) if free else ()
        for webhook_id in [each for each in due if each not in self._turns][:free]:
            self._turns[webhook_id] = asyncio.create_task(self._turn(webhook_id))
        oldest_at_s = await self._in_store(self._kept.oldest_pending_at_s)
        record_webhook_lag(0.0 if oldest_at_s is None else max(0.0, now_s - oldest_at_s))

    async def _turn(self, webhook_id: str) -> None:
        try:
            if not await self._in_store(self._claim, webhook_id):
                return
            try:
                await self._work(webhook_id, until_s=self._clock.elapsed_s() + self._rhythm.turn_s)
            finally:
                await self._in_store(self._kept.release, webhook_id, self._holder, now_s=self._clock.now_s())
        except ClaimLostError as lost:
            log.info("%s", lost)
        except UnavailableError as failed:
            log.warning("webhook %s waits for the database: %s", webhook_id, failed)
        except Exception:
            log.exception("webhook %s could not be worked on", webhook_id)

    async def _work(self, webhook_id: str, *, until_s: float) -> None:
        while self._clock.elapsed_s() < until_s:
            webhook, first = await self._in_store(self._state, webhook_id)
            if webhook is None or not webhook.enabled:
                return
            if first is None:
                if not await self._in_store(self._feed, webhook):
                    return
            elif first.next_at_s > self._clock.now_s():
                return
            else:
                await self._attempt(webhook, first)

    def _claim(self, webhook_id: str) -> bool:
        now_s = self._clock.now_s()
        return self._kept.claim(webhook_id, self._holder, now_s=now_s, until_s=now_s + self._rhythm.claim_s)

    def _state(self, webhook_id: str) -> tuple[Webhook | None, Delivery | None]:
        return self._kept.webhook(webhook_id), self._kept.first_pending(webhook_id)

    def _feed(self, webhook: Webhook) -> bool:
        """Read further events. False where there are none."""
        events = self._store.events(Page(webhook.cursor, self._rhythm.page))
        if not events:
            return False
        now_s = self._clock.now_s()
        sight = sight_of(webhook, self._store.load().snapshot, self._store.ended_job)
        found = (delivery_of(webhook, event, sight, now_s=now_s) for event in events)
        deliveries = [each for each in found if each is not None]
        until_s = now_s + self._rhythm.claim_s
        self._kept.feed(webhook.id, self._holder, deliveries, cursor=events[-1].number, until_s=until_s)
        return True

    async def _attempt(self, webhook: Webhook, delivery: Delivery) -> None:
        now_s, body = self._clock.now_s(), delivery.body.encode()
        headers = signed_headers(delivery.id, body, self._secrets(webhook, now_s), now_s=now_s)
        outcome = await self._sender.send(webhook.url, headers, body)
        now_s = self._clock.now_s()
        failing, tried = after_attempt(webhook, delivery, outcome, self._backoff, now_s=now_s, drawn=self._draw())
        record_delivery("failed" if tried.state is DeliveryState.PENDING else tried.state.value)
        until_s = now_s + self._rhythm.claim_s
        await self._in_store(self._kept.record, failing, self._holder, tried, until_s=until_s)
        if not failing.enabled:
            log.warning("webhook %s to %s is disabled: %s", webhook.id, webhook.url, failing.disabled_reason)

    def _secrets(self, webhook: Webhook, now_s: float) -> list[str]:
        numbers = [webhook.secret_number]
        if now_s < webhook.old_secret_until_s:
            numbers.append(webhook.secret_number - 1)
        return [webhook_secret(self._secret, webhook.id, number) for number in numbers]

    async def _in_store(self, call: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(call, *arguments, **named))
