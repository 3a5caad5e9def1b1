"""Receipts of recalls in short random simulations with faults."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.documents.trace_files import DemandRow
from scheduler.domain.recall_receipts import RecallOutcome
from scheduler.scheduling.policies.settings import PolicySettings
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.simulator.engine import Simulation
from scheduler.simulator.fault_injection import FaultKind, FaultRates, SeededFaultInjector
from scheduler.simulator.simulate import SimulationOptions, build_scenario, simulate
from scheduler.simulator.throughput_curves import CurveCache
from tests.simulation.receipt_checks import check_receipts
from tests.simulation.synthetic import small_cluster, synthetic_jobs

POLICIES = load_policy_set("ebbtide", PolicySettings())
RATES = FaultRates(
    until_s=50_000.0,
    mean_gap_s={
        FaultKind.NODE_LOSS: 3_000.0,
        FaultKind.WORKER_CRASH: 2_000.0,
        FaultKind.SLOW_CHECKPOINT: 1_000.0,
        FaultKind.STALE_OBSERVATION: 1_000.0,
        FaultKind.LOST_COMMIT: 1_000.0,
    },
)


OPTIONS = SimulationOptions(forecast="oracle")
CLUSTER = small_cluster(training=1, inference=3)


def restless_demand(seed: int) -> tuple[DemandRow, ...]:
    """Return demand of half a day that jumps every half hour, so that nodes are often recalled."""
    random = Random(f"demand/{seed}")
    return tuple(
        DemandRow(number + 2, number * 600.0, "inference", float(random.choice((0, 4, 12, 20))), is_load=False)
        for number in range(72)
    )


@settings(max_examples=3, deadline=None)
@given(st.integers(0, 10_000))
def test_each_recall_has_one_receipt_under_faults(seed: int) -> None:
    simulate_with_faults(seed)


@pytest.mark.full
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000))
def test_each_recall_has_one_receipt_under_faults_with_more_seeds(seed: int) -> None:
    simulate_with_faults(seed)


def simulate_with_faults(seed: int) -> None:
    """Simulate one seed with faults, and check its receipts."""
    jobs = synthetic_jobs(seed, 16, gap_s=1_500.0, mean_s=6_000.0, sizes=(4, 8))
    demand = restless_demand(seed)
    scenario = build_scenario(jobs, demand, CLUSTER, POLICIES, seed=seed, curves=CurveCache(), options=OPTIONS)
    faults = SeededFaultInjector(seed, tuple(node.name for node in scenario.nodes), RATES)
    simulation = Simulation(scenario, POLICIES, faults=faults)
    last = simulation.run()
    receipts = check_receipts(simulation.memory_store, last)
    assert len(receipts) >= 5, "the demand recalls nodes"


def test_report_counts_recalls_by_outcome() -> None:
    jobs = synthetic_jobs(1, 16, gap_s=1_500.0, mean_s=6_000.0, sizes=(4, 8))
    (report,) = simulate(jobs, restless_demand(1), CLUSTER, "ebbtide", seed=1, options=OPTIONS).policies
    assert report.recalls == sum(report.recall_outcomes.values()) > 0
    assert report.recall_outcomes.keys() == {each.value for each in RecallOutcome}
    assert report.recall_outcomes["late"] == report.recalls_late
