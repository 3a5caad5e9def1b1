"""GPU profiles and networks of pools over HTTP, and the plans that follow from them."""

from __future__ import annotations

import json
from concurrent.futures import Executor, Future
from typing import Any

import pytest

from api.openapi import load_examples
from scheduler.domain.snapshot import Snapshot
from scheduler.runtime.curve_builder import CurveBuilder
from scheduler.runtime.fleet_hardware import FleetHardwareLoader
from scheduler.solver.profiles.catalog import load_gpu
from tests.api.authenticated_service import AuthenticatedService
from tests.api.conftest import ApiService, Problem

GPU = "h100-80g"
PATH = f"/v1/hardware/gpus/{GPU}"
PROFILE: dict[str, Any] = load_examples()["GpuProfileDocument"]
SHIPPED = load_gpu(GPU)
PLAN = {"model": "llama-2-7b", "gpu": GPU, "gpus": 16, "nodes": 2, "globalBatch": 32}
EIGHTH = {
    "bandwidth_bytes_per_s": SHIPPED.inter_bandwidth_bytes_per_s / 8,
    "latency_s": SHIPPED.inter_latency_s,
    "nics_per_node": 8,
}


class InlineExecutor(Executor):
    """Runs each task at once, in this process."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


class PlanningService(ApiService):
    """A service with two nodes of 8 GPUs, whose controller solves plans."""

    def __init__(self) -> None:
        super().__init__()
        loader = FleetHardwareLoader(self.store)
        self.curves = CurveBuilder(InlineExecutor(), in_flight_max=64, load_hardware=loader.load_for)
        self.made("/v1/pools", {"name": "training", "kind": "training"})
        for name in ("t0", "t1"):
            self.made("/v1/nodes", {"name": name, "pool": "training", "gpu": GPU, "gpus": 8})

    def settle(self) -> Snapshot:
        """Tick as the controller does, until nothing is left to solve, and return the snapshot."""
        for _ in range(10):
            snapshot = self.store.load().snapshot
            learned = self.curves.list_solver_changes(snapshot, self.clock.now_s())
            learned += self.curves.collect_finished(self.clock.now_s())
            report = self.tick(learned=learned, after_s=60.0)
            self.curves.request_shapes(self.store.load().snapshot, report.wanted_shapes)
            if not learned and self.curves.is_idle:
                break
        return self.store.load().snapshot


def change(service: ApiService, **fields: Any) -> dict[str, Any]:
    answer = service.http.put(PATH, json={**PROFILE, **fields})
    assert answer.status_code == 202, answer.text
    document: dict[str, Any] = answer.json()
    return document


def test_all_known_profiles_are_listed_with_their_source(service: ApiService) -> None:
    change(service)
    profiles = {each["name"]: each for each in service.get("/v1/hardware/gpus")["items"]}
    assert {"a100-80g", "cpu", GPU} <= profiles.keys()
    assert [profiles[name]["source"] for name in ("a100-80g", GPU)] == ["shipped", "set"]
    assert [profiles[name]["version"] for name in ("a100-80g", GPU)] == [None, 1]


def test_a_profile_is_set_replaced_and_deleted(service: ApiService, problem: Problem) -> None:
    assert change(service)["version"] == 1
    service.tick()
    assert change(service, efficiency=0.5)["version"] == 2
    assert service.http.put(PATH, json={**PROFILE, "efficiency": 0.5}).status_code == 200
    service.tick()
    found = service.get(PATH)
    assert (found["version"], found["efficiency"], found["set_by"]) == (2, 0.5, "anybody")
    assert found["profile"] == {**PROFILE, "efficiency": 0.5}
    assert service.http.delete(PATH).json()["version"] == 2
    assert service.get(PATH)["source"] == "shipped"
    service.tick()
    assert service.get(PATH)["efficiency"] == SHIPPED.efficiency
    assert "Its shipped profile cannot be deleted" in problem(service.http.delete(PATH), 409)["detail"]
    messages = [event["message"] for event in service.get("/v1/events", subject=GPU)["items"]]
    assert messages == [
        f"version 1 of the profile of GPU {GPU} was set",
        f"version 2 of the profile of GPU {GPU} was set",
        f"the profile of GPU {GPU} that was set was deleted",
    ]


def test_a_profile_is_changed_conditionally(service: ApiService, problem: Problem) -> None:
    read = service.http.get(PATH).headers["etag"]
    answer = service.http.put(PATH, json=PROFILE, headers={"If-Match": read})
    assert answer.status_code == 202
    assert answer.headers["etag"] == service.http.get(PATH).headers["etag"] != read
    late = {**PROFILE, "efficiency": 0.5}
    assert (
        answer.headers["etag"] in problem(service.http.put(PATH, json=late, headers={"If-Match": read}), 412)["detail"]
    )
    problem(service.http.delete(PATH, headers={"If-Match": read}), 412)


def test_each_change_has_an_audit_entry_with_both_values(service: ApiService) -> None:
    change(service)
    change(service, efficiency=0.5)
    service.http.delete(PATH)
    first, second, third = service.get("/v1/audit", subject=GPU)["items"]
    assert [each["action"] for each in (first, second, third)] == ["SetGpuProfile", "SetGpuProfile", "DeleteGpuProfile"]
    assert (first["before"], third["after"]) == (None, None)
    assert (second["before"]["version"], second["after"]["version"]) == (1, 2)
    assert json.loads(second["after"]["profile_json"])["efficiency"] == 0.5


@pytest.mark.parametrize(
    ("fields", "field", "detail"),
    [
        ({"efficiency": 1.4}, "efficiency", f"GPU '{GPU}': efficiency is 1.4; it must be at most 1"),
        (
            {"inter_bandwidth_bytes_per_s": 0},
            "inter_bandwidth_bytes_per_s",
            f"GPU '{GPU}': inter_bandwidth_bytes_per_s is 0; it must be a finite number above 0",
        ),
        ({"memory_bytes": 0}, "memory_bytes", f"GPU '{GPU}': memory_bytes is 0; it must be a finite number above 0"),
        ({"gpu": "t4"}, "gpu", f'gpu: got "t4"; allowed: {GPU}, as in the path'),
        ({"precision": "int1"}, "precision", "GPU profile: precision is 'int1'; allowed are bf16, fp16, fp32"),
        ({"collectives": 7}, "collectives", "GPU profile: collectives is 7; it must be a list of measured tables"),
    ],
)
def test_impossible_figures_are_refused(service: ApiService, fields: dict[str, Any], field: str, detail: str) -> None:
    refusal = service.refused("PUT", PATH, {**PROFILE, **fields})
    assert (refusal["detail"], refusal["errors"][0]["field"]) == (detail, field)


def test_a_profile_must_be_an_object_of_limited_size(service: ApiService) -> None:
    service.refused("PUT", PATH, [PROFILE])
    refusal = service.refused("PUT", PATH, {**PROFILE, "source": "x" * 300_000})
    assert "at most 262144 bytes" in refusal["detail"]
    service.refused("PUT", "/v1/hardware/gpus/Not%20a%20name", PROFILE)


def test_a_model_that_nothing_else_describes_stays_while_it_is_used(service: ApiService, problem: Problem) -> None:
    path = "/v1/hardware/gpus/x1-80g"
    problem(service.http.get(path), 404)
    assert service.http.put(path, json={**PROFILE, "gpu": "x1-80g"}).status_code == 202
    service.made("/v1/pools", {"name": "training", "kind": "training"})
    service.made("/v1/nodes", {"name": "t0", "pool": "training", "gpu": "x1-80g", "gpus": 8})
    assert service.get("/v1/nodes/t0")["gpu_memory_bytes"] == PROFILE["memory_bytes"]
    refusal = problem(service.http.delete(path), 409)["detail"]
    assert refusal == "GPU x1-80g has no other profile, and 1 node need it. Set another one, or remove them first"
    service.tick()
    assert service.http.delete("/v1/nodes/t0").status_code == 202
    assert service.http.delete(path).status_code == 202
    problem(service.http.get(path), 404)


def test_everybody_reads_and_admins_change() -> None:
    service = AuthenticatedService()
    viewer, root = service.token("reader", "viewer:blue"), service.root
    read = service.http.get(PATH, headers={"Authorization": f"Bearer {viewer}"})
    assert (read.status_code, read.json()["source"]) == (200, "shipped")
    for token, status in ((viewer, 403), (service.token("lead", "queue-admin"), 403), (root, 202)):
        answer = service.http.put(PATH, json=PROFILE, headers={"Authorization": f"Bearer {token}"})
        assert answer.status_code == status, answer.text


def test_a_network_of_a_pool_is_set_and_deleted(service: ApiService, problem: Problem) -> None:
    service.made("/v1/pools", {"name": "training", "kind": "training", "network": EIGHTH})
    service.made("/v1/nodes", {"name": "t0", "pool": "training", "gpu": GPU, "gpus": 8})
    assert service.get("/v1/pools/training")["network"] == EIGHTH
    used = service.get(PATH)["network"]
    assert (used["bandwidth_bytes_per_s"], used["gpus_per_nic"]) == (EIGHTH["bandwidth_bytes_per_s"], 1.0)
    assert not used["of_profile"]
    path, read = "/v1/pools/training/network", service.http.get("/v1/pools/training").headers["etag"]
    faster = {**EIGHTH, "bandwidth_bytes_per_s": 1e10}
    answer = service.http.put(path, json=faster, headers={"If-Match": read})
    assert (answer.status_code, answer.json()["network"]) == (202, faster)
    problem(service.http.put(path, json=EIGHTH, headers={"If-Match": read}), 412)
    assert service.http.delete(path).json()["network"] is None
    assert service.get(PATH)["network"]["of_profile"]
    assert service.refused("PUT", path, {**EIGHTH, "latency_s": 0})["errors"][0]["field"] == "latency_s"
    assert service.refused("PUT", path, {**EIGHTH, "bandwidth_bytes_per_s": 25})["errors"]
    conflict = problem(service.post("/v1/pools", {"name": "training", "kind": "training", "network": faster}), 409)
    assert conflict["errors"][0]["field"] == "network"


def test_plans_follow_set_profiles_and_networks(service: ApiService) -> None:
    service.made("/v1/pools", {"name": "training", "kind": "training"})
    service.made("/v1/nodes", {"name": "t0", "pool": "training", "gpu": GPU, "gpus": 8})
    shipped = service.made("/v1/plans", PLAN)["iteration_time_s"]
    service.http.put("/v1/pools/training/network", json=EIGHTH)
    slow_network = service.made("/v1/plans", PLAN)["iteration_time_s"]
    change(service, efficiency=SHIPPED.efficiency / 2)
    slow_chip = service.made("/v1/plans", PLAN)["iteration_time_s"]
    assert shipped < slow_network < slow_chip


def test_a_slower_network_changes_the_plan_of_a_job_that_the_service_starts() -> None:
    service = PlanningService()
    gpus = {"gpus": {"min": 16, "max": 16}, "model": "llama-2-7b", "globalBatch": 32}
    first = service.submit("first", **gpus)
    before = service.settle().jobs[first].allocation.plan
    assert service.http.put("/v1/pools/training/network", json=EIGHTH).status_code == 202
    assert service.settle().jobs[first].allocation.plan == before, "a running job keeps its plan until it is re-planned"
    service.http.delete(f"/v1/jobs/{first}")
    second = service.submit("second", **gpus)
    after = service.settle().jobs[second].allocation.plan
    assert before is not None
    assert after is not None
    assert after.stages != before.stages
    assert after.iteration_time_s > 1.05 * before.iteration_time_s
    events = [event["message"] for event in service.get("/v1/events", subject="solver")["items"]]
    assert any("curves will be solved again" in message for message in events)
