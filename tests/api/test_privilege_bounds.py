"""What queue-admins and submitters cannot raise: shares of other queues, and priorities above the queue's ceiling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.api.authenticated_service import AuthenticatedService
from tests.api.conftest import JOB, Problem

QUOTA = {"guaranteed_gpus": 4, "limit_gpus": 8, "weight": 2.0, "priority_max": 10, "user_limit_gpus": 2}


@pytest.fixture
def guarded() -> Iterator[AuthenticatedService]:
    with (made := AuthenticatedService()).http:
        assert made.with_fleet().request("PATCH", "/v1/queues/research", made.root, QUOTA).status_code == 202
        yield made


@pytest.mark.parametrize(
    ("field", "value", "present"),
    [
        ("guaranteed_gpus", 5, "4"),
        ("limit_gpus", 9, "8"),
        ("limit_gpus", None, "8"),
        ("weight", 2.5, "2"),
        ("priority_max", 11, "10"),
    ],
)
def test_only_an_admin_raises_what_takes_from_other_queues(
    guarded: AuthenticatedService, problem: Problem, field: str, value: object, present: str
) -> None:
    boss = guarded.token("boss", "queue-admin:research")
    (error,) = problem(guarded.request("PATCH", "/v1/queues/research", boss, {field: value}), 403)["errors"]
    assert (error["field"], error["value"]) == (field, value)
    assert f"at most {present}," in error["allowed"]
    assert guarded.request("PATCH", "/v1/queues/research", guarded.root, {field: value}).status_code == 202


def test_a_queue_admin_lowers_quotas_and_sets_those_of_its_users(guarded: AuthenticatedService) -> None:
    boss = guarded.token("boss", "queue-admin:research")
    lower = {"guaranteed_gpus": 3, "limit_gpus": 6, "weight": 1.0, "priority_max": 0, "user_limit_gpus": None}
    answer = guarded.request("PATCH", "/v1/queues/research", boss, {**lower, "user_jobs_max": 7})
    assert answer.status_code == 202
    assert lower.items() <= answer.json().items()


def submit(guarded: AuthenticatedService, token: str, priority: int, path: str = "/v1/jobs") -> Any:
    document = {**JOB, "name": "x", "queue": "research", "steps": 9, "priority": priority}
    return guarded.request("POST", path, token, document)


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/jobs:dry-run"])
def test_a_priority_above_the_ceiling_needs_a_queue_admin(
    guarded: AuthenticatedService, problem: Problem, path: str
) -> None:
    anna, boss = guarded.token("anna", "submitter:research"), guarded.token("boss", "queue-admin:research")
    (error,) = problem(submit(guarded, anna, 11, path), 403)["errors"]
    assert (error["field"], error["value"]) == ("priority", 11)
    assert "at most 10," in error["allowed"]
    assert submit(guarded, anna, 10, path).is_success
    assert submit(guarded, boss, 1000, path).is_success


def test_a_change_cannot_raise_a_priority_above_the_ceiling(guarded: AuthenticatedService, problem: Problem) -> None:
    anna, boss = guarded.token("anna", "submitter"), guarded.token("boss", "queue-admin:research")
    job = f"/v1/jobs/{submit(guarded, anna, 5).json()['id']}"
    problem(guarded.request("PATCH", job, anna, {"priority": 11}), 403)
    assert guarded.request("PATCH", job, boss, {"priority": 500}).status_code == 202
    assert guarded.request("PATCH", job, anna, {"priority": 400}).status_code == 202, "lowering needs no role"
    problem(guarded.request("PATCH", job, anna, {"queue": "vision"}), 403)
    assert guarded.request("PATCH", job, anna, {"queue": "vision", "priority": 100}).status_code == 202


def test_queues_have_a_ceiling_by_default(guarded: AuthenticatedService, problem: Problem) -> None:
    anna = guarded.token("anna", "submitter")
    document = {**JOB, "name": "x", "steps": 9}
    problem(guarded.request("POST", "/v1/jobs", anna, {**document, "priority": 101}), 403)
    assert guarded.request("POST", "/v1/jobs", anna, {**document, "priority": 100}).status_code == 201


def test_an_undeclared_queue_has_the_ceiling_of_the_default_queue(problem: Problem) -> None:
    with (made := AuthenticatedService(undeclared_queues="allow")).http:
        made.with_fleet()
        queue = {"name": "default", "priority_max": 10}
        assert made.request("POST", "/v1/queues", made.root, queue).status_code == 201
        anna, boss = (
            made.token("anna", "submitter", "queue-admin:foo"),
            made.token("boss", "queue-admin:default", "submitter"),
        )
        document = {**JOB, "name": "x", "queue": "foo", "steps": 9}
        (error,) = problem(made.request("POST", "/v1/jobs", anna, {**document, "priority": 11}), 403)["errors"]
        assert (error["field"], error["value"]) == ("priority", 11)
        for token, priority in ((anna, 10), (boss, 11)):
            assert made.request("POST", "/v1/jobs", token, {**document, "priority": priority}).status_code == 201
