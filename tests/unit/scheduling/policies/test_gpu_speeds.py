"""Step times and remaining times of jobs without a model on unlike GPU models."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.job import Job
from scheduler.domain.job_records import GpuMeasurements
from scheduler.domain.job_state import JobState
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.explanation import explain
from scheduler.scheduling.policies.allotment import curve_speeds
from scheduler.scheduling.policies.speed import (
    describe_speeds,
    gpu_model,
    linear_step_times_s,
    node_sizes,
    relative_speeds,
    remaining_s,
    step_time_s,
)
from tests.builders import a_fleet, a_job, a_node, a_snapshot

THROUGHPUTS = {"t4": 20.0, "v100-32g": 60.0, "a100-80g": 150.0}


def seen(*jobs: Job, throughputs: dict[str, float] = THROUGHPUTS) -> Snapshot:
    """Return training nodes of V100, and inference nodes of T4."""
    pools, _ = a_fleet(training=0, inference=0)
    training = [a_node(f"v{at}", gpu="v100-32g") for at in range(3)]
    lent = [a_node(f"t{at}", "inference", gpu="t4") for at in range(2)]
    nodes = {node.name: node for node in (*training, *lent)}
    return replace(a_snapshot((pools, nodes), jobs), gpu_throughputs=throughputs)


def placed(job: Job, node: str, snapshot: Snapshot, *, correction: float = 1.0) -> Job:
    """Return the job as it runs on 8 GPUs of a node, under the plan of its curve."""
    gpus = {node: tuple(range(8))}
    plan = snapshot.curve(job).plan_for(snapshot.shape_of(gpus))
    allocation = replace(job.allocation, generation=1, target=gpus, plan=plan)
    running = replace(job, state=JobState.RUNNING, allocation=allocation)
    return replace(running, progress=replace(job.progress, correction=correction))


def step_s(snapshot: Snapshot, job: Job, model: str | None = None) -> float | None:
    return step_time_s(snapshot, job, 8, node_sizes(snapshot), model)


def test_pending_job_is_expected_to_run_on_the_reference_model() -> None:
    job = a_job("j", 8)
    assert [step_s(seen(job), job, model) for model in (None, "v100-32g", "t4")] == [0.125, 0.125, 0.375]
    assert remaining_s(seen(job), job, 8, node_sizes(seen(job))) == 3600 / 8


@pytest.mark.parametrize(("gpu", "expected"), [("", "v100-32g"), ("t4", "t4"), ("h200", None)])
def test_speed_of_a_pending_job_refers_to_the_most_common_training_model(gpu: str, expected: str | None) -> None:
    """T4 is the first by name. AFS dealt pending jobs the GPUs of lent T4 nodes alone."""
    job = a_job("j", 8, model="llama-2-7b", global_batch=8, gpu=gpu)
    assert gpu_model(seen(job), job, node_sizes(seen(job))) == expected


def test_requested_model_is_the_reference() -> None:
    job = a_job("j", 8, gpu="t4")
    assert [step_s(seen(job), job, model) for model in (None, "v100-32g")] == [0.125, pytest.approx(0.125 / 3)]


def test_running_job_is_as_fast_as_the_model_that_it_holds() -> None:
    job = placed(a_job("j", 8, 16), "t0", seen(), correction=2.0)
    snapshot = seen(job)
    sizes = node_sizes(snapshot)
    assert job.step_time_s() == pytest.approx(0.75)
    assert step_s(snapshot, job) == pytest.approx(0.75)
    assert step_s(snapshot, job, "v100-32g") == pytest.approx(0.25)
    assert remaining_s(snapshot, job, 16, sizes) == pytest.approx(3600 * 0.375)
    assert linear_step_times_s(snapshot, job, sizes)(16) == pytest.approx(0.375)
    counts, steps_per_s = curve_speeds()(snapshot, job, sizes)
    assert dict(zip(counts.tolist(), steps_per_s.tolist(), strict=True))[8] == pytest.approx(1 / 0.75)


def test_scaling_is_fitted_to_measurements_on_the_same_model() -> None:
    """On V100 a step takes 3 GPU-seconds that are shared and half a second that is not; on T4 it was run once."""
    job = a_job("j", 1, 16)
    on_v100 = GpuMeasurements("v100-32g", ((4, 5.0), (8, 7.0)))
    progress = replace(job.progress, corrections=((8, 12.0),), measured_gpu="t4", other_gpus=(on_v100,))
    job = replace(job, progress=replace(progress, correction=4.0))
    snapshot = seen(job)
    sizes = node_sizes(snapshot)
    assert [step_time_s(snapshot, job, gpus, sizes, "v100-32g") for gpus in (4, 16)] == pytest.approx([1.25, 0.6875])
    assert [step_time_s(snapshot, job, gpus, sizes, "t4") for gpus in (4, 16)] == pytest.approx([3.0, 0.75])


def test_snapshot_without_a_table_has_equal_speeds() -> None:
    job = a_job("j", 8)
    snapshot = seen(job, throughputs={})
    assert [step_s(snapshot, job, model) for model in (None, "v100-32g", "t4")] == [0.125] * 3
    assert relative_speeds(snapshot, job) == {}
    assert describe_speeds(snapshot, job) == ""


def test_explanation_names_speeds_and_their_sources() -> None:
    job = placed(a_job("j", 8, 16, speeds={"v100-32g": 2.0, "t4": 0.5}), "v0", seen())
    assert "relative speed of a GPU: t4 0.25 (declared), v100-32g 1 (declared)" in explain(seen(job), {}, "j").summary
    plain = placed(a_job("j", 8, 16), "v0", seen())
    assert describe_speeds(seen(plain), plain) == "t4 0.33 (profile), v100-32g 1 (profile)"
    progress = replace(plain.progress, corrections=((8, 1.0),), measured_gpu="v100-32g")
    measured = replace(plain, progress=progress.with_measured_gpu_s("t4", 8, 5.0))
    assert describe_speeds(seen(measured), measured) == "t4 0.2 (measured), v100-32g 1 (measured)"
    modelled = a_job("j", 8, model="gpt2", global_batch=8)
    assert describe_speeds(seen(modelled), modelled) == ""


def test_plan_on_a_mix_is_as_fast_as_the_sum() -> None:
    job = a_job("j", 8)
    plan = seen(job).curve(job).plan_for(GpuShape.from_node_counts([("v100-32g", 8), ("t4", 6)]))
    assert plan is not None
    assert plan.iteration_time_s == pytest.approx(0.1)
