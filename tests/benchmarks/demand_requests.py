"""Demand from requests: replicas from two histograms, back-fill from Prometheus, and history at a takeover.

Replicas are compared with the token-by-token simulation of requests whose lengths have a given rank correlation. The
histograms have the bounds of vLLM's. Back-fill and takeover are one pool, of 14 days.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from math import pi, sin
from pathlib import Path
from time import perf_counter, process_time

import httpx
import numpy as np
from numpy.typing import NDArray

from scheduler.demand.presets import build_query
from scheduler.demand.prometheus_api import PrometheusApi, TimeSpan
from scheduler.demand.request_reader import RequestReader
from scheduler.domain.demand_source import InferenceServer, ModelRequests, PrometheusDemand, ServerRequests
from scheduler.domain.fleet import DemandReading
from scheduler.domain.serving import ServedModel
from scheduler.domain.snapshot import Snapshot
from scheduler.forecast.forecaster import PoolForecaster
from scheduler.serving.measured_lengths import clip_lengths, join_lengths
from scheduler.store.protocol import Commit
from scheduler.store.schema_migration import migrate
from scheduler.store.sql_store import SqlStore
from tests.contract.prometheus_site import PROGRAM, Prometheus
from tests.contract.request_exposition import Exposition, Traffic, build_blocks
from tests.contract.store_records import make_next_snapshot
from tests.serving.capacity_comparison import SETUPS, find_referee
from tests.serving.length_mixes import CHAT, MIXES, draw_lengths
from tests.serving.test_measured_lengths import RATES, couple, observe, size

Row = tuple[str, str, str]

DAY_S, DAYS = 86_400.0, 14
REPLICAS, SCRAPE_S, READING_S = 8, 60.0, 30.0
REQUESTS = 20_000
TRUE, GIVEN = (-0.4, 0.0, 0.4), (0.0, 0.3, 1.0)


def rows() -> Iterator[Row]:
    yield from compare_correlations()
    if PROGRAM is not None and (promtool := shutil.which("promtool")) is not None:
        with tempfile.TemporaryDirectory() as folder:
            yield from time_back_fill(promtool, Path(folder))
    with tempfile.TemporaryDirectory() as folder:
        yield from time_takeover(f"sqlite:///{folder}/history.db")


def compare_correlations() -> Iterator[Row]:
    """Yield the replicas from histograms relative to those that the simulation needs, by true and given correlation."""
    found: dict[tuple[float, float], list[tuple[int, int]]] = {(true, given): [] for true in TRUE for given in GIVEN}
    for setup, chosen in SETUPS.items():
        for mix in MIXES.values():
            drawn = draw_lengths(np.random.default_rng(1), mix, REQUESTS)
            lengths = np.minimum(drawn, chosen.numbers.kv_tokens // 3)
            sized = {given: _size_by_histograms(setup, lengths, given) for given in GIVEN}
            for true in TRUE:
                needed = find_referee(setup, RATES[setup], couple(lengths, true), start=sized[0.0])
                for given in GIVEN:
                    found[true, given].append((sized[given], needed))
    for (true, given), pairs in found.items():
        models, referees = np.array(pairs).T
        few, ratio = int((models < referees).sum()), models.sum() / referees.sum()
        yield (
            f"requests: replicas by the simulation's, true correlation {true:g}, given {given:g}",
            "",
            f"{ratio:.3f}, too few in {few} of {len(pairs)}",
        )


def _size_by_histograms(setup: str, lengths: NDArray[np.int64], correlation: float) -> int:
    joint = join_lengths(observe(lengths[:, 0]), observe(lengths[:, 1]), correlation=correlation)
    return size(setup, clip_lengths(joint, SETUPS[setup].numbers.kv_tokens))


def time_back_fill(promtool: str, folder: Path) -> Iterator[Row]:
    """Yield times of a poll and of back-fill, from a Prometheus on this machine."""
    now_s = 300.0 * (time.time() // 300.0)
    times_s = [now_s - DAYS * DAY_S + SCRAPE_S * at for at in range(int(DAYS * DAY_S / SCRAPE_S) + 1)]
    exposition, lengths = Exposition(), draw_lengths(np.random.default_rng(5), (CHAT,), 4_000)
    traffic = Traffic(
        times_s, lambda at_s: 10.0 * at_s - 6.0 * DAY_S / (2 * pi) * sin(2 * pi * at_s / DAY_S), lengths, times_s[0]
    )
    for number in range(REPLICAS):
        exposition.add_vllm({"instance": str(number)}, traffic)
    prometheus = Prometheus(folder, "127.0.0.1:1", every="1m", data=build_blocks(promtool, exposition, folder))
    prometheus.start()
    requests = ModelRequests("llama-3-8b", ServerRequests(InferenceServer.VLLM))
    query = build_query(PrometheusDemand(requests=(requests,)), (ServedModel("llama-3-8b", "a100-80g", 1.0, 0.05),))
    try:
        with httpx.Client(timeout=60.0) as client:
            reader = RequestReader(PrometheusApi(prometheus.url, timeout_s=60.0))
            begin_s, own_s = perf_counter(), process_time()
            history = reader.read_history(client, query, TimeSpan(now_s - DAYS * DAY_S, now_s, 300.0))
            assert isinstance(history, tuple)
            taken = f"{perf_counter() - begin_s:.1f} s, {process_time() - own_s:.1f} s of CPU"
            yield (f"requests: back-fill of 14 days, {REPLICAS} replicas, {len(history)} bins", "", taken)
            for name in ("first", "later"):
                begin_s = perf_counter()
                reader.read(client, query)
                yield (f"requests: {name} poll of a pool", "", f"{1e3 * (perf_counter() - begin_s):.0f} ms")
    finally:
        prometheus.kill()


def time_takeover(url: str) -> Iterator[Row]:
    """Yield the CPU time in which a new controller reads the history of 100 pools, as before and in bins."""
    migrate(url)
    store, begin_s = SqlStore(url), 1.7e9
    readings = tuple(
        ("chat", DemandReading(begin_s + READING_S * at, float(at % 97), float(at % 97)))
        for at in range(int(DAYS * DAY_S / READING_S))
    )
    store.commit(Commit(Snapshot(), make_next_snapshot(Snapshot()), epoch=0, readings=readings))
    used_s = process_time()
    whole = PoolForecaster()
    for reading in store.list_readings("chat", since_s=0.0):
        whole.observe(reading.at_s, reading.asked_gpus)
    whole_s, used_s = process_time() - used_s, process_time()
    binned = PoolForecaster()
    for each in store.list_reading_bins("chat", since_s=0.0, bin_s=binned.step_s):
        binned.observe_bin(each)
    binned_s = process_time() - used_s
    store.close()
    yield ("requests: history of 100 pools, 14 days of 30 s, each reading", "", f"{100 * whole_s:.1f} s")
    yield ("requests: the same, in bins of the database", "", f"{100 * binned_s:.1f} s")
