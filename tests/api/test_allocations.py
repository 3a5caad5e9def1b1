"""GET /v1/allocations: spans of live and ended jobs, filters, pages, and jobs that are hidden from the caller."""

from __future__ import annotations

from typing import Any

import pytest

from api.allocations import span_view
from api.identity.authorization import HIDDEN_JOB
from api.identity.principals import Grant, Principal, Role
from scheduler.domain.allocation_span import AllocationSpan, SpanEnd
from scheduler.store.allocation_history import StoredSpan
from tests.api.authenticated_service import AuthenticatedService
from tests.api.conftest import ApiService, Problem


def list_spans(service: ApiService, **query: Any) -> list[dict[str, Any]]:
    return list(service.get("/v1/allocations", **query)["items"])


def test_spans_of_a_job_add_up_to_its_usage(fleet: ApiService) -> None:
    job = fleet.submit(gpus={"min": 2, "max": 2})
    fleet.tick()
    fleet.clock.move_to(fleet.clock.now_s() + 1.0)
    (span,) = list_spans(fleet)
    assert (span["job_id"], span["end_s"], span["end"], span["is_lent"]) == (job, None, None, False)
    fleet.clock.move_to(fleet.clock.now_s() + 100.0)
    fleet.http.delete(f"/v1/jobs/{job}")
    fleet.tick(after_s=0.0)
    fleet.tick(after_s=0.0)
    (ended,) = list_spans(fleet, job=job)
    assert ended["end"] == "cancelled"
    gpu_s = len(ended["gpus"]) * (ended["end_s"] - ended["begin_s"])
    assert gpu_s == fleet.get("/v1/usage")["total"]["gpu_s"] > 0


def test_spans_are_filtered_by_time_place_and_job(fleet: ApiService) -> None:
    first, second = (fleet.submit(gpus={"min": 1, "max": 1}) for _ in range(2))
    fleet.tick()
    fleet.clock.move_to(fleet.clock.now_s() + 1.0)
    begin_s = list_spans(fleet)[0]["begin_s"]
    assert {span["job_id"] for span in list_spans(fleet)} == {first, second}
    assert [span["job_id"] for span in list_spans(fleet, job=second)] == [second]
    assert list_spans(fleet, pool="inference") == list_spans(fleet, queue="vision") == list_spans(fleet, node="x") == []
    assert len(list_spans(fleet, pool="training", queue="default")) == 2
    assert list_spans(fleet, to=begin_s) == []
    page = fleet.get("/v1/allocations", limit=1)
    rest = fleet.get("/v1/allocations", limit=1, cursor=page["next"])
    assert rest["next"] is None
    assert page["items"][0]["number"] > rest["items"][0]["number"]


@pytest.mark.parametrize(
    ("query", "field"),
    [("from=2026-11-22&to=2026-11-20", "from"), ("from=2026-01-01&to=2026-11-01", "from"), ("to=soon", "to")],
)
def test_invalid_times_are_refused(fleet: ApiService, problem: Problem, query: str, field: str) -> None:
    response = fleet.http.get(f"/v1/allocations?{query}")
    assert problem(response, 422)["errors"][0]["field"] == field


def test_job_of_another_queue_is_hidden() -> None:
    span = AllocationSpan("a", "n", "web", "ada", "id", 3, "t0", "train", "cpu", (0,), False, 1.0, 2.0, SpanEnd.FAILED)
    reader, stranger = (Principal("r", (Grant(Role.VIEWER, queue),), subject="r") for queue in ("web", "vision"))
    hidden = {"job_id": HIDDEN_JOB, "name": None, "queue": None, "owner": None, "model": None, "generation": None}
    shown = span_view(StoredSpan(7, span), reader)
    assert span_view(StoredSpan(7, span), stranger) == {**shown, **hidden}
    assert shown["job_id"] == "a"


def test_filters_do_not_reveal_where_hidden_jobs_ran() -> None:
    with (guarded := AuthenticatedService()).http:
        guarded.with_fleet()
        job = guarded.job(guarded.root, "research")
        guarded.tick()
        guarded.clock.move_to(guarded.clock.now_s() + 1.0)
        token = guarded.token("eve", "viewer:vision")

        def list_jobs(query: str) -> list[str]:
            items = guarded.request("GET", f"/v1/allocations{query}", token).json()["items"]
            return [item["job_id"] for item in items]

        assert list_jobs("") == [HIDDEN_JOB]
        assert list_jobs("?queue=research") == list_jobs(f"?job={job}") == []
