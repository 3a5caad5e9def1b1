"""ETag and If-Match: a change fails if the resource has changed since it was read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from scheduler.domain.commands import ChangeJob

if TYPE_CHECKING:
    from tests.api.conftest import ApiService, Problem


def _etag(service: ApiService, path: str) -> str:
    return str(service.http.get(path).headers["etag"])


def test_a_jobs_etag_changes_with_its_specification_and_not_with_progress(fleet: ApiService, problem: Problem) -> None:
    path = f"/v1/jobs/{fleet.submit()}"
    read = _etag(fleet, path)
    for _ in range(3):
        fleet.tick(after_s=60.0)
    assert fleet.get(path)["progress"]["estimate"]["steps"] > 0
    assert _etag(fleet, path) == read
    changed = fleet.http.patch(path, json={"gpus": {"max": 4}}, headers={"If-Match": read})
    assert (changed.status_code, changed.headers["etag"] != read) == (202, True)
    waiting = fleet.store.count_pending_commands()
    for late in (
        fleet.http.patch(path, json={"gpus": {"max": 8}}, headers={"If-Match": read}),
        fleet.http.post(f"{path}:suspend", headers={"If-Match": f"W/{changed.headers['etag']}x, {read}"}),
        fleet.http.delete(path, headers={"If-Match": f"W/{changed.headers['etag']}"}),
    ):
        body = problem(late, 412)
        assert body["type"].endswith(":changed")
        assert changed.headers["etag"] in body["detail"]
    assert fleet.store.count_pending_commands() == waiting
    for fitting in ("*", f'"other", {changed.headers["etag"]}'):
        assert fleet.http.post(f"{path}:suspend", headers={"If-Match": fitting}).status_code == 202
        fleet.post(f"{path}:resume")


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("/v1/pools/inference", {"lending": {"headroom": 0.5}}),
        ("/v1/queues/blue", {"weight": 2.0}),
    ],
)
def test_pools_and_queues_are_changed_and_deleted_conditionally(
    fleet: ApiService, problem: Problem, path: str, change: dict[str, object]
) -> None:
    fleet.made("/v1/queues", {"name": "blue"})
    read = _etag(fleet, path)
    assert fleet.http.patch(path, json=change, headers={"If-Match": read}).headers["etag"] == _etag(fleet, path) != read
    problem(fleet.http.patch(path, json=change, headers={"If-Match": read}), 412)
    problem(fleet.http.delete(path, headers={"If-Match": read}), 412)


def test_a_node_is_drained_conditionally(fleet: ApiService, problem: Problem) -> None:
    read = _etag(fleet, "/v1/nodes/t0")
    assert fleet.http.post("/v1/nodes/t0:cordon", headers={"If-Match": read}).status_code == 202
    problem(fleet.http.post("/v1/nodes/t0:drain", headers={"If-Match": read}), 412)


def test_queue_and_priority_of_a_job_can_be_changed(fleet: ApiService) -> None:
    fleet.create_queues("blue")
    job_id = fleet.submit()
    body = fleet.http.patch(f"/v1/jobs/{job_id}", json={"queue": "blue", "priority": 7}).json()
    assert (body["queue"], body["priority"]) == ("blue", 7)
    assert fleet.store.load().inbox[-1].body == ChangeJob(job_id, "blue", 7)
    fleet.tick()
    assert fleet.get(f"/v1/jobs/{job_id}")["queue"] == "blue"
    assert fleet.refused("PATCH", f"/v1/jobs/{job_id}", {})["errors"][0]["field"] == "gpus"
