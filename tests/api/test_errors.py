"""Errors that concern no field: unknown routes, wrong methods, internal errors, an unavailable database."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from scheduler.store.memory_store import MemoryStore
from scheduler.store.protocol import UnavailableError

if TYPE_CHECKING:
    from tests.api.conftest import ApiService, Problem


@pytest.mark.parametrize("path", ["/nothing", "/v1", "/v1/nothing", "/v1/jobs/", "/v2/jobs"])
def test_an_unknown_path_is_a_404_problem(service: ApiService, problem: Problem, path: str) -> None:
    body = problem(service.http.get(path), 404)
    assert body["type"] == "urn:ebbtide:problem:not-found"
    assert body["instance"] == path


def test_a_wrong_method_is_a_405_that_names_the_allowed_ones(service: ApiService, problem: Problem) -> None:
    answer = service.http.put("/v1/jobs")
    assert problem(answer, 405)["type"] == "urn:ebbtide:problem:method-not-allowed"
    assert answer.headers["allow"]


def test_an_internal_error_is_a_500_without_details(
    service: ApiService, problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: MemoryStore) -> None:
        raise RuntimeError("password=hunter2 in /etc/secret")

    monkeypatch.setattr(MemoryStore, "load", broken)
    answer = service.http.get("/v1/jobs")
    assert problem(answer, 500)["type"] == "urn:ebbtide:problem:internal"
    assert "hunter2" not in answer.text
    assert "/etc" not in answer.text


def test_an_unavailable_database_is_a_503_with_retry_after(
    service: ApiService, problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(_: MemoryStore) -> None:
        raise UnavailableError("database postgresql://secret-host/ebbtide: connection refused")

    monkeypatch.setattr(MemoryStore, "load", gone)
    answer = service.http.get("/v1/jobs")
    assert problem(answer, 503)["type"] == "urn:ebbtide:problem:store-unavailable"
    assert answer.headers["retry-after"]
    assert "secret-host" not in answer.text
