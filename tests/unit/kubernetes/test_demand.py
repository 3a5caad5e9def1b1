"""What is told of demand: when, with which time, and what a Pool says of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from scheduler.documents.document import InvalidDocumentError
from scheduler.domain.commands import Command, ReportDemand
from scheduler.domain.fleet import DemandReading, Pool, PoolKind
from scheduler.domain.snapshot import Snapshot
from scheduler.kubernetes.api_objects import POOL
from scheduler.kubernetes.demand_sources import REPORT_INTERVAL_S, PoolReadings, compute_readings, with_demand
from scheduler.kubernetes.resources.fleet import (
    DemandSource,
    DemandSourceKind,
    KnownDemand,
    PoolDemand,
    PoolResource,
    UnknownDemand,
    UnknownDemandReason,
    parse_pool,
)
from scheduler.kubernetes.resources.meta import Condition
from scheduler.kubernetes.spec_commands import SpecCommands
from tests.unit.kubernetes.operating import NOW_S, Operating

NONE_YET = PoolReadings()
NO_SERIES = UnknownDemand(UnknownDemandReason.NO_SERIES, "the query gives no series")


def a_pool(**more: Any) -> PoolResource:
    demand = DemandSource(DemandSourceKind.PROMETHEUS, query="gpus")
    return PoolResource(Pool("serving", PoolKind.INFERENCE), "uid-1", {"role": "serve"}, demand=demand, **more)


def told(known: PoolDemand, before: PoolReadings = NONE_YET, **more: Any) -> PoolReadings:
    return compute_readings([a_pool(**more)], {"uid-1": known}, before)


def readings(found: PoolReadings) -> list[tuple[float, float]]:
    """Time and GPUs."""
    return [(each.at_s, each.body.gpus) for each in found.commands if isinstance(each.body, ReportDemand)]


def test_a_reading_bears_the_time_of_its_sample() -> None:
    assert readings(told(KnownDemand(5.0, NOW_S - 20.0))) == [(NOW_S - 20.0, 5.0)]


def test_the_same_reading_is_the_same_command_whoever_tells_it() -> None:
    assert told(KnownDemand(5.0, NOW_S)).commands == told(KnownDemand(5.0, NOW_S)).commands


def test_a_demand_that_stays_is_told_again_after_a_minute_and_one_that_changes_at_once() -> None:
    first = told(KnownDemand(5.0, NOW_S))
    soon = told(KnownDemand(5.0, NOW_S + REPORT_INTERVAL_S - 1.0), first)
    assert soon.commands == first.commands
    again = told(KnownDemand(5.0, NOW_S + REPORT_INTERVAL_S), soon)
    assert readings(again) == [(NOW_S + REPORT_INTERVAL_S, 5.0)]
    changed = told(KnownDemand(6.0, NOW_S + REPORT_INTERVAL_S + 1.0), again)
    back = told(KnownDemand(5.0, NOW_S + REPORT_INTERVAL_S + 2.0), changed)
    assert len({each.id for found in (first, again, changed, back) for each in found.commands}) == 4


@pytest.mark.parametrize("stale_after_s", [15.0, 60.0, 300.0, 86_400.0])
def test_a_demand_that_stays_never_counts_as_stale(stale_after_s: float) -> None:
    source = DemandSource(DemandSourceKind.PROMETHEUS, query="gpus", stale_after_s=stale_after_s)
    pool, found = replace(a_pool(), demand=source), NONE_YET
    for second in range(200):
        found = compute_readings([pool], {"uid-1": KnownDemand(5.0, NOW_S + second)}, found)
        ((at_s, _),) = readings(found)
        assert NOW_S + second - at_s < stale_after_s / 3


def test_while_nothing_is_known_nothing_is_told_and_the_pool_says_why() -> None:
    found = told(NO_SERIES, told(KnownDemand(5.0, NOW_S)))
    assert found.commands == ()
    assert found.conditions == {"uid-1": (Condition("DemandKnown", False, "NoSeries", "the query gives no series"),)}
    assert readings(told(KnownDemand(5.0, NOW_S + 1.0), found)) == [(NOW_S + 1.0, 5.0)]


def test_a_new_leader_lets_the_pools_condition_stand_until_it_has_asked() -> None:
    unasked = UnknownDemand(UnknownDemandReason.NOT_ASKED_YET, "being asked")
    known = (Condition("DemandKnown", True, "Read"),)
    assert told(unasked, demand_claims=known).conditions == {"uid-1": known}
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
def test_a_reading_is_sent_until_the_snapshot_has_it_or_a_later_one(reading: DemandReading, is_sent: bool) -> None:
    snapshot = Snapshot(now_s=NOW_S, demand={} if reading is None else {"serving": reading})
    assert len(with_demand(SpecCommands(), told(KnownDemand(5.0, NOW_S)), snapshot).commands) == is_sent


@dataclass
class Demanding(Operating):
    """With the demand of the Pool `serving` as it is known."""

    known: PoolDemand = NO_SERIES
    told: PoolReadings = field(default_factory=PoolReadings)

    def take(self) -> SpecCommands:
        taken = super().take()
        pools = [pool for pool in taken.fleet.pools if pool.demand.kind is not DemandSourceKind.PUSH]
        self.told = compute_readings(pools, {pool.uid: self.known for pool in pools}, self.told)
        return with_demand(taken, self.told, self.snapshot)

    def condition(self) -> tuple[str, str, str]:
        status = self.server.get(POOL, "serving")["status"]
        (found,) = [each for each in status["conditions"] if each["type"] == "DemandKnown"]
        return found["status"], found["reason"], status.get("demandGpus", "")


def test_a_pools_demand_is_seen_in_its_status_next_to_what_else_is_said_of_it() -> None:
    rig = Demanding()
    demand = {"source": "prometheus", "query": "gpus", "staleAfter": "2m"}
    rig.server.add(POOL, "serving", {"kind": "inference", "nodeSelector": {"role": "serve"}, "demand": demand})
    rig.add_node("s0", {"role": "serve"})
    rig.settle()
    assert rig.condition() == ("False", "NoSeries", "")
    assert rig.server.get(POOL, "serving")["status"]["problem"] == "NoSeries"
    rig.known = KnownDemand(5.0, NOW_S)
    rig.settle()
    assert rig.condition() == ("True", "Read", "5")
    status = rig.server.get(POOL, "serving")["status"]
    assert "problem" not in status
    assert {"Accepted", "DemandKnown"} <= {each["type"] for each in status["conditions"]}
    rig.known = replace(NO_SERIES, reason=UnknownDemandReason.STALE)
    rig.settle()
    assert rig.condition() == ("False", "Stale", "5")
    assert rig.snapshot.demand["serving"] == DemandReading(NOW_S, 5.0, 5.0)


def test_a_pool_of_which_demand_is_pushed_says_when_nobody_has_for_too_long() -> None:
    rig = Demanding()
    demand = {"source": "push", "staleAfter": "2m"}
    rig.server.add(POOL, "serving", {"kind": "inference", "nodeSelector": {"role": "serve"}, "demand": demand})
    rig.add_node("s0", {"role": "serve"})
    rig.settle()
    assert rig.condition() == ("False", "NotPushedYet", "")
    rig.send(Command("pushed", rig.snapshot.now_s, ReportDemand("serving", 5.0)))
    rig.settle()
    assert rig.condition() == ("True", "Pushed", "5")
    rig.wait(121.0)
    rig.settle()
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
def test_what_a_pool_calls_stale_is_what_freezes_its_lending(
    demand: dict[str, object] | None, stale_s: float | None
) -> None:
    spec = {"kind": "inference", "nodeSelector": {"role": "serve"}, **({"demand": demand} if demand else {})}
    assert parse_pool({"metadata": {"name": "serving"}, "spec": spec}).pool.lending.demand_stale_s == stale_s


def test_a_staleness_shorter_than_the_time_between_two_readings_is_refused() -> None:
    spec = {"kind": "inference", "nodeSelector": {"a": "b"}, "demand": {"source": "push", "staleAfter": "14s"}}
    with pytest.raises(InvalidDocumentError, match=r"demand\.staleAfter: got 14\.0; allowed: at least 15 s"):
        parse_pool({"metadata": {"name": "serving"}, "spec": spec})
