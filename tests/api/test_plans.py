"""Plans over HTTP: a plan, or the binding constraint."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.api.conftest import ApiService, Problem

GPT2: dict[str, Any] = {"model": "gpt2", "gpu": "a100-80g", "gpus": 4, "globalBatch": 16, "sequenceLength": 256}


def test_a_plan_has_search_statistics(service: ApiService) -> None:
    plan = service.made("/v1/plans", GPT2)
    assert set(plan) == {
        "schedule",
        "micro_batches",
        "micro_batch_size",
        "iteration_time_s",
        "samples_per_s",
        "peak_bytes_per_gpu",
        "stages",
        "optimality_gap",
        "search_time_s",
        "step_range_s",
        "candidates",
        "estimated",
        "inspection",
        "runners_up",
        "remark",
        "whole",
    }
    assert sum(stage["gpus"] for stage in plan["stages"]) == 4
    assert plan["micro_batches"] * plan["micro_batch_size"] == 16
    assert plan["candidates"] > 0
    assert service.store.count_pending_commands() == 0


def test_frozen_layers_shorten_a_step(service: ApiService, problem: Problem) -> None:
    whole, frozen = (service.made("/v1/plans", GPT2 | {"frozenLayers": layers}) for layers in (0, 12))
    assert frozen["iteration_time_s"] < 0.6 * whole["iteration_time_s"]
    refused = problem(service.post("/v1/plans", GPT2 | {"frozenLayers": 13}), 422)
    assert refused["errors"][0]["field"] == "frozenLayers"
    assert refused["errors"][0]["allowed"] == "at most 12, the layers of gpt2"


def test_limits_restrict_the_plan(service: ApiService, problem: Problem) -> None:
    plan = service.made("/v1/plans", GPT2 | {"limits": {"only": ["tensor"]}, "simplicity": 0.02})
    assert {run["tp"] for stage in plan["stages"] for run in stage["strategies"]} == {4}
    assert (plan["simplest"]["strategies"], plan["simplest"]["strategies_min"]) == (1, 1)
    refused = problem(service.post("/v1/plans", GPT2 | {"limits": {"without": ["tensr"]}}), 422)
    assert refused["errors"][0]["field"] == "limits.without.0"
    infeasible = problem(service.post("/v1/plans", GPT2 | {"limits": {"microBatchesMin": 32}}), 422)
    assert infeasible["type"] == "urn:ebbtide:problem:infeasible"
    assert infeasible["detail"].startswith("limits: ")


def test_a_framework_gets_the_plan_that_it_can_run_in_its_words(service: ApiService, problem: Problem) -> None:
    limits = {"limits": {"only": ["tensor"]}}
    plan = service.made("/v1/plans", GPT2 | limits | {"framework": "megatron-lm"})
    args = plan["export"]["args"]
    assert args[args.index("--tensor-model-parallel-size") + 1] == "4"
    assert plan["export"]["file"] is None
    stored = service.made("/v1/plans", GPT2 | {"framework": "deepspeed"})["export"]["file"]
    assert json.loads(stored["text"])["train_batch_size"] == 16
    assert "export" not in service.made("/v1/plans", GPT2 | limits)
    infeasible = problem(service.post("/v1/plans", GPT2 | limits | {"framework": "llama-factory"}), 422)
    assert infeasible["type"] == "urn:ebbtide:problem:infeasible"
    mixed = [{"gpu": gpu, "nodes": 1, "gpusPerNode": 1} for gpu in ("h100-80g", "l40s")]
    several = {"model": "gpt2", "globalBatch": 16, "shape": mixed, "framework": "megatron-lm"}
    for request in (GPT2 | {"framework": "megatron"}, several):
        refused = problem(service.post("/v1/plans", request), 422)
        assert refused["errors"][0]["field"] == "framework"


def test_a_shape_replaces_gpu_and_gpus(service: ApiService) -> None:
    shape = [{"gpu": "a100-80g", "nodes": 1, "gpusPerNode": 4}]
    same = {"model": "gpt2", "shape": shape, "globalBatch": 16, "sequenceLength": 256}
    assert service.made("/v1/plans", same)["stages"] == service.made("/v1/plans", GPT2)["stages"]


def test_a_mixed_shape_has_a_remark_if_mixing_does_not_pay(service: ApiService) -> None:
    shape = [{"gpu": "h100-80g", "nodes": 1, "gpusPerNode": 2}, {"gpu": "l40s", "nodes": 1, "gpusPerNode": 1}]
    small, large = (
        service.made("/v1/plans", {"model": "gpt2", "shape": shape, "globalBatch": batch, "tolerance": 0.01})
        for batch in (2, 96)
    )
    assert small["remark"].startswith("1x2 h100-80g alone")
    assert small["whole"]["slower_ratio"] > 0
    used = {stage["gpu"] for stage in large["stages"]}
    assert used == {"h100-80g", "l40s"} if not large["remark"] else len(used) == 1


def test_a_plan_has_an_inspection_and_runners_up(service: ApiService) -> None:
    plan = service.made("/v1/plans", GPT2 | {"alternatives": 2})
    [device] = plan["inspection"]["devices"]
    spent_s = [value for name, value in device.items() if name.endswith("_s")]
    assert sum(spent_s) == pytest.approx(plan["iteration_time_s"])
    assert device["memory_bytes"] == plan["peak_bytes_per_gpu"]
    assert [other["slower_ratio"] >= 0 for other in plan["runners_up"]] == [True, True]


def test_the_memory_of_the_host_bounds_what_is_offloaded(service: ApiService, problem: Problem) -> None:
    offloading = {"model": "llama-2-13b", "gpu": "v100-32g", "gpus": 4, "globalBatch": 4, "sequenceLength": 512}
    device = service.made("/v1/plans", offloading)["inspection"]["devices"][0]
    assert device["host_bytes"] > 20e9
    assert device["host_bytes_max"] is None
    refused = problem(service.post("/v1/plans", offloading | {"hostMemory": "20GB"}), 422)
    assert refused["type"] == "urn:ebbtide:problem:infeasible"
    enough = service.made("/v1/plans", offloading | {"hostMemory": device["host_bytes"]})
    assert enough["inspection"]["devices"][0]["host_bytes_max"] == device["host_bytes"]


def test_parameters_are_streamed_from_the_host_that_a_request_states(service: ApiService, problem: Problem) -> None:
    large = {"model": "llama-2-13b", "gpu": "v100-16g", "gpus": 1, "globalBatch": 1, "sequenceLength": 128}
    assert problem(service.post("/v1/plans", large), 422)["type"] == "urn:ebbtide:problem:infeasible"
    plan = service.made("/v1/plans", large | {"hostMemory": "300GB"})
    runs = [run for stage in plan["stages"] for run in stage["strategies"]]
    assert sum(run["layers"] for run in runs if run.get("offload_parameters")) > 20
    assert plan["inspection"]["devices"][0]["host_bytes"] <= 300e9
    for limits in ({"without": ["offload_parameters"]}, {"without": ["offload"]}):
        refused = problem(service.post("/v1/plans", large | {"hostMemory": "300GB", "limits": limits}), 422)
        assert refused["type"] == "urn:ebbtide:problem:infeasible"


def test_an_infeasible_request_names_the_binding_constraint(service: ApiService, problem: Problem) -> None:
    big = {"model": "llama-2-7b", "gpu": "a100-80g", "gpus": 1, "globalBatch": 8, "memory": "16GB"}
    body = problem(service.post("/v1/plans", big), 422)
    assert body["type"] == "urn:ebbtide:problem:infeasible"
    assert "16.0 GB" in body["detail"]


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("model", {"model": "gpt-9"}),
        ("model", {"model": ""}),
        ("gpu", {"gpu": "abacus"}),
        ("gpu", {"gpu": ""}),
        ("gpus", {"gpus": 0}),
        ("gpus", {"gpus": None}),
        ("nodes", {"nodes": 3}),
        ("globalBatch", {"globalBatch": 0}),
        ("globalBatch", {"globalBatch": 10**15}),
        ("sequenceLength", {"sequenceLength": -1}),
        ("memory", {"memory": "-1GB"}),
        ("memory", {"memory": "90TB"}),
        ("hostMemory", {"hostMemory": 0}),
        ("gpu", {"shape": [{"gpu": "cpu", "nodes": 1, "gpusPerNode": 1}]}),
        ("shape", {"shape": []}),
        ("tolerance", {"tolerance": 1}),
        ("tolerance", {"tolerance": -0.1}),
        ("alternatives", {"alternatives": 11}),
        ("alternatives", {"alternatives": "two"}),
        ("sequence_length", {"sequence_length": 256}),
    ],
)
def test_a_malformed_plan_request_is_refused(service: ApiService, field: str, change: dict[str, Any]) -> None:
    assert service.refused("POST", "/v1/plans", GPT2 | change)["errors"][0]["field"] == field


def test_nan_and_infinity_are_refused(service: ApiService, problem: Problem) -> None:
    body = b'{"model": "gpt2", "gpu": "cpu", "gpus": NaN, "globalBatch": 8}'
    answer = service.http.post("/v1/plans", content=body, headers={"Content-Type": "application/json"})
    assert problem(answer, 422)["errors"][0]["field"] == "gpus"


def test_too_many_searches_are_a_429(service: ApiService, problem: Problem) -> None:
    parts = service.app.state.service
    taken = 0
    while parts.searches.acquire(blocking=False):
        taken += 1
    answer = service.post("/v1/plans", GPT2)
    assert problem(answer, 429)["type"] == "urn:ebbtide:problem:busy"
    assert answer.headers["retry-after"] == "1"
    for _ in range(taken):
        parts.searches.release()
    assert service.post("/v1/plans", GPT2).status_code == 200
