"""Queues over HTTP: declared, changed field by field, and what they use, borrow and wait for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scheduler.settings import Settings
from tests.api.conftest import ApiService, Problem
from tests.api.guarded import Guarded

VISION = {"name": "vision", "guaranteed_gpus": 1, "limit_gpus": 4, "weight": 2}


def test_a_queue_is_declared_found_at_once_and_kept_by_the_next_tick(fleet: ApiService) -> None:
    answer = fleet.post("/v1/queues", VISION)
    assert (answer.status_code, answer.headers["Location"]) == (201, "/v1/queues/vision")
    assert fleet.get("/v1/queues/vision") == {
        **VISION,
        "user_limit_gpus": None,
        "user_jobs_max": None,
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


def test_the_same_queue_again_is_no_change_and_another_of_its_name_a_conflict(
    fleet: ApiService, problem: Problem
) -> None:
    fleet.made("/v1/queues", VISION)
    waiting = fleet.store.count_pending_commands()
    assert fleet.post("/v1/queues", VISION).status_code == 200
    told = problem(fleet.post("/v1/queues", {**VISION, "limit_gpus": None, "weight": 1}), 409)
    assert [(error["field"], error["allowed"]) for error in told["errors"]] == [
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
    told = fleet.refused("PATCH", "/v1/queues/vision", {"limit_gpus": 1})
    assert "at least guaranteed_gpus, which is 2" in told["errors"][0]["allowed"]
    problem(fleet.http.patch("/v1/queues/nobody", json={"weight": 2}), 404)


def test_jobs_show_what_a_queue_uses_borrows_and_waits_for(fleet: ApiService) -> None:
    fleet.made("/v1/queues", VISION)
    fleet.submit(gpus={"min": 2, "max": 2}, queue="vision", priority=1)
    fleet.submit(queue="vision")
    fleet.submit(queue="elsewhere", gpus={"min": 3, "max": 3})
    fleet.tick()
    elsewhere, vision = fleet.get("/v1/queues")["items"]
    assert (vision["used_gpus"], vision["own_gpus"], vision["borrowed_gpus"], vision["running_jobs"]) == (2, 1, 1, 1)
    assert (vision["waiting_jobs"], vision["waiting_gpus"]) == (1, 1)
    assert (elsewhere["name"], elsewhere["declared"], elsewhere["waiting_gpus"]) == ("elsewhere", False, 3)
    assert (elsewhere["guaranteed_gpus"], elsewhere["limit_gpus"]) == (0, None)


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
def test_a_malformed_queue_is_refused_by_field(fleet: ApiService, field: str, document: dict[str, Any]) -> None:
    assert fleet.refused("POST", "/v1/queues", document)["errors"][0]["field"] == field


def test_a_user_may_keep_only_so_many_jobs_waiting(fleet: ApiService, problem: Problem) -> None:
    fleet.made("/v1/queues", {"name": "vision", "user_limit_gpus": 2, "user_jobs_max": 2})
    fields: dict[str, Any] = {"gpus": {"min": 2, "max": 2}, "steps": 1000}
    document = {"name": "train", "queue": "vision", **fields}
    key = {"Idempotency-Key": "second"}
    running = fleet.submit("first", queue="vision", **fields)
    fleet.tick()
    assert fleet.get(f"/v1/jobs/{running}")["state"] == "starting"
    fleet.submit(queue="vision", **fields)
    second = fleet.http.post("/v1/jobs", json=document, headers=key)
    assert second.status_code == 201
    told = problem(fleet.post("/v1/jobs", document), 409)
    assert "anybody has 2 waiting jobs in queue vision, which takes 2 of one user (user_jobs_max)" in told["detail"]
    problem(fleet.post("/v1/jobs:dry-run", document), 409)
    again = fleet.http.post("/v1/jobs", json=document, headers=key)
    assert again.json()["id"] == second.json()["id"], "a submission that was taken is not refused when it is repeated"
    fleet.submit(queue="elsewhere", **fields)
    fleet.tick()
    told = fleet.get(f"/v1/jobs/{second.json()['id']}/explanation")
    assert told["summary"] == "queued: needs 2 GPUs; anybody has 2 of 2 GPUs in queue vision"
    assert told["reason"]["code"] == "WaitingForUserLimit"
    assert told["reason"]["numbers"] == {"needed_gpus": 2.0, "user_used_gpus": 2.0, "user_limit_gpus": 2.0}
    assert told["unblocks"] == "the end of other jobs of anybody in queue vision, or a higher user limit for it"


def test_a_slip_in_a_queues_name_is_told_or_refused_as_the_operator_has_chosen(
    fleet: ApiService, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fleet.submit(queue="visoin")
    assert "declared" not in fleet.get(f"/v1/jobs/{first}/explanation")["summary"], "nobody has declared any"
    fleet.made("/v1/queues", VISION)
    summary = fleet.get(f"/v1/jobs/{first}/explanation")["summary"]
    assert summary.endswith("; queue 'visoin' is not declared; did you mean 'vision'?")
    other = fleet.submit(queue="text")
    assert "declared" not in fleet.get(f"/v1/jobs/{other}/explanation")["summary"]

    strict = Settings(undeclared_queues="refuse")
    monkeypatch.setattr(fleet.app.state, "service", replace(fleet.app.state.service, settings=strict))
    document = {"name": "train", "gpus": {"min": 1, "max": 1}, "queue": "visoin"}
    for path in ("/v1/jobs", "/v1/jobs:dry-run"):
        (error,) = fleet.refused("POST", path, document)["errors"]
        assert (error["field"], error["allowed"]) == ("queue", "one of vision; did you mean 'vision'?")
    fleet.submit(queue="vision")
    fleet.http.delete("/v1/queues/vision")
    fleet.submit(queue="visoin")


def test_who_may_not_read_a_queue_is_told_neither_its_name_nor_what_it_takes() -> None:
    guarded = Guarded(undeclared_queues="refuse").with_fleet()
    assert guarded.ask("PATCH", "/v1/queues/vision", guarded.root, {"user_jobs_max": 1}).status_code == 202
    both, ann = guarded.token("ann", "submitter:vision", "submitter:research"), guarded.token("ann", "submitter:mine")
    document = {"name": "train", "queue": "mine", "gpus": {"min": 1, "max": 1}}
    refused = guarded.ask("POST", "/v1/jobs", ann, document)
    assert (refused.status_code, refused.json()["errors"][0]["allowed"]) == (422, "one that an admin declared")
    guarded.job(both, "vision")
    job_id, of_one = guarded.job(both, "research"), guarded.token("ann", "submitter:research")
    for queue in ("vision", "nobody"):
        answer = guarded.ask("PATCH", f"/v1/jobs/{job_id}", of_one, {"queue": queue})
        assert (answer.status_code, "waiting" in answer.text) == (403, False)
