"""Idempotency keys of job submissions: retries, concurrent requests, ended jobs, other documents."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.api.conftest import JOB

if TYPE_CHECKING:
    from tests.api.conftest import ApiService, Problem


def submit(service: ApiService, key: str, document: dict[str, Any] = JOB) -> httpx.Response:
    return service.http.post("/v1/jobs", json=document, headers={"Idempotency-Key": key})


def test_a_retry_returns_the_job_in_its_current_state(fleet: ApiService) -> None:
    first = submit(fleet, "k-1")
    assert first.status_code == 201
    fleet.tick()
    again = submit(fleet, "k-1", dict(reversed({**JOB, "gpus": {"max": 2, "min": 1}}.items())))
    assert (again.status_code, again.headers["location"]) == (201, first.headers["location"])
    assert (first.json()["state"], again.json()["state"]) == ("submitted", "starting")
    assert len(fleet.get("/v1/jobs")["items"]) == 1


def test_a_retry_returns_an_ended_job(fleet: ApiService) -> None:
    job_id = submit(fleet, "k-1").json()["id"]
    fleet.tick()
    fleet.http.delete(f"/v1/jobs/{job_id}")
    for _ in range(3):
        fleet.tick()
    again = submit(fleet, "k-1").json()
    assert (again["id"], again["state"]) == (job_id, "cancelled")


def test_another_key_creates_another_job(service: ApiService) -> None:
    assert submit(service, "k-1").json()["id"] != submit(service, "k-2").json()["id"]


def test_a_key_with_another_document_names_the_job(service: ApiService, problem: Problem) -> None:
    job_id = submit(service, "k-1").json()["id"]
    refusal = problem(submit(service, "k-1", {**JOB, "gpus": {"min": 1, "max": 3}}), 422)
    assert refusal["type"] == "urn:ebbtide:problem:idempotency-key-reused"
    assert job_id in refusal["detail"]


def test_a_refused_document_does_not_use_the_key(service: ApiService) -> None:
    assert submit(service, "k-1", {**JOB, "gpus": {"min": 3, "max": 2}}).status_code == 422
    assert submit(service, "k-1").status_code == 201


def test_concurrent_requests_create_one_job(service: ApiService) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: submit(service, "k-1"), range(24)))
    assert {answer.status_code for answer in answers} == {201}
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert len(service.get("/v1/jobs")["items"]) == 1


@pytest.mark.parametrize("key", ["", "two words", "k" * 256])
def test_an_invalid_key_is_refused(service: ApiService, problem: Problem, key: str) -> None:
    refusal = problem(submit(service, key), 422)
    assert [error["field"] for error in refusal["errors"]] == ["Idempotency-Key"]
