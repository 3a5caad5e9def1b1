"""Demand readings with requests: the demand of scaled models, rates for the forecaster, and events."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.domain.commands import (
    Command,
    ReportDemand,
    ReportDemandHistory,
    SetDemandSource,
    SetServedModels,
)
from scheduler.domain.demand_source import DemandQuery, PrometheusDemand
from scheduler.domain.events import EventCode
from scheduler.domain.serving import ModelLoad, ScaleTarget, ServedModel, SizingMode, SizingPolicy, name_rate_series
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.commands import apply_command
from scheduler.scheduling.mutable_snapshot import MutableSnapshot
from tests.builders import a_fleet, a_snapshot

TARGET = ScaleTarget("apps/v1", "Deployment", "serving", "chat", "deployments")
SCALED = SizingPolicy(SizingMode.SCALE, stabilization_s=100.0, target=TARGET)
LOAD = ModelLoad("chat", 5.0, 1.0, 3, 2, 6.0, 4, 4, 0.5, 0.02, 0.5, "tpot")


def serve(policy: SizingPolicy) -> Snapshot:
    served = ServedModel("chat", "h100-80g", 1.0, 0.05, sizing=policy)
    return apply(a_snapshot(a_fleet(training=1, inference=2)), 0.0, SetServedModels("inference", (served,))).view()


def apply(
    snapshot: Snapshot, at_s: float, body: ReportDemand | ReportDemandHistory | SetServedModels | SetDemandSource
) -> MutableSnapshot:
    changed = MutableSnapshot(replace(snapshot, now_s=at_s))
    apply_command(changed, Command(f"command-{at_s}", at_s, body))
    return changed


def report(snapshot: Snapshot, at_s: float, load: ModelLoad) -> MutableSnapshot:
    return apply(snapshot, at_s, ReportDemand("inference", float(load.replicas * load.gpus), (load,)))


@pytest.mark.parametrize(("mode", "gpus"), [(SizingMode.OFF, 6.0), (SizingMode.ADVISE, 6.0), (SizingMode.SCALE, 8.0)])
def test_scaled_models_demand_what_is_proposed(mode: SizingMode, gpus: float) -> None:
    after = report(serve(replace(SCALED, mode=mode)), 10.0, LOAD)
    reading = after.demand["inference"]
    assert (reading.asked_gpus, reading.loads) == (gpus, (LOAD,))
    assert [each.replicas for each in reading.advice] == ([] if mode is SizingMode.OFF else [4])


def test_rates_of_sized_models_are_recorded_for_the_forecast() -> None:
    after = report(serve(SCALED), 10.0, LOAD)
    rates = dict(after.readings)[name_rate_series("inference", "chat")]
    assert (rates.at_s, rates.asked_gpus) == (10.0, 5.0)
    assert [name for name, _ in report(serve(SizingPolicy()), 10.0, LOAD).readings] == ["inference"]
    assert dict(after.readings)["inference"].loads == ()


def test_each_change_of_a_proposal_is_one_event() -> None:
    numbers, snapshot = [], serve(SCALED)
    for at_s, ahead in ((10.0, 4), (20.0, 4), (30.0, 6), (40.0, 2), (140.0, 2), (150.0, 2)):
        after = report(snapshot, at_s, replace(LOAD, replicas=2, ahead_replicas=ahead, steady_replicas=ahead))
        numbers += [each.numbers["replicas"] for each in after.events if each.code is EventCode.REPLICAS_PROPOSED]
        snapshot = after.view()
    assert numbers == [4, 6, 2]


def test_report_of_gpus_keeps_the_proposal_and_drops_the_figures() -> None:
    before = report(serve(SCALED), 10.0, LOAD).view()
    reading = apply(before, 20.0, ReportDemand("inference", 1.0)).demand["inference"]
    assert (reading.asked_gpus, reading.loads, reading.advice) == (1.0, (), before.demand["inference"].advice)


def test_older_report_changes_nothing() -> None:
    before = report(serve(SCALED), 10.0, LOAD).view()
    assert report(before, 5.0, replace(LOAD, ahead_replicas=9)).demand == before.demand


def test_history_keeps_the_proposal_and_requests_keep_the_count_of_back_fills() -> None:
    before = report(serve(SCALED), 10.0, LOAD).view()
    older = apply(before, 20.0, ReportDemandHistory("inference", ((5.0, 2.0),))).view()
    present = older.demand["inference"]
    assert (present.loads, present.advice, present.backfills) == ((LOAD,), before.demand["inference"].advice, 1)
    reading = report(older, 30.0, LOAD).demand["inference"]
    assert (reading.loads, reading.backfills) == ((LOAD,), 1)
    newer = apply(older, 30.0, ReportDemandHistory("inference", ((25.0, 2.0),))).demand["inference"]
    assert (newer.asked_gpus, newer.loads, newer.advice) == (2.0, (), present.advice)


def test_only_the_first_of_two_simultaneous_sources_counts() -> None:
    source = PrometheusDemand((DemandQuery("sum(gpus)"),))
    after = apply(serve(SCALED), 1.0, SetDemandSource("inference", source))
    assert (after.pools["inference"].demand, [event.code for event in after.events]) == (
        None,
        [EventCode.COMMAND_REFUSED],
    )
