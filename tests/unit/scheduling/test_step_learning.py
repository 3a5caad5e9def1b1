"""Measured steps of running jobs: when they are recorded, and what `explain` says of them."""

from __future__ import annotations

from dataclasses import replace
from math import log

import pytest

from scheduler.domain.commands import Command, ReportProgress, SolverChanged, SubmitJob
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.learned_constants import CurveConstants
from scheduler.domain.observation import Observation
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.step_measurements import ModelMeasurements, StepMeasurement
from scheduler.scheduling.explanation import explain
from scheduler.scheduling.mutable_snapshot import MutableSnapshot
from scheduler.scheduling.snapshot_update import update_snapshot
from scheduler.scheduling.step_learning import MEASUREMENT_S_MIN, learn_constants, predict_step_factor
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
    plan = replace(plan, iteration_time_s=10.0, terms=TERMS if predicted else (), profile_time_s=10.0)
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


def test_explanation_names_what_the_plan_learned() -> None:
    job = a_runner("a", "t0", "ann")
    job = replace(job, constants=CurveConstants(SLOW, SLOW, SLOW))
    snapshot = run_until(a_snapshot(FLEET, [job]), 300.0, 20)
    assert "network of a100-80g takes 3.1 times as long" in explain(snapshot, {}, "a").summary


def test_a_stalled_job_hardly_moves_the_predictions_of_other_owners() -> None:
    jobs = [a_runner("a", "t0", "ann"), a_runner("b", "t1", "bob")]
    snapshot = run_until(a_snapshot(FLEET, jobs), 86_400.0, 1)
    factor = predict_step_factor(snapshot, snapshot.jobs["b"])
    assert factor is not None
    assert factor.mean == pytest.approx(1.0, abs=0.02)


NODE_TERMS = (0.9, 0.1, 0.0, 0.0, 0.0, 0.0)
SLOW = (("a100-80g", (0, 0, 5, 0, 0, 0)),)


def with_measured_network(snapshot: Snapshot, owner: str) -> Snapshot:
    """Return the snapshot after an owner's plans: as predicted on one node, and 2.5 times as slow on several."""
    rows = [
        StepMeasurement.from_ratio(f"past-{nodes}-{at}", owner, terms, (0.0, float(at), float(nodes)), ratio)
        for at in range(2)
        for nodes, terms, ratio in ((0, NODE_TERMS, 1.0), (1, (0.7, 0.0, 0.3, 0.0, 0.0, 0.0), 2.5))
    ]
    known = {"a100-80g gpt2/seq-0": ModelMeasurements(0.0, tuple(rows))}
    return replace(snapshot, step_measurements=known)


def learn(snapshot: Snapshot) -> Snapshot:
    """Let a row of ann change, at which her jobs learn."""
    updated = MutableSnapshot(snapshot)
    ((key, known),) = snapshot.step_measurements.items()
    updated.step_measurements = {key: replace(known, updated_at_s=1.0)}
    learn_constants(updated)
    return updated.view()


def test_jobs_learn_from_their_owners_rows_only() -> None:
    jobs = [a_runner("a", "t0", "ann"), a_runner("b", "t1", "bob")]
    snapshot = with_measured_network(a_snapshot(FLEET, jobs), jobs[0].owner_key)
    learned = learn(snapshot).jobs
    ((gpu, levels),) = learned["a"].constants.newest
    assert gpu == "a100-80g"
    assert levels[2] >= 4
    assert levels[0] == levels[1] == 0
    assert learned["b"].constants == CurveConstants()


def test_a_running_job_keeps_its_curve_until_the_next_one_is_solved() -> None:
    job = a_runner("a", "t0", "ann")
    learned = learn(with_measured_network(a_snapshot(FLEET, [job]), job.owner_key)).jobs["a"]
    assert (learned.curve_key, learned.is_curve_current) == (job.curve_key, False)
    assert {request.key for request in learned.curve_requests} == {learned.curve_key, learned.next_curve_key}
    assert learned.with_next_curve().curve_key == learned.next_curve_key


def test_a_new_job_starts_with_what_its_owner_has_learned() -> None:
    owner = a_runner("x", "t0", "ann").owner_key
    snapshot = with_measured_network(a_snapshot(FLEET, []), owner)
    spec = a_job("a", 8, model="gpt2", global_batch=64).spec
    command = Command("s", 1.0, SubmitJob("a", spec), actor="ann")
    job = update_snapshot(replace(snapshot, now_s=1.0), Observation(1.0, -1), [command]).snapshot.jobs["a"]
    assert job.constants.newest[0][1][2] >= 4
    assert job.constants.newest == job.constants.curve == job.constants.plan


@pytest.mark.parametrize(("measured", "rebased"), [(1.3, 1.079), (2.0, 1.25), (0.2, 0.8)])
def test_a_correction_is_relative_to_the_constants_of_the_curve(measured: float, rebased: float) -> None:
    """A plan of 10 s by the profile is predicted at 12.1 s if the network takes 3.05 times as long."""
    job = a_runner("a", "t0", "ann").with_constants(SLOW).with_next_curve()
    job = replace(job, progress=replace(job.progress, correction=measured))
    assert job.curve_correction == pytest.approx(rebased, abs=1e-3)
    assert job.with_new_plan(job.curve_correction).constants.plan == SLOW


def test_a_waiting_job_switches_at_once() -> None:
    job = a_job("a", 8, model="gpt2", global_batch=64)
    job = replace(job, progress=replace(job.progress, correction=1.7)).with_constants(SLOW)
    assert job.is_curve_current
    assert not job.needs_new_plan
    assert job.curve_correction == 1.0


def test_changed_hardware_makes_jobs_forget_what_they_measured_on_it() -> None:
    """The running plan stays, but no row is recorded of it: the prediction was for the old hardware."""
    job = a_runner("a", "t0", "ann").with_constants(SLOW)
    snapshot = with_measured_network(a_snapshot(FLEET, [job]), job.owner_key)
    change = Command("c", 1.0, SolverChanged("", {"a100-80g": "digest"}), actor="solver")
    changed = update_snapshot(replace(snapshot, now_s=1.0), Observation(1.0, -1), [change]).snapshot
    assert not changed.step_measurements
    assert changed.jobs["a"].constants.newest == ()
    assert changed.jobs["a"].allocation == job.allocation
    assert not run_until(changed, 300.0, 20).step_measurements


@pytest.mark.parametrize(("measured", "percent"), [((0.7, 0.8), 90), ((0.7, 0.98), 100), ((0.7, 0.0), 100)])
def test_a_waiting_job_expects_the_memory_that_plans_of_its_model_took(
    measured: tuple[float, ...], percent: int
) -> None:
    """One measured plan is not enough, and the largest of several counts."""
    job = a_job("a", 8, model="gpt2", global_batch=64)
    rows = tuple(
        StepMeasurement.from_ratio(f"past-{at}", job.owner_key, NODE_TERMS, (float(at),), 1.0).with_memory(memory)
        for at, memory in enumerate(measured)
    )
    snapshot = a_snapshot(FLEET, [job], step_measurements={"a100-80g gpt2/seq-0": ModelMeasurements(0.0, rows)})
    learned = learn(snapshot).jobs["a"]
    assert learned.memory.percent == percent
    assert (learned.curve_key == job.curve_key) == (percent == 100)
