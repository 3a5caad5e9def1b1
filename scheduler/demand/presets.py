"""PromQL of demand presets: the GPUs that an inference server needs, from metrics that the server exports.

Load in requests: R running and W waiting requests need (R + W) / C replicas, where C is what one replica serves at the
same time, such as --max-num-seqs of vLLM. Load in cache: where a server reports how full its KV cache is, the replicas
hold K full caches, and the waiting requests will need as much cache each as the running ones do, so that K (R + W) / R
caches of at most `CACHE_FILL_MAX` are needed. The larger load counts, rounded up to whole replicas. Each query returns
nothing if one of its metrics is missing, because PromQL drops a sum of which one side is missing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from scheduler.demand.request_presets import RequestPromql, build_request_promql
from scheduler.domain.demand_source import DemandTerm, InferenceServer, PrometheusDemand, ServerLoad
from scheduler.domain.serving import ServedModel

CACHE_FILL_MAX = 0.9
"""Share of the KV cache up to which a replica is filled. Above it, engines preempt running requests."""
RATE_WINDOW = "2m"


@dataclass(frozen=True, slots=True)
class PromqlTerm:
    """A query whose result, times `gpus_each`, is a number of GPUs. `sums_series` allows several series."""

    promql: str
    gpus_each: float = 1.0
    sums_series: bool = False


@dataclass(frozen=True, slots=True)
class PrometheusQuery:
    """Queries whose results are added, or those of `requests`, and the age at which a sample becomes stale."""

    terms: tuple[PromqlTerm, ...]
    stale_after_s: float
    requests: tuple[RequestPromql, ...] = ()


def build_query(source: PrometheusDemand, serving: tuple[ServedModel, ...] = ()) -> PrometheusQuery:
    """Return the queries of a source, with the PromQL of its presets. `serving` are the models of its pool."""
    terms, requests = tuple(map(_build_term, source.terms)), build_request_promql(source, serving)
    return PrometheusQuery(terms, source.stale_after_s, requests)


def build_preset_promql(load: ServerLoad) -> str:
    """Return PromQL for the number of replicas that the server's load needs, at least `replicas_min`.

    Sources, with the releases whose metrics were compared:
    vLLM 0.9 to 0.32, https://docs.vllm.ai/en/stable/usage/metrics/ (`kv_cache_usage_perc` since 0.10, before it
    `gpu_cache_usage_perc`). SGLang 0.4 to 0.5, https://docs.sglang.io/references/production_metrics.html. TGI 3,
    https://huggingface.co/docs/text-generation-inference/reference/metrics. Triton 24.04 and later, docs/user_guide/
    metrics.md of its server. Dynamo 1.0, https://docs.nvidia.com/dynamo/v1.0.2/user-guides/observability-local/metrics.
    KServe with Knative 1.19 and later, https://knative.dev/docs/serving/observability/metrics/serving-metrics. llm-d
    0.3 to 0.7 (`inference_pool_*` of the Gateway API Inference Extension) and the llm-d router 0.11 (`llm_d_epp_*`).
    Ray Serve 2.9 and later, https://docs.ray.io/en/latest/serve/monitoring.html.
    """
    return f"clamp_min({_build_replicas(load)}, {load.replicas_min})"


def _build_term(term: DemandTerm) -> PromqlTerm:
    if isinstance(term, ServerLoad):
        return PromqlTerm(build_preset_promql(term), term.gpus_each)
    return PromqlTerm(term.promql, term.gpus_each, term.sums_series)


def _build_replicas(load: ServerLoad) -> str:
    labels, each = _format_labels(load.selector), load.requests_each
    match load.server:
        case InferenceServer.VLLM:
            cache = f"(sum(vllm:kv_cache_usage_perc{labels}) or sum(vllm:gpu_cache_usage_perc{labels}))"
            running, waiting = f"vllm:num_requests_running{labels}", f"vllm:num_requests_waiting{labels}"
            return _by_requests_and_cache(f"sum({running})", f"sum({waiting})", cache, each)
        case InferenceServer.SGLANG:
            running, waiting = f"sum(sglang:num_running_reqs{labels})", f"sum(sglang:num_queue_reqs{labels})"
            return _by_requests_and_cache(running, waiting, f"sum(sglang:token_usage{labels})", each)
        case InferenceServer.LLM_D:
            running, waiting, cache = (
                f"({_sum_of_pool('llm_d_epp_average', name, 'llm_d_epp_ready_endpoints', labels)}"
                f" or {_sum_of_pool('inference_pool_average', name, 'inference_pool_ready_pods', labels)})"
                for name in ("running_requests", "queue_size", "kv_cache_utilization")
            )
            return _by_requests_and_cache(running, waiting, cache, each)
        case InferenceServer.TGI:
            return _by_requests(f"sum(tgi_batch_current_size{labels}) + sum(tgi_queue_size{labels})", each)
        case InferenceServer.TRITON:
            return _by_requests(_count_triton_requests(labels), each)
        case InferenceServer.DYNAMO:
            # A request counts as in flight from its arrival to its last token, so that it includes the queued ones.
            return _by_requests(f"sum(dynamo_frontend_inflight_requests{labels})", each)
        case InferenceServer.RAY_SERVE:
            running = f"sum(ray_serve_replica_processing_queries{labels})"
            return _by_requests(f"{running} + sum(ray_serve_deployment_queued_queries{labels})", each)
        case InferenceServer.KSERVE:
            return f"sum(kn_revision_pods_desired{labels})"


def _by_requests(requests: str, requests_each: float | None) -> str:
    return f"ceil(({requests}) / {requests_each:g})"


def _by_requests_and_cache(running: str, waiting: str, cache: str, requests_each: float | None) -> str:
    by_requests = f"(({running} + {waiting}) / {requests_each:g})"
    by_cache = f"({cache} * ({running} + {waiting}) / clamp_min({running}, 1) / {CACHE_FILL_MAX:g})"
    # The larger of two numbers a and b is (a + b + |a - b|) / 2. Unlike `or`, it is missing if one of them is.
    return f"ceil(({by_requests} + {by_cache} + abs({by_requests} - {by_cache})) / 2)"


def _sum_of_pool(prefix: str, name: str, count: str, labels: str) -> str:
    """Return the sum over endpoints of a metric that the endpoint picker reports as their average.

    Each replica of the picker reports the whole pool, so that the largest of them counts.
    """
    average, endpoints = (f"max by (namespace, name) ({each}{labels})" for each in (f"{prefix}_{name}", count))
    return f"sum({average} * {endpoints})"


def _count_triton_requests(labels: str) -> str:
    """Return the requests in the server: those that wait, and by Little's law those that execute.

    A server whose requests take T seconds in total per second executes T requests on average.
    """
    total_us, queued_us = (
        f"sum(rate(nv_inference_{name}_duration_us{labels}[{RATE_WINDOW}]))" for name in ("request", "queue")
    )
    return f"clamp_min({total_us} - {queued_us}, 0) / 1e6 + sum(nv_inference_pending_request_count{labels})"


def _format_labels(selector: Mapping[str, str]) -> str:
    matchers = ",".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in sorted(selector.items()))
    return f"{{{matchers}}}" if matchers else ""
