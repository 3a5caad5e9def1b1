"""Webhooks and simulations that are asked for again with their Idempotency-Key, on a real store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from api.client import Client
from api.client.connection import RetryPolicy
from api.openapi import load_examples
from scheduler.settings import Settings
from scheduler.store.schema_migration import migrate
from scheduler.store.sql_store import SqlStore
from tests.api.conftest import ApiService

if TYPE_CHECKING:
    from tests.api.conftest import Problem

NOUNS = ("webhooks", "simulations")


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[ApiService]:
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
def test_the_same_key_and_document_are_the_same_thing(kept: ApiService, noun: str) -> None:
    first, again = (ask(kept, noun, document(noun)) for _ in range(2))
    assert (again.status_code, again.json()) == (first.status_code, first.json())
    assert again.headers["location"] == first.headers["location"] == f"/v1/{noun}/{first.json()['id']}"
    assert ask(kept, noun, document(noun), "k-2").json()["id"] != first.json()["id"]
    assert len(kept.get(f"/v1/{noun}")["items"]) == 2


@pytest.mark.parametrize("noun", NOUNS)
def test_a_key_with_another_document_is_refused_and_names_what_it_made(
    kept: ApiService, problem: Problem, noun: str
) -> None:
    made = ask(kept, noun, document(noun)).json()["id"]
    told = problem(ask(kept, noun, other(noun)), 422)
    assert told["type"] == "urn:ebbtide:problem:idempotency-key-reused"
    assert made in told["detail"]


@pytest.mark.parametrize("noun", NOUNS)
def test_a_document_that_was_refused_has_used_up_no_key(kept: ApiService, noun: str) -> None:
    assert ask(kept, noun, {}).status_code == 422
    assert ask(kept, noun, document(noun)).is_success


def test_a_webhook_that_was_deleted_is_not_made_anew(kept: ApiService, problem: Problem) -> None:
    made = ask(kept, "webhooks", document("webhooks")).json()["id"]
    kept.http.delete(f"/v1/webhooks/{made}")
    assert (
        f"{made}, which this key made, was deleted"
        in problem(ask(kept, "webhooks", document("webhooks")), 409)["detail"]
    )


def test_one_who_has_as_many_simulations_as_may_be_still_finds_an_old_one(
    kept: ApiService, problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.simulations.LIVE_MAX", 1)
    made = ask(kept, "simulations", document("simulations")).json()
    assert ask(kept, "simulations", document("simulations")).json() == made
    problem(ask(kept, "simulations", document("simulations"), "k-2"), 409)


@pytest.mark.parametrize("noun", NOUNS)
def test_many_at_once_make_one(kept: ApiService, noun: str) -> None:
    made = json.dumps(document(noun))
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: ask(kept, noun, json.loads(made)), range(8)))
    done = [answer for answer in answers if answer.status_code != 429]  # so many are read at a time, not more
    assert len({answer.json()["id"] for answer in done if answer.is_success}) == 1
    assert all(answer.is_success for answer in done)
    assert len(kept.get(f"/v1/{noun}")["items"]) == 1


class Lossy(httpx.BaseTransport):
    """Loses the first answer to a POST."""

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
def test_the_client_asks_again_where_an_answer_is_lost(kept: ApiService, noun: str) -> None:
    transport = Lossy(kept.transport)
    with Client("http://service", transport=transport, retries=RetryPolicy(sleep=lambda _: None)) as client:
        if noun == "webhooks":
            made = dict(client.create_webhook(document(noun)))
        else:
            asked = document(noun)
            made = dict(client.create_simulation(asked["jobs"], asked["cluster"], policies=["fifo"]))
    assert transport.lost == 1
    assert [item["id"] for item in kept.get(f"/v1/{noun}")["items"]] == [made["id"]]
