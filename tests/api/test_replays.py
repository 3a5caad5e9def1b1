"""Replays of recorded time: what is simulated, who may start one, and the series of its charts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scheduler.domain.commands import Command, ReportProgress
from scheduler.simulator.report import CHART_POINTS_MAX, PolicySeries
from scheduler.store.schema_migration import migrate
from scheduler.store.sql_store import SqlStore
from tests.api.authenticated_service import AuthenticatedService
from tests.api.conftest import Problem

HOUR_S = 3600.0


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[AuthenticatedService]:
    """A service with an inference pool and its demand, a job that has run, and one that has ended."""
    url = f"sqlite:///{tmp_path / 'replay.sqlite'}"
    migrate(url)
    made = AuthenticatedService(SqlStore(url), rate_per_s=1e6, rate_burst=10**6)
    made.http.headers.update({"Authorization": f"Bearer {made.root}"})
    made.with_fleet()
    made.made("/v1/pools", {"name": "inference", "kind": "inference", "lending": {"headroom": 0.2}})
    made.made("/v1/nodes", {"name": "i0", "pool": "inference", "gpu": "cpu", "gpus": 1})
    made.made("/v1/pools/inference/demand", {"gpus": 1})
    running, gone = (made.submit(name, gpus={"min": 1, "max": 1}) for name in ("running", "gone"))
    for _ in range(3):
        made.tick(after_s=60.0)
    for job_id in (running, gone):
        made.store.send(Command(f"report-{job_id}", made.clock.now_s(), ReportProgress(job_id, 1, 50.0)))
    made.tick(after_s=HOUR_S)
    made.http.delete(f"/v1/jobs/{gone}")
    made.tick()
    made.tick()
    yield made
    made.http.close()


def _files(service: AuthenticatedService, task: dict[str, Any]) -> tuple[dict[str, Any], str]:
    store = service.store
    assert isinstance(store, SqlStore)
    files = store.simulations.get_files(task["id"])
    assert files is not None
    return json.loads(files.cluster), files.jobs


def test_replay_has_the_recorded_jobs_and_the_changed_fleet(recorded: AuthenticatedService) -> None:
    change = {"nodes": {"training": 2}, "lending": {"headroom": 0.0, "enabled": False}, "policies": ["fifo", "ebbtide"]}
    task = recorded.made("/v1/simulations:replay", change)
    cluster, jobs = _files(recorded, task)
    pools = {pool["name"]: pool for pool in cluster["pools"]}
    assert pools["training"]["nodes"] == 3
    assert pools["inference"]["lending"]["headroom"] == 0.0
    assert pools["inference"]["lending"]["enabled"] is False
    assert len(jobs.splitlines()) == 1 + 2
    assert (task["state"], task["policies"], task["progress"]["jobs_total"]) == ("queued", ["fifo", "ebbtide"], 4)
    assert task["description"].splitlines()[0].endswith("+2 nodes in training, without lending, headroom 0")
    unchanged, _ = _files(recorded, recorded.made("/v1/simulations:replay", {}))
    assert next(pool for pool in unchanged["pools"] if pool["name"] == "inference")["lending"]["headroom"] == 0.2


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"nodes": {"nowhere": 1}}, "nodes"),
        ({"nodes": {"training": -1}}, "nodes.training"),
        ({"days": 0}, "days"),
        ({"days": 40}, "days"),
        ({"policies": ["nothing"]}, None),
    ],
)
def test_change_that_does_not_fit_is_refused(
    recorded: AuthenticatedService, problem: Problem, change: dict[str, Any], field: str | None
) -> None:
    refused = problem(recorded.post("/v1/simulations:replay", change), 422)
    assert field is None or [each["field"] for each in refused["errors"]] == [field]
    assert recorded.get("/v1/simulations")["items"] == []


def test_replay_needs_the_role_admin_on_all_queues(recorded: AuthenticatedService, problem: Problem) -> None:
    for grant in ("viewer", "submitter", "queue-admin", "submitter:research"):
        token = recorded.token("anna", grant)
        problem(recorded.request("POST", "/v1/simulations:replay", token, {}), 403)


def test_replay_without_recorded_jobs_is_a_conflict(recorded: AuthenticatedService, problem: Problem) -> None:
    recorded.tick(after_s=40 * 24 * HOUR_S)
    problem(recorded.post("/v1/simulations:replay", {"days": 0.01}), 409)


def test_series_follow_from_a_report_and_leave_it_unchanged(recorded: AuthenticatedService, problem: Problem) -> None:
    task = recorded.made("/v1/simulations:replay", {})
    path = f"/v1/simulations/{task['id']}"
    problem(recorded.http.get(f"{path}/series"), 409)
    store = recorded.store
    assert isinstance(store, SqlStore)
    now_s = recorded.clock.now_s()
    assert store.simulations.claim("test", now_s=now_s, until_s=now_s + 60.0) is not None
    series = [PolicySeries("fifo", 0, 60, 9, *(((0.5,) * 1001,) * 3), 8, 1, *(((1.0,) * 1001,) * 3), (1.0,)).to_chart()]
    report = {"seed": 0, "policies": [], "series": series}
    store.simulations.finish(task["id"], "test", report, now_s=now_s)
    assert recorded.get(f"{path}/report") == {"seed": 0, "policies": []}
    (shown,) = recorded.get(f"{path}/series")["series"]
    assert len(shown["queued_jobs"]) == len(shown["lent_nodes"]) <= CHART_POINTS_MAX
    assert set(shown["queued_jobs"]) == {0.5}
    assert shown["submitting_s"] == 9
    assert shown["step_s"] * len(shown["queued_jobs"]) >= 60 * 1001
