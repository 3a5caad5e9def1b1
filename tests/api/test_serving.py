"""Models of an inference pool over HTTP, and demand given as requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.api.conftest import ApiService, Problem

MODEL: dict[str, Any] = {
    "model": "llama-3-8b",
    "gpu": "rtx-4090",
    "objective": {"ttft": "1s", "tpot": "50ms"},
    "lengths": [{"prompt": 180, "output": 150, "requests": 40}, {"prompt": 1500, "output": 500, "requests": 8}],
    "sizing": {"mode": "advise", "stabilization": "2m"},
}
OTHER = {**MODEL, "model": "qwen2-7b", "sizing": {}}
SERVING = "/v1/pools/inference/serving"
DEMAND = "/v1/pools/inference/demand"


def serve(fleet: ApiService, *models: dict[str, Any]) -> dict[str, Any]:
    answer = fleet.http.put(SERVING, json={"serving": list(models)})
    assert answer.status_code == 202, answer.text
    body: dict[str, Any] = answer.json()
    return body


def test_models_are_set_read_and_replaced(fleet: ApiService, problem: Problem) -> None:
    [view] = serve(fleet, MODEL)["serving"]
    assert (view["model"], view["gpus_per_replica"], view["sizing"]) == ("llama-3-8b", 1, "advise")
    assert (view["load"], view["advice"]) == (None, None)
    [document] = fleet.get(SERVING)["models"]
    assert document["sizing"]["stabilization"] == 120.0
    assert document["lengths"] == MODEL["lengths"]
    waiting = fleet.store.count_pending_commands()
    serve(fleet, document)
    assert fleet.store.count_pending_commands() == waiting
    assert serve(fleet)["serving"] == []
    problem(fleet.http.put("/v1/pools/training/serving", json={"serving": []}), 409)
    problem(fleet.http.get("/v1/pools/training/serving"), 409)


def test_change_of_the_models_requires_the_etag_that_was_read(fleet: ApiService, problem: Problem) -> None:
    etag = fleet.http.get(SERVING).headers["ETag"]
    serve(fleet, MODEL)
    problem(fleet.http.put(SERVING, json={"serving": []}, headers={"If-Match": etag}), 412)


def test_requests_become_replicas_and_gpus(fleet: ApiService) -> None:
    serve(fleet, MODEL, OTHER)
    requests = [{"model": "llama-3-8b", "rate": 30}, {"model": "qwen2-7b", "rate": 0}]
    body = fleet.made(DEMAND, {"requests": requests})
    fleet.tick()
    first, second = fleet.get("/v1/pools/inference")["serving"]
    load = first["load"]
    assert body["asked_gpus"] == load["gpus"] == load["replicas"] > 1
    assert 0 < load["ttft_s"] <= 1
    assert 0 < load["tpot_s"] <= 0.05
    assert load["binding"] in ("ttft", "tpot", "kv_cache", "throughput", "sequences")
    assert first["advice"]["replicas"] == load["ahead_replicas"] == load["replicas"]
    assert (second["load"]["replicas"], second["advice"]) == (0, None)
    codes = [event["code"] for event in fleet.get("/v1/events")["items"]]
    assert codes.count("ReplicasProposed") == 1


def test_proposal_falls_after_its_window_only(fleet: ApiService) -> None:
    serve(fleet, MODEL)
    proposed = []
    for rate in (40, 4, 4, 4, 4):
        fleet.made(DEMAND, {"requests": [{"model": "llama-3-8b", "rate": rate}]})
        fleet.tick(after_s=50.0)
        proposed.append(fleet.get("/v1/pools/inference")["serving"][0]["advice"]["replicas"])
    assert proposed[0] == proposed[1] == proposed[2] > proposed[4]


def test_plain_number_of_gpus_is_still_accepted(fleet: ApiService) -> None:
    serve(fleet, MODEL)
    fleet.made(DEMAND, {"requests": [{"model": "llama-3-8b", "rate": 4}]})
    assert fleet.made(DEMAND, {"gpus": 1})["asked_gpus"] == 1.0
    view = fleet.get("/v1/pools/inference")["serving"][0]
    assert view["load"] is None
    assert view["advice"] is not None


@pytest.mark.parametrize(
    ("report", "field"),
    [
        ({}, "gpus"),
        ({"gpus": 1, "requests": [{"model": "llama-3-8b", "rate": 1}]}, "gpus"),
        ({"readings": [{"at": 1, "gpus": 1}], "requests": [{"model": "llama-3-8b", "rate": 1}]}, "gpus"),
        ({"requests": [{"model": "llama-3-9b", "rate": 1}]}, "requests.0.model"),
        ({"requests": [{"model": "llama-3-8b", "rate": 1}] * 2}, "requests.1.model"),
        ({"requests": [{"model": "llama-3-8b", "rate": -1}]}, "requests.0.rate"),
        ({"requests": [{"model": "llama-3-8b", "rate": 1e9}]}, "requests.0.rate"),
        (
            {"requests": [{"model": "llama-3-8b", "rate": 1, "lengths": [{"prompt": 900_000, "output": 9}]}]},
            "requests.0.rate",
        ),
        ({"requests": [{"model": "llama-3-8b", "rate": 1, "burstiness": 0}]}, "requests.0.burstiness"),
    ],
)
def test_invalid_reports_name_the_field(
    fleet: ApiService, problem: Problem, report: dict[str, Any], field: str
) -> None:
    serve(fleet, MODEL)
    assert [error["field"] for error in problem(fleet.post(DEMAND, report), 422)["errors"]] == [field]


def test_report_names_every_model(fleet: ApiService, problem: Problem) -> None:
    serve(fleet, MODEL, OTHER)
    body = problem(fleet.post(DEMAND, {"requests": [{"model": "llama-3-8b", "rate": 1}]}), 422)
    assert [error["field"] for error in body["errors"]] == ["requests"]
    assert "qwen2-7b" in body["errors"][0]["allowed"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model": "llama-3-9b"}, "serving.0.model"),
        ({"gpu": "rtx-4091"}, "serving.0.gpu"),
        ({"objective": {"ttft": "1s", "tpot": "5ms"}}, "serving.0"),
        ({"sizing": {"mode": "scale"}}, "serving.0.sizing.target"),
        ({"sizing": {"minReplicas": 3, "maxReplicas": 2}}, "serving.0.sizing.maxReplicas"),
        ({"sizing": {"startup": "2d"}}, "serving.0.sizing.startup"),
        ({"lengths": [{"prompt": 0, "output": 1}]}, "serving.0.lengths.0.prompt"),
    ],
)
def test_invalid_models_name_the_field(fleet: ApiService, problem: Problem, change: dict[str, Any], field: str) -> None:
    body = problem(fleet.http.put(SERVING, json={"serving": [{**MODEL, **change}]}), 422)
    assert [error["field"] for error in body["errors"]] == [field]


def test_pool_is_created_with_its_models(fleet: ApiService, problem: Problem) -> None:
    pool = {"name": "chat", "kind": "inference", "serving": [MODEL]}
    assert fleet.made("/v1/pools", pool)["serving"][0]["model"] == "llama-3-8b"
    twice = {"name": "chat2", "kind": "inference", "serving": [MODEL, MODEL]}
    [error] = problem(fleet.post("/v1/pools", twice), 422)["errors"]
    assert error["field"] == "serving.1.model"
    problem(fleet.post("/v1/pools", {"name": "chat3", "kind": "training", "serving": [MODEL]}), 422)


def test_pool_has_either_models_or_a_demand_source(fleet: ApiService, problem: Problem) -> None:
    path, source = "/v1/pools/inference/demand-source", {"queries": [{"promql": "sum(gpus)", "unit": "gpus"}]}
    serve(fleet, MODEL)
    problem(fleet.http.put(path, json=source), 409)
    serve(fleet)
    assert fleet.http.put(path, json=source).status_code == 202
    problem(fleet.http.put(SERVING, json={"serving": [MODEL]}), 409)
    assert serve(fleet)["serving"] == []
    pool = {"name": "chat", "kind": "inference", "serving": [MODEL], "demand": source}
    assert [error["field"] for error in problem(fleet.post("/v1/pools", pool), 422)["errors"]] == ["serving"]


def test_requests_may_come_from_prometheus_for_the_models_that_are_served(fleet: ApiService, problem: Problem) -> None:
    path, asked = "/v1/pools/inference/demand-source", {"model": MODEL["model"], "preset": "vllm", "window": "2m"}
    problem(fleet.http.put(path, json={"requests": [asked]}), 409)
    serve(fleet, MODEL)
    [error] = problem(fleet.http.put(path, json={"requests": [{**asked, "preset": "kserve"}]}), 422)["errors"]
    assert error["field"] == "requests.0.preset"
    problem(fleet.http.put(path, json={"requests": [{**asked, "model": "other"}]}), 409)
    source = fleet.http.put(path, json={"requests": [asked]}).json()["demand_source"]
    assert source["queries"] == []
    assert source["requests"] == [{**asked, "window": 120.0, "correlation": 0.3, "burstiness": 1.0}]
    problem(fleet.http.put(SERVING, json={"serving": []}), 409)
    assert serve(fleet, MODEL)["demand_source"] == source
    pool = {"name": "chat", "kind": "inference", "serving": [MODEL], "demand": {"requests": [asked]}}
    assert fleet.post("/v1/pools", pool).json()["demand_source"] == source
    pool["serving"] = []
    assert [each["field"] for each in problem(fleet.post("/v1/pools", pool), 422)["errors"]] == ["demand.requests"]
