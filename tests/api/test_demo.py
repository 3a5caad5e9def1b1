"""Routes of the demo: they exist in its service alone, and a surge recalls every lent node in time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from api.demo import SURGE_S, DemoDay
from api.identity.authorization import ADMIN, VIEWER, RouteRules, list_route_rules
from tests.api.conftest import NOW_S, ApiService, Problem


@pytest.fixture
def demo() -> Iterator[ApiService]:
    """The service of a demo with two training and two inference nodes."""
    made = ApiService(demo=DemoDay())
    with made.http:
        made.made("/v1/pools", {"name": "training", "kind": "training"})
        lending = {"headroom": 0.0, "return_deadline_s": 15, "cold_start_s": 3}
        made.made("/v1/pools", {"name": "inference", "kind": "inference", "lending": lending})
        for name, pool in (("t0", "training"), ("t1", "training"), ("i0", "inference"), ("i1", "inference")):
            made.made("/v1/nodes", {"name": name, "pool": pool, "gpu": "a100-80g", "gpus": 2})
        yield made


def test_only_the_service_of_a_demo_has_the_routes_and_the_controls(
    service: ApiService, demo: ApiService, problem: Problem
) -> None:
    for method, path in (("GET", "/v1/demo"), ("PUT", "/v1/demo"), ("POST", "/v1/demo/surge")):
        problem(service.http.request(method, path, json={}), 404)
    assert "demo.js" not in service.http.get("/").text
    assert "demo.js" in demo.http.get("/").text
    assert service.http.get("/").headers["ETag"] != demo.http.get("/").headers["ETag"]


def test_only_admins_change_the_demo(demo: ApiService) -> None:
    rules = RouteRules(list_route_rules(demo.app.routes))
    assert rules.find("GET", "/v1/demo") == VIEWER
    assert rules.find("PUT", "/v1/demo") == rules.find("POST", "/v1/demo/surge") == ADMIN


def test_the_day_begins_when_it_is_told_to(demo: ApiService) -> None:
    assert demo.get("/v1/demo")["started_at_s"] is None
    reply = demo.http.put("/v1/demo", json={"started_at_s": NOW_S + 5.0, "day_s": 180.0})
    assert reply.status_code == 200
    day = demo.get("/v1/demo")
    assert (day["started_at_s"], day["day_s"], day["surge_until_s"]) == (NOW_S + 5.0, 180.0, None)
    assert demo.refused("PUT", "/v1/demo", {"started_at_s": NOW_S, "day_s": 0})


def test_a_second_surge_prolongs_the_first(demo: ApiService) -> None:
    first = demo.made("/v1/demo/surge")
    assert first["surge_until_s"] == first["surged_at_s"] + SURGE_S
    demo.tick(after_s=SURGE_S / 2)
    second = demo.made("/v1/demo/surge")
    assert second["surged_at_s"] == first["surged_at_s"]
    assert second["surge_until_s"] > first["surge_until_s"]
    demo.tick(after_s=2 * SURGE_S)
    third = demo.made("/v1/demo/surge")
    assert third["surged_at_s"] > second["surge_until_s"]


def test_a_surge_raises_demand_at_once_and_recalls_every_lent_node_in_time(demo: ApiService) -> None:
    demo.lend_all()
    lent = {loan["node"] for loan in demo.get("/v1/loans")["items"]}
    day = demo.made("/v1/demo/surge")
    assert demo.get("/v1/pools/inference")["demand"]["gpus"] == day["surge_gpus"]["inference"] == 3.8
    for _ in range(4):
        demo.tick()
    receipts = demo.get("/v1/recalls")["items"]
    assert {receipt["node"]: receipt["outcome"] for receipt in receipts} == dict.fromkeys(lent, "in_time")
    assert all(receipt["returned_at_s"] < receipt["return_by_s"] for receipt in receipts)
    assert {loan["state"] for loan in demo.get("/v1/loans")["items"]} == {"returned"}
