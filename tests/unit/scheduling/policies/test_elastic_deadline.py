"""Allotments for jobs with deadlines."""

from __future__ import annotations

from dataclasses import replace

from scheduler.domain.decisions import ReasonCode
from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.policies.allotment import Allotment
from scheduler.scheduling.policies.elastic_deadline import earliest_deadline_first, elastic_deadline_shares
from scheduler.scheduling.policies.settings import PolicySettings
from tests.builders import GPU, a_curve, a_fleet, a_job, a_node, a_snapshot

SETTINGS = PolicySettings()
FLEET = a_fleet(training=1, inference=0)


def job(job_id: str, least: int, most: int, deadline_s: float | None, *, steps: int = 3600, **more: object) -> Job:
    return a_job(job_id, least, most, steps=steps, deadline_s=deadline_s, **more)  # type: ignore[arg-type]  # fields of a JobSpec


def edf(*jobs: Job) -> Allotment:
    return earliest_deadline_first(a_snapshot(FLEET, jobs), 8, SETTINGS)


def shares(*jobs: Job, snapshot: Snapshot | None = None) -> Allotment:
    return elastic_deadline_shares(snapshot or a_snapshot(FLEET, jobs), 8, SETTINGS)


def curved(steps_per_s: dict[int, float], *jobs: Job) -> Snapshot:
    times = {GpuShape.packed(GPU, count, 8): 1.0 / speed for count, speed in steps_per_s.items()}
    return a_snapshot(FLEET, jobs, curves={jobs[0].spec.curve_key: a_curve(times)})


def test_edf_follows_deadlines_and_passes_over_jobs_that_do_not_fit() -> None:
    jobs = [job("late", 4, 4, 300.0), job("wide", 8, 8, 250.0), job("first", 4, 4, 200.0), job("never", 1, 1, None)]
    allotment = edf(*jobs)
    assert list(allotment.gpus.items()) == [("first", 4), ("late", 4)]
    assert [reason.code for reason in allotment.waiting.values()] == [ReasonCode.INSUFFICIENT_GPUS] * 2
    assert allotment.waiting["wide"].numbers == {"needed_gpus": 8.0, "free_gpus": 4.0, "position": 2.0}


def test_edf_counts_a_deadline_from_submission_and_puts_priority_first() -> None:
    jobs = [job("a", 8, 8, 100.0, now_s=50.0), job("b", 8, 8, 140.0)]
    assert dict(edf(*jobs).gpus) == {"b": 8}
    assert dict(edf(*jobs, job("urgent", 8, 8, None, priority=1)).gpus) == {"urgent": 8}


def test_edf_gives_the_largest_count_even_if_it_is_slower() -> None:
    jobs = [job(name, 1, 8, at_s, model="m", global_batch=8) for name, at_s in (("first", 100.0), ("then", 200.0))]
    allotment = earliest_deadline_first(curved({1: 1.0, 2: 1.5, 4: 1.2, 6: 1.1}, *jobs), 8, SETTINGS)
    assert dict(allotment.gpus) == {"first": 6, "then": 2}


def test_deadline_shares_come_first_and_the_rest_goes_to_the_earliest_of_equal_gain() -> None:
    """800 steps in 200 s take 4 GPUs, 800 in 400 s then 2.

    Under linear scaling, no job takes more GPU time with more GPUs.
    """
    assert dict(shares(job("a", 1, 8, 200.0, steps=800), job("b", 1, 8, 400.0, steps=800)).gpus) == {"a": 6, "b": 2}


def test_first_submission_is_admitted_and_others_run_as_best_effort() -> None:
    jobs = [job("a", 1, 8, 200.0, steps=800), job("b", 1, 8, 400.0, steps=800), job("c", 1, 8, 300.0, steps=2000)]
    allotment = shares(*jobs)
    assert dict(allotment.gpus) == {"a": 5, "b": 2, "c": 1}
    assert shares(jobs[2], replace(jobs[0], id="d")).gpus["c"] == 7, "c is asked first: 2000 steps in 300 s"


def test_running_jobs_are_admitted_before_pending_ones() -> None:
    runs = job("z", 4, 8, 100.0, steps=800, state=JobState.RUNNING, on={"t0": (0, 1, 2, 3)})
    assert dict(shares(job("a", 4, 8, 100.0, steps=800), runs).gpus) == {"z": 8}


def test_unreachable_deadline_is_reported_with_numbers() -> None:
    jobs = [job("a", 8, 8, 100.0, steps=800), job("late", 1, 4, 150.0, steps=800), job("b", 8, 8, 110.0, steps=800)]
    waiting = shares(*jobs).waiting
    assert waiting["late"].code is waiting["b"].code is ReasonCode.DEADLINE_UNREACHABLE
    assert waiting["late"].numbers["least_run_time_s"] == 200.0
    assert waiting["late"].numbers["deadline_in_s"] == 150.0
    assert "(200 s on 4 GPUs, its fastest)" in waiting["late"].detail
    assert waiting["b"].numbers["least_run_time_s"] < waiting["b"].numbers["deadline_in_s"]


def test_admitted_job_that_starts_later_is_not_unreachable() -> None:
    allotment = shares(job("a", 8, 8, 100.0, steps=800), job("b", 8, 8, 200.0, steps=800))
    assert dict(allotment.gpus) == {"a": 8}
    assert allotment.waiting["b"].code is ReasonCode.INSUFFICIENT_GPUS


def test_counts_without_a_plan_or_speedup_are_never_used() -> None:
    """4 GPUs would be done by 200 s, 3 are not measured, and 8 are slower than 4."""
    one = job("a", 1, 8, 200.0, steps=500, model="m", global_batch=8)
    allotment = shares(snapshot=curved({1: 1.0, 2: 1.9, 4: 3.5, 8: 3.2}, one))
    assert dict(allotment.gpus) == {"a": 4}


def test_rest_goes_where_gpu_time_grows_least() -> None:
    """Both need one GPU; the second GPU is worth 0.9 to `flat` and 1.0 to `steep`, and costs `flat` 53 GPU-s more."""
    flat = job("flat", 1, 4, 2000.0, steps=1000, model="m", global_batch=8)
    steep = job("steep", 1, 4, 3000.0, steps=1000)
    snapshot = a_snapshot(
        a_fleet(training=1, inference=0, gpus_per_node=4),
        [flat, steep],
        curves={flat.spec.curve_key: a_curve({GpuShape.packed(GPU, 1, 4): 1.0, GpuShape.packed(GPU, 2, 4): 1 / 1.9})},
    )
    assert dict(elastic_deadline_shares(snapshot, 4, SETTINGS).gpus) == {"flat": 1, "steep": 3}


def test_job_without_a_plan_waits_for_one() -> None:
    one = job("a", 1, 8, 200.0, model="m", global_batch=8)
    for allotment in (shares(one), edf(one)):
        assert allotment.waiting["a"].code is ReasonCode.WAITING_FOR_PLAN


def test_gpu_models_are_allotted_separately() -> None:
    pools, nodes = FLEET
    mixed = (pools, {**nodes, "h0": a_node("h0", gpus=4, gpu="h100-80g")})
    jobs = [job("a", 1, 16, 100.0), job("h", 1, 16, 100.0, gpu="h100-80g")]
    assert dict(earliest_deadline_first(a_snapshot(mixed, jobs), 12, SETTINGS).gpus) == {"a": 8, "h": 4}
