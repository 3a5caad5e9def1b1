"""GET /v1/history and GET /v1/history/snapshot: series of pools, and the fleet as it was."""

from __future__ import annotations

from typing import Any

import pytest

from api.history import POINTS_TYPICAL
from scheduler.runtime.fleet_history import FleetHistory
from scheduler.scheduling.past_fleet import capture_fleet, decode_past_fleet, encode_past_fleet
from tests.api.authenticated_service import AuthenticatedService
from tests.api.conftest import NOW_S, ApiService, Problem

USES = ("inference", "used", "lent_used", "lent_idle", "free", "other", "down")


def pools_of(service: ApiService, **query: str | float) -> dict[str, dict[str, Any]]:
    return {pool["name"]: pool for pool in service.get("/v1/history", **query)["pools"]}


def write_checkpoint(service: ApiService) -> None:
    assert service.leader is not None
    epoch = service.leader.epoch
    history = FleetHistory(service.store, clock=service.clock, epoch=lambda: epoch, season_s=86_400.0)
    history.step()


def test_uses_add_up_to_the_capacity_in_every_bin(fleet: ApiService) -> None:
    fleet.lend_all()
    begun_s = fleet.clock.now_s()
    for _ in range(5):
        fleet.tick(after_s=50.0)
    pools = pools_of(fleet, from_s=begun_s, step_s=60)
    assert list(pools) == ["inference", "training"]
    for pool in pools.values():
        assert len(pool["capacity"]) == 5
        for at, capacity in enumerate(pool["capacity"]):
            assert capacity == pytest.approx(2.0)
            assert sum(pool["uses"][use][at] for use in USES) == pytest.approx(capacity)
    assert pools["inference"]["uses"]["lent_used"][-1] == 2.0
    assert pools["training"]["uses"]["used"][-1] == 2.0
    assert (pools["inference"]["lent_nodes"][-1], pools["inference"]["demand"][-1]) == (2.0, 0.0)
    assert sum(pools_of(fleet)["inference"]["lends"]) == 2


def test_time_since_the_last_commit_counts(fleet: ApiService) -> None:
    fleet.tick()
    fleet.clock.move_to(fleet.clock.now_s() + 130.0)
    view = fleet.get("/v1/history", pool="training", from_s=fleet.clock.now_s() - 60.0)
    assert view["pools"][0]["uses"]["free"] == [2.0, 2.0]
    assert (view["step_s"], len(view["at_s"])) == (60, 2)


@pytest.mark.parametrize(("hours", "step_s"), [(1, 60), (6, 60), (24, 600), (48, 600), (168, 3600), (720, 3600)])
def test_ranges_have_few_points(fleet: ApiService, hours: int, step_s: int) -> None:
    view = fleet.get("/v1/history", from_s=NOW_S - 3600.0 * hours, to_s=NOW_S)
    assert view["step_s"] == step_s
    assert len(view["at_s"]) <= POINTS_TYPICAL + 1


def test_times_without_observation_are_null(fleet: ApiService) -> None:
    fleet.tick()
    pool = pools_of(fleet, from_s=NOW_S - 600.0, to_s=NOW_S - 60.0)["training"]
    assert set(pool["capacity"]) == {None}
    assert set(pool["recalls"]) == {0}


@pytest.mark.parametrize(
    "query", [{"step_s": 61}, {"step_s": 60, "from_s": NOW_S - 30 * 86_400}, {"from_s": 0.0}, {"from_s": NOW_S + 9e6}]
)
def test_ranges_and_steps_are_checked(fleet: ApiService, problem: Problem, query: dict[str, float]) -> None:
    problem(fleet.http.get("/v1/history", params=query), 422)


def test_unknown_pool_is_not_found(fleet: ApiService, problem: Problem) -> None:
    problem(fleet.http.get("/v1/history", params={"pool": "gone"}), 404)


def test_fleet_is_shown_as_it_was(fleet: ApiService, problem: Problem) -> None:
    problem(fleet.http.get("/v1/history/snapshot", params={"at_s": NOW_S}), 404)
    fleet.lend_all()
    waiting = fleet.submit("later", gpus={"min": 8, "max": 8})
    fleet.tick()
    write_checkpoint(fleet)
    then_s = fleet.clock.now_s()
    fleet.http.delete(f"/v1/jobs/{waiting}")
    for _ in range(3):
        fleet.tick(after_s=200.0)
    write_checkpoint(fleet)
    past = fleet.get("/v1/history/snapshot", at_s=then_s + 10.0)
    assert (past["as_of_s"], [node["state"] for node in past["nodes"]]) == (then_s, ["lent", "lent", "training"])
    assert [(job["gpus"], job["nodes"]) for job in past["jobs"]] == [(4, 3)]
    assert ([job["id"] for job in past["pending"]], past["pending_jobs"], past["pending_gpus"]) == ([waiting], 1, 8)
    assert past["events"]
    assert max(event["at_s"] for event in past["events"]) <= then_s + 10.0
    assert fleet.get("/v1/history/snapshot", at_s=fleet.clock.now_s())["pending_jobs"] == 0


def test_callers_see_their_own_queues_only() -> None:
    service = AuthenticatedService().with_fleet()
    mine, theirs = service.token("mia", "viewer:vision"), service.token("rob", "submitter:research")
    shown = service.job(service.root, "vision")
    hidden = [service.job(theirs, "research", name=f"secret-{at}") for at in range(3)]
    service.tick()
    write_checkpoint(service)
    at_s = service.clock.now_s()
    past = service.request("GET", f"/v1/history/snapshot?at_s={at_s}", mine)
    assert past.status_code == 200
    assert "secret" not in past.text
    assert not any(job_id in past.text for job_id in hidden)
    jobs = [job["id"] for job in (*past.json()["jobs"], *past.json()["pending"])]
    assert jobs == [shown]
    assert past.json()["pending_jobs"] == len(past.json()["pending"])
    service.tick(after_s=60.0)
    pools = {}
    for token in (mine, service.root):
        [pools[token]] = service.request("GET", f"/v1/history?from_s={at_s}", token).json()["pools"]
    assert set(pools[mine]["pending_jobs"]) == {None}
    assert pools[service.root]["pending_jobs"][0] > 0
    assert pools[mine]["uses"] == pools[service.root]["uses"]


def test_checkpoints_keep_the_state(fleet: ApiService) -> None:
    fleet.lend_all()
    fleet.submit("later", gpus={"min": 8, "max": 8})
    fleet.tick()
    past = capture_fleet(fleet.store.load().snapshot, 7)
    assert decode_past_fleet(encode_past_fleet(past)) == past
