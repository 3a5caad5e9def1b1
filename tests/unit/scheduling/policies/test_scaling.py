"""The number of GPUs of each elastic job."""

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


def test_growth_below_its_reconfiguration_cost_is_skipped() -> None:
    """80 s remain on 2 GPUs: four would save 40 s, and the change costs 30 s, which count twice."""
    assert flexible_counts(a_snapshot(FLEET, [runs("j", "t0", 2, steps=160, most=4)]), (), 6, SETTINGS) == {}


def test_small_imbalance_moves_no_gpus() -> None:
    jobs = [runs("a", "t0", 4, steps=20_000), runs("b", "t1", 5, steps=20_000)]
    assert flexible_counts(a_snapshot(FLEET, jobs), (), 0, SETTINGS) == {}


def test_a_long_job_gives_its_gpus_to_a_short_one() -> None:
    jobs = [runs("long", "t0", 8, steps=500_000), runs("short", "t1", 1, steps=1_000)]
    assert flexible_counts(a_snapshot(FLEET, jobs), (), 0, SETTINGS) == {"long": 1, "short": 8}


def test_no_job_shrinks_for_gpus_that_would_be_idle() -> None:
    """The other job is nearly done and would gain too little."""
    jobs = [runs("wide", "t0", 8, steps=4_000), runs("nearly", "t1", 1, steps=50)]
    assert flexible_counts(a_snapshot(FLEET, jobs), (), 0, SETTINGS) == {}


def test_resize_pause_applies_except_at_the_minimum() -> None:
    settings = replace(SETTINGS, resize_pause_s=600.0)
    jobs = [runs("rests", "t0", 2, steps=10**6), runs("least", "t1", 1, steps=10**6)]
    assert set(flexible_counts(a_snapshot(FLEET, jobs, now_s=100.0), (), 13, settings)) == {"least"}
    assert set(flexible_counts(a_snapshot(FLEET, jobs, now_s=600.0), (), 13, settings)) == {"least", "rests"}


def test_reachable_deadline_precedes_other_gains() -> None:
    """Four GPUs end the job just in time; eight would not help its deadline, and the short one gets them."""
    jobs = [runs("due", "t0", 1, steps=10_000, deadline_s=3_000.0), runs("short", "t1", 1, steps=4_000)]
    assert flexible_counts(a_snapshot(FLEET, jobs), (), 3, SETTINGS) == {"due": 4}
    assert flexible_counts(a_snapshot(FLEET, jobs), (), 10, SETTINGS) == {"due": 4, "short": 8}


def test_starting_jobs_share_spare_gpus_at_no_cost() -> None:
    jobs = [a_job("new", 1, 4, steps=40), a_job("waits", 1, 4)]
    assert flexible_counts(a_snapshot(FLEET, jobs), ("new",), 3, SETTINGS) == {"new": 4}


def curve(*counts: int, infeasible: tuple[int, ...] = ()) -> ScalingCurve:
    found = ScalingCurve({GpuShape.packed(GPU, n, 8): build_data_parallel_plan(GPU, n) for n in counts})
    for n in infeasible:
        found = found.with_infeasible(GpuShape.packed(GPU, n, 8), "too big")
    return found


def test_counts_without_a_plan_are_skipped() -> None:
    job = runs("j", "t0", 2, steps=10**6, model="llama-2-7b", global_batch=8)
    snapshot = a_snapshot(FLEET, [job], curves={job.spec.curve_key: curve(2, 5, infeasible=(1,))})
    assert flexible_counts(snapshot, (), 2, SETTINGS) == {}
    assert flexible_counts(snapshot, (), 6, SETTINGS) == {"j": 5}


def test_job_on_a_shape_outside_its_curve_can_stay() -> None:
    """Three GPUs are not on the curve; the present plan gives their speed, and only two more are free."""
    job = runs("j", "t0", 3, steps=10**6, least=3, model="llama-2-7b", global_batch=8)
    snapshot = a_snapshot(FLEET, [job], curves={job.spec.curve_key: curve(6)})
    assert flexible_counts(snapshot, (), 2, SETTINGS) == {}
    assert flexible_counts(snapshot, (), 3, SETTINGS) == {"j": 6}


def test_gpus_are_freed_where_they_gain_least() -> None:
    """A GPU brings the end nearer for a job with little remaining work."""
    jobs = [runs("dear", "t0", 8, steps=10**4), runs("cheap", "t1", 8, steps=10**6)]
    snapshot = a_snapshot(FLEET, jobs)
    assert least_gain_first(snapshot, 3, SETTINGS) == {"cheap": 5}
    assert least_gain_first(snapshot, 9, SETTINGS) == {"cheap": 1, "dear": 6}
    assert least_gain_first(snapshot, 99, SETTINGS) == {"cheap": 1, "dear": 1}


def test_no_job_shrinks_below_its_plans() -> None:
    job = runs("j", "t0", 8, steps=10**6, model="llama-2-7b", global_batch=8)
    snapshot = a_snapshot(FLEET, [job], curves={job.spec.curve_key: curve(4, 8, infeasible=(1,))})
    assert least_gain_first(snapshot, 8, SETTINGS) == {"j": 4}
