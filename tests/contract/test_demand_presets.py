"""Presets and back-filled history, evaluated by a real Prometheus over expositions in the form of each server."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from scheduler.demand.presets import PrometheusQuery, PromqlTerm, build_query
from scheduler.demand.prometheus_api import PrometheusApi, TimeSpan
from scheduler.demand.prometheus_poller import HISTORY_S, HISTORY_STEP_S, PrometheusPoller
from scheduler.domain.demand_source import (
    DemandQuery,
    DemandTerm,
    DemandUnit,
    InferenceServer,
    KnownDemand,
    PrometheusDemand,
    ServerLoad,
    UnknownDemand,
    UnknownDemandReason,
)
from tests.contract.prometheus_site import PROGRAM, Prometheus
from tests.kubernetes.waiting import eventually

PROMTOOL = shutil.which("promtool")
pytestmark = pytest.mark.skipif(
    PROGRAM is None or PROMTOOL is None, reason="no prometheus on the path (Debian's package prometheus)"
)

NOW_S = HISTORY_STEP_S * (time.time() // HISTORY_STEP_S)
AHEAD_S = 10_800.0
GAUGES = """
vllm:num_requests_running{engine="0",model_name="chat",instance="a"} 200
vllm:num_requests_running{engine="0",model_name="chat",instance="b"} 100
vllm:num_requests_waiting{engine="0",model_name="chat",instance="a"} 40
vllm:num_requests_waiting{engine="0",model_name="chat",instance="b"} 0
vllm:kv_cache_usage_perc{engine="0",model_name="chat",instance="a"} 0.9
vllm:kv_cache_usage_perc{engine="0",model_name="chat",instance="b"} 0.45
vllm:num_requests_running{model_name="long"} 20
vllm:num_requests_waiting{model_name="long"} 30
vllm:gpu_cache_usage_perc{model_name="long"} 0.95
vllm:num_requests_running{model_name="idle"} 0
vllm:num_requests_waiting{model_name="idle"} 0
vllm:kv_cache_usage_perc{model_name="idle"} 0
vllm:num_requests_running{model_name="partial"} 9
vllm:kv_cache_usage_perc{model_name="partial"} 0.2
sglang:num_running_reqs{model_name="chat"} 60
sglang:num_queue_reqs{model_name="chat"} 10
sglang:token_usage{model_name="chat"} 0.5
tgi_batch_current_size 20
tgi_queue_size 12
nv_inference_pending_request_count{model="chat",version="1"} 7
dynamo_frontend_inflight_requests{model="chat"} 100
dynamo_frontend_queued_requests{model="chat"} 30
kn_revision_pods_desired{kn_revision_name="chat-00001"} 3
kn_revision_pods_desired{kn_revision_name="chat-00002"} 2
inference_pool_average_running_requests{name="chat",instance="a"} 10
inference_pool_average_running_requests{name="chat",instance="b"} 10
inference_pool_average_queue_size{name="chat",instance="a"} 2
inference_pool_average_queue_size{name="chat",instance="b"} 2
inference_pool_average_kv_cache_utilization{name="chat",instance="a"} 0.3
inference_pool_average_kv_cache_utilization{name="chat",instance="b"} 0.3
inference_pool_ready_pods{name="chat",instance="a"} 3
inference_pool_ready_pods{name="chat",instance="b"} 3
llm_d_epp_average_running_requests{name="routed"} 8
llm_d_epp_average_queue_size{name="routed"} 0
llm_d_epp_average_kv_cache_utilization{name="routed"} 0.2
llm_d_epp_ready_endpoints{name="routed"} 2
ray_serve_replica_processing_queries{deployment="chat",replica="a"} 5
ray_serve_replica_processing_queries{deployment="chat",replica="b"} 7
ray_serve_deployment_queued_queries{deployment="chat"} 4
served_replicas{model="chat"} 3
served_replicas{model="draw"} 2
"""
US_PER_S = {"nv_inference_request_duration_us": 3e6, "nv_inference_queue_duration_us": 1e6}


def write_samples(path: Path) -> None:
    """Write gauges, Triton's counters, and a month of two histories of which one has gaps.

    All continue for three hours after the tests are collected, so that tests find samples however late they run.
    """
    families: dict[str, list[str]] = {}
    recent_s = [NOW_S + 15.0 * at for at in range(-40, int(AHEAD_S / 15.0))]
    for line in GAUGES.strip().splitlines():
        series, _, value = line.rpartition(" ")
        families.setdefault(series.partition("{")[0], []).extend(f"{series} {value} {at_s}" for at_s in recent_s)
    for name, per_s in US_PER_S.items():
        families[name] = [f'{name}{{model="chat"}} {per_s * (at_s - recent_s[0])} {at_s}' for at_s in recent_s]
    steps = range(-int(AHEAD_S / HISTORY_STEP_S), int(HISTORY_S / HISTORY_STEP_S) + 300)
    past_s = [NOW_S - HISTORY_STEP_S * at for at in steps][::-1]
    families["daily_gpus"] = [f"daily_gpus {at % 288} {at_s}" for at, at_s in enumerate(past_s)]
    families["gappy_gpus"] = [f"gappy_gpus 1 {at_s}" for at, at_s in enumerate(past_s) if at % 4 == 0]
    with path.open("w", encoding="utf-8") as file:
        for name, lines in families.items():
            file.write(f"# TYPE {name} gauge\n")
            file.writelines(f"{line}\n" for line in lines)
        file.write("# EOF\n")


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("presets")
    samples, data = folder / "samples.txt", folder / "data"
    write_samples(samples)
    blocks = ["--max-block-duration=744h"]  # the default of two hours gives a month 350 blocks, which take a minute
    command = [str(PROMTOOL), "tsdb", "create-blocks-from", "openmetrics", *blocks, str(samples), str(data)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    made = Prometheus(folder, "127.0.0.1:1", every="1m", data=data)
    made.start()
    yield made
    made.kill()


def read_gpus(prometheus: Prometheus, *terms: DemandTerm) -> float | UnknownDemandReason:
    query = build_query(PrometheusDemand(terms, stale_after_s=600.0))
    with httpx.Client() as client:
        found = PrometheusApi(prometheus.url, timeout_s=10.0).read_demand(client, query)
    return found.reason if isinstance(found, UnknownDemand) else found.gpus


def load(server: InferenceServer, requests_each: float | None, gpus_each: float = 1.0, **labels: str) -> ServerLoad:
    return ServerLoad(server, labels, gpus_each, requests_each)


@pytest.mark.parametrize(
    ("term", "gpus"),
    [
        (load(InferenceServer.VLLM, 256, 4, model_name="chat"), 8.0),  # max(340 / 256, 1.35 x 340 / 300 / 0.9 = 1.7)
        (load(InferenceServer.VLLM, 256, 8, model_name="long"), 24.0),  # 0.95 x 50 / 20 / 0.9 = 2.6
        (load(InferenceServer.VLLM, 256, 8, model_name="idle"), 8.0),  # one replica at least
        (load(InferenceServer.SGLANG, 32, 2, model_name="chat"), 6.0),  # 70 / 32 = 2.2
        (load(InferenceServer.TGI, 16, 1), 2.0),  # 32 / 16
        (load(InferenceServer.TRITON, 4, 1, model="chat"), 3.0),  # (3 - 1 executing + 7 pending) / 4
        (load(InferenceServer.DYNAMO, 64, 8, model="chat"), 16.0),  # 100 / 64, which include the queued ones
        (load(InferenceServer.KSERVE, None, 2), 10.0),  # 5 pods
        (load(InferenceServer.LLM_D, 16, 1, name="chat"), 3.0),  # 3 x 12 / 16, once for both endpoint pickers
        (load(InferenceServer.LLM_D, 16, 1, name="routed"), 1.0),
        (load(InferenceServer.RAY_SERVE, 8, 1, deployment="chat"), 2.0),  # 16 / 8
    ],
)
def test_preset_computes_the_gpus_of_its_servers_load(prometheus: Prometheus, term: ServerLoad, gpus: float) -> None:
    assert read_gpus(prometheus, term) == gpus


@pytest.mark.parametrize("server", [each for each in InferenceServer if each is not InferenceServer.KSERVE])
def test_missing_metric_makes_the_demand_unknown(prometheus: Prometheus, server: InferenceServer) -> None:
    assert read_gpus(prometheus, load(server, 8, 1, model_name="elsewhere")) is UnknownDemandReason.NO_SERIES


def test_server_without_one_of_its_metrics_is_unknown(prometheus: Prometheus) -> None:
    partial = load(InferenceServer.VLLM, 8, 1, model_name="partial")
    assert read_gpus(prometheus, partial) is UnknownDemandReason.NO_SERIES


def test_terms_are_summed_in_gpus_and_one_unknown_term_makes_the_sum_unknown(prometheus: Prometheus) -> None:
    replicas = DemandQuery("served_replicas", DemandUnit.REPLICAS, 2.0, sums_series=True)
    nodes = DemandQuery("tgi_queue_size", DemandUnit.NODES, 8.0)
    tgi = load(InferenceServer.TGI, 16, 1)
    assert read_gpus(prometheus, replicas, nodes, tgi) == 5 * 2 + 12 * 8 + 2
    many = DemandQuery("served_replicas", DemandUnit.REPLICAS, 2.0)
    assert read_gpus(prometheus, nodes, many) is UnknownDemandReason.MANY_SERIES
    assert read_gpus(prometheus, nodes, DemandQuery("no_such_gpus")) is UnknownDemandReason.NO_SERIES


def test_selector_values_are_quoted(prometheus: Prometheus) -> None:
    odd = load(InferenceServer.TGI, 16, 1, model='"} or vector(1) #\\')
    assert read_gpus(prometheus, odd) is UnknownDemandReason.NO_SERIES


def test_month_is_back_filled_at_the_resolution_of_the_forecast(prometheus: Prometheus) -> None:
    query = PrometheusQuery((PromqlTerm("daily_gpus", 2.0),), 600.0)
    poller = PrometheusPoller(prometheus.url, on_change=lambda: None, interval_s=0.1)
    poller.start()
    try:
        poller.set_queries({query: float("-inf")})
        history = eventually(lambda: poller.take_history(query), what="a month of history")
        known = poller.get_demand(query, time.time())
        poller.set_queries({query: known.at_s if isinstance(known, KnownDemand) else 0.0})
        time.sleep(0.3)
        assert poller.take_history(query) == ()
    finally:
        poller.stop()
    assert 8060 <= len(history) <= 8064
    assert {later[0] - earlier[0] for earlier, later in pairwise(history)} == {HISTORY_STEP_S}
    first = int(HISTORY_S / HISTORY_STEP_S) + 299
    assert all(gpus == 2.0 * ((first - round((NOW_S - at_s) / HISTORY_STEP_S)) % 288) for at_s, gpus in history)


def test_outage_is_back_filled_from_the_newest_reading_and_never_with_partial_sums(prometheus: Prometheus) -> None:
    query = PrometheusQuery((PromqlTerm("daily_gpus"), PromqlTerm("gappy_gpus")), 30.0)
    with httpx.Client() as client:
        api = PrometheusApi(prometheus.url, timeout_s=10.0)
        history = api.read_history(client, query, TimeSpan(NOW_S - 6000.0, NOW_S, HISTORY_STEP_S))
    assert not isinstance(history, UnknownDemand)
    steps = {round((at_s - NOW_S) / HISTORY_STEP_S) + int(HISTORY_S / HISTORY_STEP_S) + 299 for at_s, _ in history}
    # A sample counts for up to five minutes, so that it may cover the next step, too.
    assert {step % 4 for step in steps} <= {0, 1}
    assert 5 <= len(steps) <= 12
