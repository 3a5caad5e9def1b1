"""The number of GPUs on which a job with frozen layers is re-planned."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest

from scheduler.domain.decisions import ReasonCode, ResizeJob
from scheduler.domain.gpu_sets import Gpus, GpuShape, count
from scheduler.domain.job import Job
from scheduler.domain.job_queue import JobQueue
from scheduler.domain.job_records import FrozenLayers
from scheduler.domain.job_state import JobState
from scheduler.domain.parallel_plan import LayerStrategy
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.scheduling.scheduler import decide
from tests.builders import GPU, a_curve, a_fleet, a_job, a_snapshot

NOW_S = 10_000.0
T0, T1, HALF = {"t0": tuple(range(8))}, {"t1": tuple(range(8))}, {"t1": (0, 1, 2, 3)}
StepTimes = Mapping[int, float]


def a_trainer(job_id: str, on: Gpus, step_s: float, *, steps: int, frozen: bool = False) -> Job:
    """Return a running job of 4 to 16 GPUs under a sharded plan, which no curve of this file has."""
    job = a_job(job_id, 4, 16, state=JobState.RUNNING, on=on, model=job_id, global_batch=16, steps=steps)
    plan = job.allocation.plan
    assert plan is not None
    sharded = LayerStrategy(layers=1, dp=count(on), zero=3, shard_group=count(on))
    stages = tuple(replace(stage, strategies=(sharded,)) for stage in plan.stages)
    plan = replace(plan, stages=stages, iteration_time_s=step_s)
    return replace(
        job,
        allocation=replace(job.allocation, plan=plan),
        progress=replace(job.progress, at_s=NOW_S),
        freezing=FrozenLayers(7, 7, NOW_S - 100.0, 1.0) if frozen else job.freezing,
    )


def with_curves(jobs: Iterable[tuple[Job, StepTimes]]) -> Snapshot:
    """Return two nodes of 8 GPUs with these jobs, each with the step times of its curve by GPUs."""
    pairs = list(jobs)
    curves = {
        job.curve_key: a_curve({GpuShape.packed(GPU, gpus, 8): time_s for gpus, time_s in times_s.items()})
        for job, times_s in pairs
    }
    fleet = a_fleet(training=2, inference=0)
    return a_snapshot(fleet, [job for job, _ in pairs], curves=curves, now_s=NOW_S, full_pass_at_s=NOW_S)


def replanned(snapshot: Snapshot, policies: str = "ebbtide") -> ResizeJob:
    """Return the only decision: the re-plan of the job with frozen layers."""
    [decision] = decide(snapshot, load_policy_set(policies)).decisions
    assert isinstance(decision, ResizeJob)
    assert (decision.job_id, decision.reason.code) == ("train", ReasonCode.LAYERS_FROZE)
    return decision


def test_job_gives_up_gpus_that_another_job_values_more() -> None:
    """On 4 GPUs its steps take longer than before, but the other job ends in half its time."""
    train = a_trainer("train", T0, 1.0, steps=100_000, frozen=True)
    other = a_trainer("other", T1, 1.0, steps=1_000)
    snapshot = with_curves([(train, {4: 1.1, 8: 0.7}), (other, {4: 2.0, 8: 1.0, 12: 0.5})])
    decision = replanned(snapshot)
    assert count(decision.gpus) == 4
    assert "a step takes 1.1 s on 4 GPUs instead of 1 s on 8" in decision.reason.detail
    assert decision.reason.numbers["saved_s"] < 0


def test_job_keeps_gpus_that_no_other_job_gains_from() -> None:
    train = a_trainer("train", T0, 1.0, steps=100_000, frozen=True)
    other = a_trainer("other", T1, 1.0, steps=1_000)
    snapshot = with_curves([(train, {4: 1.1, 8: 0.7}), (other, {4: 2.0, 8: 1.0, 12: 1.0})])
    assert replanned(snapshot).gpus == T0


def test_job_grows_onto_free_gpus_in_the_same_resize() -> None:
    train = a_trainer("train", T0, 1.0, steps=100_000, frozen=True)
    decision = replanned(with_curves([(train, {4: 1.1, 8: 0.7, 16: 0.4})]))
    assert count(decision.gpus) == 16
    assert decision.plan.iteration_time_s == 0.4


def test_growth_need_not_pay_for_the_resize_that_is_due() -> None:
    """It saves 20 s, and a resize on its own costs 60 s."""
    train = a_trainer("train", T0, 1.0, steps=100_000, frozen=True)
    assert count(replanned(with_curves([(train, {8: 0.7, 16: 0.6998})])).gpus) == 16


def test_growth_needs_a_gain_and_room_in_the_quota() -> None:
    train = a_trainer("train", T0, 1.0, steps=100_000, frozen=True)
    assert replanned(with_curves([(train, {8: 0.7, 16: 0.7})])).gpus == T0
    limited = replace(with_curves([(train, {8: 0.7, 16: 0.4})]), queues={"default": JobQueue("default", 0, 8)})
    assert replanned(limited).gpus == T0


def test_growth_counts_no_gpus_that_another_job_of_the_queue_could_give_up() -> None:
    """The policy deals `other` half its GPUs, but this stage takes none from it."""
    train = a_trainer("train", HALF, 1.0, steps=2_000, frozen=True)
    other = a_trainer("other", T0, 1.0, steps=100_000)
    snapshot = with_curves([(train, {4: 0.8, 8: 0.4, 12: 0.2}), (other, {4: 1.0, 8: 1.0})])
    for limit, gpus in ((12, 4), (16, 8)):
        assert count(replanned(replace(snapshot, queues={"default": JobQueue("default", 0, limit)})).gpus) == gpus


def test_job_outside_its_range_is_not_replanned_there() -> None:
    """Its owner lowered its maximum, and no plan within the range is solved yet."""
    train = a_trainer("train", T0, 1.0, steps=100_000, frozen=True)
    lowered = replace(train, spec=replace(train.spec, max_gpus=6))
    assert decide(with_curves([(lowered, {8: 0.7})]), load_policy_set("ebbtide")).decisions == ()


@pytest.mark.parametrize("policies", ["fifo", "las"])
def test_policy_sets_without_a_scaling_policy_keep_the_gpus(policies: str) -> None:
    train = a_trainer("train", T0, 1.0, steps=100_000, frozen=True)
    fixed = replace(train, spec=replace(train.spec, min_gpus=8, max_gpus=8))
    assert replanned(with_curves([(fixed, {8: 0.7})]), policies).gpus == T0


def test_job_does_not_grow_while_another_one_waits_for_gpus_of_others() -> None:
    """The pending job needs 8 GPUs; 4 are free, and the other job can give up 4."""
    train = a_trainer("train", HALF, 1.0, steps=100_000, frozen=True)
    other = a_trainer("other", {"t0": tuple(range(8))}, 1.0, steps=100_000)
    pending = a_job("pending", 8)
    snapshot = with_curves([(train, {4: 0.7, 8: 0.4}), (other, {4: 1.5, 8: 1.0})])
    snapshot = replace(snapshot, jobs={**snapshot.jobs, "pending": pending})
    gpus = {
        each.job_id: count(each.gpus)
        for each in decide(snapshot, load_policy_set("ebbtide")).decisions
        if isinstance(each, ResizeJob)
    }
    assert gpus == {"train": 4, "other": 4}


def test_full_pass_before_the_replan_counts_with_the_plan_for_frozen_layers() -> None:
    """The frozen curve is fastest on 8 GPUs, so the full pass takes none away, although the old plan is slower."""
    train = a_trainer("train", T0, 1.0, steps=100_000, frozen=True)
    train = replace(train, freezing=replace(train.freezing, at_s=NOW_S))
    snapshot = replace(with_curves([(train, {4: 0.9, 6: 0.7, 8: 0.5})]), full_pass_at_s=float("-inf"))
    assert decide(snapshot, load_policy_set("ebbtide")).decisions == ()
