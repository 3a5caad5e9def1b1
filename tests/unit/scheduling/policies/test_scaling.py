"""How many GPUs each elastic job should have."""

from __future__ import annotations

from dataclasses import replace

from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.scaling_curve import ScalingCurve, build_data_parallel_plan
from scheduler.scheduling.policies.scaling import flexible_counts, least_gain_first
from scheduler.scheduling.policies.settings import PolicySettings
from tests.builders import GPU, a_fleet, a_job, a_snapshot

SETTINGS = PolicySettings(reconfiguration_s=30.0, resize_pause_s=0.0)
FLEET = a_fleet(training=4, inference=0)


def runs(job_id: str, node: str, gpus: int, *, steps: int, least: int = 1, most: int = 8, **more: object) -> Job:
    on = {node: tuple(range(gpus))}
    return a_job(job_id, least, most, state=JobState.RUNNING, on=on, steps=steps, **more)  # type: ignore[arg-type]  # fields of a JobSpec


def test_free_gpus_go_to_the_job_that_ends_first() -> None:
    """The long one would save more seconds, but hold the GPUs a hundred times as long for them."""
    jobs = [runs("short", "t0", 2, steps=2_000), runs("long", "t1", 2, steps=200_000)]
    assert flexible_counts(a_snapshot(FLEET, jobs), (), 6, SETTINGS) == {"short": 8}


def test_growth_that_does_not_pay_for_itself_is_left() -> None:
    """80 s left on 2 GPUs: four would save 40 s, and the change costs 30 s, which are counted twice."""
    assert flexible_counts(a_snapshot(FLEET, [runs("j", "t0", 2, steps=160, most=4)]), (), 6, SETTINGS) == {}


def test_a_small_imbalance_moves_no_gpus_from_job_to_job() -> None:
    jobs = [runs("a", "t0", 4, steps=20_000), runs("b", "t1", 5, steps=20_000)]
    assert flexible_counts(a_snapshot(FLEET, jobs), (), 0, SETTINGS) == {}


def test_a_long_job_gives_its_gpus_to_a_short_one() -> None:
    jobs = [runs("long", "t0", 8, steps=500_000), runs("short", "t1", 1, steps=1_000)]
    assert flexible_counts(a_snapshot(FLEET, jobs), (), 0, SETTINGS) == {"long": 1, "short": 8}


def test_no_job_shrinks_for_gpus_that_would_then_be_idle() -> None:
    """The other job is nearly done: it gains too little to be disturbed."""
    jobs = [runs("wide", "t0", 8, steps=4_000), runs("nearly", "t1", 1, steps=50)]
    assert flexible_counts(a_snapshot(FLEET, jobs), (), 0, SETTINGS) == {}


def test_jobs_rest_between_two_changes_unless_they_are_at_their_minimum() -> None:
    settings = replace(SETTINGS, resize_pause_s=600.0)
    jobs = [runs("rests", "t0", 2, steps=10**6), runs("least", "t1", 1, steps=10**6)]
    assert set(flexible_counts(a_snapshot(FLEET, jobs, now_s=100.0), (), 13, settings)) == {"least"}
    assert set(flexible_counts(a_snapshot(FLEET, jobs, now_s=600.0), (), 13, settings)) == {"least", "rests"}


def test_a_deadline_that_can_be_met_comes_before_any_other_gain() -> None:
    """Four GPUs end the job just in time; eight would be no better for its deadline, and the short one gets them."""
    jobs = [runs("due", "t0", 1, steps=10_000, deadline_s=3_000.0), runs("short", "t1", 1, steps=4_000)]
    assert flexible_counts(a_snapshot(FLEET, jobs), (), 3, SETTINGS) == {"due": 4}
    assert flexible_counts(a_snapshot(FLEET, jobs), (), 10, SETTINGS) == {"due": 4, "short": 8}


def test_starting_jobs_share_what_is_spare_and_pay_nothing() -> None:
    jobs = [a_job("new", 1, 4, steps=40), a_job("waits", 1, 4)]
    assert flexible_counts(a_snapshot(FLEET, jobs), ("new",), 3, SETTINGS) == {"new": 4}


def curve(*counts: int, infeasible: tuple[int, ...] = ()) -> ScalingCurve:
    found = ScalingCurve({GpuShape.packed(GPU, n, 8): build_data_parallel_plan(GPU, n) for n in counts})
    for n in infeasible:
        found = found.with_infeasible(GpuShape.packed(GPU, n, 8), "too big")
    return found


def test_counts_that_the_curve_has_no_plan_for_are_skipped() -> None:
    job = runs("j", "t0", 2, steps=10**6, model="llama-2-7b", global_batch=8)
    snapshot = a_snapshot(FLEET, [job], curves={job.spec.curve_key: curve(2, 5, infeasible=(1,))})
    assert flexible_counts(snapshot, (), 2, SETTINGS) == {}
    assert flexible_counts(snapshot, (), 6, SETTINGS) == {"j": 5}


def test_a_job_on_a_shape_of_its_own_may_stay_there() -> None:
    """Three GPUs are not on the curve; its own plan says what they are worth, and only two are free."""
    job = runs("j", "t0", 3, steps=10**6, least=3, model="llama-2-7b", global_batch=8)
    snapshot = a_snapshot(FLEET, [job], curves={job.spec.curve_key: curve(6)})
    assert flexible_counts(snapshot, (), 2, SETTINGS) == {}
    assert flexible_counts(snapshot, (), 3, SETTINGS) == {"j": 6}


def test_room_is_made_where_a_gpu_gains_least() -> None:
    """Where little is left a GPU brings the end nearer than where much is."""
    jobs = [runs("dear", "t0", 8, steps=10**4), runs("cheap", "t1", 8, steps=10**6)]
    snapshot = a_snapshot(FLEET, jobs)
    assert least_gain_first(snapshot, 3, SETTINGS) == {"cheap": 5}
    assert least_gain_first(snapshot, 9, SETTINGS) == {"cheap": 1, "dear": 6}
    assert least_gain_first(snapshot, 99, SETTINGS) == {"cheap": 1, "dear": 1}


def test_nobody_is_shrunk_below_what_his_plans_allow() -> None:
    job = runs("j", "t0", 8, steps=10**6, model="llama-2-7b", global_batch=8)
    snapshot = a_snapshot(FLEET, [job], curves={job.spec.curve_key: curve(4, 8, infeasible=(1,))})
    assert least_gain_first(snapshot, 8, SETTINGS) == {"j": 4}
