"""Measured steps of running jobs: when they are recorded, and what `explain` says of them."""

from __future__ import annotations

from dataclasses import replace
from math import log

import pytest

from scheduler.domain.commands import Command, ReportProgress
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.observation import Observation
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.explanation import explain
from scheduler.scheduling.snapshot_update import update_snapshot
from scheduler.scheduling.step_learning import MEASUREMENT_S_MIN, predict_step_factor
from tests.builders import a_fleet, a_job, a_snapshot

FLEET = a_fleet(training=4, inference=0)
TERMS = (0.6, 0.2, 0.1, 0.0, 0.05, 0.05)


def a_runner(job_id: str, node: str, owner: str = "", *, predicted: bool = True) -> Job:
    """Return a job that runs on 8 GPUs with a step of 10 s, as predicted by the cost model or not."""
    job = a_job(
        job_id,
        8,
        state=JobState.RUNNING,
        on={node: tuple(range(8))},
        model="gpt2",
        global_batch=64,
    )
    plan = job.allocation.plan
    assert plan is not None
    plan = replace(plan, iteration_time_s=10.0, terms=TERMS if predicted else ())
    return replace(job, allocation=replace(job.allocation, plan=plan), owner=owner)


def run_until(snapshot: Snapshot, at_s: float, steps: float, job_id: str = "a") -> Snapshot:
    """Report the steps of a job at a time."""
    report = Command("r", at_s, ReportProgress(job_id, 1, steps))
    return update_snapshot(replace(snapshot, now_s=at_s), Observation(at_s, -1), [report]).snapshot


def test_a_job_that_has_run_long_enough_is_recorded() -> None:
    """Its steps take 15 s; corrections average old and new ratio, so two reports leave 1.375."""
    early = run_until(a_snapshot(FLEET, [a_runner("a", "t0")]), 0.5 * MEASUREMENT_S_MIN, 4)
    assert not early.step_measurements
    late = run_until(early, 300.0, 20)
    ((key, known),) = late.step_measurements.items()
    assert key == "a100-80g gpt2/seq-0"
    assert [row.job for row in known.rows] == ["a"]
    assert known.rows[0].log_ratio == pytest.approx(log(late.jobs["a"].progress.correction), abs=1e-3)


def test_plans_that_the_cost_model_did_not_predict_are_not_recorded() -> None:
    snapshot = run_until(a_snapshot(FLEET, [a_runner("a", "t0", predicted=False)]), 300.0, 20)
    assert not snapshot.step_measurements
    assert predict_step_factor(snapshot, snapshot.jobs["a"]) is None


def test_explanation_compares_measured_and_predicted_steps() -> None:
    """The own rows of the explained job do not count, those of its owner's other jobs do."""
    jobs = [a_runner("a", "t0", "ann"), a_runner("b", "t1", "ann")]
    snapshot = run_until(a_snapshot(FLEET, jobs), 300.0, 20)
    explained = explain(snapshot, {}, "a").summary
    assert "a step takes 12.5 s (predicted 10 s" in explained
    snapshot = run_until(snapshot, 310.0, 20, "b")
    factor = predict_step_factor(snapshot, snapshot.jobs["a"])
    assert factor is not None
    assert factor.mean > 1.1
    assert f"predicted {10 * factor.mean:.3g} s" in explain(snapshot, {}, "a").summary


def test_a_stalled_job_hardly_moves_the_predictions_of_other_owners() -> None:
    jobs = [a_runner("a", "t0", "ann"), a_runner("b", "t1", "bob")]
    snapshot = run_until(a_snapshot(FLEET, jobs), 86_400.0, 1)
    factor = predict_step_factor(snapshot, snapshot.jobs["b"])
    assert factor is not None
    assert factor.mean == pytest.approx(1.0, abs=0.02)
