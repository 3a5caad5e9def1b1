"""Demand traces: scaled, filled, repeated and played."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from scheduler.documents.trace_files import DemandRow, JobRow, read_demand
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.simulator.demand import (
    LEVEL_SPREAD,
    DemandChange,
    DemandError,
    DemandTrace,
    build_demand_traces,
    merge_demand_changes,
)
from scheduler.simulator.engine import Simulation, TickRecord
from scheduler.simulator.simulate import build_scenario
from scheduler.simulator.throughput_curves import CurveCache
from tests.simulation.synthetic import small_cluster

CLUSTER = small_cluster(training=1, inference=2, peak_gpus=12.0)
FLAT = small_cluster(training=1, inference=2)


def rows(*amounts: float, is_load: bool = True, pool: str = "inference") -> list[DemandRow]:
    return [DemandRow(at + 2, at * 600.0, pool, amount, is_load) for at, amount in enumerate(amounts)]


def test_loads_are_scaled_to_peak_gpus() -> None:
    (trace,) = build_demand_traces(rows(50.0, 200.0, 100.0), CLUSTER)
    assert trace == DemandTrace("inference", (0.0, 600.0, 1200.0), (3.0, 12.0, 6.0))


def test_gpus_are_not_scaled() -> None:
    (trace,) = build_demand_traces(rows(0.0, 99.0, is_load=False), FLAT)
    assert trace.gpus == (0.0, 99.0)


def test_trace_repeats_with_seeded_changes() -> None:
    trace = DemandTrace("inference", (0.0, 600.0), (10.0, 20.0))
    first, second, again, last = islice(trace.iter_changes(7), 4)
    assert (first, second) == (DemandChange(0.0, "inference", 10.0), DemandChange(600.0, "inference", 20.0))
    assert (again.at_s, last.at_s, again.first_pass) == (1200.0, 1800.0, False)
    assert again.gpus not in (10.0, 20.0)
    assert again.gpus == pytest.approx(10.0, rel=LEVEL_SPREAD + 0.1)
    assert list(islice(trace.iter_changes(7), 40)) == list(islice(trace.iter_changes(7), 40))
    assert list(islice(trace.iter_changes(7), 40)) != list(islice(trace.iter_changes(8), 40))


def test_changes_of_several_pools_are_in_order_of_time() -> None:
    traces = [DemandTrace("a", (0.0, 600.0), (1.0, 2.0)), DemandTrace("b", (300.0, 400.0), (1.0, 2.0))]
    times_s = [change.at_s for change in islice(merge_demand_changes(traces, 1), 20)]
    assert times_s == sorted(times_s)
    assert list(merge_demand_changes([], 1)) == []


@pytest.mark.parametrize(
    ("trace", "message"),
    [
        (rows(1.0, pool="chat"), "line 2: pool: got 'chat'; allowed: inference"),
        (rows(1.0, pool="training"), "line 2: pool: got 'training'; allowed: inference"),
        (rows(1.0), "line 2: load: pool inference has no peak_gpus"),
        ([*rows(1.0, is_load=False), *rows(1.0, 2.0)[1:]], "line 3: pool inference mixes gpus and load"),
    ],
)
def test_demand_that_does_not_fit_the_cluster_is_refused(trace: list[DemandRow], message: str) -> None:
    with pytest.raises(DemandError, match=message):
        build_demand_traces(trace, FLAT)


def shared(**series: list[float]) -> list[DemandRow]:
    return [
        DemandRow(at + 2, at * 300.0, name, amount, is_load=True, shared=True)
        for name, amounts in series.items()
        for at, amount in enumerate(amounts)
    ]


def test_pool_uses_its_own_series_or_the_one_it_names() -> None:
    pools = [*CLUSTER.pools, CLUSTER.pools[1].model_copy(update={"name": "chat", "demand": "fn1", "peak_gpus": 6.0})]
    cluster = CLUSTER.model_copy(update={"pools": pools})
    first, second = build_demand_traces(shared(fn0=[9.0, 9.0], fn1=[0.0, 2.0], inference=[1.0, 2.0]), cluster)
    assert (first.pool, first.gpus) == ("inference", (6.0, 12.0))
    assert (second.pool, second.gpus) == ("chat", (0.0, 6.0)), "a zero of a file of many series is a quiet time"
    with pytest.raises(DemandError, match=r"line 1: .* pool inference: got fn0, fn1"):
        build_demand_traces(shared(fn0=[9.0], fn1=[1.0]), cluster)
    with pytest.raises(DemandError, match=r"line 1: .* pool chat: got inference"):
        build_demand_traces(rows(1.0), cluster)


class Played:
    """Demand changes as a simulation plays them."""

    def __init__(self) -> None:
        self.changes: list[tuple[float, float]] = []

    def on_tick(self, tick: TickRecord) -> None:
        """Not recorded."""

    def on_demand_change(self, change: DemandChange) -> None:
        self.changes.append((change.at_s, change.gpus))


def test_demand_is_played_at_the_resolution_of_its_file(tmp_path: Path) -> None:
    lines = [f"{at * 0.5},inference,{12 if at == 101 else at % 3}" for at in range(240)]
    (tmp_path / "demand.csv").write_text("\n".join(["time_s,pool,gpus", *lines]))
    demand = read_demand(tmp_path / "demand.csv")
    played, policies = Played(), load_policy_set("ebbtide")
    jobs = [JobRow(2, "a", 0.0, 100.0, 8)]
    scenario = build_scenario(jobs, demand, FLAT, policies, seed=0, curves=CurveCache())
    Simulation(scenario, policies, observers=[played]).run()
    expected = [(row.time_s, row.amount) for row in demand if row.time_s <= 100.0]
    assert played.changes == expected
    assert (50.5, 12.0) in played.changes, "a peak of half a second"
