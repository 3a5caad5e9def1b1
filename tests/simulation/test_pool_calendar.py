"""Known events, blackouts and demand profiles in simulations of the whole controller."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.documents.simulation import ClusterDocument
from scheduler.documents.trace_files import DemandRow, JobRow
from scheduler.domain.decisions import LendNode, RecallNode
from scheduler.domain.fleet import LoanState
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.simulator.demand import DemandChange
from scheduler.simulator.engine import Simulation, TickRecord
from scheduler.simulator.simulate import build_scenario
from scheduler.simulator.throughput_curves import CurveCache

HOUR_S, DAY_S = 3_600.0, 86_400.0
NODES, NODE_GPUS = 8, 4


class LoanLog:
    """Records lent nodes after each tick, and when nodes are lent."""

    def __init__(self) -> None:
        self.lent: list[tuple[float, float, int]] = []
        self.loans_at_s: list[float] = []
        self.recall_details: list[str] = []

    def on_tick(self, tick: TickRecord) -> None:
        lent = sum(loan.state is not LoanState.RETURNED and loan.is_live for loan in tick.after.loans.values())
        self.lent.append((tick.report.now_s, tick.report.next_wake_s, lent))
        recalls = [each for each in tick.report.decisions if isinstance(each, RecallNode)]
        self.recall_details += [each.reason.detail for each in recalls]
        self.loans_at_s += [tick.report.now_s for each in tick.report.decisions if isinstance(each, LendNode)]

    def on_demand_change(self, change: DemandChange) -> None:
        """Ignore demand."""

    def count_lent(self, from_s: float, until_s: float) -> int:
        """Return the most nodes lent at some time of the span."""
        return max((lent for at_s, wake_s, lent in self.lent if at_s < until_s and wake_s > from_s), default=0)


def simulate(lending: dict[str, Any], demand: Callable[[float], float], *, hours: float, training_s: float) -> LoanLog:
    """Simulate a pool whose nodes one long job could use at all times."""
    cluster = ClusterDocument.model_validate(
        {
            "pools": [
                {"name": "training", "kind": "training", "nodes": 1, "gpus_per_node": NODE_GPUS, "gpu": "a100-80g"},
                {
                    "name": "inference",
                    "kind": "inference",
                    "nodes": NODES,
                    "gpus_per_node": NODE_GPUS,
                    "gpu": "a100-80g",
                    "lending": {"headroom": 0, "return_deadline_s": 300, "cold_start_s": 300, **lending},
                },
            ],
            "elastic": {"from_gpus": 1, "min_ratio": 0.1, "max_ratio": 16},
        }
    )
    rows = [
        DemandRow(2 + at, at * 300.0, "inference", demand(at * 300.0), is_load=False) for at in range(int(hours * 12))
    ]
    policies, log = load_policy_set("ebbtide"), LoanLog()
    jobs = [JobRow(2 + at, f"job-{at}", 0.0, training_s, NODE_GPUS) for at in range(NODES)]
    scenario = build_scenario(jobs, rows, cluster, policies, seed=0, curves=CurveCache())
    Simulation(scenario, policies, observers=[log]).run()
    return log


PROFILE = {"demand_profile": [4.0] * 24}


@settings(max_examples=4, deadline=None, derandomize=True)
@given(st.integers(3 * 3_600, 6 * 3_600), st.integers(9, NODES * NODE_GPUS))
def test_nodes_are_back_before_a_known_event(start_s: int, gpus: int) -> None:
    event = {"name": "launch", "start_s": start_s, "duration_s": "1h", "gpus": gpus}
    log = simulate({**PROFILE, "known_events": [event]}, lambda at_s: 2.0, hours=12, training_s=6 * HOUR_S)
    assert log.count_lent(0.0, start_s) > 0, "the pool lends before the event"
    assert any("'launch'" in detail for detail in log.recall_details)
    assert log.count_lent(start_s - 300.0, start_s + HOUR_S) * NODE_GPUS <= NODES * NODE_GPUS - gpus


def test_pool_without_an_event_lends_through_the_same_hours() -> None:
    log = simulate(PROFILE, lambda at_s: 2.0, hours=12, training_s=6 * HOUR_S)
    assert log.count_lent(4 * HOUR_S, 5 * HOUR_S) == 6


def test_nothing_is_lent_in_a_blackout() -> None:
    lending = {**PROFILE, "time_zone": "Asia/Kolkata", "blackouts": [{"cron": "0 */2 * * *", "duration_s": "1h"}]}
    log = simulate(lending, lambda at_s: 2.0 + 20.0 * (at_s % 7_200.0 < 1_800.0), hours=12, training_s=4 * HOUR_S)
    minutes_by_the_clock = [(at_s + 5.5 * HOUR_S) % (2 * HOUR_S) / 60.0 for at_s in log.loans_at_s]
    assert len(minutes_by_the_clock) > 5
    assert min(minutes_by_the_clock) >= 60.0


@pytest.mark.parametrize(("profile", "lends"), [(True, True), (False, False)])
def test_profile_of_the_true_demand_lends_on_the_first_day(profile: bool, lends: bool) -> None:
    hourly = [6.0 + 10.0 * (8 <= hour < 20) for hour in range(24)]
    lending = {"demand_profile": hourly} if profile else {}
    log = simulate(lending, lambda at_s: hourly[int(at_s % DAY_S // HOUR_S)], hours=20, training_s=HOUR_S)
    assert bool(log.loans_at_s) is lends
