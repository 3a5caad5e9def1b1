"""Lyra's policies as published."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from scheduler.domain.fleet import LoanState
from scheduler.domain.gpu_sets import Gpus, GpuShape
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.scheduling.policies import lyra
from scheduler.scheduling.policies.recall_selection import RecallNeed
from scheduler.scheduling.policies.settings import PolicySettings
from scheduler.scheduling.policies.speed import linear_step_times_s, node_sizes
from tests.builders import GPU, a_curve, a_fleet, a_job, a_loan, a_snapshot

SETTINGS = PolicySettings()
FLEET = a_fleet(training=4, inference=4)
counts = partial(lyra.linear_counts, settings=SETTINGS)


def runs(job_id: str, on: Gpus, *, least: int = 1, most: int = 8, steps: int = 10_000, **more: object) -> Job:
    return a_job(job_id, least, most, state=JobState.RUNNING, on=on, steps=steps, **more)  # type: ignore[arg-type]  # fields of a JobSpec


def span(node: str, gpus: int, first: int = 0) -> Gpus:
    return {node: tuple(range(first, first + gpus))}


def test_all_flexible_gpus_are_redistributed_at_any_cost() -> None:
    """Under linear scaling, the time saved is largest if GPUs are shared in the ratio of the square roots of the
    work: 100 to 10, so 7 to 2 or 8 to 1 of 9. Our own scaling would not resize recently resized jobs, and counts a
    price."""
    jobs = [runs("small", span("t0", 7), steps=100), runs("big", span("t1", 2), steps=10_000)]
    assert counts(a_snapshot(FLEET, jobs), (), 0) == {"small": 1, "big": 8}


def test_starting_jobs_take_part_and_inelastic_ones_do_not() -> None:
    jobs = [a_job("new", 1, 4, steps=4000), a_job("rigid", 2, 2), a_job("waits", 1, 4)]
    assert counts(a_snapshot(FLEET, jobs), ("new", "rigid"), 2) == {"new": 3}


def test_flattening_curve_is_ignored() -> None:
    """The curve says that 8 GPUs are no faster than 2."""
    times = {GpuShape.packed(GPU, count, 8): time_s for count, time_s in ((1, 1.0), (2, 0.5), (8, 0.5))}
    job = a_job("a", 1, 8, model="m", global_batch=8, steps=1000)
    snapshot = a_snapshot(FLEET, [job], curves={job.spec.curve_key: a_curve(times)})
    assert counts(snapshot, ("a",), 7) == {"a": 8}
    believed = linear_step_times_s(snapshot, job, node_sizes(snapshot))
    assert [believed(count) for count in (1, 2, 4, 8)] == [1.0, 0.5, 0.25, 0.125]


def test_linear_law_starts_from_the_present_speed() -> None:
    job = runs("a", span("t0", 4), model="m", global_batch=8)
    plan = job.allocation.plan
    assert plan is not None
    slow = replace(job, allocation=replace(job.allocation, plan=replace(plan, iteration_time_s=0.4)))
    snapshot = a_snapshot(FLEET, [slow])
    assert linear_step_times_s(snapshot, slow, node_sizes(snapshot))(8) == 0.2
    unknown = replace(slow, id="b", state=JobState.QUEUED, allocation=a_job("b").allocation)
    assert linear_step_times_s(snapshot, unknown, node_sizes(snapshot))(8) is None


def test_whole_flexible_parts_are_freed_where_least_is_lost() -> None:
    """Shrinking to 1 GPU costs W / GPUs per freed GPU: 1250 s for `long`, 250 s for `short`."""
    short, rigid = runs("short", span("t1", 4), steps=1000), runs("rigid", span("t2", 8), least=8)
    snapshot = a_snapshot(FLEET, [runs("long", span("t0", 8)), short, rigid])
    assert lyra.least_linear_gain_first(snapshot, 2, SETTINGS) == {"short": 2}
    assert lyra.least_linear_gain_first(snapshot, 5, SETTINGS) == {"short": 1, "long": 6}
    assert lyra.least_linear_gain_first(snapshot, 99, SETTINGS) == {"short": 1, "long": 1}


def reclaimed(jobs: list[Job], count: int, *, offered: str = "") -> tuple[str, ...]:
    loans = [a_loan(f"i{at}", LoanState.OFFERED if f"i{at}" == offered else LoanState.ACTIVE) for at in range(4)]
    return lyra.least_node_fraction(a_snapshot(FLEET, jobs, loans), "inference", RecallNeed(count), SETTINGS)


def test_node_cost_is_the_fraction_of_its_jobs() -> None:
    """i0 holds one whole job, i1 halves of two, i2 a half, i3 only a third of one."""
    jobs = [
        runs("whole", span("i0", 1), least=1, most=1),
        runs("two", {**span("i1", 2), **span("i2", 2)}, least=4, most=4),
        runs("half", {**span("i1", 2, 4), **span("t0", 2)}, least=4, most=4),
        runs("third", {**span("i3", 2), **span("t1", 2), **span("t2", 2)}, least=6, most=6),
    ]
    assert reclaimed(jobs, 1) == ("i3",)
    assert reclaimed(jobs, 2) == ("i3", "i2")
    assert reclaimed(jobs, 3) == ("i3", "i2", "i1"), "`two` has left i1 with i2, so i1 costs a half, i0 a whole job"


def test_flexible_workers_are_free_down_to_the_minimum() -> None:
    jobs = [
        runs("elastic", {**span("t0", 2), **span("i0", 2), **span("i1", 2)}, least=4),
        runs("rigid", {**span("i2", 1), **span("i3", 1)}, least=2, most=2),
    ]
    assert reclaimed(jobs, 1) == ("i0",)
    assert reclaimed(jobs, 2)[1] != "i3", "i1 and i2 cost a half each, and i2 frees i3 too"
    assert reclaimed(jobs, 9) == ("i0", "i1", "i2", "i3")


def test_unused_nodes_go_first_and_offered_ones_before_active_ones() -> None:
    assert reclaimed([runs("a", span("i0", 8), least=8)], 2, offered="i3") == ("i3", "i1")
