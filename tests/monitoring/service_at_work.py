"""Metrics of a service outside its ticks, recorded by its real parts: solves, webhooks, retention and streams."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message

from api.webhooks.deliverer import Backoff, DeliveryTimings, WebhookDeliverer
from api.webhooks.sender import WebhookSender
from scheduler.domain.events import DeliveryState, Event, EventCode, Webhook
from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import WantedShape
from scheduler.runtime.clock import ManualClock
from scheduler.runtime.curve_builder import CurveBuilder
from scheduler.runtime.process_pool import ProcessPool
from scheduler.runtime.retention import Retention, RetentionPeriods
from scheduler.store.api_protocol import HistoryLog
from scheduler.store.protocol import Commit
from scheduler.store.schema_migration import migrate
from scheduler.store.sql_store import SqlStore
from scheduler.telemetry.metrics import STREAMS, WEBHOOK_LAG, record_history_deletion, record_solve
from tests.builders import GPU, a_fleet, a_job, a_snapshot
from tests.webhook_receiver import Answer, receiver, wait_for

_EVENTS, _LAG_S = 4, 45.0


def record_solves(now_s: float) -> None:
    """Solve two points of a curve in a pool. Simulations call the solver directly, without metrics."""
    job = a_job("a", 1, 8, model="llama-2-7b", global_batch=8)
    snapshot = a_snapshot(a_fleet(training=1, inference=0), [job])
    pool = ProcessPool(1)
    curves = CurveBuilder(pool, in_flight_max=4, on_solved=record_solve)
    curves.request_shapes(snapshot, [WantedShape(job.spec.curve_key, GpuShape.packed(GPU, gpus, 8)) for gpus in (4, 8)])
    wait([pool.submit(int)])  # the only process has solved them before
    assert len(curves.collect_finished(now_s)) == 2
    curves.close()


def deliver_and_delete(folder: Path, now_s: float) -> None:
    """Deliver three messages (the first succeeds, the second is dead, the third pending), then delete all events."""
    url = f"sqlite:///{folder / 'webhooks.sqlite'}"
    migrate(url)
    store, clock = SqlStore(url), ManualClock(now_s)
    lease = store.acquire_lease("day", now_s=now_s, ttl_s=1e9)
    assert lease is not None
    with receiver() as hook:
        store.webhooks.create(Webhook("wh_day", "ada", hook.url, now_s))
        hook.answer = lambda number: Answer(204 if number == 0 else 500)
        events = tuple(Event(now_s, EventCode.JOB_STARTED, "job", f"event {number}") for number in range(_EVENTS))
        previous = store.load().snapshot
        store.commit(Commit(previous, Snapshot(generation=previous.generation + 1), lease.epoch, events=events))
        _deliver(store, clock)
    clock.move_to(now_s + 100.0)
    stop = threading.Event()

    def note(kind: str, count: int) -> None:
        record_history_deletion(kind, count)
        stop.set()

    Retention(
        store,
        RetentionPeriods({HistoryLog.EVENTS: 10.0}, logs_s=None),
        clock=clock,
        epoch=lambda: lease.epoch,
        on_deleted=note,
    ).run(stop)
    store.close()


def _deliver(store: SqlStore, clock: ManualClock) -> None:
    courier = WebhookDeliverer(
        store,
        WebhookSender(frozenset({"127.0.0.1"}), now_s=clock.now_s),
        secret=b"a secret that only tests know....",
        holder="day",
        clock=clock,
        draw_fraction=lambda: 0.0,
        backoff=Backoff(attempts=2, delay_s=1.0, factor=1.0),
        timings=DeliveryTimings(poll_s=0.01),
    )
    stop = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(courier.run(stop)))
    thread.start()
    dead = (DeliveryState.DEAD,)
    wait_for(lambda: _list_states(store)[1:2] == [DeliveryState.PENDING] and _list_attempts(store)[1] == 1)
    clock.move_to(clock.now_s() + _LAG_S)
    wait_for(lambda: tuple(_list_states(store)[1:2]) == dead and _list_attempts(store)[2] == 1)
    wait_for(lambda: WEBHOOK_LAG._value.get() >= _LAG_S)
    stop.set()
    thread.join()


def _list_states(store: SqlStore) -> list[DeliveryState]:
    return [each.state for each in reversed(store.webhooks.list_deliveries("wh_day", limit=9))]


def _list_attempts(store: SqlStore) -> list[int]:
    return [each.attempts for each in reversed(store.webhooks.list_deliveries("wh_day", limit=9))]


@contextmanager
def open_stream(app: ASGIApp) -> Iterator[None]:
    """Follow the events of the application during the block."""
    loop, leaves = asyncio.new_event_loop(), asyncio.Event()

    async def follow() -> None:
        scope: dict[str, Any] = {
            "type": "http", "http_version": "1.1", "method": "GET", "path": "/v1/events", "raw_path": b"/v1/events",
            "query_string": b"", "headers": [(b"host", b"service"), (b"accept", b"text/event-stream")],
            "scheme": "http", "server": ("service", 80), "client": ("127.0.0.1", 1), "root_path": "",
        }  # fmt: skip
        asked = iter([{"type": "http.request", "body": b"", "more_body": False}])

        async def receive() -> Message:
            for message in asked:
                return message
            await leaves.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            """Discard the message."""

        await app(scope, receive, send)

    thread = threading.Thread(target=lambda: loop.run_until_complete(follow()))
    thread.start()
    wait_for(lambda: STREAMS._value.get() > 0)
    yield
    loop.call_soon_threadsafe(leaves.set)
    thread.join()
    loop.close()
