"""Events and decisions that begin with the newest one, and filters of decisions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.api.authenticated_service import AuthenticatedService

if TYPE_CHECKING:
    from tests.api.conftest import ApiService


def _walk(service: ApiService, path: str, **query: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    cursor = ""
    while True:
        page = service.get(path, limit=2, cursor=cursor, **query)
        found += page["items"]
        cursor = page["next"] or ""
        if not cursor:
            return found


@pytest.fixture
def busy(fleet: ApiService) -> ApiService:
    """A fleet with decisions about a job and about lent nodes."""
    fleet.lend_all()
    return fleet


@pytest.mark.parametrize("path", ["/v1/events", "/v1/decisions"])
def test_newest_first_is_the_reverse_of_oldest_first(busy: ApiService, path: str) -> None:
    oldest = busy.get(path, limit=1000)["items"]
    assert len(oldest) > 2
    assert _walk(busy, path, order="newest") == oldest[::-1]


@pytest.mark.parametrize("order", ["oldest", "newest"])
def test_decisions_are_filtered_by_subject_and_kind(busy: ApiService, order: str) -> None:
    listed = busy.get("/v1/decisions", limit=1000)["items"]
    about_i0 = _walk(busy, "/v1/decisions", order=order, subject="i0")
    lent = _walk(busy, "/v1/decisions", order=order, kind="LendNode")
    assert {each["number"] for each in about_i0} == {each["number"] for each in listed if each["subject"] == "i0"}
    assert {each["number"] for each in lent} == {each["number"] for each in listed if each["kind"] == "LendNode"}
    assert about_i0
    assert lent


def test_newest_events_of_one_subject(busy: ApiService) -> None:
    listed = [each for each in busy.get("/v1/events", limit=1000)["items"] if each["subject"] == "i1"]
    assert _walk(busy, "/v1/events", order="newest", subject="i1") == listed[::-1] != []


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("decisions?kind=Lend", "kind"),
        ("decisions?order=newest&after=3", "after"),
        ("events?order=newest&after=3", "after"),
        ("events?order=newest&cursor=x", "cursor"),
    ],
)
def test_invalid_filters_name_their_field(fleet: ApiService, query: str, field: str) -> None:
    assert [each["field"] for each in fleet.refused("GET", f"/v1/{query}")["errors"]] == [field]


def test_newest_items_hide_jobs_of_other_queues() -> None:
    guarded = AuthenticatedService().with_fleet()
    anna, bert = guarded.token("anna", "submitter:research"), guarded.token("bert", "submitter:vision")
    his = guarded.job(bert, "vision", "secret")
    guarded.tick()
    for path in ("events", "decisions"):
        for query in ("order=newest", f"order=newest&subject={his}"):
            answer = guarded.request("GET", f"/v1/{path}?{query}", anna)
            assert answer.status_code == 200
            assert his not in answer.text.replace(f"subject={his}", "")
        assert his in guarded.request("GET", f"/v1/{path}?order=newest", guarded.root).text
    guarded.http.close()
