"""Published schedulers in the simulator: small traces worked out by hand, and published results for whole ones."""

from __future__ import annotations

import pytest

from scheduler.documents.document import parse_document
from scheduler.documents.simulation import ClusterDocument
from scheduler.documents.trace_files import JobRow
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.simulator.engine import Simulation
from scheduler.simulator.simulate import build_scenario, resolve_policy_sets
from scheduler.simulator.throughput_curves import CurveCache
from tests.benchmarks.reproduce import MURI, MURI_JOBS, Published, simulate_muri, traces

FOUR_GPUS = parse_document(
    ClusterDocument,
    {
        "pools": [{"name": "training", "kind": "training", "nodes": 1, "gpus_per_node": 4, "gpu": "a100-80g"}],
        "reconfiguration_s": 0,
        "storage_bytes_per_s": None,
    },
)
SHORT = (JobRow(2, "a", 0, 100, 4), JobRow(3, "b", 10, 20, 2), JobRow(4, "c", 10, 50, 2), JobRow(5, "d", 20, 200, 1))
LONG_AND_MIDDLE = (JobRow(2, "a", 0, 3000, 4), JobRow(3, "b", 1, 1000, 4))
LONG = (JobRow(2, "a", 0, 2000, 4), JobRow(3, "b", 100, 500, 4), JobRow(4, "c", 110, 10, 4))


def ends_s(jobs: tuple[JobRow, ...], name: str) -> dict[str, float]:
    """Return when each job ends on four GPUs."""
    (policies,), curves = resolve_policy_sets(name, FOUR_GPUS), CurveCache()
    simulation = Simulation(
        build_scenario(jobs, (), FOUR_GPUS, policies, seed=0, curves=curves), policies, curves=curves
    )
    simulation.run()
    return {job.id: job.state_since_s for job in simulation.memory_store.list_ended_jobs(limit=10)}


BY_HAND = [
    (SHORT, "sjf", {"a": 100.0, "b": 120.0, "c": 150.0, "d": 320.0}),  # no preemption; d fits beside c at 120 s
    # b and c preempt a at 10 s, with 90 s left. b ends at 30 s; d fits beside c, a does not. a preempts d at 60 s.
    (SHORT, "srtf", {"a": 150.0, "b": 30.0, "c": 60.0, "d": 320.0}),
    # At 60 s, d has 170 GPU-s left and a has 360, so d runs on and a does not fit beside it.
    (SHORT, "srsf", {"a": 320.0, "b": 30.0, "c": 60.0, "d": 230.0}),
    # a moves to the second queue at 3,250 GPU-s, at 812.5 s; b stays in the first, and c comes after it.
    (LONG, "las", {"a": 2510.0, "b": 1312.5, "c": 1322.5}),
    # a moves to the second queue at 812.5 s and b at 1,625 s. There a waits, so that b lets it pass. a moves to the
    # third queue at 2,612.5 s, b has 187.5 s left, and then a has 1,200 s left.
    (LONG_AND_MIDDLE, "las", {"a": 4000.0, "b": 2800.0}),
]


@pytest.mark.parametrize(
    ("jobs", "name", "expected"), BY_HAND, ids=[f"{name} of {len(jobs)}" for jobs, name, _ in BY_HAND]
)
def test_small_trace_ends_as_worked_out_by_hand(
    jobs: tuple[JobRow, ...], name: str, expected: dict[str, float]
) -> None:
    assert ends_s(jobs, name) == pytest.approx(expected)
    assert not load_policy_set(name).scales


@pytest.mark.parametrize("published", MURI, ids=lambda published: published.policy)
def test_muri_trace_matches_muris_simulator(published: Published) -> None:
    try:
        traces(MURI_JOBS)
    except FileNotFoundError as missing:
        pytest.skip(f"{missing} is missing")
    report = simulate_muri(published.policy)
    print(f"\n{published.policy}: JCT {report.jct_s.mean:,.0f} s, waiting {report.queueing_s.mean:,.0f} s")
    assert report.completed == report.jobs == 992
    assert report.jct_s.mean == pytest.approx(published.jct_s, rel=published.tolerance)
    assert report.queueing_s.mean == pytest.approx(published.waiting_s, rel=published.tolerance)
