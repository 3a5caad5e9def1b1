"""The list of jobs: search, order, recently ended jobs, and why pending jobs wait."""

from __future__ import annotations

from typing import get_args

from hypothesis import given
from hypothesis import strategies as st

from api.job_list import JobSort, sort_jobs
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from tests.api.conftest import ApiService, Problem
from tests.builders import a_job

DAY_S = 86_400.0


def test_search_finds_parts_of_id_name_queue_and_owner(fleet: ApiService) -> None:
    fleet.create_queues("blue-team")
    train, tune = fleet.submit("llama-train"), fleet.submit("tune", queue="blue-team")
    fleet.http.delete(f"/v1/jobs/{fleet.submit('llama-old')}")
    fleet.tick()
    for text, names in (
        ("AMA", {"llama-train", "llama-old"}),
        ("blue", {"tune"}),
        (tune[-6:], {"tune"}),
        (train, {"llama-train"}),
        ("%", set()),
    ):
        assert {item["name"] for item in fleet.get("/v1/jobs", search=text)["items"]} == names, text
    live = fleet.get("/v1/jobs", search="llama", state="live")["items"]
    assert [item["name"] for item in live] == ["llama-train"]


def test_ended_jobs_leave_the_list_by_age_and_live_ones_stay(fleet: ApiService) -> None:
    live, gone = fleet.submit("live"), fleet.submit("gone")
    fleet.http.delete(f"/v1/jobs/{gone}")
    fleet.tick()
    recent: dict[str, str | float] = {"state": "live,cancelled", "ended_max_age_s": DAY_S}
    assert {item["id"] for item in fleet.get("/v1/jobs", **recent)["items"]} == {live, gone}
    fleet.tick(after_s=DAY_S + 1)
    assert {item["id"] for item in fleet.get("/v1/jobs", **recent)["items"]} == {live}
    assert {item["id"] for item in fleet.get("/v1/jobs", ended_within_s=2 * DAY_S)["items"]} == {gone}


def test_every_order_pages_through_each_job_once(fleet: ApiService) -> None:
    for name in ("b", "a", "c"):
        fleet.submit(name)
    fleet.tick()
    for sort in get_args(JobSort):
        whole = fleet.get("/v1/jobs", sort=sort)["items"]
        first = fleet.get("/v1/jobs", sort=sort, limit=2)
        rest = fleet.get("/v1/jobs", sort=sort, limit=2, cursor=first["next"])
        assert [item["id"] for item in first["items"] + rest["items"]] == [item["id"] for item in whole], sort
        assert rest["next"] is None
    assert [item["name"] for item in fleet.get("/v1/jobs", sort="name")["items"]] == ["a", "b", "c"]
    assert [item["name"] for item in fleet.get("/v1/jobs", sort="-name")["items"]] == ["c", "b", "a"]


def test_cursor_of_another_order_is_refused(fleet: ApiService, problem: Problem) -> None:
    for name in ("a", "b"):
        fleet.submit(name)
    cursor = fleet.get("/v1/jobs", sort="name", limit=1)["next"]
    for sort in ("-name", "gpus", "-submitted"):
        answer = fleet.http.get("/v1/jobs", params={"sort": sort, "cursor": cursor})
        assert problem(answer, 422)["errors"][0]["field"] == "cursor"


def test_pending_jobs_have_their_reason_on_request(fleet: ApiService) -> None:
    fleet.submit("huge", gpus={"min": 64, "max": 64})
    fleet.submit("small")
    fleet.tick()
    by_name = {item["name"]: item for item in fleet.get("/v1/jobs", reasons=1)["items"]}
    listed = fleet.get("/v1/waiting")["items"]
    assert by_name["huge"]["pending_reason"] == next(item["reason"] for item in listed if item["name"] == "huge")
    assert "pending_reason" not in by_name["small"]
    assert all("pending_reason" not in item for item in fleet.get("/v1/jobs")["items"])


def _job(number: int, name: str, steps: int, submitted_s: float) -> Job:
    return a_job(f"{name}-{number}", 1, 8, state=JobState.QUEUED, now_s=submitted_s, steps=steps)


jobs_strategy = st.lists(st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 3), st.floats(0, 9))).map(
    lambda rows: [_job(number, *row) for number, row in enumerate(rows)]
)


@given(jobs_strategy, st.sampled_from(get_args(JobSort)))
def test_orders_are_permutations_with_unknown_values_last(jobs: list[Job], sort: JobSort) -> None:
    listed = sort_jobs(jobs, sort, 10.0)
    assert sorted(job.id for job in listed) == sorted(job.id for job in jobs)
    if sort.endswith("progress"):
        unknown = [not job.spec.steps for job in listed]
        assert unknown == sorted(unknown)
