"""Whole simulations of a few jobs: exact times, determinism and report fields."""

from __future__ import annotations

import doctest
import json
from dataclasses import replace
from pathlib import Path

import pytest

from scheduler.documents.simulation import ClusterError
from scheduler.documents.trace_files import DemandRow, JobRow, TraceError
from scheduler.simulator import simulate as module
from scheduler.simulator.demand import DemandError
from scheduler.simulator.report import PolicyReport, TickTimes
from scheduler.simulator.simulate import SimulationOptions, load_inputs, simulate
from tests.simulation.synthetic import small_cluster, synthetic_demand, synthetic_jobs

CLUSTER = small_cluster(training=1, inference=1)
QUIET = (DemandRow(2, 0.0, "inference", 8.0, is_load=False),)

CONTRACT = {
    "policy": None,
    "jobs": None,
    "completed": None,
    "queueing_s": {"mean", "p50", "p95", "p99"},
    "jct_s": {"mean", "p50", "p95", "p99"},
    "jct_elastic_s": {"mean", "p50", "p95", "p99"},
    "jct_bound_s": None,
    "makespan_s": None,
    "usage_ratio": {"training", "inference", "overall"},
    "idle_while_waiting_gpu_hours": None,
    "loaned_gpu_hours": None,
    "unused_loan_gpu_hours": None,
    "loans": None,
    "recalls": None,
    "recalls_late": None,
    "preemptions": None,
    "preemption_ratio": None,
    "resizes": None,
    "collateral_gpus": None,
    "lost_gpu_hours": None,
    "lost_ratio": None,
    "inference_short_intervals_ratio": {"first_pass", "all"},
    "ticks": None,
    "tick_s": {"p50", "p99", "max"},
    "wall_s": None,
    "deadlines_met_ratio": None,
    "rejected": None,
    "violations": None,
    "violated": None,
    "incomplete_saves": None,
    "unserved_gpu_hours": None,
}
"""Names of the report that other programs use."""


def simulate_jobs(*jobs: JobRow, policy: str = "fifo") -> PolicyReport:
    (report,) = simulate(jobs, QUIET, CLUSTER, policy, seed=0).policies
    return report


def without_durations(report: PolicyReport) -> PolicyReport:
    """Return the report without real durations."""
    return replace(report, wall_s=0.0, tick_s=TickTimes(0.0, 0.0, 0.0))


def test_jobs_run_as_long_as_in_the_trace_and_queue() -> None:
    report = simulate_jobs(JobRow(2, "a", 0.0, 100.0, 8), JobRow(3, "b", 10.0, 50.0, 4), JobRow(4, "c", 10.0, 60.0, 4))
    assert (report.jobs, report.completed, report.makespan_s) == (3, 3, 160.0)
    assert report.queueing_s.mean == 60.0
    assert report.jct_s.mean == pytest.approx((100 + 140 + 150) / 3)
    assert (report.lost_gpu_hours, report.preemptions, report.resizes, report.loans) == (0.0, 0, 0, 0)


def test_usage_and_idle_gpus_match_a_manual_calculation() -> None:
    report = simulate_jobs(JobRow(2, "a", 0.0, 100.0, 6), JobRow(3, "b", 50.0, 50.0, 4), JobRow(4, "c", 200.0, 1.0, 1))
    assert report.usage_ratio.training == pytest.approx((600 + 200) / (8 * 200))
    assert report.usage_ratio.inference == 1.0
    assert report.usage_ratio.overall == pytest.approx((800 + 1600) / (16 * 200))
    assert report.idle_while_waiting_gpu_hours == pytest.approx(2 * 50 / 3600)


def test_elastic_policy_grows_a_single_job() -> None:
    report = simulate_jobs(JobRow(2, "a", 0.0, 1000.0, 4), policy="ebbtide")
    assert report.jct_s.mean == pytest.approx(500.0)
    assert report.jct_bound_s == 500.0


