"""Documents of demand sources: forms, units, presets, and signals that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.demand.request_presets import build_request_promql
from scheduler.documents.custom_resource import PoolSpec, pool_from_spec, prometheus_demand_from_spec
from scheduler.documents.demand_source import (
    DemandQueryDocument,
    DemandQuerySpec,
    DemandSourceDocument,
    to_prometheus_demand,
    to_source_document,
)
from scheduler.documents.document import InvalidDocumentError, parse_document
from scheduler.domain.demand_source import (
    DemandQuery,
    DemandUnit,
    InferenceServer,
    RequestQueries,
    ServerLoad,
    UtilisationSignalError,
    check_no_utilisation,
)
from scheduler.domain.serving import ServedModel

VLLM = {"preset": "vllm", "gpus_per_replica": 8, "requests_per_replica": 256}


def test_units_and_presets_become_terms() -> None:
    document = {
        "queries": [
            {"promql": "sum(gpus)"},
            {"promql": "replicas", "unit": "replicas", "gpus_per_replica": 4, "aggregate": "sum"},
            {"promql": "nodes", "unit": "nodes", "gpus_per_node": 8},
            {**VLLM, "selector": {"namespace": "chat"}, "replicas_min": 0},
            {"preset": "kserve", "gpus_per_replica": 1},
        ],
        "stale_after_s": "2m",
    }
    source = to_prometheus_demand(parse_document(DemandSourceDocument, document))
    assert source.stale_after_s == 120.0
    assert source.terms == (
        DemandQuery("sum(gpus)"),
        DemandQuery("replicas", DemandUnit.REPLICAS, 4.0, sums_series=True),
        DemandQuery("nodes", DemandUnit.NODES, 8.0),
        ServerLoad(InferenceServer.VLLM, {"namespace": "chat"}, 8.0, 256.0, 0),
        ServerLoad(InferenceServer.KSERVE, {}, 1.0),
    )
    again = to_prometheus_demand(parse_document(DemandSourceDocument, to_source_document(source)))
    assert again == source


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ({}, "promql"),
        ({"promql": "gpus", **VLLM}, "promql"),
        ({"promql": "gpus", "unit": "replicas"}, "gpus_per_replica"),
        ({"promql": "gpus", "unit": "nodes", "gpus_per_replica": 2}, "gpus_per_replica"),
        ({"promql": "gpus", "gpus_per_node": 8}, "gpus_per_node"),
        ({"promql": "gpus", "selector": {"a": "b"}}, "selector"),
        ({**VLLM, "unit": "replicas"}, "unit"),
        ({**VLLM, "aggregate": "sum"}, "aggregate"),
        ({**VLLM, "gpus_per_replica": None}, "gpus_per_replica"),
        ({**VLLM, "requests_per_replica": None}, "requests_per_replica"),
        ({**VLLM, "preset": "kserve"}, "requests_per_replica"),
        ({**VLLM, "preset": "nim"}, "preset"),
        ({**VLLM, "selector": {"model-name": "chat"}}, "selector"),
        ({"promql": "avg(DCGM_FI_DEV_GPU_UTIL)"}, "promql"),
    ],
)
def test_contradictions_are_refused_by_field(query: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidDocumentError) as refused:
        parse_document(DemandQueryDocument, query)
    assert [error.field for error in refused.value.invalid_fields] == [field]


def test_custom_resource_spells_its_fields_in_camel_case() -> None:
    spec = parse_document(DemandQuerySpec, {"preset": "tgi", "gpusPerReplica": 2, "requestsPerReplica": 16})
    assert spec.to_term() == ServerLoad(InferenceServer.TGI, {}, 2.0, 16.0)
    with pytest.raises(InvalidDocumentError) as refused:
        parse_document(DemandQuerySpec, {"promql": "gpus", "unit": "replicas"})
    assert [error.field for error in refused.value.invalid_fields] == ["gpusPerReplica"]


def pool(**demand: Any) -> PoolSpec:
    return parse_document(PoolSpec, {"kind": "inference", "nodeSelector": {"a": "b"}, "demand": demand})


def test_pool_has_one_query_or_several_and_ages_in_order() -> None:
    one, several = pool(source="prometheus", query="gpus"), pool(source="prometheus", queries=[{"promql": "gpus"}])
    assert one.demand is not None
    assert several.demand is not None
    assert prometheus_demand_from_spec(one.demand) == prometheus_demand_from_spec(several.demand)
    aged = pool_from_spec("serving", pool(source="push", staleAfter="10m", lostAfter="1h")).lending
    assert (aged.demand_stale_s, aged.demand_lost_s) == (600.0, 3600.0)
    for refused in (
        {"source": "prometheus"},
        {"source": "prometheus", "query": "gpus", "queries": [{"promql": "gpus"}]},
        {"source": "push", "queries": [{"promql": "gpus"}]},
        {"source": "push", "staleAfter": "10m", "lostAfter": "10m"},
        {"source": "prometheus", "query": "nvidia_gpu_duty_cycle"},
    ):
        with pytest.raises(InvalidDocumentError):
            pool(**refused)


ASKED = {"model": "llama-3-8b", "preset": "vllm", "selector": {"model_name": "llama"}, "window": "2m"}
OWN = {"model": "llama-3-8b", "rate": "sum(rate)", "prompt_lengths": "prompts", "output_lengths": "outputs"}


@pytest.mark.parametrize("requests", [ASKED, OWN, {"model": "llama-3-8b", "rate": "sum(rate)"}])
def test_requests_become_queries_and_a_document_again(requests: dict[str, Any]) -> None:
    given = {**requests, "replicas": "sum(up)", "correlation": 0.5, "burstiness": 2.0}
    source = to_prometheus_demand(parse_document(DemandSourceDocument, {"requests": [given]}))
    document = to_source_document(source)
    assert to_prometheus_demand(parse_document(DemandSourceDocument, document)) == source
    assert document["requests"][0] == given | ({"window": 120.0} if "window" in given else {})
    (promql,) = build_request_promql(source, (ServedModel("llama-3-8b", "h100-80g", 1.0, 0.05),))
    assert promql.correlation == 0.5
    assert "sum(up)" in promql.past_rate


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"preset": None}, "rate"),
        ({"rate": "x"}, "rate"),
        ({"preset": "kserve"}, "preset"),
        ({"window": 10}, "window"),
        ({"selector": {"a-b": "c"}}, "selector"),
        ({"prompt_lengths": "x"}, "prompt_lengths"),
        ({"correlation": 1.5}, "correlation"),
        ({"burstiness": 0}, "burstiness"),
        ({"preset": None, "selector": None, "window": None, "rate": "x", "prompt_lengths": "y"}, "output_lengths"),
        ({"preset": None, "window": None, "rate": "x"}, "selector"),
        ({"preset": None, "selector": None, "window": None, "rate": "avg(DCGM_FI_DEV_GPU_UTIL)"}, "rate"),
    ],
)
def test_invalid_requests_name_their_field(change: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidDocumentError) as caught:
        parse_document(DemandSourceDocument, {"requests": [{**ASKED, **change}]})
    assert [each.field for each in caught.value.invalid_fields] == [f"requests.0.{field}"]


@pytest.mark.parametrize("document", [{}, {"queries": [{"promql": "x"}], "requests": [ASKED]}])
def test_source_has_either_queries_or_requests(document: dict[str, Any]) -> None:
    with pytest.raises(InvalidDocumentError) as caught:
        parse_document(DemandSourceDocument, document)
    assert [each.field for each in caught.value.invalid_fields] == ["queries"]


def test_each_model_has_one_entry() -> None:
    with pytest.raises(InvalidDocumentError) as caught:
        parse_document(DemandSourceDocument, {"requests": [ASKED, ASKED]})
    assert [each.field for each in caught.value.invalid_fields] == ["requests.1.model"]


def test_pool_of_kubernetes_has_requests_for_each_served_model() -> None:
    served = {"model": "llama-3-8b", "gpu": "h100-80g", "objective": {"ttft": "1s", "tpot": "50ms"}}
    asked = {"model": "llama-3-8b", "rate": "x", "promptLengths": "y", "outputLengths": "z"}
    spec = {"kind": "inference", "nodeSelector": {"a": "b"}, "serving": [served]}
    found = parse_document(PoolSpec, {**spec, "demand": {"source": "requests", "requests": [asked]}})
    assert found.demand is not None
    (requests,) = prometheus_demand_from_spec(found.demand).requests
    assert requests.queries == RequestQueries("x", "y", "z")
    for demand, field in (
        ({"source": "requests", "requests": [{**asked, "model": "other"}]}, "demand.requests"),
        ({"source": "prometheus", "query": "x"}, "serving"),
        ({"source": "push", "requests": [asked]}, "demand.requests"),
        ({"source": "prometheus", "query": "x", "requests": [asked]}, "demand.requests"),
        ({"source": "requests"}, "demand.requests"),
    ):
        with pytest.raises(InvalidDocumentError) as caught:
            parse_document(PoolSpec, {**spec, "demand": demand})
        assert [each.field for each in caught.value.invalid_fields] == [field]


@pytest.mark.parametrize(
    "promql",
    [
        "avg(DCGM_FI_DEV_GPU_UTIL)",
        "sum(DCGM_FI_PROF_GR_ENGINE_ACTIVE) * 8",
        "max(DCGM_FI_PROF_SM_OCCUPANCY)",
        'count({__name__="nvidia_smi_utilization_gpu_ratio"} > 0.5)',
        "cluster:nvidia_gpu_duty_cycle:avg",
        "container_accelerator_duty_cycle",
        "sum(nv_gpu_utilization)",
        "ray_node_gpus_utilization / 100",
    ],
)
def test_gpu_utilisation_is_no_signal(promql: str) -> None:
    with pytest.raises(UtilisationSignalError):
        check_no_utilisation(promql)


@pytest.mark.parametrize(
    "promql",
    ["vllm:gpu_cache_usage_perc", "sum(kube_deployment_spec_replicas) * 8", "DCGM_FI_DEV_FB_USED", "inference_gpus"],
)
def test_other_signals_are_accepted(promql: str) -> None:
    check_no_utilisation(promql)
