"""Simulations with a ground truth: jobs end when their true work is done."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from scheduler.documents.trace_files import JobRow
from scheduler.domain.job_state import JobState
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.simulator.demand import DemandChange
from scheduler.simulator.engine import Simulation, TickRecord
from scheduler.simulator.ground_truth import NOTHING_HIDDEN, GroundTruth, build_true_submissions
from scheduler.simulator.simulate import SimulationOptions, build_scenario, simulate
from scheduler.simulator.throughput_curves import CurveCache
from scheduler.simulator.workloads import build_submissions
from tests.simulation.synthetic import small_cluster, synthetic_demand

CLUSTER = small_cluster(training=2, inference=1)
DEMAND = synthetic_demand(1, 1, peak_gpus=8)
TRUTH = GroundTruth(models=True, error=0.15, duration=0.5)


def lone_jobs(count: int = 5) -> tuple[JobRow, ...]:
    """Jobs so far apart that none waits."""
    random = Random(5)
    gaps = enumerate(random.randint(3_000, 9_000) for _ in range(count))
    return tuple(JobRow(n + 2, f"job-{n}", n * 40_000.0, float(s), (1, 2, 4, 8)[n % 4]) for n, s in gaps)


class Beliefs:
    """Records what policies see of running jobs."""

    def __init__(self) -> None:
        self.remaining_steps: list[float] = []
        self.overrun: set[str] = set()

    def on_tick(self, tick: TickRecord) -> None:
        for job in tick.after.jobs.values():
            if job.state is JobState.RUNNING and job.progress.steps > job.spec.steps:
                self.overrun.add(job.id)
                self.remaining_steps.append(job.remaining_steps(tick.report.now_s) or 0.0)

    def on_demand_change(self, change: DemandChange) -> None:
        """Ignore demand."""


def test_jobs_run_as_long_as_in_the_trace() -> None:
    jobs = lone_jobs()
    (declared,) = simulate(jobs, DEMAND, CLUSTER, "fifo", seed=1).policies
    (true,) = simulate(jobs, DEMAND, CLUSTER, "fifo", seed=1, options=SimulationOptions(truth=TRUTH)).policies
    assert true.completed == declared.completed == len(jobs)
    assert true.jct_s.mean == pytest.approx(declared.jct_s.mean, rel=0.005), "steps are whole, so lengths are rounded"


def test_job_past_its_declared_length_continues_with_an_estimated_rest() -> None:
    policies = load_policy_set("fifo")
    options = SimulationOptions(truth=GroundTruth(duration=0.5))
    world = build_scenario(lone_jobs(), DEMAND, CLUSTER, policies, seed=1, curves=CurveCache(), options=options)
    low = {
        submission.job_id
        for submission in world.submissions
        if submission.steps_true and submission.steps_true > 1.3 * submission.spec.steps
    }
    beliefs = Beliefs()
    last: Snapshot = Simulation(world, policies, observers=[beliefs]).run()
    assert not last.jobs
    assert low
    assert low <= beliefs.overrun, "checkpoints show it every 15 minutes"
    assert min(beliefs.remaining_steps) > 0.0


def test_policies_do_not_see_true_length_or_speed() -> None:
    curves = CurveCache()
    rows = lone_jobs()
    declared = build_submissions([replace(row, model="") for row in rows], CLUSTER, curves, elastic=True)
    hidden = build_true_submissions(rows, CLUSTER, curves, GroundTruth(error=0.15, duration=0.5, seed=2), elastic=True)
    for plain, submission in zip(declared, hidden, strict=True):
        assert submission.spec.steps != submission.steps_true
        assert 0.5 <= submission.spec.steps / plain.spec.steps <= 1.5
        assert submission.spec.duration_estimate_s is not None
        assert plain.spec.duration_estimate_s is not None
        ratio = submission.spec.duration_estimate_s / plain.spec.duration_estimate_s
        assert ratio == pytest.approx(submission.spec.steps / plain.spec.steps, rel=0.01)


def test_bound_is_the_shortest_true_run_time_for_all_policies() -> None:
    curves, rows = CurveCache(), lone_jobs()
    rigid = build_true_submissions(rows, CLUSTER, curves, TRUTH, elastic=False)
    elastic = build_true_submissions(rows, CLUSTER, curves, TRUTH, elastic=True)
    assert [submission.run_time_s_min for submission in rigid] == [submission.run_time_s_min for submission in elastic]
    for row, submission in zip(rows, elastic, strict=True):
        assert submission.run_time_s_min <= row.duration_s * 1.01
        assert bool(submission.spec.model) == (row.gpus >= 2)


def test_default_ground_truth_is_the_trace() -> None:
    curves, rows = CurveCache(), lone_jobs()
    assert build_true_submissions(rows, CLUSTER, curves, NOTHING_HIDDEN, elastic=True) == build_submissions(
        rows, CLUSTER, curves, elastic=True
    )
