"""Idempotency keys of webhooks and simulations, on a real store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from api.openapi import load_examples
from ebbtide.client import Client
from ebbtide.client.connection import RetryPolicy
from scheduler.settings import Settings
from scheduler.store.schema_migration import migrate
from scheduler.store.sql_store import SqlStore
from tests.api.conftest import ApiService

if TYPE_CHECKING:
    from tests.api.conftest import Problem

NOUNS = ("webhooks", "simulations")


@pytest.fixture
def sql_service(tmp_path: Path) -> Iterator[ApiService]:
    url = f"sqlite:///{tmp_path}/keys.sqlite"
    migrate(url)
    store = SqlStore(url)
    settings = Settings(auth="off", allowed_hosts="service", webhook_hosts="hooks.example.com")
    service = ApiService(settings, store)
    with service.http:
        yield service
    store.close()


def document(noun: str) -> dict[str, Any]:
    named = {"webhooks": {"url": "https://hooks.example.com/a"}, "simulations": load_examples()["SimulationDocument"]}
    return dict(named[noun])


def other(noun: str) -> dict[str, Any]:
    return document(noun) | ({"codes": ["JobStarted"]} if noun == "webhooks" else {"seed": 99})


def ask(service: ApiService, noun: str, asked: dict[str, Any], key: str = "k-1") -> httpx.Response:
    return service.http.post(f"/v1/{noun}", json=asked, headers={"Idempotency-Key": key})


@pytest.mark.parametrize("noun", NOUNS)
def test_a_retry_returns_what_the_first_request_created(sql_service: ApiService, noun: str) -> None:
    first, again = (ask(sql_service, noun, document(noun)) for _ in range(2))
    assert (again.status_code, again.json()) == (first.status_code, first.json())
    assert again.headers["location"] == first.headers["location"] == f"/v1/{noun}/{first.json()['id']}"
    assert ask(sql_service, noun, document(noun), "k-2").json()["id"] != first.json()["id"]
    assert len(sql_service.get(f"/v1/{noun}")["items"]) == 2


@pytest.mark.parametrize("noun", NOUNS)
def test_a_key_with_another_document_names_what_it_created(
    sql_service: ApiService, problem: Problem, noun: str
) -> None:
    made = ask(sql_service, noun, document(noun)).json()["id"]
    refusal = problem(ask(sql_service, noun, other(noun)), 422)
    assert refusal["type"] == "urn:ebbtide:problem:idempotency-key-reused"
    assert made in refusal["detail"]


@pytest.mark.parametrize("noun", NOUNS)
def test_a_refused_document_does_not_use_the_key(sql_service: ApiService, noun: str) -> None:
    assert ask(sql_service, noun, {}).status_code == 422
    assert ask(sql_service, noun, document(noun)).is_success


def test_the_key_of_a_deleted_webhook_creates_nothing(sql_service: ApiService, problem: Problem) -> None:
    made = ask(sql_service, "webhooks", document("webhooks")).json()["id"]
    sql_service.http.delete(f"/v1/webhooks/{made}")
    assert made in problem(ask(sql_service, "webhooks", document("webhooks")), 409)["detail"]


def test_a_retry_works_at_the_limit_of_simulations(
    sql_service: ApiService, problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.simulations.LIVE_SIMULATIONS_MAX", 1)
    made = ask(sql_service, "simulations", document("simulations")).json()
    assert ask(sql_service, "simulations", document("simulations")).json() == made
    problem(ask(sql_service, "simulations", document("simulations"), "k-2"), 409)


@pytest.mark.parametrize("noun", NOUNS)
def test_concurrent_requests_create_one(sql_service: ApiService, noun: str) -> None:
    made = json.dumps(document(noun))
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: ask(sql_service, noun, json.loads(made)), range(8)))
    done = [
        answer for answer in answers if answer.status_code != 429
    ]  # 429: only a few simulations are checked concurrently
    assert len({answer.json()["id"] for answer in done if answer.is_success}) == 1
    assert all(answer.is_success for answer in done)
    assert len(sql_service.get(f"/v1/{noun}")["items"]) == 1


class LossyTransport(httpx.BaseTransport):
    """Loses the first response to a POST."""

    def __init__(self, through: httpx.BaseTransport) -> None:
        self._through = through
        self.lost = 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        answer = self._through.handle_request(request)
        if request.method == "POST" and not self.lost:
            self.lost += 1
            raise httpx.ReadError("the connection broke")
        return answer


@pytest.mark.parametrize("noun", NOUNS)
def test_the_client_retries_after_a_lost_response(sql_service: ApiService, noun: str) -> None:
    transport = LossyTransport(sql_service.transport)
    with Client("http://service", transport=transport, retries=RetryPolicy(sleep=lambda _: None)) as client:
        if noun == "webhooks":
            made = dict(client.create_webhook(document(noun)))
        else:
            asked = document(noun)
            made = dict(client.create_simulation(asked["jobs"], asked["cluster"], policies=["fifo"]))
    assert transport.lost == 1
    assert [item["id"] for item in sql_service.get(f"/v1/{noun}")["items"]] == [made["id"]]
