"""Labels over HTTP: submission, search, changes, authorization, audit and events."""

from __future__ import annotations

import pytest

from scheduler.domain.job_labels import LABELS_MAX
from tests.api.authenticated_service import AuthenticatedService
from tests.api.conftest import ApiService, Problem


def find(service: ApiService, selector: str, **query: str) -> set[str]:
    return {item["name"] for item in service.get("/v1/jobs", selector=selector, **query)["items"]}


def test_live_and_ended_jobs_are_found_by_labels(fleet: ApiService) -> None:
    fleet.submit("a", labels={"team": "vision", "tier": "dev"})
    fleet.submit("b", labels={"team": "vision"})
    fleet.submit("c", labels={"team": "speech"})
    fleet.submit("d")
    gone = fleet.submit("e", labels={"team": "vision"})
    fleet.http.delete(f"/v1/jobs/{gone}")
    for _ in range(3):
        fleet.tick()
    assert gone not in fleet.store.load().snapshot.jobs
    for selector, names in (
        ("team=vision", {"a", "b", "e"}),
        ("team=vision,tier!=dev", {"b", "e"}),
        ("team in (speech, vision),!tier", {"b", "c", "e"}),
        ("team notin (vision)", {"c", "d"}),
        ("!team", {"d"}),
    ):
        assert find(fleet, selector) == names, selector
    assert find(fleet, "team=vision", state="live") == {"a", "b"}
    assert find(fleet, "team=vision", sort="name", search="e-") == {"e"}
    assert fleet.get(f"/v1/jobs/{gone}")["labels"] == {"team": "vision"}
    first = fleet.get("/v1/jobs", selector="team=vision", limit=2)
    rest = fleet.get("/v1/jobs", selector="team=vision", limit=2, cursor=first["next"])
    assert [item["name"] for item in first["items"] + rest["items"]] == ["e", "b", "a"]


def test_labels_are_set_and_removed_with_an_event_and_an_audit_entry(fleet: ApiService) -> None:
    job_id = fleet.submit("a", labels={"team": "vision", "tier": "dev"})
    before = fleet.http.get(f"/v1/jobs/{job_id}").headers["etag"]
    change = {"labels": {"tier": None, "stage": "tune"}}
    answer = fleet.http.patch(f"/v1/jobs/{job_id}", json=change, headers={"If-Match": before})
    assert answer.status_code == 202
    assert answer.json()["labels"] == {"stage": "tune", "team": "vision"}
    fleet.tick()
    assert fleet.get(f"/v1/jobs/{job_id}")["spec"]["labels"] == {"stage": "tune", "team": "vision"}
    assert find(fleet, "stage=tune") == {"a"}
    messages = [event["message"] for event in fleet.get(f"/v1/jobs/{job_id}/events")["items"]]
    assert sum("stage=tune" in message for message in messages) == 1
    entry = fleet.get("/v1/audit", subject=job_id)["items"][-1]
    assert (entry["action"], entry["before"]["labels"]) == ("ChangeJob", {"team": "vision", "tier": "dev"})
    assert entry["after"]["labels"] == {"stage": "tune", "team": "vision"}


def test_labels_and_queue_change_together(fleet: ApiService) -> None:
    fleet.create_queues("research")
    job_id = fleet.submit("a")
    fleet.http.patch(f"/v1/jobs/{job_id}", json={"queue": "research", "gpus": {"max": 2}, "labels": {"a": "b"}})
    fleet.tick()
    job = fleet.get(f"/v1/jobs/{job_id}")
    assert (job["queue"], job["gpus"]["max"], job["labels"]) == ("research", 2, {"a": "b"})


def test_an_ended_job_keeps_its_labels(fleet: ApiService, problem: Problem) -> None:
    job_id = fleet.submit("a", labels={"team": "vision"})
    fleet.http.delete(f"/v1/jobs/{job_id}")
    for _ in range(3):
        fleet.tick()
    problem(fleet.http.patch(f"/v1/jobs/{job_id}", json={"labels": {"team": None}}), 409)
    assert fleet.get(f"/v1/jobs/{job_id}")["labels"] == {"team": "vision"}


@pytest.mark.parametrize(
    ("labels", "field", "value"),
    [
        ({"a b": "c"}, "labels.a b", "a b"),
        ({"tier": "-x"}, "labels.tier", "-x"),
        ({"ebbtide.dev/job": "x"}, "labels.ebbtide.dev/job", "ebbtide.dev/job"),
        ({"tier": 3}, "labels.tier", 3),
    ],
)
def test_an_invalid_label_is_named_with_its_value(
    service: ApiService, problem: Problem, labels: dict[str, object], field: str, value: object
) -> None:
    job_id = service.submit("a")
    for answer in (
        service.post("/v1/jobs", {"name": "b", "gpus": {"min": 1, "max": 1}, "command": ["x"], "labels": labels}),
        service.http.patch(f"/v1/jobs/{job_id}", json={"labels": labels}),
    ):
        (error,) = problem(answer, 422)["errors"]
        assert (error["field"], error["value"]) == (field, value)


def test_more_labels_than_a_job_may_have_are_refused(service: ApiService, problem: Problem) -> None:
    full = {f"k{number}": "v" for number in range(LABELS_MAX)}
    job_id = service.submit("a", labels=full)
    problem(service.http.patch(f"/v1/jobs/{job_id}", json={"labels": {"more": "v"}}), 422)
    assert service.http.patch(f"/v1/jobs/{job_id}", json={"labels": {"more": "v", "k0": None}}).status_code == 202
    document = {"name": "b", "gpus": {"min": 1, "max": 1}, "command": ["x"], "labels": {**full, "more": "v"}}
    assert problem(service.post("/v1/jobs", document), 422)["errors"][0]["field"] == "labels"


@pytest.mark.parametrize("selector", ["team=", "a b", "team in vision", "=x", "-x"])
def test_an_invalid_selector_is_refused(service: ApiService, problem: Problem, selector: str) -> None:
    answer = service.http.get("/v1/jobs", params={"selector": selector})
    if selector == "team=":
        assert answer.status_code == 200, "the empty value is a value"
        return
    assert problem(answer, 422)["errors"][0]["field"] == "selector"


def test_labels_of_jobs_that_the_caller_may_not_read_are_never_found() -> None:
    guarded = AuthenticatedService().with_fleet()
    vision, research = guarded.token("ann", "submitter:vision"), guarded.token("bob", "submitter:research")
    own, foreign = guarded.job(vision, "vision", "own"), guarded.job(research, "research", "foreign")
    for token, job_id in ((vision, own), (research, foreign)):
        assert guarded.request("PATCH", f"/v1/jobs/{job_id}", token, {"labels": {"team": "x"}}).status_code == 202
    for state in ("live", "ended"):
        for sort in ("-submitted", "name"):
            page = guarded.request("GET", f"/v1/jobs?selector=team&state={state}&sort={sort}", vision).json()
            assert {item["id"] for item in page["items"]} == {own}, (state, sort)
            assert page["next"] is None
        guarded.request("DELETE", f"/v1/jobs/{own}", vision)
        guarded.request("DELETE", f"/v1/jobs/{foreign}", research)
        for _ in range(3):
            guarded.tick()
    other = guarded.token("cy", "viewer:vision")
    assert guarded.request("PATCH", f"/v1/jobs/{own}", other, {"labels": {"team": "y"}}).status_code == 403
    assert guarded.request("PATCH", f"/v1/jobs/{foreign}", vision, {"labels": {"team": "y"}}).status_code == 404
