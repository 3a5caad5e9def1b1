"""The fewest GPUs that a job starts on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scheduler.domain.decisions import StartJob
from scheduler.domain.gpu_sets import GpuShape, count
from scheduler.domain.job import Job
from scheduler.domain.job_queue import JobQueue
from scheduler.domain.job_state import JobState
from scheduler.domain.scaling_curve import ScalingCurve
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.policies.speed import efficient_gpus, min_feasible_gpus, step_time_s
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.scheduling.scheduler import decide
from tests.builders import GPU, a_curve, a_fleet, a_job, a_node, a_snapshot

COSTS_GPU_S = {1: 60.0, 2: 60.0, 4: 22.0, 8: 18.0, 16: 20.0}
"""GPU-seconds a step: up to 2 GPUs the model's state is moved about most of the time."""


def large_curve() -> ScalingCurve:
    return a_curve({GpuShape.packed(GPU, gpus, 8): cost / gpus for gpus, cost in COSTS_GPU_S.items()})


def large(job_id: str = "large", least: int = 1, most: int = 16, **more: Any) -> Job:
    return a_job(job_id, least, most, model="llama-2-7b", global_batch=8, steps=1000, **more)


def seen(*jobs: Job, nodes: int = 2, **more: Any) -> Snapshot:
    fleet, curves = a_fleet(training=nodes, inference=0), {large().spec.curve_key: large_curve()}
    return a_snapshot(fleet, jobs, curves=curves, **more)


def efficient(snapshot: Snapshot) -> int:
    return efficient_gpus(snapshot, snapshot.jobs["large"], snapshot.typical_node_sizes)


def test_inefficient_counts_are_left_out() -> None:
    snapshot = seen(large())
    assert (min_feasible_gpus(snapshot, snapshot.jobs["large"], snapshot.typical_node_sizes), efficient(snapshot)) == (
        1,
        4,
    )


def test_only_counts_in_range_are_compared() -> None:
    assert efficient(seen(large(most=2))) == 1
    assert efficient(seen(large(least=8))) == 8


def test_linearly_scaling_job_starts_on_its_minimum() -> None:
    snapshot = seen(replace(a_job("large", 1, 16), id="large"))
    assert efficient(snapshot) == 1


def test_starting_count_is_limited_by_the_cluster() -> None:
    pools, nodes = a_fleet(training=0, inference=0)
    small = a_snapshot((pools, {**nodes, "t0": a_node("t0", gpus=2)}), [large()])
    key = large().spec.curve_key
    curve = a_curve({GpuShape.packed(GPU, gpus, 2): cost / gpus for gpus, cost in COSTS_GPU_S.items()})
    assert efficient(replace(small, curves={key: curve})) == 1


def test_starting_count_is_limited_by_the_queue() -> None:
    queues = {"default": JobQueue("default", limit_gpus=2)}
    assert efficient(seen(large(), queues=queues)) == 1


def starts(snapshot: Snapshot, policy: str = "ebbtide") -> dict[str, int]:
    decisions = decide(snapshot, load_policy_set(policy)).decisions
    return {decision.job_id: count(decision.gpus) for decision in decisions if isinstance(decision, StartJob)}


def busy(gpus: int) -> Job:
    """Return a rigid job that ends in a second, too soon for any job to start before."""
    return a_job("busy", gpus, state=JobState.RUNNING, on={"t0": tuple(range(gpus))}, steps=gpus)


def test_job_starts_inefficiently_if_no_other_waits() -> None:
    assert starts(seen(busy(6), large(), nodes=1)) == {"large": 2}


def test_job_waits_for_efficient_gpus_if_others_can_use_free_ones() -> None:
    assert starts(seen(busy(6), large(), large("second"), nodes=1)) == {}
    assert starts(seen(busy(6), large(), large("second"), nodes=1), policy="lyra") == {"large": 1, "second": 1}


def measured(*corrections: tuple[int, float], now: float = 1.0) -> Job:
    job = a_job("large", 1, 16)
    return replace(job, progress=replace(job.progress, correction=now, corrections=corrections))


def step_time(job: Job, gpus: int) -> float | None:
    snapshot = a_snapshot(a_fleet(training=2, inference=0), [job])
    return step_time_s(snapshot, job, gpus, snapshot.typical_node_sizes)


def test_job_without_a_model_scales_linearly_until_measured_twice() -> None:
    assert step_time(measured(now=2.0), 8) == 0.25
    assert step_time(measured((4, 2.0), now=2.0), 8) == 0.25


def test_fixed_step_time_is_fitted_from_two_measurements() -> None:
    """A step takes 3 GPU-seconds that are shared and half a second that is not: 5 GPU-seconds on 4, 7 on 8."""
    job = measured((4, 5.0), (8, 7.0))
    assert [step_time(job, gpus) for gpus in (1, 4, 8, 16)] == pytest.approx([3.5, 1.25, 0.875, 0.6875])


def test_superlinear_measurements_are_taken_as_linear() -> None:
    assert step_time(measured((4, 5.0), (8, 4.0), now=4.0), 16) == 0.25