def test_report_is_determined_by_the_seed() -> None:
    jobs = synthetic_jobs(3, 60, gap_s=2500.0, mean_s=8000.0)
    cluster = small_cluster(training=2, inference=3)
    demand = synthetic_demand(3, 1, peak_gpus=20.0)
    first, again, other = (
        without_durations(simulate(jobs, demand, cluster, "ebbtide", seed=seed).policies[0]) for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other
    assert first.completed == 60
    assert first.loans > 0
    assert first.recalls_late == 0


def test_report_has_the_documented_fields() -> None:
    report = simulate([JobRow(2, "a", 0.0, 10.0, 1)], QUIET, CLUSTER, "fifo, ebbtide", seed=5).to_json()
    assert (report["seed"], [entry["policy"] for entry in report["policies"]]) == (5, ["fifo", "ebbtide"])
    for entry in report["policies"]:
        assert list(entry) == list(CONTRACT)
        assert {name: set(entry[name]) for name, inner in CONTRACT.items() if inner} == {
            name: inner for name, inner in CONTRACT.items() if inner
        }
    assert json.loads(json.dumps(report, allow_nan=False)) == report


def test_progress_counts_ended_jobs_of_all_policies() -> None:
    calls: list[tuple[int, int]] = []
    jobs = [JobRow(2, "a", 0.0, 10.0, 1), JobRow(3, "b", 0.0, 20.0, 1)]
    simulate(jobs, QUIET, CLUSTER, "fifo,ebbtide", seed=0, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'lifo'.*fifo"):
        simulate_jobs(JobRow(2, "a", 0.0, 10.0, 1), policy="fifo,lifo")


def test_error_names_the_invalid_file_line_and_field(tmp_path: Path) -> None:
    jobs, demand, cluster = tmp_path / "jobs.csv", tmp_path / "demand.csv", tmp_path / "cluster.yaml"
    jobs.write_text("job_id,submit_time_s,duration_s,gpus\na,0,10,1\n")
    demand.write_text("time_s,pool,gpus\n0,inference,3\n")
    pool = "name: training, kind: training, nodes: 1, gpus_per_node: 8"
    cluster.write_text(f"pools: [{{{pool}, gpu: a100-80g}}]")
    assert len(load_inputs(jobs, demand, cluster).jobs) == 1
    cluster.write_text(f"pools: [{{{pool}, gpu: abacus}}]")
    with pytest.raises(ClusterError, match=r"cluster\.yaml line 1: pools\.0\.gpu: .*'abacus'.*a100-80g"):
        load_inputs(jobs, demand, cluster)
    jobs.write_text("job_id,submit_time_s,duration_s,gpus\na,0,10,0\n")
    with pytest.raises(TraceError, match=r"jobs\.csv line 2: gpus: .*'0'"):
        load_inputs(jobs, demand, cluster)


def test_docstring_example_runs() -> None:
    assert doctest.testmod(module) == doctest.TestResults(failed=0, attempted=11)


def test_demand_is_required_with_inference_pools_only() -> None:
    alone = CLUSTER.model_copy(update={"pools": CLUSTER.pools[:1]})
    jobs = (JobRow(2, "a", 0.0, 100.0, 8),)
    (report,) = simulate(jobs, (), alone, "ebbtide", seed=0).policies
    assert (report.completed, report.usage_ratio.inference, report.loans) == (1, 0.0, 0)
    with pytest.raises(DemandError, match=r"demand: .*inference"):
        simulate(jobs, (), CLUSTER, "fifo", seed=0)
    with pytest.raises(DemandError, match="no inference pool"):
        simulate(jobs, QUIET, alone, "fifo", seed=0)


def test_oracle_lends_without_a_shortage() -> None:
    jobs = synthetic_jobs(3, 30, gap_s=2500.0, mean_s=8000.0)
    demand, cluster = synthetic_demand(3, 1, peak_gpus=22.0), small_cluster(training=1, inference=3)
    (report,) = simulate(
        jobs, demand, cluster, "ebbtide", seed=1, options=SimulationOptions(forecast="oracle")
    ).policies
    assert report.loans > 0
    assert (report.inference_short_intervals_ratio.all, report.recalls_late) == (0.0, 0)
    with pytest.raises(ValueError, match=r"forecast: .*'tarot'.*persistence, oracle"):
        SimulationOptions(forecast="tarot")
