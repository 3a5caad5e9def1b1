"""Preemptive orders by remaining time, remaining service and attained service."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.domain.decisions import ReasonCode
from scheduler.domain.job import Intent, Job
from scheduler.domain.job_account import JobAccount
from scheduler.domain.job_state import JobState
from scheduler.scheduling.policies.allotment import Allot, Allotment
from scheduler.scheduling.policies.job_order import (
    LAS_LIMITS_GPU_S,
    least_attained_service,
    shortest_remaining_service,
    shortest_remaining_time,
)
from scheduler.scheduling.policies.settings import PolicySettings
from tests.builders import GPU, a_fleet, a_job, a_node, a_snapshot

FLEET = a_fleet(training=1, inference=0)
SETTINGS = PolicySettings()
FIRST_GPU_S, SECOND_GPU_S = LAS_LIMITS_GPU_S


def allotted(allot: Allot, *jobs: Job, now_s: float = 0.0, capacity: int = 8, ratio: float = 0.0) -> Allotment:
    settings = replace(SETTINGS, las_promote_ratio=ratio)
    return allot(a_snapshot(FLEET, jobs, now_s=now_s), capacity, settings)


def served(job: Job, gpu_s: float, *, waited_s: float = 0.0, at_s: float = 0.0) -> Job:
    return replace(job, account=JobAccount(gpu_s=gpu_s, waited_s=waited_s, settled_at_s=at_s))


def test_srtf_uses_time_and_srsf_time_by_gpus() -> None:
    wide, narrow = a_job("wide", 8, steps=8 * 100), a_job("narrow", 1, steps=150)
    assert list(allotted(shortest_remaining_time, wide, narrow).gpus) == ["wide"]
    assert list(allotted(shortest_remaining_service, wide, narrow).gpus) == ["narrow"]


def test_progress_of_a_running_job_counts() -> None:
    running = a_job("running", 8, steps=8 * 500, state=JobState.RUNNING, on={"t0": tuple(range(8))})
    fresh = a_job("fresh", 8, steps=8 * 450)
    assert list(allotted(shortest_remaining_time, running, fresh, now_s=0.0).gpus) == ["fresh"]
    assert list(allotted(shortest_remaining_time, running, fresh, now_s=60.0).gpus) == ["running"]


def test_running_job_precedes_equals_then_the_earlier_one() -> None:
    running = a_job("z", 8, state=JobState.RUNNING, on={"t0": tuple(range(8))}, now_s=5.0)
    early, late = a_job("b", 8, now_s=1.0), a_job("a", 8, now_s=2.0)
    assert list(allotted(shortest_remaining_time, late, early, running, now_s=5.0).gpus) == ["z"]
    assert list(allotted(shortest_remaining_time, late, early, now_s=5.0).gpus) == ["b"]


@pytest.mark.parametrize("allot", [shortest_remaining_time, shortest_remaining_service, least_attained_service])
def test_priority_comes_before_everything(allot: Allot) -> None:
    short = a_job("short", 8, steps=8, state=JobState.RUNNING, on={"t0": tuple(range(8))})
    urgent = served(a_job("urgent", 8, steps=8 * 10**6, priority=1), 10 * SECOND_GPU_S)
    assert list(allotted(allot, short, urgent).gpus) == ["urgent"]


def test_job_that_does_not_fit_is_passed_over_with_numbers() -> None:
    jobs = [a_job("a", 6, steps=6), a_job("b", 4, steps=40), a_job("c", 2, steps=200), a_job("d", 12, steps=12)]
    allotment = allotted(shortest_remaining_time, *jobs)
    assert allotment.gpus == {"a": 6, "c": 2}
    assert allotment.waiting["b"].code is ReasonCode.INSUFFICIENT_GPUS
    numbers = {"needed_gpus": 4.0, "free_gpus": 2.0, "position": 3.0, "remaining_s": 10.0}
    assert allotment.waiting["b"].numbers == numbers
    assert allotment.waiting["d"].code is ReasonCode.NO_MATCHING_FLAVOR


def test_preempted_job_keeps_its_place_in_the_order() -> None:
    stopping = replace(a_job("stopping", 8, steps=8), intent=Intent.CANCEL)
    preempted = a_job("preempted", 8, steps=80, state=JobState.PREEMPTED)
    waiting = a_job("waiting", 8, steps=800)
    allotment = allotted(shortest_remaining_time, stopping, preempted, waiting)
    assert (list(allotment.gpus), list(allotment.waiting)) == (["preempted"], ["waiting"])


def test_job_that_waits_for_its_gpu_model_blocks_no_other() -> None:
    pools, nodes = a_fleet(training=1, inference=0)
    fleet = (pools, {**nodes, "v0": a_node("v0", gpu="v100-32g", gpus=4)})
    jobs = [a_job("picky", 6, steps=6, gpu="v100-32g"), a_job("any", 8, steps=800), a_job("v", 4, gpu="v100-32g")]
    allotment = shortest_remaining_time(a_snapshot(fleet, jobs), 12, SETTINGS)
    assert allotment.gpus == {"any": 8, "v": 4}
    assert allotment.waiting["picky"].code is ReasonCode.NO_MATCHING_FLAVOR


def test_las_queues_jobs_by_attained_service() -> None:
    third = served(a_job("third", 4, now_s=0.0), SECOND_GPU_S)
    second = served(a_job("second", 4, now_s=1.0), FIRST_GPU_S)
    first = served(a_job("first", 4, now_s=2.0), FIRST_GPU_S - 1.0)
    assert list(allotted(least_attained_service, third, second, first, now_s=2.0).gpus) == ["first", "second"]


def test_las_keeps_a_running_job_until_it_leaves_its_queue() -> None:
    running = a_job("running", 8, state=JobState.RUNNING, on={"t0": tuple(range(8))}, now_s=50.0)
    fresh = a_job("fresh", 8)
    allotment = allotted(least_attained_service, fresh, running, now_s=100.0)
    assert list(allotment.gpus) == ["running"]
    assert allotment.valid_until_s == pytest.approx(50.0 + FIRST_GPU_S / 8)
    then = allotted(least_attained_service, fresh, running, now_s=allotment.valid_until_s)
    assert list(then.gpus) == ["fresh"]


def stopped(job: Job, gpu_s: float, at_s: float) -> Job:
    account = JobAccount(gpu_s=gpu_s, settled_at_s=at_s, first_started_at_s=0.0, last_started_at_s=0.0)
    return replace(job, account=account, state_since_s=at_s)


def test_las_lets_pending_jobs_pass_one_that_enters_their_queue() -> None:
    running = a_job("running", 8, state=JobState.RUNNING, on={"t0": tuple(range(8))}, now_s=0.0)
    waiting = stopped(a_job("waiting", 8), 6_000.0, at_s=0.0)
    entered_s = FIRST_GPU_S / 8
    for late_s, expected in ((-1.0, "running"), (0.0, "waiting"), (0.5, "waiting"), (2.0, "running")):
        found = allotted(least_attained_service, waiting, running, now_s=entered_s + late_s)
        assert list(found.gpus) == [expected], late_s


def test_las_goes_on_with_the_job_that_stopped_last_in_a_queue() -> None:
    early, late = stopped(a_job("early", 8), 6_000.0, at_s=10.0), stopped(a_job("late", 8), 6_000.0, at_s=20.0)
    entered = stopped(a_job("entered", 8), FIRST_GPU_S, at_s=5.0)
    order = [early, late, entered]
    for expected in ("late", "early", "entered"):
        assert list(allotted(least_attained_service, *order, now_s=30.0).gpus) == [expected]
        order = [job for job in order if job.id != expected]


def test_las_looks_again_when_a_job_that_starts_now_leaves_its_queue() -> None:
    assert allotted(least_attained_service, a_job("new", 8), now_s=5.0).valid_until_s == 5.0 + FIRST_GPU_S / 8


def test_las_promotes_long_waiting_jobs() -> None:
    at_s = 2.0 * SECOND_GPU_S / 8
    starved = served(a_job("starved", 8), SECOND_GPU_S)
    other = served(a_job("other", 8, now_s=at_s - 9.0), FIRST_GPU_S, at_s=at_s - 9.0)
    before = allotted(least_attained_service, starved, other, now_s=at_s - 5.0, ratio=2.0)
    assert list(before.gpus) == ["other"]
    assert before.valid_until_s == pytest.approx(at_s)
    assert list(allotted(least_attained_service, starved, other, now_s=at_s).gpus) == ["other"]
    assert list(allotted(least_attained_service, starved, other, now_s=at_s, ratio=2.0).gpus) == ["starved"]
    started = a_job("starved", 8, state=JobState.RUNNING, on={"t0": tuple(range(8))}, now_s=at_s + 30.0)
    started = served(started, SECOND_GPU_S + 240.0, waited_s=at_s, at_s=at_s + 30.0)
    runs = allotted(least_attained_service, started, a_job("fresh", 8), now_s=at_s + 31.0, ratio=2.0)
    assert list(runs.gpus) == ["starved"]
    assert runs.valid_until_s == pytest.approx(at_s + 30.0 + FIRST_GPU_S / 8)


def test_remaining_service_of_unknown_length_equals_attained_service() -> None:
    served_job = served(a_job("served", 8, steps=0), 800.0)
    assert list(allotted(shortest_remaining_time, served_job, a_job("known", 8, steps=8 * 90)).gpus) == ["known"]
    assert list(allotted(shortest_remaining_time, served_job, a_job("known", 8, steps=8 * 110)).gpus) == ["served"]


@pytest.mark.parametrize("allot", [shortest_remaining_time, shortest_remaining_service])
def test_job_keeps_its_place_when_it_starts_on_slow_gpus(allot: Allot) -> None:
    pools, nodes = a_fleet(training=2, inference=0)
    fleet, slow = (pools, {**nodes, "v0": a_node("v0", gpu="v100-32g", gpus=1)}), {GPU: 1.0, "v100-32g": 0.1}
    busy = a_job("busy", 16, state=JobState.RUNNING, on={"t0": tuple(range(8)), "t1": tuple(range(8))}, steps=16)
    first, second = (a_job(name, steps=steps, speeds=slow) for name, steps in (("first", 100), ("second", 110)))
    waiting = a_snapshot(fleet, [busy, first, second])
    plan = waiting.curve(first).plan_for(waiting.shape_of({"v0": (0,)}))
    started = a_job("first", state=JobState.RUNNING, on={"v0": (0,)}, steps=100, speeds=slow)
    started = replace(started, allocation=replace(started.allocation, plan=plan))
    for snapshot in (waiting, a_snapshot(fleet, [busy, started, second])):
        assert list(allot(snapshot, 17, SETTINGS).gpus) == ["busy", "first"]


def test_running_job_on_two_gpu_models_keeps_both() -> None:
    pools, nodes = a_fleet(training=1, inference=0, gpus_per_node=4)
    fleet = (pools, {**nodes, "v0": a_node("v0", gpu="v100-32g", gpus=4)})
    mixed = a_job("mixed", 8, state=JobState.RUNNING, on={"t0": (0, 1, 2, 3), "v0": (0, 1, 2, 3)})
    longer, shorter = a_job("x", 4, steps=10**6), a_job("x", 4, steps=4)
    assert shortest_remaining_time(a_snapshot(fleet, [mixed, longer]), 8, SETTINGS).gpus == {"mixed": 8}
    assert shortest_remaining_time(a_snapshot(fleet, [mixed, shorter]), 8, SETTINGS).gpus == {"x": 4}
