"""GET /v1/jobs/{job}/cost, and usage by the model that jobs train: the jobs add up to the savings of their queue."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import Any

import pytest

from scheduler.domain.commands import Command
from scheduler.settings import Settings
from scheduler.solver.curve import build_curve_solved, solve_point
from scheduler.store.memory_store import MemoryStore
from tests.api.authenticated_service import AuthenticatedService
from tests.api.conftest import ApiService
from tests.builders import GPU

HOUR_S = 3600.0
MODEL = "llama-2-7b"


@pytest.fixture
def priced() -> Iterator[ApiService]:
    """A service with prices for the GPUs of its training pool."""
    service = ApiService(Settings(auth="off", allowed_hosts="service", gpu_prices={GPU: 2.5}, currency="EUR"))
    with service.http:
        service.made("/v1/pools", {"name": "training", "kind": "training"})
        for node in ("t0", "t1"):
            service.made("/v1/nodes", {"name": node, "pool": "training", "gpu": GPU, "gpus": 8})
        yield service


def read_cost(service: ApiService, job: str) -> dict[str, Any]:
    return dict(service.get(f"/v1/jobs/{job}/cost"))


def tick_with_solver(service: ApiService, ticks: int) -> None:
    """Run ticks, and solve the curve points that each requests for the next."""
    learned: tuple[Command, ...] = ()
    for _ in range(ticks):
        wanted = service.tick(after_s=300.0, learned=learned).wanted_shapes
        requests, now_s = service.store.load().snapshot.curve_requests(), service.clock.now_s()
        bodies = [
            build_curve_solved(each.curve_key, each.shape, solve_point(requests[each.curve_key], each.shape))
            for each in wanted
        ]
        learned = tuple(Command(f"solved-{now_s}-{at}", now_s, body) for at, body in enumerate(bodies))


def test_jobs_add_up_to_the_savings_of_their_queue(priced: ApiService) -> None:
    jobs = [priced.submit(gpus={"min": gpus, "max": gpus}) for gpus in (2, 4)]
    for _ in range(4):
        priced.tick(after_s=300.0)
    priced.clock.move_to(priced.clock.now_s() + 60.0)
    costs = [read_cost(priced, job) for job in jobs]
    (queue,) = priced.get("/v1/savings", by="queue")["items"]
    for name in ("gpu_s", "own_gpu_s", "lent_gpu_s"):
        assert sum(cost[name] for cost in costs) == pytest.approx(queue[name])
    for name in ("used", "on_loan"):
        assert sum(cost["amounts"][name] for cost in costs) == pytest.approx(queue["amounts"][name])
    for cost in costs:
        assert (cost["currency"], cost["unpriced"], cost["unrecorded_gpu_s"]) == ("EUR", [], 0.0)
        assert cost["gpu_s"] > 0.0
        assert cost["amounts"]["used"] == pytest.approx(2.5 * cost["gpu_s"] / HOUR_S)


def test_generations_add_up_to_the_job_also_after_its_end(priced: ApiService) -> None:
    job = priced.submit(gpus={"min": 2, "max": 2}, onResize="checkpoint")
    for _ in range(2):
        priced.tick(after_s=300.0)
    priced.http.patch(f"/v1/jobs/{job}", json={"gpus": {"min": 4, "max": 4}}).raise_for_status()
    for _ in range(3):
        priced.tick(after_s=300.0)
    running = read_cost(priced, job)
    first, *_, last = running["generations"]
    assert [each["generation"] for each in running["generations"]] == sorted(
        {each["generation"] for each in running["generations"]}
    )
    assert (last["end_s"], last["gpus"]) == (None, [GPU])
    assert first["end_s"] > first["begin_s"]
    priced.http.delete(f"/v1/jobs/{job}")
    for _ in range(3):
        priced.tick(after_s=10.0)
    ended = read_cost(priced, job)
    assert all(each["end_s"] is not None for each in ended["generations"])
    assert sum(each["gpu_s"] for each in ended["generations"]) == pytest.approx(ended["gpu_s"])
    assert sum(each["amounts"]["used"] for each in ended["generations"]) == pytest.approx(ended["amounts"]["used"])
    assert ended["gpu_s"] == pytest.approx(priced.get(f"/v1/jobs/{job}")["account"]["gpu_s"])
    assert ended["gpu_s"] >= running["gpu_s"]


def test_usage_before_allocations_were_recorded_is_named(priced: ApiService) -> None:
    job = priced.submit(gpus={"min": 2, "max": 2})
    for _ in range(2):
        priced.tick(after_s=300.0)
    store = MemoryStore(priced.store.load().snapshot)
    forgetful = ApiService(Settings(auth="off", allowed_hosts="service"), store=store)
    forgetful.clock.move_to(priced.clock.now_s())
    with forgetful.http:
        cost = read_cost(forgetful, job)
    assert (cost["gpu_s"], cost["generations"], cost["amounts"]) == (0.0, [], None)
    recorded = read_cost(priced, job)
    assert recorded["gpu_s"] > 0.0
    assert cost["unrecorded_gpu_s"] == pytest.approx(recorded["gpu_s"])


def test_usage_is_grouped_by_the_model_that_jobs_train(priced: ApiService) -> None:
    trained = priced.submit(gpus={"min": 8, "max": 8}, model=MODEL, globalBatch=8)
    priced.submit(gpus={"min": 2, "max": 2})
    tick_with_solver(priced, 4)
    report = priced.get("/v1/savings", by="model")
    by_model = {row["model"]: row for row in report["items"]}
    assert by_model.keys() == {"", MODEL}
    assert by_model[MODEL]["gpu_s"] > 0.0
    assert by_model[MODEL]["gpu_s"] == pytest.approx(read_cost(priced, trained)["gpu_s"])
    assert sum(row["gpu_s"] for row in report["items"]) == pytest.approx(report["total"]["gpu_s"])
    priced.http.delete(f"/v1/jobs/{trained}")
    for _ in range(3):
        priced.tick(after_s=10.0)
    rows = csv.DictReader(io.StringIO(priced.http.get("/v1/savings?by=model&format=csv").text))
    ended = {row["model"]: float(row["gpu_s"]) for row in rows}
    assert ended[MODEL] >= by_model[MODEL]["gpu_s"] - 0.001
    assert {row["model"] for row in priced.get("/v1/usage", by="model,gpu")["items"]} == {"", MODEL}
    spans = priced.get("/v1/allocations")["items"]
    assert {span["model"] for span in spans if span["job_id"] == trained} == {MODEL}


def test_cost_of_a_job_in_another_queue_is_hidden() -> None:
    with (guarded := AuthenticatedService()).http:
        guarded.with_fleet()
        job = guarded.job(guarded.root, "research")
        guarded.tick()
        for role, status in (("viewer:vision", 404), ("viewer:research", 200)):
            token = guarded.token(role.replace(":", "-"), role)
            assert guarded.request("GET", f"/v1/jobs/{job}/cost", token).status_code == status
