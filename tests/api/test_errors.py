"""Errors that are nobody's field: unknown routes, wrong methods, faults of the service itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from scheduler.store.memory_store import MemoryStore
from scheduler.store.protocol import UnavailableError

if TYPE_CHECKING:
    from tests.api.conftest import ApiService, Problem


@pytest.mark.parametrize("path", ["/nothing", "/v1", "/v1/nothing", "/v1/jobs/", "/v2/jobs"])
def test_an_unknown_path_is_a_404_problem(service: ApiService, problem: Problem, path: str) -> None:
    told = problem(service.http.get(path), 404)
    assert told["type"] == "urn:ebbtide:problem:not-found"
    assert told["instance"] == path


def test_a_wrong_method_is_a_405_problem_that_names_the_right_ones(service: ApiService, problem: Problem) -> None:
    answer = service.http.put("/v1/jobs")
    assert problem(answer, 405)["type"] == "urn:ebbtide:problem:method-not-allowed"
    assert answer.headers["allow"]


def test_a_fault_of_the_service_is_a_500_problem_that_tells_nothing_of_it(
    service: ApiService, problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: MemoryStore) -> None:
        raise RuntimeError("password=hunter2 in /etc/secret")

    monkeypatch.setattr(MemoryStore, "load", broken)
    answer = service.http.get("/v1/jobs")
    assert problem(answer, 500)["type"] == "urn:ebbtide:problem:internal"
    assert "hunter2" not in answer.text
    assert "/etc" not in answer.text


def test_a_database_that_does_not_answer_is_a_503_problem_that_says_when_to_come_again(
    service: ApiService, problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(_: MemoryStore) -> None:
        raise UnavailableError("database postgresql://secret-host/ebbtide: connection refused")

    monkeypatch.setattr(MemoryStore, "load", gone)
    answer = service.http.get("/v1/jobs")
    assert problem(answer, 503)["type"] == "urn:ebbtide:problem:store-unavailable"
    assert answer.headers["retry-after"]
    assert "secret-host" not in answer.text
