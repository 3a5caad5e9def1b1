"""GET /v1/savings: sums equal usage and the use of pools, amounts, rows by each dimension, and what callers may see."""

from __future__ import annotations

import csv
import io

import pytest

from scheduler.domain.capacity_history import HOURS
from scheduler.settings import Settings
from tests.api.authenticated_service import AuthenticatedService
from tests.api.conftest import ApiService, Problem

HOUR_S = 3600.0
SUMS = ("gpu_s", "own_gpu_s", "lent_gpu_s", "lost_gpu_s")


@pytest.fixture
def lending(fleet: ApiService) -> ApiService:
    """A service that has lent both inference nodes for half an hour, while a job waits for GPUs that do not exist."""
    fleet.lend_all()
    fleet.submit(gpus={"min": 64, "max": 64}, queue="default")
    for _ in range(6):
        fleet.tick(after_s=300.0)
    return fleet


@pytest.mark.parametrize("by", ["day", "queue", "owner", "gpu", "model"])
def test_held_gpu_time_is_that_of_usage(lending: ApiService, by: str) -> None:
    report, usage = lending.get("/v1/savings", by=by), lending.get("/v1/usage", by=by)
    assert {name: report["total"][name] for name in SUMS} == usage["total"]
    assert [{name: row[name] for name in SUMS} for row in report["items"]] == [
        {name: row[name] for name in SUMS} for row in usage["items"]
    ]
    assert report["total"]["lent_gpu_s"] > 0.0
    idle = [row["idle_waiting_gpu_s"] for row in report["items"]]
    assert all((value is None) == (by != "day") for value in idle)


def test_idle_gpu_time_is_that_of_the_recorded_use_of_pools(fleet: ApiService) -> None:
    fleet.submit(gpus={"min": 64, "max": 64})
    for _ in range(4):
        fleet.tick(after_s=200.0)
    report = fleet.get("/v1/savings")
    bins = fleet.store.capacity.list_bins(HOURS.step_s, from_s=0.0, to_s=1e12)
    waited_gpu_s = sum(each.free_waited_gpu_s for each in bins if each.pool == "training")
    assert report["total"]["idle_waiting_gpu_s"] == pytest.approx(waited_gpu_s)
    assert waited_gpu_s == pytest.approx(2 * 600.0, rel=0.01), "two GPUs are idle while a job waits"
    assert report["total"]["lent_idle_gpu_s"] == 0.0
    assert report["recorded_since_s"] <= fleet.clock.now_s()
    (day,) = report["items"]
    assert day["idle_waiting_gpu_s"] == report["total"]["idle_waiting_gpu_s"]
    fleet.clock.move_to(fleet.clock.now_s() + 50.0)
    assert fleet.get("/v1/savings")["total"]["idle_waiting_gpu_s"] == pytest.approx(waited_gpu_s + 2 * 50.0)


def test_amounts_are_gpu_hours_times_the_price_of_the_model() -> None:
    service = ApiService(Settings(auth="off", allowed_hosts="service", gpu_prices={"cpu": 2.5}, currency="EUR"))
    with service.http:
        service.made("/v1/pools", {"name": "training", "kind": "training"})
        service.made("/v1/nodes", {"name": "t0", "pool": "training", "gpu": "cpu", "gpus": 4})
        service.submit(gpus={"min": 2, "max": 2})
        service.submit(gpus={"min": 64, "max": 64})
        for _ in range(4):
            service.tick(after_s=300.0)
        report = service.get("/v1/savings", by="queue")
        total = report["total"]
        assert (report["currency"], report["prices"], report["unpriced"]) == ("EUR", {"cpu": 2.5}, [])
        assert total["amounts"]["used"] == pytest.approx(2.5 * total["gpu_s"] / HOUR_S)
        assert total["amounts"]["idle_waiting"] == pytest.approx(2.5 * total["idle_waiting_gpu_s"] / HOUR_S)
        assert total["amounts"]["on_loan"] == total["amounts"]["lost"] == 0.0
        (row,) = report["items"]
        assert row["amounts"] == {**total["amounts"], "idle_waiting": None}
        table = list(csv.DictReader(io.StringIO(service.http.get("/v1/savings?format=csv").text)))
        assert float(table[0]["used_EUR"]) == pytest.approx(total["amounts"]["used"], abs=0.001)
        assert float(table[0]["idle_waiting_gpu_s"]) == pytest.approx(total["idle_waiting_gpu_s"], abs=0.001)


def test_models_without_a_price_are_named(lending: ApiService) -> None:
    assert lending.get("/v1/savings")["total"]["amounts"] is None
    priced = ApiService(
        Settings(auth="off", allowed_hosts="service", gpu_prices={"h100-80g": 2.0}), store=lending.store
    )
    priced.clock.move_to(lending.clock.now_s())
    with priced.http:
        report = priced.get("/v1/savings", by="gpu")
        assert report["unpriced"] == ["cpu"]
        assert report["total"]["amounts"]["used"] == 0.0


def test_csv_has_names_that_no_spreadsheet_runs(fleet: ApiService) -> None:
    fleet.submit(gpus={"min": 1, "max": 1})
    fleet.tick(after_s=60.0)
    fleet.clock.move_to(fleet.clock.now_s() + 60.0)
    answer = fleet.http.get("/v1/savings?by=owner", headers={"Accept": "text/csv"})
    assert answer.headers["content-disposition"] == 'attachment; filename="savings.csv"'
    (row,) = csv.DictReader(io.StringIO(answer.text))
    assert (row["owner"], row["owner_id"], row["idle_waiting_gpu_s"]) == ("anybody", "local", "")


def test_callers_see_the_usage_of_their_queues_only() -> None:
    with (guarded := AuthenticatedService()).http:
        guarded.with_fleet()
        guarded.job(guarded.root, "research")
        guarded.tick()
        guarded.clock.move_to(guarded.clock.now_s() + 60.0)
        token = guarded.token("eve", "viewer:vision")
        report = guarded.request("GET", "/v1/savings?by=queue", token).json()
        assert report["items"] == []
        assert report["total"]["gpu_s"] == 0.0
        assert guarded.request("GET", "/v1/savings/comparison", token).status_code == 403


@pytest.mark.parametrize(("query", "field"), [("by=hour", "by"), ("from=soon", "from")])
def test_invalid_parameters_are_refused(fleet: ApiService, problem: Problem, query: str, field: str) -> None:
    assert problem(fleet.http.get(f"/v1/savings?{query}"), 422)["errors"][0]["field"].endswith(field)
