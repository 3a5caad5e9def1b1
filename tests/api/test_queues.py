"""Queues over HTTP: declared, changed field by field, and what they use, borrow and wait for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.api.conftest import ApiService, Problem

VISION = {"name": "vision", "guaranteed_gpus": 1, "limit_gpus": 4, "weight": 2}


def test_a_queue_is_declared_found_at_once_and_kept_by_the_next_tick(fleet: ApiService) -> None:
    answer = fleet.post("/v1/queues", VISION)
    assert (answer.status_code, answer.headers["Location"]) == (201, "/v1/queues/vision")
    assert fleet.get("/v1/queues/vision") == {
        **VISION,
        "user_limit_gpus": None,
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
    waiting = fleet.store.inbox_size()
    assert fleet.post("/v1/queues", VISION).status_code == 200
    told = problem(fleet.post("/v1/queues", {**VISION, "limit_gpus": None, "weight": 1}), 409)
    assert [(error["field"], error["allowed"]) for error in told["errors"]] == [
        ("limit_gpus", "4, as it was declared"),
        ("weight", "2.0, as it was declared"),
    ]
    assert fleet.store.inbox_size() == waiting


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
