"""Queues over HTTP: quotas, usage, limits per user, and visibility."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.settings import Settings
from tests.api.authenticated_service import AuthenticatedService
from tests.api.conftest import JOB, ApiService, Problem

VISION = {"name": "vision", "guaranteed_gpus": 1, "limit_gpus": 4, "weight": 2}


def test_a_created_queue_is_visible_at_once_and_committed_by_the_tick(fleet: ApiService) -> None:
    answer = fleet.post("/v1/queues", VISION)
    assert (answer.status_code, answer.headers["Location"]) == (201, "/v1/queues/vision")
    assert fleet.get("/v1/queues/vision") == {
        **VISION,
        "user_limit_gpus": None,
        "user_jobs_max": None,
        "priority_max": 100,
        "declared": True,
        "used_gpus": 0,
        "own_gpus": 0,
        "borrowed_gpus": 0,
        "running_jobs": 0,
        "waiting_jobs": 0,
        "waiting_gpus": 0,
    }
    fleet.tick()
    assert list(fleet.store.load().snapshot.queues) == ["vision"]
    assert [event["code"] for event in fleet.get("/v1/events", subject="vision")["items"]] == ["QueueChanged"]


def test_creating_a_queue_again_changes_nothing_and_a_different_one_conflicts(
    fleet: ApiService, problem: Problem
) -> None:
    fleet.made("/v1/queues", VISION)
    waiting = fleet.store.count_pending_commands()
    assert fleet.post("/v1/queues", VISION).status_code == 200
    body = problem(fleet.post("/v1/queues", {**VISION, "limit_gpus": None, "weight": 1}), 409)
    assert [(error["field"], error["allowed"]) for error in body["errors"]] == [
        ("limit_gpus", "4, as it was declared"),
        ("weight", "2.0, as it was declared"),
    ]
    assert fleet.store.count_pending_commands() == waiting


def test_a_queue_is_changed_field_by_field(fleet: ApiService, problem: Problem) -> None:
    fleet.made("/v1/queues", VISION)
    for change, expected in (
        ({"guaranteed_gpus": 2}, (2, 4, 2.0)),
        ({"limit_gpus": None}, (2, None, 2.0)),
        ({"limit_gpus": 3, "weight": 0.5}, (2, 3, 0.5)),
        ({"user_limit_gpus": 2}, (2, 3, 0.5)),
    ):
        answer = fleet.http.patch("/v1/queues/vision", json=change)
        assert answer.status_code == 202
        view = answer.json()
        assert (view["guaranteed_gpus"], view["limit_gpus"], view["weight"]) == expected
    assert view["user_limit_gpus"] == 2
    body = fleet.refused("PATCH", "/v1/queues/vision", {"limit_gpus": 1})
    assert "at least guaranteed_gpus, which is 2" in body["errors"][0]["allowed"]
    problem(fleet.http.patch("/v1/queues/nobody", json={"weight": 2}), 404)


def test_a_queue_shows_used_borrowed_and_pending_gpus(fleet: ApiService) -> None:
    fleet.made("/v1/queues", VISION)
    fleet.submit(gpus={"min": 2, "max": 2}, queue="vision")
    fleet.tick()
    fleet.submit(queue="vision")
    fleet.submit(gpus={"min": 3, "max": 3})
    fleet.tick()
    default, vision = fleet.get("/v1/queues")["items"]
    assert (vision["used_gpus"], vision["own_gpus"], vision["borrowed_gpus"], vision["running_jobs"]) == (2, 1, 1, 1)
    assert (vision["waiting_jobs"], vision["waiting_gpus"]) == (1, 1)
    assert (default["name"], default["declared"], default["waiting_gpus"]) == ("default", False, 3)
    assert (default["guaranteed_gpus"], default["limit_gpus"]) == (0, None)


def test_a_deleted_queue_leaves_its_jobs_without_guarantee(fleet: ApiService, problem: Problem) -> None:
    fleet.made("/v1/queues", VISION)
    job_id = fleet.submit(queue="vision")
    assert fleet.http.delete("/v1/queues/vision").json()["declared"] is True
    fleet.tick()
    assert fleet.get("/v1/queues/vision")["declared"] is False
    assert fleet.get(f"/v1/jobs/{job_id}")["queue"] == "vision"
    problem(fleet.http.delete("/v1/queues/vision"), 404)
    problem(fleet.http.get("/v1/queues/nobody"), 404)


@pytest.mark.parametrize(
    ("field", "document"),
    [
        ("name", {}),
        ("name", {"name": "Vision Team"}),
        ("guaranteed_gpus", {"name": "a", "guaranteed_gpus": -1}),
        ("guaranteed_gpus", {"name": "a", "guaranteed_gpus": 1.5}),
        ("guaranteed_gpus", {"name": "a", "guaranteed_gpus": None}),
        ("limit_gpus", {"name": "a", "guaranteed_gpus": 4, "limit_gpus": 3}),
        ("limit_gpus", {"name": "a", "limit_gpus": 10**400}),
        ("user_limit_gpus", {"name": "a", "user_limit_gpus": -1}),
        ("weight", {"name": "a", "weight": 0}),
        ("weight", {"name": "a", "weight": "much"}),
        ("gpus", {"name": "a", "gpus": 4}),
    ],
)
def test_a_malformed_queue_names_its_field(fleet: ApiService, field: str, document: dict[str, Any]) -> None:
    assert fleet.refused("POST", "/v1/queues", document)["errors"][0]["field"] == field


def test_pending_jobs_per_user_are_limited(fleet: ApiService, problem: Problem) -> None:
    fleet.made("/v1/queues", {"name": "vision", "user_limit_gpus": 2, "user_jobs_max": 2})
    fields: dict[str, Any] = {"gpus": {"min": 2, "max": 2}, "steps": 1000, "command": ["true"]}
    document = {"name": "train", "queue": "vision", **fields}
    key = {"Idempotency-Key": "second"}
    running = fleet.submit("first", queue="vision", **fields)
    fleet.tick()
    assert fleet.get(f"/v1/jobs/{running}")["state"] == "starting"
    fleet.submit(queue="vision", **fields)
    second = fleet.http.post("/v1/jobs", json=document, headers=key)
    assert second.status_code == 201
    refused = problem(fleet.post("/v1/jobs", document), 409)
    assert "`user_jobs_max` is 2" in refused["detail"]
    problem(fleet.post("/v1/jobs:dry-run", document), 409)
    again = fleet.http.post("/v1/jobs", json=document, headers=key)
    assert again.json()["id"] == second.json()["id"], "a retry of an accepted submission must not be refused"
    fleet.submit(**fields)
    fleet.tick()
    body = fleet.get(f"/v1/jobs/{second.json()['id']}/explanation")
    assert body["reason"]["code"] == "WaitingForUserLimit"
    assert body["reason"]["numbers"] == {"needed_gpus": 2.0, "user_used_gpus": 2.0, "user_limit_gpus": 2.0}
    assert "user limit" in body["unblocks"]


def test_job_for_an_undeclared_queue_is_refused(fleet: ApiService) -> None:
    document = {**JOB, "queue": "visoin"}
    (error,) = fleet.refused("POST", "/v1/jobs", document)["errors"]
    assert error["allowed"] == "one of default, or a new queue that is created first"
    fleet.made("/v1/queues", VISION)
    for path in ("/v1/jobs", "/v1/jobs:dry-run"):
        (error,) = fleet.refused("POST", path, document)["errors"]
        allowed = "one of default, vision, or a new queue that is created first; did you mean 'vision'?"
        assert (error["field"], error["value"], error["allowed"]) == ("queue", "visoin", allowed)
    job_id = fleet.submit(queue="vision")
    (error,) = fleet.refused("PATCH", f"/v1/jobs/{job_id}", {"queue": "visoin"})["errors"]
    assert error["field"] == "queue"
    fleet.http.delete("/v1/queues/vision")
    fleet.refused("POST", "/v1/jobs", {**JOB, "queue": "vision"})
    fleet.submit()


def test_undeclared_queues_are_accepted_by_setting() -> None:
    lenient = ApiService(Settings(auth="off", allowed_hosts="service", undeclared_queues="allow"))
    first = lenient.submit(queue="visoin")
    assert "declared" not in lenient.get(f"/v1/jobs/{first}/explanation")["summary"], "nobody has declared any"
    lenient.made("/v1/queues", VISION)
    summary = lenient.get(f"/v1/jobs/{first}/explanation")["summary"]
    assert summary.endswith("; queue 'visoin' is not declared; did you mean 'vision'?")
    other = lenient.submit(queue="text")
    assert "declared" not in lenient.get(f"/v1/jobs/{other}/explanation")["summary"]


def test_errors_reveal_nothing_about_hidden_queues() -> None:
    guarded = AuthenticatedService().with_fleet()
    assert guarded.request("PATCH", "/v1/queues/vision", guarded.root, {"user_jobs_max": 1}).status_code == 202
    both, ann = guarded.token("ann", "submitter:vision", "submitter:research"), guarded.token("ann", "submitter:mine")
    document = {**JOB, "queue": "mine"}
    refused = guarded.request("POST", "/v1/jobs", ann, document)
    allowed = "one of default, or a new queue that is created first"
    assert (refused.status_code, refused.json()["errors"][0]["allowed"]) == (422, allowed)
    guarded.job(both, "vision")
    job_id, of_one = guarded.job(both, "research"), guarded.token("ann", "submitter:research")
    for queue in ("vision", "nobody"):
        answer = guarded.request("PATCH", f"/v1/jobs/{job_id}", of_one, {"queue": queue})
        assert (answer.status_code, "waiting" in answer.text) == (403, False)
