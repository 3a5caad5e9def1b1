"""PromQL of the requests for a model: their rate, and the histograms of their prompts and outputs.

Most servers count a request when it ends. Under overload fewer end than arrive, so the growth of the requests in the
server is added: arrivals are ends plus growth. While a backlog shrinks, nothing is subtracted, because the backlog
needs its replicas, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from scheduler.domain.demand_source import InferenceServer, ModelRequests, PrometheusDemand, RequestQueries
from scheduler.domain.serving import ServedModel

LENGTH_WINDOW_S = 3_600.0
"""Time over which lengths are averaged. They change more slowly than rates, and their tails need many requests."""
PAST_LENGTH_WINDOW_S = 21_600.0
"""The same for back-filled history, in which each such time has its own lengths."""


@dataclass(frozen=True, slots=True)
class RequestPromql:
    """Queries of the requests for a served model.

    Attributes:
        rate: requests per second. `past_rate`: also with zeros for the times without replicas.
        newest: time of the newest sample of the rate. Empty: the rate is as new as its evaluation.
        lengths: buckets by `le` of prompts and of outputs, with the sum of tokens as the series without `le`.
        past_lengths: the same over longer times. Both are empty if the lengths of the served model count.
        replicas: number of replicas. Empty: not known.
    """

    served: ServedModel
    rate: str
    past_rate: str
    newest: str = ""
    lengths: tuple[str, ...] = ()
    past_lengths: tuple[str, ...] = ()
    replicas: str = ""
    correlation: float = 0.0
    arrival_scv: float = 1.0


@dataclass(frozen=True, slots=True)
class _ServerMetrics:
    """Metrics of a server.

    Attributes:
        counters: names of the counter of requests, newest release first.
        in_flight: gauges of requests that the counter does not count yet.
        prompts, outputs: names of the histograms, in the order of `counters`.
        matchers: labels that all series of the histograms have, for each of the two.
    """

    counters: tuple[str, ...]
    prompts: tuple[str, ...]
    outputs: tuple[str, ...]
    in_flight: tuple[str, ...] = ()
    matchers: tuple[Mapping[str, str], Mapping[str, str]] = ({}, {})


METRICS: Mapping[InferenceServer, _ServerMetrics] = {
    # vllm/v1/metrics/loggers.py counts a request at its end, also an aborted one, together with both lengths.
    InferenceServer.VLLM: _ServerMetrics(
        ("vllm:request_success_total",),
        ("vllm:request_prompt_tokens",),
        ("vllm:request_generation_tokens",),
        ("vllm:num_requests_running", "vllm:num_requests_waiting"),
    ),
    # sglang/srt/metrics/collector.py. The histograms need --collect-tokens-histogram.
    InferenceServer.SGLANG: _ServerMetrics(
        ("sglang:num_requests_total",),
        ("sglang:prompt_tokens_histogram",),
        ("sglang:generation_tokens_histogram",),
        ("sglang:num_running_reqs", "sglang:num_queue_reqs"),
    ),
    # router/src/server.rs of text-generation-inference counts a request at its arrival.
    InferenceServer.TGI: _ServerMetrics(
        ("tgi_request_count",), ("tgi_request_input_length",), ("tgi_request_generated_tokens",)
    ),
    # custom_metrics_reporter of tensorrtllm_backend, and the metrics of Triton's server for requests that wait.
    InferenceServer.TRITON: _ServerMetrics(
        ("nv_llm_output_token_len_count",),
        ("nv_llm_input_token_len",),
        ("nv_llm_output_token_len",),
        ("nv_inference_pending_request_count",),
        ({"response_metric_type": "total_input_tokens"}, {"response_metric_type": "total_output_tokens"}),
    ),
    # https://docs.nvidia.com/dynamo/v1.4.0/reference/observability/metrics-catalog
    InferenceServer.DYNAMO: _ServerMetrics(
        ("dynamo_frontend_requests_total",),
        ("dynamo_frontend_input_sequence_tokens",),
        ("dynamo_frontend_output_sequence_tokens",),
        ("dynamo_frontend_inflight_requests",),
    ),
    # The endpoint picker of the llm-d router, and of the Gateway API Inference Extension before it, counts arrivals.
    InferenceServer.LLM_D: _ServerMetrics(
        ("llm_d_epp_request_total", "inference_objective_request_total"),
        ("llm_d_epp_request_input_tokens", "inference_objective_input_tokens"),
        ("llm_d_epp_request_output_tokens", "inference_objective_output_tokens"),
    ),
    # Ray Serve LLM passes on the metrics of vLLM under names with `_` for `:`.
    InferenceServer.RAY_SERVE: _ServerMetrics(
        ("ray_vllm_request_generation_tokens_count",),
        ("ray_vllm_request_prompt_tokens",),
        ("ray_vllm_request_generation_tokens",),
        ("ray_vllm_num_requests_running", "ray_vllm_num_requests_waiting"),
    ),
}


def build_request_promql(source: PrometheusDemand, serving: tuple[ServedModel, ...]) -> tuple[RequestPromql, ...]:
    """Return the queries of a source, in the order of its models. Models that the pool does not serve are left out."""
    served = {each.model: each for each in serving}
    return tuple(_build(each, served[each.model]) for each in source.requests if each.model in served)


def _build(requests: ModelRequests, served: ServedModel) -> RequestPromql:
    queries = requests.queries
    if isinstance(queries, RequestQueries):
        lengths = (queries.prompt_lengths, queries.output_lengths) if queries.prompt_lengths else ()
        rate, newest, past_lengths = queries.rate, "", lengths
    else:
        metrics, window_s = METRICS[queries.server], queries.window_s
        rate = _build_rate(metrics, queries.selector, window_s)
        newest = _first_known(f"max(timestamp({name}{_format_labels(queries.selector)}))" for name in metrics.counters)
        lengths, past_lengths = (
            _build_lengths(metrics, queries.selector, each) for each in (LENGTH_WINDOW_S, PAST_LENGTH_WINDOW_S)
        )
    return RequestPromql(
        served,
        rate,
        # The line breaks end comments at the ends of queries.
        f"(\n{rate}\n) or (sum(\n{requests.replicas}\n) == 0)" if requests.replicas else rate,
        newest,
        lengths,
        past_lengths,
        requests.replicas,
        requests.correlation,
        requests.arrival_scv,
    )


def _build_rate(metrics: _ServerMetrics, selector: Mapping[str, str], window_s: float) -> str:
    labels, window = _format_labels(selector), f"[{window_s:.0f}s]"
    matchers = _format_labels({**selector, **metrics.matchers[1]})
    ends = _first_known(f"sum(rate({name}{matchers}{window}))" for name in metrics.counters)
    if not metrics.in_flight:
        return ends
    growth = " + ".join(f"sum(delta({name}{labels}{window}))" for name in metrics.in_flight)
    return f"{ends} + clamp_min(({growth}) / {window_s:.0f}, 0)"


def _build_lengths(metrics: _ServerMetrics, selector: Mapping[str, str], window_s: float) -> tuple[str, str]:
    prompts, outputs = (
        _first_known(
            f"sum by (le) (rate({_format_labels({**selector, **matchers}, f'{name}_(bucket|sum)')}[{window_s:.0f}s]))"
            for name in names
        )
        for names, matchers in zip((metrics.prompts, metrics.outputs), metrics.matchers, strict=True)
    )
    return prompts, outputs


def _first_known(queries: Iterable[str]) -> str:
    """Return a query with the result of the first of these that returns any."""
    known = list(queries)
    return known[0] if len(known) == 1 else f"({' or '.join(known)})"


def _format_labels(selector: Mapping[str, str], name_pattern: str = "") -> str:
    """Return label matchers in braces, with one for the names of metrics if they have a pattern."""
    matchers = [f"__name__=~{json.dumps(name_pattern)}"] if name_pattern else []
    matchers += [f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in sorted(selector.items())]
    return f"{{{','.join(matchers)}}}" if matchers else ""
