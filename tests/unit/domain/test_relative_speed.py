"""Relative speeds of GPU models: their sources, and the plans that follow from them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.domain.codec import decode, encode
from scheduler.domain.fleet import Node, Pool
from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.job import Job, Progress
from scheduler.domain.job_speed import with_measured_speeds
from scheduler.domain.job_state import JobState
from scheduler.domain.relative_speed import SpeedSource, choose_reference_gpu, resolve_prior_speeds
from scheduler.domain.scaling_curve import LINEAR_CURVE, LinearCurve
from scheduler.domain.snapshot import Snapshot
from tests.builders import a_fleet, a_job, a_node, a_snapshot

THROUGHPUTS = {"t4": 2.0, "v100-32g": 8.0, "a100-80g": 16.0}
PACKED = {gpu: GpuShape.packed(gpu, 8, 8) for gpu in THROUGHPUTS}
POSITIVE = st.floats(0.01, 100.0)


def curve_of(job: Job) -> LinearCurve:
    """Return the curve of a job whose reference is V100."""
    return with_measured_speeds(job, LinearCurve(resolve_prior_speeds("v100-32g", job.spec.speeds, THROUGHPUTS)))


def on(job: Job, gpu: str, curve: LinearCurve, *, correction: float) -> Job:
    """Return the job as it runs on 8 GPUs of a model, with this measured correction of its plan."""
    plan = curve.plan_for(PACKED[gpu])
    allocation = replace(job.allocation, target={gpu: tuple(range(8))}, plan=plan)
    progress = replace(job.progress, correction=correction)
    return replace(job, state=JobState.RUNNING, state_since_s=0.0, allocation=allocation, progress=progress)


def step_time_s(job: Job, gpu: str) -> float:
    plan = curve_of(job).plan_for(PACKED[gpu])
    assert plan is not None
    return plan.iteration_time_s * job.curve_correction


def moved(job: Job, gpu: str, *, measured_step_s: float) -> Job:
    """Return the job after it ran for an hour on GPUs of a model, with this step time."""
    curve = curve_of(job)
    running = on(job, gpu, curve, correction=1.0)
    running = on(job, gpu, curve, correction=measured_step_s / running.step_time_s())
    return running.transition_to(JobState.RESIZING, 3600.0)


def test_reference_is_the_most_common_training_model() -> None:
    assert choose_reference_gpu({"t4": 8, "v100-32g": 16, "a100-80g": 16, "cpu": 0}) == "a100-80g"
    assert choose_reference_gpu({"t4": 0}) == ""


def test_speeds_without_a_declaration_are_those_of_the_profiles() -> None:
    speeds = resolve_prior_speeds("v100-32g", {}, THROUGHPUTS)
    assert {gpu: speed.value for gpu, speed in speeds.items()} == {"t4": 0.25, "v100-32g": 1.0, "a100-80g": 2.0}
    assert {speed.source for speed in speeds.values()} == {SpeedSource.PROFILE}


def test_declared_speeds_are_relative_to_the_reference() -> None:
    speeds = resolve_prior_speeds("v100-32g", {"v100-32g": 2.0, "t4": 1.0}, THROUGHPUTS)
    assert (speeds["t4"].value, speeds["t4"].source) == (0.5, SpeedSource.DECLARED)
    assert (speeds["a100-80g"].value, speeds["a100-80g"].source) == (2.0, SpeedSource.PROFILE)


def test_declared_speeds_without_the_reference_are_anchored_at_a_profile() -> None:
    speeds = resolve_prior_speeds("v100-32g", {"a100-80g": 1.0, "t4": 0.2}, THROUGHPUTS)
    assert (speeds["a100-80g"].value, speeds["t4"].value) == (2.0, 0.4)


def test_declared_speed_precedes_measured_speed_and_that_precedes_the_profile() -> None:
    job = moved(a_job("j", 8, 8), "v100-32g", measured_step_s=0.125)
    assert step_time_s(job, "t4") == pytest.approx(0.5), "by the profile"
    job = moved(job, "t4", measured_step_s=0.25)
    assert step_time_s(job, "t4") == pytest.approx(0.25), "as measured"
    assert step_time_s(job, "v100-32g") == pytest.approx(0.125), "as measured before"
    assert step_time_s(job, "a100-80g") == pytest.approx(0.03125), "by the profile, from where it ran last"
    declared = replace(job, spec=replace(job.spec, speeds={"v100-32g": 1.0, "t4": 0.1}))
    assert step_time_s(declared, "t4") == pytest.approx(10.0 * step_time_s(declared, "v100-32g"))


@given(first=POSITIVE, second=POSITIVE, third=POSITIVE)
def test_each_measured_model_keeps_its_step_time_after_any_moves(first: float, second: float, third: float) -> None:
    job = moved(a_job("j", 8, 8), "v100-32g", measured_step_s=first)
    job = moved(job, "t4", measured_step_s=second)
    job = moved(job, "a100-80g", measured_step_s=third)
    seen = [step_time_s(job, gpu) for gpu in ("v100-32g", "t4", "a100-80g")]
    assert seen == pytest.approx([first, second, third])
    back = on(job, "t4", curve_of(job), correction=job.progress.correction)
    assert back.step_time_s() == pytest.approx(second), "the plan on a known model has the measured speed at once"


def test_short_runs_are_not_measured() -> None:
    job = a_job("j", 8, 8)
    running = on(job, "t4", curve_of(job), correction=3.0)
    assert running.transition_to(JobState.RESIZING, 59.0).progress.measured_gpu == ""


def test_plan_from_before_the_table_keeps_its_measured_speed() -> None:
    job = on(a_job("j", 8, 8), "t4", LINEAR_CURVE, correction=5.0)
    assert step_time_s(job, "t4") == pytest.approx(job.step_time_s())
    assert step_time_s(job, "v100-32g") == pytest.approx(job.step_time_s() / 4.0)


@given(counts=st.dictionaries(st.sampled_from(sorted(THROUGHPUTS)), st.integers(1, 64), min_size=1))
def test_known_speeds_of_a_mix_add_up(counts: dict[str, int]) -> None:
    curve = curve_of(a_job("j"))
    plan = curve.plan_for(GpuShape.from_node_counts(counts.items()))
    assert plan is not None
    steps_per_s = sum(count * THROUGHPUTS[gpu] / 8.0 for gpu, count in counts.items())
    assert 1.0 / plan.iteration_time_s == pytest.approx(steps_per_s)
    assert {stage.gpu: stage.gpus for stage in plan.stages} == counts
    assert plan.summarize() == f"dp{sum(counts.values())} · 1 micro-batch"


def test_mix_with_an_unknown_speed_has_no_plan() -> None:
    mixed = GpuShape.from_node_counts([("t4", 8), ("l4", 8)])
    assert curve_of(a_job("j")).plan_for(mixed) is None
    assert LINEAR_CURVE.plan_for(mixed) is None
    alone = LINEAR_CURVE.plan_for(GpuShape.packed("l4", 8, 8))
    assert alone is not None
    assert alone.iteration_time_s == 1 / 8


@given(throughputs=st.dictionaries(st.sampled_from(["a100-80g", "t4"]), st.floats(1.0, 1e15)))
def test_fleet_of_one_model_ignores_the_table(throughputs: dict[str, float]) -> None:
    job = a_job("j", 1, 8)
    snapshot = replace(a_snapshot(a_fleet(training=2, inference=1), [job]), gpu_throughputs=throughputs)
    assert snapshot.curve(job) is LINEAR_CURVE


def two_models() -> tuple[dict[str, Pool], dict[str, Node]]:
    """Return a fleet of two training nodes of 8 A100, and an inference node of 8 T4."""
    pools, nodes = a_fleet(training=2, inference=0)
    return pools, {**nodes, "i0": a_node("i0", "inference", gpu="t4")}


def test_snapshot_without_a_table_has_equal_speeds() -> None:
    document = encode(replace(a_snapshot(two_models(), [a_job("j")]), gpu_throughputs=THROUGHPUTS))
    del document["gpu_throughputs"]
    snapshot = decode(Snapshot, document)
    assert snapshot.curve(snapshot.jobs["j"]) is LINEAR_CURVE


def test_progress_of_an_older_version_counts_for_the_model_that_is_measured_next() -> None:
    progress = decode(Progress, {"at_s": 0.0, "corrections": [[4, 2.0]]})
    assert progress.measured_gpu_s("t4") == ((4, 2.0),)
    later = progress.with_measured_gpu_s("t4", 8, 3.0).with_measured_gpu_s("a100-80g", 8, 1.0)
    assert (later.measured_gpu_s("t4"), later.measured_gpu_s("a100-80g")) == (((4, 2.0), (8, 3.0)), ((8, 1.0),))
