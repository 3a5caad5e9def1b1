"""Demand readings, and the conditions that Pools get from them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import create_autospec

import pytest

from scheduler.demand.reports import REPORT_INTERVAL_S
from scheduler.documents.document import InvalidDocumentError
from scheduler.domain.commands import Command, ReportDemand, ReportDemandHistory
from scheduler.domain.demand_source import (
    DemandQuery,
    KnownDemand,
    PoolDemand,
    PrometheusDemand,
    UnknownDemand,
    UnknownDemandReason,
)
from scheduler.domain.fleet import DemandReading, Forecast, Pool, PoolKind
from scheduler.domain.serving import ModelRate, ReportedRequests, RequestLength
from scheduler.domain.snapshot import Snapshot
from scheduler.kubernetes.api_objects import POOL
from scheduler.kubernetes.client import KubernetesClient
from scheduler.kubernetes.demand_sources import DemandSources, PoolReadings, compute_readings, with_demand
from scheduler.kubernetes.resources.fleet import DemandSource, DemandSourceKind, PoolResource, parse_pool
from scheduler.kubernetes.resources.meta import Condition
from scheduler.kubernetes.spec_commands import SpecCommands
from tests.kubernetes.waiting import eventually
from tests.unit.kubernetes.operator_rig import NOW_S, OperatorRig
from tests.unit.kubernetes.scripted_server import Answer, ScriptedServer

GPUS = PrometheusDemand((DemandQuery("gpus"),))
NONE_YET = PoolReadings()
NO_SERIES = UnknownDemand(UnknownDemandReason.NO_SERIES, "the query gives no series")


def build_pool(**more: Any) -> PoolResource:
    demand = DemandSource(DemandSourceKind.PROMETHEUS, prometheus=GPUS)
    return PoolResource(Pool("serving", PoolKind.INFERENCE), "uid-1", {"role": "serve"}, demand=demand, **more)


def told(known: PoolDemand, before: PoolReadings = NONE_YET, **more: Any) -> PoolReadings:
    return compute_readings([build_pool(**more)], {"uid-1": known}, before)


def readings(found: PoolReadings) -> list[tuple[float, float]]:
    """Return time and GPUs of the readings."""
    return [(each.at_s, each.body.gpus) for each in found.commands if isinstance(each.body, ReportDemand)]


def test_reading_has_the_time_of_its_sample() -> None:
    assert readings(told(KnownDemand(5.0, NOW_S - 20.0))) == [(NOW_S - 20.0, 5.0)]


def test_equal_readings_have_equal_command_ids() -> None:
    assert told(KnownDemand(5.0, NOW_S)).commands == told(KnownDemand(5.0, NOW_S)).commands


def test_unchanged_demand_is_reported_every_minute_and_changes_at_once() -> None:
    first = told(KnownDemand(5.0, NOW_S))
    soon = told(KnownDemand(5.0, NOW_S + REPORT_INTERVAL_S - 1.0), first)
    assert soon.commands == first.commands
    again = told(KnownDemand(5.0, NOW_S + REPORT_INTERVAL_S), soon)
    assert readings(again) == [(NOW_S + REPORT_INTERVAL_S, 5.0)]
    changed = told(KnownDemand(6.0, NOW_S + REPORT_INTERVAL_S + 1.0), again)
    back = told(KnownDemand(5.0, NOW_S + REPORT_INTERVAL_S + 2.0), changed)
    assert len({each.id for found in (first, again, changed, back) for each in found.commands}) == 4


@pytest.mark.parametrize("stale_after_s", [15.0, 60.0, 300.0, 86_400.0])
def test_unchanged_demand_never_becomes_stale(stale_after_s: float) -> None:
    source = DemandSource(DemandSourceKind.PROMETHEUS, prometheus=GPUS, stale_after_s=stale_after_s)
    pool, found = replace(build_pool(), demand=source), NONE_YET
    for second in range(200):
        found = compute_readings([pool], {"uid-1": KnownDemand(5.0, NOW_S + second)}, found)
        ((at_s, _),) = readings(found)
        assert NOW_S + second - at_s < stale_after_s / 3


def test_requests_of_a_pool_become_loads_which_are_sent_until_they_are_applied() -> None:
    spec = {
        "kind": "inference",
        "nodeSelector": {"role": "serve"},
        "serving": [{"model": "llama-3-8b", "gpu": "a100-80g", "objective": {"ttft": "1s", "tpot": "50ms"}}],
        "demand": {"source": "requests", "requests": [{"model": "llama-3-8b", "preset": "vllm"}]},
    }
    pool = parse_pool({"metadata": {"name": "serving", "uid": "uid-1"}, "spec": spec})
    assert pool.demand.prometheus is not None
    assert pool.demand.kind is DemandSourceKind.REQUESTS
    requests = ReportedRequests("llama-3-8b", 40.0, lengths=(RequestLength(200, 100),))
    known = KnownDemand(1.0, NOW_S, (requests,))
    rate = ModelRate("llama-3-8b", NOW_S, 300.0, 0.95, 90.0)
    forecast = Forecast(NOW_S, 600.0, (0.5,), (1.0,), "persistence", rates=(rate,))
    found = compute_readings([pool], {"uid-1": known}, NONE_YET, {"serving": forecast})
    (command,) = found.commands
    assert isinstance(command.body, ReportDemand)
    (load,) = command.body.loads
    assert load.ahead_replicas > load.replicas
    assert found.conditions == {"uid-1": (Condition("DemandKnown", True, "Read"),)}
    scaled = DemandReading(NOW_S, 64.0, float(load.ahead_replicas), loads=command.body.loads)
    for reading, sent in ((scaled, 0), (replace(scaled, loads=()), 1)):
        snapshot = replace(Snapshot(), demand={"serving": reading})
        assert len(with_demand(SpecCommands(), found, snapshot).commands) == sent


def read_until_filled(sources: DemandSources) -> list[PoolReadings]:
    """Read until a reading and a history were found. A round of the poller may end between the two."""
    found: list[PoolReadings] = []

    def is_filled() -> bool:
        found.append(sources.read([build_pool()], time.time()))
        return any(each.histories for each in found) and bool(found[-1].readings)

    eventually(is_filled, what="a reading and a history")
    return found


def test_operator_back_fills_the_history_of_its_queries_once() -> None:
    now_s = time.time()

    def success(kind: str, series: dict[str, Any]) -> Answer:
        return Answer(body={"status": "success", "data": {"resultType": kind, "result": [{"metric": {}, **series}]}})

    answers = (
        success("vector", {"value": [now_s, "5"]}),
        success("vector", {"value": [now_s, str(now_s)]}),
        success("matrix", {"values": [[now_s - 600.0, "3"], [now_s - 300.0, "4"]]}),
    )
    with ScriptedServer(*answers).running() as server:
        sources = DemandSources(create_autospec(KubernetesClient), prometheus_url=server.url)
        sources.start()
        try:
            found = [*read_until_filled(sources), sources.read([build_pool()], time.time())]
        finally:
            sources.stop()
    (history,) = (command for each in found for command in each.histories)
    assert history.body == ReportDemandHistory("serving", ((now_s - 600.0, 3.0), (now_s - 300.0, 4.0)))
    sent = with_demand(SpecCommands(), replace(found[-1], histories=(history,)), Snapshot()).commands
    assert [type(command.body) for command in sent] == [ReportDemand, ReportDemandHistory]


def test_unknown_demand_is_not_reported_and_sets_the_condition() -> None:
    found = told(NO_SERIES, told(KnownDemand(5.0, NOW_S)))
    assert found.commands == ()
    assert found.conditions == {"uid-1": (Condition("DemandKnown", False, "NoSeries", "the query gives no series"),)}
    assert readings(told(KnownDemand(5.0, NOW_S + 1.0), found)) == [(NOW_S + 1.0, 5.0)]


def test_new_leader_keeps_the_condition_until_its_first_reading() -> None:
    unasked = UnknownDemand(UnknownDemandReason.NOT_ASKED_YET, "being asked")
    known = (Condition("DemandKnown", True, "Read"),)
    assert told(unasked, demand_conditions=known).conditions == {"uid-1": known}
    assert told(unasked).conditions == {"uid-1": (Condition("DemandKnown", False, "NotAskedYet", "being asked"),)}


@pytest.mark.parametrize(
    ("reading", "is_sent"),
    [
        (None, True),
        (DemandReading(NOW_S - 60.0, 5.0, 5.0), True),
        (DemandReading(NOW_S, 4.0, 4.0), True),
        (DemandReading(NOW_S, 4.0, 5.0), False),
        (DemandReading(NOW_S + 1.0, 3.0, 3.0), False),
    ],
    ids=["first", "newer", "other number", "clamped", "overtaken"],
)
def test_reading_is_sent_until_the_snapshot_contains_it(reading: DemandReading, is_sent: bool) -> None:
    snapshot = Snapshot(now_s=NOW_S, demand={} if reading is None else {"serving": reading})
    assert len(with_demand(SpecCommands(), told(KnownDemand(5.0, NOW_S)), snapshot).commands) == is_sent


@dataclass
class Demanding(OperatorRig):
    """A rig in which the demand of the Pool `serving` is given."""

    known: PoolDemand = NO_SERIES
    told: PoolReadings = field(default_factory=PoolReadings)

    def compute_commands(self) -> SpecCommands:
        taken = super().compute_commands()
        pools = [pool for pool in taken.fleet.pools if pool.demand.kind is not DemandSourceKind.PUSH]
        self.told = compute_readings(pools, {pool.uid: self.known for pool in pools}, self.told)
        return with_demand(taken, self.told, self.snapshot)

    def condition(self) -> tuple[str, str, str]:
        status = self.server.get(POOL, "serving")["status"]
        (found,) = [each for each in status["conditions"] if each["type"] == "DemandKnown"]
        return found["status"], found["reason"], status.get("demandGpus", "")


def test_pool_status_contains_demand_and_all_conditions() -> None:
    rig = Demanding()
    demand = {"source": "prometheus", "query": "gpus", "staleAfter": "2m"}
    rig.server.add(POOL, "serving", {"kind": "inference", "nodeSelector": {"role": "serve"}, "demand": demand})
    rig.add_node("s0", {"role": "serve"})
    rig.run_until_stable()
    assert rig.condition() == ("False", "NoSeries", "")
    assert rig.server.get(POOL, "serving")["status"]["problem"] == "NoSeries"
    rig.known = KnownDemand(5.0, NOW_S)
    rig.run_until_stable()
    assert rig.condition() == ("True", "Read", "5")
    status = rig.server.get(POOL, "serving")["status"]
    assert "problem" not in status
    assert {"Accepted", "DemandKnown"} <= {each["type"] for each in status["conditions"]}
    rig.known = replace(NO_SERIES, reason=UnknownDemandReason.STALE)
    rig.run_until_stable()
    assert rig.condition() == ("False", "Stale", "5")
    reading = rig.snapshot.demand["serving"]
    assert (reading.at_s, reading.gpus, reading.asked_gpus) == (NOW_S, 5.0, 5.0)


def test_missing_or_stale_push_sets_the_condition() -> None:
    rig = Demanding()
    demand = {"source": "push", "staleAfter": "2m"}
    rig.server.add(POOL, "serving", {"kind": "inference", "nodeSelector": {"role": "serve"}, "demand": demand})
    rig.add_node("s0", {"role": "serve"})
    rig.run_until_stable()
    assert rig.condition() == ("False", "NotPushedYet", "")
    rig.send(Command("pushed", rig.snapshot.now_s, ReportDemand("serving", 5.0)))
    rig.run_until_stable()
    assert rig.condition() == ("True", "Pushed", "5")
    rig.advance(121.0)
    rig.run_until_stable()
    assert rig.condition() == ("False", "Stale", "5")


@pytest.mark.parametrize(
    ("demand", "stale_s"),
    [
        (None, None),
        ({"source": "push"}, None),
        ({"source": "push", "staleAfter": 90}, 90.0),
        ({"source": "prometheus", "query": "gpus"}, 300.0),
        ({"source": "deployments", "selector": {"app": "chat"}, "staleAfter": "1h"}, 3600.0),
    ],
)
def test_stale_after_applies_to_the_lending_policy(demand: dict[str, object] | None, stale_s: float | None) -> None:
    spec = {"kind": "inference", "nodeSelector": {"role": "serve"}, **({"demand": demand} if demand else {})}
    assert parse_pool({"metadata": {"name": "serving"}, "spec": spec}).pool.lending.demand_stale_s == stale_s


def test_stale_after_below_the_query_interval_is_rejected() -> None:
    spec = {"kind": "inference", "nodeSelector": {"a": "b"}, "demand": {"source": "push", "staleAfter": "14s"}}
    with pytest.raises(InvalidDocumentError, match=r"demand\.staleAfter: got 14\.0; allowed: at least 15 s"):
        parse_pool({"metadata": {"name": "serving"}, "spec": spec})
