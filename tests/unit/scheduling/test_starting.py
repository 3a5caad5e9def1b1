"""Starting: which jobs start, which wait, and that no job starves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.domain.decisions import ReasonCode, ResizeJob, StartJob
from scheduler.domain.gpu_sets import GpuShape, count
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.scaling_curve import ScalingCurve, build_data_parallel_plan
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import TickResult
from scheduler.scheduling.explanation import explain
from scheduler.scheduling.policies.settings import PolicySettings
from scheduler.scheduling.policies.speed import min_feasible_gpus
from scheduler.scheduling.policy_sets import list_policy_sets, load_policy_set
from scheduler.scheduling.scheduler import decide
from tests.builders import GPU, a_curve, a_fleet, a_job, a_node, a_snapshot

SETTINGS = PolicySettings(ageing_s=100.0, patience_ageings=5.0)
OTHER = "h100-80g"


def decided(snapshot: Snapshot) -> TickResult:
    return decide(snapshot, load_policy_set("ebbtide", SETTINGS))


def started(result: TickResult) -> set[str]:
    return {decision.job_id for decision in result.decisions if isinstance(decision, StartJob)}


def busy(job_id: str, on: dict[str, tuple[int, ...]]) -> Job:
    return a_job(job_id, sum(map(len, on.values())), state=JobState.RUNNING, on=on)


def test_overdue_job_with_a_reservation_is_passed_without_delay() -> None:
    fleet = a_fleet(training=1, inference=0)
    jobs = [busy("busy", {"t0": (0, 1, 2, 3)}), a_job("big", 8)]
    short, long = (a_job("small", 1, steps=steps, now_s=500.0) for steps in (10, 10**6))
    passed = decided(a_snapshot(fleet, [*jobs, short], now_s=600.0))
    assert started(passed) == {"small"}
    kept = decided(a_snapshot(fleet, [*jobs, long], now_s=600.0))
    assert started(kept) == set()
    assert kept.waiting["big"].code is ReasonCode.INSUFFICIENT_GPUS
    assert kept.waiting["small"].code is ReasonCode.BEHIND_HEAD_OF_QUEUE


def test_overdue_job_without_a_reservation_is_not_passed() -> None:
    fleet = a_fleet(training=1, inference=0)
    endless = a_job("busy", 4, state=JobState.RUNNING, on={"t0": (0, 1, 2, 3)}, steps=0)
    jobs = [endless, a_job("big", 8), a_job("small", 1, steps=10, now_s=100.0)]
    assert started(decided(a_snapshot(fleet, jobs, now_s=400.0))) == {"small"}, "not overdue yet"
    overdue = decided(a_snapshot(fleet, [*jobs[:2], replace(jobs[2], submitted_at_s=500.0)], now_s=600.0))
    assert started(overdue) == set()
    assert overdue.waiting["small"].code is ReasonCode.BEHIND_HEAD_OF_QUEUE


def test_overdue_job_starts_before_later_short_jobs() -> None:
    fleet = a_fleet(training=1, inference=0)
    short = [a_job(f"short{at}", 8, now_s=600.0, steps=8) for at in range(3)]
    result = decided(a_snapshot(fleet, [*short, a_job("long", 8, steps=10**9)], now_s=600.0))
    assert started(result) == {"long"}


def test_overdue_job_that_can_never_fit_blocks_no_job() -> None:
    fleet = a_fleet(training=1, inference=0)
    result = decided(a_snapshot(fleet, [a_job("giant", 64), a_job("small", 1, now_s=600.0)], now_s=600.0))
    assert started(result) == {"small"}
    assert result.waiting["giant"].code is ReasonCode.NO_MATCHING_FLAVOR


def test_job_for_a_missing_gpu_model_blocks_no_job() -> None:
    fleet = a_fleet(training=1, inference=0)
    result = decided(a_snapshot(fleet, [a_job("picky", 8, gpu=OTHER, steps=1), a_job("easy", 8)]))
    assert started(result) == {"easy"}
    assert result.waiting["picky"].code is ReasonCode.NO_MATCHING_FLAVOR


def test_fewest_gpus_of_a_model_that_no_usable_node_has_are_the_minimum() -> None:
    curve = replace(a_curve({}), infeasible={GpuShape.packed(GPU, 8, 8): "memory"})
    job = a_job("left", 8, model="llama-2-7b", global_batch=8, state=JobState.QUEUED, steps=10)
    snapshot = a_snapshot(a_fleet(training=1, inference=0), [job], curves={job.spec.curve_key: curve})
    assert min_feasible_gpus(snapshot, job, {}) == 8


@pytest.mark.parametrize("policy", sorted(list_policy_sets()))
def test_job_with_a_plan_for_a_gpu_model_that_left_waits(policy: str) -> None:
    fleet = a_fleet(training=1, inference=0)
    curve = a_curve({GpuShape.packed(OTHER, 8, 8): 1.0})
    left = a_job("left", 8, gpu=OTHER, model="llama-2-7b", global_batch=8, state=JobState.QUEUED, steps=10)
    snapshot = a_snapshot(fleet, [left, a_job("next", 8)], curves={left.spec.curve_key: curve})
    result = decide(snapshot, load_policy_set(policy, SETTINGS))
    assert started(result) == (set() if policy == "fifo" else {"next"})
    reason = result.waiting["left"]
    assert reason.code in (ReasonCode.NO_MATCHING_FLAVOR, ReasonCode.WAITING_FOR_PLAN)
    assert explain(snapshot, result.waiting, "left").reason == reason


def test_job_reserves_its_own_gpu_model_only() -> None:
    pools, nodes = a_fleet(training=1, inference=0)
    nodes = {**nodes, "h0": a_node("h0", gpu=OTHER)}
    wide = a_job("wide", 1, 8, state=JobState.RUNNING, on={"t0": (0, 1, 2, 3, 4, 5, 6, 7)})
    full = busy("full", {"h0": (0, 1, 2, 3)})
    result = decided(
        a_snapshot((pools, nodes), [wide, full, a_job("picky", 8, gpu=OTHER), a_job("small", 4, gpu=OTHER)])
    )
    assert started(result) == {"small"}
    assert not [decision for decision in result.decisions if isinstance(decision, ResizeJob)]


def test_job_starts_on_the_model_with_a_plan() -> None:
    pools, nodes = a_fleet(training=2, inference=0)
    nodes = {**nodes, "h0": a_node("h0", gpu=OTHER)}
    job = a_job("choosy", 4, model="llama-2-7b", global_batch=8)
    curve = ScalingCurve().with_infeasible(GpuShape.packed(GPU, 4, 8), "needs 94.1 GB of 80.0 GB per GPU")
    curve = curve.with_plan(GpuShape.packed(OTHER, 4, 8), build_data_parallel_plan(OTHER, 4))
    result = decided(a_snapshot((pools, nodes), [job], curves={job.spec.curve_key: curve}))
    assert [decision.gpus for decision in result.decisions if isinstance(decision, StartJob)] == [{"h0": (0, 1, 2, 3)}]


def test_gpus_that_a_job_cannot_use_go_to_the_next() -> None:
    fleet = a_fleet(training=1, inference=0)
    job = a_job("unsolved", 8, model="llama-2-7b", global_batch=8, steps=1)
    result = decided(a_snapshot(fleet, [job, a_job("next", 8)]))
    assert started(result) == {"next"}
    assert result.waiting["unsolved"].code is ReasonCode.WAITING_FOR_PLAN
    assert "next" not in result.waiting


def test_pending_job_reserves_flexible_gpus() -> None:
    fleet = a_fleet(training=1, inference=0)
    wide = a_job("wide", 2, 8, state=JobState.RUNNING, on={"t0": (0, 1, 2, 3, 4, 5)})
    result = decided(a_snapshot(fleet, [wide, a_job("late", 4, steps=1), a_job("later", 2)]))
    assert started(result) == set()
    assert result.waiting["late"].code is ReasonCode.WAITING_FOR_PREEMPTED_WORKLOADS
    resized = [decision for decision in result.decisions if isinstance(decision, ResizeJob)]
    assert [(decision.job_id, count(decision.gpus)) for decision in resized] == [("wide", 2)]


def test_jobs_start_wide_only_if_no_job_waits() -> None:
    fleet = a_fleet(training=1, inference=0)
    alone = decided(a_snapshot(fleet, [a_job("new", 2, 8)]))
    assert [count(d.gpus) for d in alone.decisions if isinstance(d, StartJob)] == [8]
    crowded = decided(a_snapshot(fleet, [a_job("new", 2, 8, steps=1), busy("busy", {"t0": (0,)}), a_job("big", 8)]))
    assert [count(d.gpus) for d in crowded.decisions if isinstance(d, StartJob)] == [2]


def test_strict_order_lets_no_job_pass_the_head() -> None:
    fleet = a_fleet(training=1, inference=0)
    jobs = [busy("busy", {"t0": (0,)}), a_job("head", 8), a_job("tail", 1, now_s=1.0)]
    result = decide(a_snapshot(fleet, jobs, now_s=2.0), load_policy_set("fifo"))
    assert started(result) == set()
    assert result.waiting["tail"].code is ReasonCode.BEHIND_HEAD_OF_QUEUE


def test_job_starts_without_gpus_that_slow_it() -> None:
    """The free GPUs are on two nodes, where 8 of them are slower than 4 of one node."""
    fleet = a_fleet(training=2, inference=0)
    jobs = [busy("a", {"t0": (0, 1, 2, 3)}), busy("b", {"t1": (0, 1, 2, 3)})]
    job = a_job("j", 2, 8, model="llama-2-7b", global_batch=8)
    times_s = {GpuShape.packed(GPU, count, 8): step_s for count, step_s in ((2, 10.0), (4, 6.0), (8, 3.0))}
    curve = a_curve({**times_s, GpuShape.from_node_counts([(GPU, 4), (GPU, 4)]): 7.0})
    result = decided(a_snapshot(fleet, [*jobs, job], curves={job.spec.curve_key: curve}))
    (start,) = [decision for decision in result.decisions if isinstance(decision, StartJob)]
    assert (count(start.gpus), len(start.gpus), start.plan.iteration_time_s) == (4, 1, 6.0)


def test_only_waiting_job_starts_on_an_inefficient_minimum() -> None:
    """2 GPUs would be faster than 4, but the minimum is 4."""
    job = a_job("j", 4, 8, model="llama-2-7b", global_batch=8)
    curve = a_curve({GpuShape.packed(GPU, 2, 8): 5.0, GpuShape.packed(GPU, 4, 8): 6.0})
    result = decided(a_snapshot(a_fleet(training=1, inference=0), [job], curves={job.spec.curve_key: curve}))
    (start,) = [decision for decision in result.decisions if isinstance(decision, StartJob)]
    assert count(start.gpus) == 4


def test_job_starts_on_its_fastest_gpu_model() -> None:
    """More GPUs of the slower model are free. A job without a curve takes those."""
    pools, nodes = a_fleet(training=2, inference=0)
    nodes = {**nodes, "h0": a_node("h0", gpu=OTHER)}
    curve = a_curve({GpuShape.packed(GPU, 4, 8): 1.0, GpuShape.packed(OTHER, 4, 8): 0.4})
    job = a_job("modelled", 4, model="llama-2-7b", global_batch=8)
    snapshot = a_snapshot((pools, nodes), [job, a_job("plain", 4)], curves={job.spec.curve_key: curve})
    starts = {d.job_id: set(d.gpus) for d in decided(snapshot).decisions if isinstance(d, StartJob)}
    assert starts["modelled"] == {"h0"}
    assert starts["plain"] <= {"t0", "t1"}
