"""Simulations under several seeds: intervals, paired differences and parallel processes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from scheduler.documents.trace_files import DemandRow, JobRow
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.simulator.report import PolicyReport, TickTimes
from scheduler.simulator.seed_sweep import (
    SweepReport,
    compute_confidence_interval,
    compute_student_t_bound,
    flatten_metrics,
    simulate_seeds,
)
from scheduler.simulator.simulate import SimulationInputs, SimulationOptions, simulate
from scheduler.simulator.workloads import WorkloadError
from tests.simulation.synthetic import small_cluster, synthetic_jobs

WAVE_GPUS = (4.0, 8.0, 14.0, 20.0, 12.0, 6.0)
INPUTS = SimulationInputs(
    synthetic_jobs(3, 12, gap_s=600.0, mean_s=32000.0),
    tuple(DemandRow(at + 2, at * 1800.0, "inference", gpus, is_load=False) for at, gpus in enumerate(WAVE_GPUS)),
    small_cluster(training=1, inference=3),
)
OPTIONS = SimulationOptions(forecast="oracle")


def without_durations(report: PolicyReport) -> PolicyReport:
    return replace(report, wall_s=0.0, tick_s=TickTimes(0.0, 0.0, 0.0))


@pytest.mark.parametrize(
    ("freedom", "bound"),
    [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (5, 2.57058), (9, 2.26216), (30, 2.04227), (999, 1.96234)],
)
def test_student_t_bounds_match_published_tables(freedom: int, bound: float) -> None:
    assert compute_student_t_bound(0.95, freedom) == pytest.approx(bound, rel=1e-5)


def test_confidence_interval_matches_a_manual_calculation() -> None:
    half = 4.30265 * 2.0 / 3**0.5
    assert compute_confidence_interval([8.0, 10.0, 12.0]) == pytest.approx(
        {"mean": 10.0, "low": 10.0 - half, "high": 10.0 + half}
    )


def test_parallel_reports_equal_those_of_simulate() -> None:
    calls: list[tuple[int, int]] = []
    runs = simulate_seeds(INPUTS, "fifo,ebbtide", (1, 2), processes=2, progress=lambda *done: calls.append(done))
    alone = [simulate(INPUTS.jobs, INPUTS.demand, INPUTS.cluster, "fifo,ebbtide", seed=seed) for seed in (1, 2)]
    for run, expected in zip(runs, alone, strict=True):
        assert run.seed == expected.seed
        assert list(map(without_durations, run.policies)) == list(map(without_durations, expected.policies))
        assert run.series == expected.series
    assert calls[-1] == (48, 48)


def test_report_has_means_intervals_and_differences_to_the_first_policy() -> None:
    runs = simulate_seeds(INPUTS, "fifo,ebbtide", (1, 2, 3), options=OPTIONS)
    document = SweepReport(runs).to_json()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert (document["seeds"], document["runs"]) == ([1, 2, 3], [run.to_json() for run in runs])
    fifo, ebbtide = document["policies"]
    assert (fifo["policy"], fifo["differences"], ebbtide["policy"]) == ("fifo", {}, "ebbtide")
    lent = [[policy.loaned_gpu_hours for policy in run.policies] for run in runs]
    assert ebbtide["figures"]["loaned_gpu_hours"] == compute_confidence_interval([mine for _, mine in lent])
    assert ebbtide["differences"]["loaned_gpu_hours"] == compute_confidence_interval(
        [mine - first for first, mine in lent]
    )
    assert ebbtide["figures"]["loaned_gpu_hours"]["low"] < ebbtide["figures"]["loaned_gpu_hours"]["high"]
    assert fifo["figures"]["jobs"] == {"mean": 12.0, "low": 12.0, "high": 12.0}
    assert set(fifo["figures"]) == set(flatten_metrics(document["runs"][0]["policies"][0]))


def test_error_of_another_process_is_raised() -> None:
    jobs = (JobRow(2, "a", 0.0, 10.0, 9),)
    with pytest.raises(WorkloadError, match="jobs line 2"):
        simulate_seeds(replace(INPUTS, jobs=jobs), "fifo,ebbtide", (1, 2), processes=2)


def test_policy_that_cannot_be_pickled_is_refused_by_name() -> None:
    mine = replace(load_policy_set("fifo"), name="mine", order=lambda snapshot, settings: ())
    with pytest.raises(ValueError, match=r"policy mine .*process"):
        simulate_seeds(INPUTS, [mine], (0, 1), processes=2)
