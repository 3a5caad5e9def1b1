"""PoolDemandReader: polled demand, back-fill and failures of pools with a source, as commands."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from scheduler.demand.reports import PoolDemandReader, ReportBuilder, build_report, next_reading
from scheduler.domain.commands import Command, DemandSourceFailed, ReportDemand, ReportDemandHistory
from scheduler.domain.demand_source import (
    DemandQuery,
    InferenceServer,
    KnownDemand,
    ModelRequests,
    PrometheusDemand,
    ServerRequests,
)
from scheduler.domain.fleet import DemandReading, Forecast, Pool, PoolKind
from scheduler.domain.serving import (
    ModelRate,
    ReportedRequests,
    RequestLength,
    ServedModel,
    SizingMode,
    SizingPolicy,
)
from scheduler.domain.snapshot import Snapshot
from tests.builders import a_fleet, a_snapshot
from tests.kubernetes.waiting import eventually
from tests.unit.kubernetes.scripted_server import Answer, ScriptedServer

SOURCE = PrometheusDemand((DemandQuery("gpus"),))


def a_service(source: PrometheusDemand | None = SOURCE, *, reading: DemandReading | None = None) -> Snapshot:
    snapshot: Snapshot = a_snapshot(a_fleet(training=1, inference=1))
    pool: Pool = replace(snapshot.pools["inference"], demand=source)
    demand = {} if reading is None else {"inference": reading}
    return replace(snapshot, pools={**snapshot.pools, "inference": pool}, demand=demand)


def success(kind: str, *result: Any) -> Answer:
    return Answer(body={"status": "success", "data": {"resultType": kind, "result": list(result)}})


def a_vector(value: float) -> Answer:
    return success("vector", {"metric": {}, "value": [time.time(), str(value)]})


@contextmanager
def reading_from(url: str) -> Iterator[PoolDemandReader]:
    reader = PoolDemandReader(url)
    try:
        yield reader
    finally:
        reader.close()


def read_until(reader: PoolDemandReader, snapshot: Snapshot, count: int = 1) -> list[Command]:
    """Read until there are so many commands. A round of the poller may end between two of them."""
    found: list[Command] = []

    def is_enough() -> bool:
        found.extend(reader.read(snapshot, time.time()))
        return len(found) >= count

    eventually(is_enough, what=f"{count} commands")
    return found


def test_pool_without_a_source_is_not_polled() -> None:
    assert PoolDemandReader("http://127.0.0.1:1").read(a_service(None), 1.0) == ()


def test_new_source_reports_its_demand_and_then_its_history() -> None:
    now_s = time.time()
    history = success("matrix", {"metric": {}, "values": [[now_s - 600.0, "3"], [now_s - 300.0, "4"]]})
    answers = a_vector(5.0), a_vector(now_s), history
    with ScriptedServer(*answers).running() as server, reading_from(server.url) as reader:
        commands = read_until(reader, a_service(), 2)
        assert [command.body for command in commands] == [
            ReportDemand("inference", 5.0),
            ReportDemandHistory("inference", ((now_s - 600.0, 3.0), (now_s - 300.0, 4.0))),
        ]
        assert server.heard == ["POST /api/v1/query"] * 2 + ["POST /api/v1/query_range"]
        assert reader.read(a_service(), time.time()) == ()


BUCKETS = {"100": 4.0, "500": 9.0, "+Inf": 10.0, "": 2_000.0}
SERVED = ServedModel("llama-3-8b", "a100-80g", 1.0, 0.05, sizing=SizingPolicy(SizingMode.ADVISE))


def a_histogram(kind: str, at_s: float) -> Answer:
    samples = {"vector": "value", "matrix": "values"}[kind]
    pairs = {le: [at_s, str(value)] for le, value in BUCKETS.items()}
    series = [{"metric": {"le": le} if le else {}, samples: each} for le, each in pairs.items()]
    return success(kind, *[{**each, "values": [each["values"]]} if kind == "matrix" else each for each in series])


def test_requests_become_loads_with_the_expected_rate_and_a_history() -> None:
    now_s = 300.0 * (time.time() // 300.0)
    ahead = ModelRate(SERVED.model, now_s, 300.0, 0.95, 90.0)
    forecast = Forecast(now_s, 600.0, (0.5,), (1.0,), "persistence", rates=(ahead,))
    source = PrometheusDemand(requests=(ModelRequests(SERVED.model, ServerRequests(InferenceServer.VLLM)),))
    service = a_service(source, reading=DemandReading(now_s - 3_600.0, 1.0, 1.0))
    pools = {**service.pools, "inference": replace(service.pools["inference"], serving=(SERVED,))}
    service = replace(service, pools=pools, forecasts={"inference": forecast})
    rates = success("matrix", {"metric": {}, "values": [[now_s - 600.0, "0"], [now_s - 300.0, "40"]]})
    present = a_vector(now_s), a_vector(40.0), a_histogram("vector", now_s), a_histogram("vector", now_s)
    past = a_histogram("matrix", now_s), a_histogram("matrix", now_s), rates
    with ScriptedServer(*present, *past).running() as server, reading_from(server.url) as reader:
        report, history = (command.body for command in read_until(reader, service, 2))
        assert server.heard == ["POST /api/v1/query"] * 4 + ["POST /api/v1/query_range"] * 3
    assert isinstance(report, ReportDemand)
    (load,) = report.loads
    assert (load.rate_per_s, load.ahead_rate_per_s) == (40.0, 90.0)
    assert 0 < load.replicas < load.ahead_replicas
    assert load.lengths is not None
    assert abs(load.lengths.prompt_mean - 200.0) < 2.0
    assert report.gpus == load.replicas
    assert isinstance(history, ReportDemandHistory)
    assert history.readings == ((now_s - 600.0, 0.0), (now_s - 300.0, float(load.replicas)))


def test_small_changes_of_the_rate_are_reported_once_a_minute() -> None:
    pool = Pool("inference", PoolKind.INFERENCE, serving=(SERVED,))
    lengths = (RequestLength(200, 100),)
    reported: list[Command] = []
    for at_s, rate_per_s in ((0.0, 40.0), (15.0, 40.01), (30.0, 40.02), (60.0, 40.03), (75.0, 400.0)):
        requests = ReportedRequests(SERVED.model, rate_per_s, lengths=lengths)
        demand = KnownDemand(1.0, at_s, (requests,))
        previous = reported[-1] if reported else None
        reading = next_reading(build_report(pool, demand, None), pool.name, demand, 300.0, previous)
        reported += [] if reading is previous else [reading]
    assert [each.at_s for each in reported] == [0.0, 60.0, 75.0]


def test_report_is_built_again_only_for_another_demand_forecast_or_pool() -> None:
    pool, builder = Pool("inference", PoolKind.INFERENCE, serving=(SERVED,)), ReportBuilder()
    demand = KnownDemand(1.0, 0.0, (ReportedRequests(SERVED.model, 40.0, lengths=(RequestLength(200, 100),)),))
    report = builder.build(pool, demand, None)
    assert builder.build(replace(pool), demand, None) is report
    later = builder.build(pool, replace(demand), None)
    assert later == report
    assert later is not report
    wide = replace(pool, serving=(replace(SERVED, tensor_degree=2),))
    assert builder.build(wide, demand, None).loads[0].gpus == 2


def test_recent_reading_needs_no_history() -> None:
    now_s = time.time()
    known = DemandReading(now_s - 60.0, 2.0, 2.0)
    with ScriptedServer(a_vector(5.0), a_vector(now_s)).running() as server, reading_from(server.url) as reader:
        commands = read_until(reader, a_service(reading=known))
        assert [command.body for command in commands] == [ReportDemand("inference", 5.0)]
        assert len(server.heard) == 2


def test_failure_is_reported_once_with_its_reason() -> None:
    with ScriptedServer(success("vector")).running() as server, reading_from(server.url) as reader:
        (command,) = read_until(reader, a_service())
        assert isinstance(command.body, DemandSourceFailed)
        assert (command.body.pool, command.body.reason) == ("inference", "NoSeries")
        assert reader.read(a_service(), time.time()) == ()


def test_service_without_the_url_of_prometheus_says_so() -> None:
    (command,) = PoolDemandReader().read(a_service(), 1.0)
    assert isinstance(command.body, DemandSourceFailed)
    assert "EBBTIDE_PROMETHEUS_URL" in command.body.message
