"""Request rates and lengths from a real Prometheus: restarts, overload, silence, and histograms with holes."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from math import nan, pi, sin

import httpx
import numpy as np
import pytest

from scheduler.demand.presets import build_query
from scheduler.demand.prometheus_api import PrometheusApi, TimeSpan
from scheduler.demand.request_reader import RequestReader
from scheduler.domain.demand_source import (
    InferenceServer,
    KnownDemand,
    ModelRequests,
    PoolDemand,
    PrometheusDemand,
    RequestQueries,
    ServerRequests,
    UnknownDemand,
    UnknownDemandReason,
)
from scheduler.domain.serving import ReportedRequests, RequestLength, ServedModel
from scheduler.serving.measured_lengths import summarize_lengths
from scheduler.serving.served_models import count_replicas
from tests.contract.prometheus_site import PROGRAM, Prometheus
from tests.contract.request_exposition import Exposition, Traffic, build_blocks
from tests.serving.length_mixes import CHAT, draw_lengths

PROMTOOL = shutil.which("promtool")
pytestmark = pytest.mark.skipif(
    PROGRAM is None or PROMTOOL is None, reason="no prometheus on the path (Debian's package prometheus)"
)

STEP_S, DAY_S = 60.0, 86_400.0
NOW_S = 300.0 * (time.time() // 300.0)
FUTURE_S = [NOW_S + STEP_S * at for at in range(-90, 180)]
PAST_S = [NOW_S + STEP_S * at for at in range(-2_160, 180)]
"""Times of samples, which go on for three hours so that tests find some however late they run."""
LENGTHS = draw_lengths(np.random.default_rng(5), (CHAT,), 4_000)
SERVED = ServedModel("llama-3-8b", "a100-80g", 1.0, 0.05)
KNOWN = ServedModel("llama-3-8b", "a100-80g", 1.0, 0.05, lengths=(RequestLength(100, 50),))
BROKEN_AT_S = NOW_S - 3_600.0


def daily(at_s: float) -> float:
    """Requests until a time, of a rate that swings between 4 and 16 per second each day."""
    return 10.0 * at_s - 6.0 * DAY_S / (2 * pi) * sin(2 * pi * at_s / DAY_S)


def steady(rate_per_s: float, start_s: float = FUTURE_S[0]) -> Traffic:
    times_s = [at_s for at_s in FUTURE_S if at_s >= start_s]
    return Traffic(times_s, lambda at_s: rate_per_s * at_s, LENGTHS, start_s)


def build_exposition() -> Exposition:
    made = Exposition()
    made.add_vllm({"model_name": "chat", "instance": "a"}, steady(5.0))
    restarted = [at_s for at_s in FUTURE_S if at_s < NOW_S - 3_000.0]
    made.add_vllm({"model_name": "chat", "instance": "b"}, Traffic(restarted, lambda s: 5.0 * s, LENGTHS, FUTURE_S[0]))
    made.add_vllm({"model_name": "chat", "instance": "b"}, steady(5.0, NOW_S - 3_000.0))  # its counters begin at zero
    made.add_vllm({"model_name": "idle"}, steady(0.0))
    overload = steady(5.0)
    made.add_vllm({"model_name": "overload"}, overload, waiting=lambda at_s: 3.0 * (at_s - FUTURE_S[0]))
    made.add_vllm({"model_name": "drain"}, overload, waiting=lambda at_s: 3.0 * (FUTURE_S[-1] - at_s))
    ended = [at_s for at_s in FUTURE_S if at_s < BROKEN_AT_S]
    for name, replicas in (("gone", 0.0), ("broken", 2.0)):
        made.add_vllm({"model_name": name}, Traffic(ended, lambda at_s: 5.0 * at_s, LENGTHS, FUTURE_S[0]))
        made.add("kube_deployment_spec_replicas", {"deployment": name}, ((at_s, replicas) for at_s in FUTURE_S))
    past = Traffic(PAST_S, daily, LENGTHS, PAST_S[0])
    made.add_vllm({"model_name": "daily"}, past)
    for name in ("sglang:num_requests_total", "dynamo_frontend_requests_total"):
        made.add(name, {"model": "chat"}, ((at_s, 5.0 * (at_s - FUTURE_S[0])) for at_s in FUTURE_S))
    for name in ("sglang:num_running_reqs", "sglang:num_queue_reqs", "dynamo_frontend_inflight_requests"):
        made.add(name, {"model": "chat"}, ((at_s, 4.0) for at_s in FUTURE_S))
    for prefix in ("llm_d_epp_request", "tgi_request"):
        total = "tgi_request_count" if prefix == "tgi_request" else f"{prefix}_total"
        made.add(total, {"model": "chat"}, ((at_s, 5.0 * (at_s - FUTURE_S[0])) for at_s in FUTURE_S))
    for prompts, outputs in (
        ("sglang:prompt_tokens_histogram", "sglang:generation_tokens_histogram"),
        ("dynamo_frontend_input_sequence_tokens", "dynamo_frontend_output_sequence_tokens"),
        ("llm_d_epp_request_input_tokens", "llm_d_epp_request_output_tokens"),
        ("tgi_request_input_length", "tgi_request_generated_tokens"),
    ):
        made.add_histogram(prompts, {"model": "chat"}, steady(5.0), LENGTHS[:, 0])
        made.add_histogram(outputs, {"model": "chat"}, steady(5.0), LENGTHS[:, 1])
    for le, value in (("100", 40.0), ("200", nan), ("1000", 90.0), ("+Inf", 100.0)):
        made.add("holes", {"le": le}, ((at_s, value) for at_s in FUTURE_S))
        made.add("endless", {"le": le}, ((at_s, value) for at_s in FUTURE_S if le != "+Inf"))
        made.add("broken_end", {"le": le}, ((at_s, nan if le == "+Inf" else value) for at_s in FUTURE_S))
    return made


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("requests")
    data = build_blocks(str(PROMTOOL), build_exposition(), folder)
    made = Prometheus(folder, "127.0.0.1:1", every="1m", data=data)
    made.start()
    yield made
    made.kill()


def vllm(name: str, replicas: str = "", correlation: float = 0.0) -> ModelRequests:
    server = ServerRequests(InferenceServer.VLLM, {"model_name": name})
    return ModelRequests(SERVED.model, server, replicas=replicas, correlation=correlation)


def read(prometheus: Prometheus, requests: ModelRequests, served: ServedModel = SERVED) -> PoolDemand:
    query = build_query(PrometheusDemand((), 300.0, (requests,)), (served,))
    with httpx.Client() as client:
        return RequestReader(PrometheusApi(prometheus.url, timeout_s=10.0)).read(client, query)


def read_requests(prometheus: Prometheus, requests: ModelRequests, served: ServedModel = SERVED) -> ReportedRequests:
    found = read(prometheus, requests, served)
    assert isinstance(found, KnownDemand), found
    return found.requests[0]


def read_failure(prometheus: Prometheus, requests: ModelRequests, served: ServedModel = SERVED) -> UnknownDemandReason:
    found = read(prometheus, requests, served)
    assert isinstance(found, UnknownDemand), found
    return found.reason


def true_replicas(rate_per_s: float) -> int:
    exact = tuple(RequestLength(prompt, output) for prompt, output in LENGTHS.tolist())
    return count_replicas(SERVED, ReportedRequests(SERVED.model, rate_per_s, lengths=exact))


def test_rate_and_lengths_of_all_replicas_give_the_gpus_of_the_true_requests(prometheus: Prometheus) -> None:
    found = read(prometheus, vllm("chat"))
    assert isinstance(found, KnownDemand)
    (requests,) = found.requests
    assert requests.rate_per_s == pytest.approx(10.0, rel=0.01)
    summary = summarize_lengths(requests.lengths)
    assert summary.prompt_mean == pytest.approx(LENGTHS[:, 0].mean(), rel=0.02)
    assert summary.output_mean == pytest.approx(LENGTHS[:, 1].mean(), rel=0.02)
    assert abs(found.gpus - true_replicas(10.0)) <= 1
    assert time.time() - found.at_s <= 2 * STEP_S


@pytest.mark.parametrize(
    "server", [InferenceServer.SGLANG, InferenceServer.TGI, InferenceServer.DYNAMO, InferenceServer.LLM_D]
)
def test_each_server_has_a_preset(prometheus: Prometheus, server: InferenceServer) -> None:
    requests = ModelRequests(SERVED.model, ServerRequests(server, {"model": "chat"}))
    found = read_requests(prometheus, requests)
    assert found.rate_per_s == pytest.approx(5.0, rel=0.01)
    assert summarize_lengths(found.lengths).output_mean == pytest.approx(LENGTHS[:, 1].mean(), rel=0.02)


def test_backlog_that_grows_counts_as_arrivals_and_one_that_shrinks_changes_nothing(prometheus: Prometheus) -> None:
    assert read_requests(prometheus, vllm("overload")).rate_per_s == pytest.approx(8.0, rel=0.02)
    assert read_requests(prometheus, vllm("drain")).rate_per_s == pytest.approx(5.0, rel=0.02)


def test_silence_is_zero_while_servers_export_counters_and_unknown_without_them(prometheus: Prometheus) -> None:
    idle = read(prometheus, vllm("idle"))
    assert isinstance(idle, KnownDemand)
    assert idle.gpus == 0.0
    for name in ("gone", "broken", "never"):
        assert read_failure(prometheus, vllm(name)) is UnknownDemandReason.NO_SERIES


def test_scale_to_zero_is_told_from_a_broken_scrape_by_the_number_of_replicas(prometheus: Prometheus) -> None:
    replicas = 'kube_deployment_spec_replicas{{deployment="{}"}} # desired'
    gone = read(prometheus, vllm("gone", replicas.format("gone")))
    assert isinstance(gone, KnownDemand)
    assert (gone.gpus, gone.requests[0].rate_per_s) == (0.0, 0.0)
    assert read_failure(prometheus, vllm("broken", replicas.format("broken"))) is UnknownDemandReason.NO_SERIES
    assert read_failure(prometheus, vllm("gone", replicas.format("other"))) is UnknownDemandReason.NO_SERIES


def own(prompts: str, outputs: str = "holes", rate: str = "vector(5)") -> ModelRequests:
    return ModelRequests(SERVED.model, RequestQueries(rate, prompts, outputs))


def test_bucket_that_is_not_a_number_merges_with_the_next(prometheus: Prometheus) -> None:
    lengths = read_requests(prometheus, own("holes")).lengths
    shares = {bound: sum(each.requests for each in lengths if each.prompt <= bound) for bound in (100, 1_000)}
    assert shares == pytest.approx({100: 0.4, 1_000: 0.9}, abs=0.02)


@pytest.mark.parametrize(
    ("requests", "reason"),
    [
        (own("endless"), UnknownDemandReason.NO_LENGTHS),
        (own("broken_end"), UnknownDemandReason.NO_LENGTHS),
        (own("no_such_buckets"), UnknownDemandReason.NO_LENGTHS),
        (own("sum("), UnknownDemandReason.BAD_QUERY),
        (own("scalar(holes)"), UnknownDemandReason.BAD_QUERY),
        (own('label_replace(holes{le="+Inf"}, "le", "much", "", "")'), UnknownDemandReason.NO_LENGTHS),
        (own("holes", rate="vector(NaN)"), UnknownDemandReason.NOT_A_NUMBER),
        (own("holes", rate="vector(-1)"), UnknownDemandReason.NOT_A_NUMBER),
        (own("holes", rate="holes"), UnknownDemandReason.MANY_SERIES),
        (own("1e6 * holes", rate="vector(1e9)"), UnknownDemandReason.CANNOT_SERVE),
    ],
)
def test_invalid_results_have_a_reason(
    prometheus: Prometheus, requests: ModelRequests, reason: UnknownDemandReason
) -> None:
    assert read_failure(prometheus, requests) is reason


def test_lengths_of_the_served_model_count_until_some_are_measured(prometheus: Prometheus) -> None:
    assert read_requests(prometheus, own("no_such_buckets"), KNOWN).lengths == ()
    rate_alone = ModelRequests(SERVED.model, RequestQueries("vector(5)"))
    assert read_requests(prometheus, rate_alone, KNOWN).lengths == ()
    assert read_failure(prometheus, rate_alone) is UnknownDemandReason.CANNOT_SERVE


def test_history_has_the_replicas_of_each_bin(prometheus: Prometheus) -> None:
    query = build_query(PrometheusDemand((), 300.0, (vllm("daily"),)), (SERVED,))
    span = TimeSpan(NOW_S - DAY_S, NOW_S, 300.0)
    with httpx.Client() as client:
        history = RequestReader(PrometheusApi(prometheus.url, timeout_s=30.0)).read_history(client, query, span)
    assert not isinstance(history, UnknownDemand)
    assert len(history) == 289
    for at_s, gpus in history[::36]:
        assert abs(gpus - true_replicas((daily(at_s) - daily(at_s - 300.0)) / 300.0)) <= 1


def test_history_of_a_server_without_replicas_is_zero(prometheus: Prometheus) -> None:
    replicas = 'kube_deployment_spec_replicas{deployment="gone"}'
    span = TimeSpan(BROKEN_AT_S + 600.0, NOW_S, 300.0)
    found = {}
    for name, count in (("gone", replicas), ("broken", "")):
        query = build_query(PrometheusDemand((), 300.0, (vllm(name, count),)), (SERVED,))
        with httpx.Client() as client:
            found[name] = RequestReader(PrometheusApi(prometheus.url, timeout_s=30.0)).read_history(client, query, span)
    assert found["broken"] == ()
    assert isinstance(found["gone"], tuple)
    assert {gpus for _, gpus in found["gone"]} == {0.0}
