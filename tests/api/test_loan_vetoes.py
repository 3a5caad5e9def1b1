"""Vetoes of proposed loans: by the API, and by the response of a webhook's receiver."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from api.webhooks.deliverer import DeliveryTimings, WebhookDeliverer
from api.webhooks.sender import WebhookSender
from scheduler.domain.commands import Command, ForecastMade
from scheduler.domain.fleet import Forecast
from scheduler.settings import Settings
from scheduler.store.schema_migration import migrate
from scheduler.store.sql_store import SqlStore
from tests.api.authenticated_service import AuthenticatedService
from tests.api.conftest import ApiService
from tests.webhook_receiver import Answer, Receiver, receiver, wait_for

if TYPE_CHECKING:
    from tests.api.conftest import Problem

NOTICE_S = 900.0
VETO = json.dumps({"veto": True, "reason": "a release is rolled out"})


def propose(fleet: ApiService) -> list[dict[str, Any]]:
    """Let the pool propose the loans of both its nodes, and return them."""
    answer = fleet.http.patch("/v1/pools/inference", json={"lending": {"notice_s": "15m", "veto_s": 7200}})
    assert answer.status_code == 202, answer.text
    fleet.submit(gpus={"min": 4, "max": 4})
    fleet.made("/v1/pools/inference/demand", {"gpus": 0})
    forecast = Forecast(fleet.clock.now_s(), 600.0, (0.5, 0.999), (0.0, 0.0), "test")
    fleet.tick(learned=(Command("forecast", fleet.clock.now_s(), ForecastMade("inference", forecast)),))
    loans: list[dict[str, Any]] = fleet.get("/v1/loans")["items"]
    assert {loan["state"] for loan in loans} == {"proposed"}
    return loans


def list_events(fleet: ApiService, code: str) -> list[dict[str, Any]]:
    return [event for event in fleet.get("/v1/events", limit=500)["items"] if event["code"] == code]


def list_vetoes(fleet: ApiService) -> list[dict[str, Any]]:
    """Return the audit entries of vetoes."""
    return [entry for entry in fleet.get("/v1/audit", limit=100)["items"] if entry["action"] == "VetoLoan"]


def test_proposed_loan_is_vetoed_once_with_a_reason(fleet: ApiService, problem: Problem) -> None:
    second, first = propose(fleet)
    assert first["offered_at_s"] - first["proposed_at_s"] == NOTICE_S
    assert {event["subject"] for event in list_events(fleet, "LoanProposed")} == {first["id"], second["id"]}
    fleet.refused("POST", f"/v1/loans/{first['id']}:veto", {"reason": ""})
    vetoed = fleet.made(f"/v1/loans/{first['id']}:veto", {"reason": "not today"})
    assert (vetoed["state"], vetoed["is_live"]) == ("vetoed", False)
    problem(fleet.post(f"/v1/loans/{first['id']}:veto", {"reason": "not today"}), 409)
    fleet.tick()
    [event] = list_events(fleet, "LoanVetoed")
    assert event["subject"] == first["id"]
    assert "not today" in event["message"]
    [entry] = list_vetoes(fleet)
    assert (entry["subject"], entry["after"]) == (first["id"], {"reason": "not today", "state": "vetoed"})
    fleet.tick(after_s=NOTICE_S)
    assert fleet.get("/v1/loans", node=first["node"])["items"][0]["state"] == "vetoed"
    assert fleet.get("/v1/loans", node=second["node"])["items"][0]["state"] == "offered"
    explained = fleet.get("/v1/pools/inference/explanation")
    assert (explained["code"], explained["vetoed_nodes"], explained["lent_nodes"]) == ("NodesVetoed", 1, 1)


def test_unknown_or_ended_loan_cannot_be_vetoed(fleet: ApiService, problem: Problem) -> None:
    problem(fleet.post("/v1/loans/i9-1:veto", {"reason": "no"}), 404)
    fleet.lend_all()
    loan = fleet.get("/v1/loans")["items"][0]
    problem(fleet.post(f"/v1/loans/{loan['id']}:veto", {"reason": "no"}), 409)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqlStore]:
    url = f"sqlite:///{tmp_path / 'state.sqlite'}"
    migrate(url)
    made = SqlStore(url)
    yield made
    made.close()


@pytest.fixture
def hooked(store: SqlStore) -> Iterator[ApiService]:
    """A service whose webhooks may reach this host."""
    made = ApiService(Settings(auth="off", allowed_hosts="service", webhook_hosts="127.0.0.1"), store)
    with made.http:
        for pool, node in (("training", "t0"), ("inference", "i0"), ("inference", "i1")):
            made.made("/v1/pools", {"name": pool, "kind": pool})
            made.made("/v1/nodes", {"name": node, "pool": pool, "gpu": "cpu", "gpus": 1})
        assert made.http.patch("/v1/pools/inference", json={"lending": {"headroom": 0.0}}).status_code == 202
        yield made


@contextmanager
def deliver(service: ApiService) -> Iterator[None]:
    """Deliver webhooks in a thread meanwhile."""
    store = service.store
    assert isinstance(store, SqlStore)
    deliverer = WebhookDeliverer(
        store,
        WebhookSender(frozenset({"127.0.0.1"})),
        secret=b"s" * 32,
        holder="test",
        clock=service.clock,
        draw_fraction=lambda: 0.0,
        timings=DeliveryTimings(poll_s=0.02),
    )
    stop = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(deliverer.run(stop)))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def run_deliveries(service: ApiService, hook: Receiver, webhook: str, count: int) -> list[dict[str, Any]]:
    """Deliver until `count` messages have ended, and return them, oldest first."""
    store = service.store
    assert isinstance(store, SqlStore)

    def ended() -> list[object]:
        listed = store.webhooks.list_deliveries(webhook, before=None, limit=100, state=None)
        return [each for each in listed if each.ended_at_s is not None]

    with deliver(service):
        wait_for(lambda: len(ended()) >= count, lambda: hook.received)
    deliveries: list[dict[str, Any]] = service.get(f"/v1/webhooks/{webhook}/deliveries")["items"]
    return deliveries[::-1]


def test_receiver_of_an_admins_webhook_vetoes_by_its_response(hooked: ApiService) -> None:
    with receiver() as hook:
        webhook = hooked.made("/v1/webhooks", {"url": hook.url, "codes": ["LoanProposed"]})
        assert webhook["may_veto"]
        hook.answer = lambda number: Answer(200, body=VETO if number == 0 else '{"veto": false}')
        propose(hooked)
        deliveries = run_deliveries(hooked, hook, webhook["id"], 2)
    assert [(each["state"], each["error"]) for each in deliveries] == [("delivered", "")] * 2
    vetoed = deliveries[0]["subject"]
    assert hook.received[0].document["subject"] == vetoed
    hooked.tick()
    [event] = list_events(hooked, "LoanVetoed")
    assert event["subject"] == vetoed
    assert all(word in event["message"] for word in (webhook["owner"], webhook["id"], "a release is rolled out"))
    states = {loan["id"]: loan["state"] for loan in hooked.get("/v1/loans")["items"]}
    assert states == {vetoed: "vetoed", deliveries[1]["subject"]: "proposed"}
    [entry] = list_vetoes(hooked)
    assert (entry["actor"], entry["after"]["webhook"]) == (webhook["owner"], webhook["id"])


def test_response_that_is_no_veto_is_consent(hooked: ApiService) -> None:
    with receiver() as hook:
        webhook = hooked.made("/v1/webhooks", {"url": hook.url, "codes": ["LoanProposed"]})
        hook.answer = lambda number: Answer(200, body="ok") if number else Answer(202, body=VETO)
        propose(hooked)
        run_deliveries(hooked, hook, webhook["id"], 2)
    hooked.tick()
    assert {loan["state"] for loan in hooked.get("/v1/loans")["items"]} == {"proposed"}


def test_late_veto_has_no_effect_and_the_delivery_shows_it(hooked: ApiService) -> None:
    with receiver() as hook:
        webhook = hooked.made("/v1/webhooks", {"url": hook.url, "codes": ["LoanProposed"]})
        hook.answer = lambda number: Answer(200, body=VETO)
        propose(hooked)
        hooked.tick(after_s=NOTICE_S)
        deliveries = run_deliveries(hooked, hook, webhook["id"], 2)
    assert all(each["state"] == "delivered" and "too late" in each["error"] for each in deliveries)
    assert {loan["state"] for loan in hooked.get("/v1/loans")["items"]} <= {"offered", "active"}


def test_webhook_may_veto_only_while_none_but_admins_have_changed_it(store: SqlStore) -> None:
    service = AuthenticatedService(store)
    keeper = service.token("keeper", "queue-admin")
    hook = {"url": "https://hooks.example/loans"}
    assert service.request("POST", "/v1/webhooks", keeper, hook).json()["may_veto"] is False
    made = service.request("POST", "/v1/webhooks", service.root, hook).json()
    path = f"/v1/webhooks/{made['id']}"
    assert service.request("PATCH", path, service.root, {"codes": ["LoanProposed"]}).json()["may_veto"] is True
    assert service.request("PATCH", path, keeper, {"url": "https://other.example/"}).json()["may_veto"] is False
    assert service.request("PATCH", path, service.root, {"url": hook["url"]}).json()["may_veto"] is False
