"""How many GPUs each elastic job should have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from scheduler.domain.gpu_shape import GpuShape
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.scaling_curve import ScalingCurve, data_parallel_plan
from scheduler.policies.scaling import Item, fill_knapsack, flexible_counts, least_gain_first
from scheduler.policies.settings import PolicySettings
from tests.builders import GPU, a_fleet, a_job, a_snapshot

Groups = Mapping[str, list[Item]]
SETTINGS = PolicySettings(reconfiguration_s=30.0, resize_pause_s=0.0)
FLEET = a_fleet(training=4, inference=0)


def concave(random: Random) -> list[Item]:
    """Every count, each GPU gaining no more than the one before."""
    gains = sorted((random.randint(1, 100) for _ in range(random.randint(0, 6))), reverse=True)
    least, remaining_s = random.randint(1, 4), 1000.0
    items = [Item(least, remaining_s)]
    for at, gain in enumerate(gains):
        remaining_s -= gain
        items.append(Item(least + at + 1, remaining_s))
    return items


def with_holes(random: Random) -> list[Item]:
    """Counts with gaps, and gains in any order."""
    counts = sorted(random.sample(range(1, 13), random.randint(1, 5)))
    times = sorted((float(random.randint(1, 1000)) for _ in counts), reverse=True)
    falling = [Item(gpus, time_s) for gpus, time_s in zip(counts, times, strict=True)]
    return [falling[0], *(item for before, item in pairwise(falling) if item.remaining_s < before.remaining_s)]


def saved_s(groups: Groups, counts: Mapping[str, int]) -> float:
    return sum(
        items[0].remaining_s - next(item.remaining_s for item in items if item.gpus == counts[job_id])
        for job_id, items in groups.items()
    )


def best_s(groups: Groups, budget: int) -> float:
    """The exact dynamic programme over budget."""
    best = [0.0] * (budget + 1)
    for items in groups.values():
        choices = [(item.gpus - items[0].gpus, items[0].remaining_s - item.remaining_s) for item in items]
        best = [max(best[left - w] + v for w, v in choices if w <= left) for left in range(budget + 1)]
    return best[budget]


def instance(random: Random, *, is_concave: bool) -> tuple[Groups, int]:
    make = concave if is_concave else with_holes
    return {f"j{at}": make(random) for at in range(random.randint(1, 6))}, random.randint(0, 15)


def test_the_greedy_knapsack_is_exact_on_concave_gains() -> None:
    random = Random(3)
    for _ in range(500):
        groups, budget = instance(random, is_concave=True)
        assert saved_s(groups, fill_knapsack(groups, budget)) == pytest.approx(best_s(groups, budget))


def test_the_greedy_knapsack_misses_at_most_one_item_otherwise() -> None:
    random, exact = Random(4), 0
    for _ in range(500):
        groups, budget = instance(random, is_concave=False)
        found, best = saved_s(groups, fill_knapsack(groups, budget)), best_s(groups, budget)
        largest = max(items[0].remaining_s - items[-1].remaining_s for items in groups.values())
        exact += found == best
        assert best - largest <= found <= best
    print(f"\nexact in {exact} of 500")


def test_the_budget_is_never_exceeded() -> None:
    random = Random(5)
    for _ in range(200):
        groups, budget = instance(random, is_concave=random.random() < 0.5)
        counts = fill_knapsack(groups, budget)
        assert sum(counts[job_id] - items[0].gpus for job_id, items in groups.items()) <= budget


def runs(job_id: str, node: str, gpus: int, *, steps: int, least: int = 1, most: int = 8, **more: object) -> Job:
    on = {node: tuple(range(gpus))}
    return a_job(job_id, least, most, state=JobState.RUNNING, on=on, steps=steps, **more)  # type: ignore[arg-type]  # fields of a JobSpec


def test_free_gpus_go_where_they_save_most() -> None:
    jobs = [runs("short", "t0", 2, steps=2_000), runs("long", "t1", 2, steps=200_000)]
    assert flexible_counts(a_snapshot(FLEET, jobs), (), 6, SETTINGS) == {"short": 2, "long": 8}


def test_growth_that_does_not_pay_for_itself_is_left() -> None:
    """80 s left on 2 GPUs: four would save 40 s, and the change costs 30 s."""
    assert flexible_counts(a_snapshot(FLEET, [runs("j", "t0", 2, steps=160, most=4)]), (), 6, SETTINGS) == {"j": 2}


def test_a_small_imbalance_moves_no_gpus_from_job_to_job() -> None:
    jobs = [runs("a", "t0", 4, steps=20_000), runs("b", "t1", 5, steps=20_000)]
    assert flexible_counts(a_snapshot(FLEET, jobs), (), 0, SETTINGS) == {"a": 4, "b": 5}


def test_a_large_imbalance_moves_them() -> None:
    jobs = [runs("a", "t0", 8, steps=1_000), runs("b", "t1", 1, steps=500_000)]
    counts = flexible_counts(a_snapshot(FLEET, jobs), (), 0, SETTINGS)
    assert counts["b"] > 1
    assert sum(counts.values()) == 9


def test_no_job_shrinks_for_gpus_that_would_then_be_idle() -> None:
    """The other job is nearly done: it gains too little to be disturbed."""
    jobs = [runs("wide", "t0", 8, steps=4_000), runs("nearly", "t1", 1, steps=50)]
    assert flexible_counts(a_snapshot(FLEET, jobs), (), 0, SETTINGS) == {"wide": 8, "nearly": 1}


def test_jobs_rest_between_two_changes_unless_they_are_at_their_minimum() -> None:
    settings = replace(SETTINGS, resize_pause_s=600.0)
    jobs = [runs("rests", "t0", 2, steps=10**6), runs("least", "t1", 1, steps=10**6)]
    assert set(flexible_counts(a_snapshot(FLEET, jobs, now_s=100.0), (), 4, settings)) == {"least"}
    assert set(flexible_counts(a_snapshot(FLEET, jobs, now_s=600.0), (), 4, settings)) == {"least", "rests"}


def test_starting_jobs_share_what_is_spare_and_pay_nothing() -> None:
    jobs = [a_job("new", 1, 4, steps=40), a_job("waits", 1, 4)]
    assert flexible_counts(a_snapshot(FLEET, jobs), ("new",), 3, SETTINGS) == {"new": 4}


def curve(*counts: int, infeasible: tuple[int, ...] = ()) -> ScalingCurve:
    found = ScalingCurve({GpuShape.packed(GPU, n, 8): data_parallel_plan(GPU, n) for n in counts})
    for n in infeasible:
        found = found.with_infeasible(GpuShape.packed(GPU, n, 8), "too big")
    return found


def test_counts_that_the_curve_has_no_plan_for_are_skipped() -> None:
    job = runs("j", "t0", 2, steps=10**6, model="llama-2-7b", global_batch=8)
    snapshot = a_snapshot(FLEET, [job], curves={job.spec.curve_key: curve(2, 5, infeasible=(1,))})
    assert flexible_counts(snapshot, (), 2, SETTINGS) == {"j": 2}
    assert flexible_counts(snapshot, (), 6, SETTINGS) == {"j": 5}


def test_a_job_on_a_shape_of_its_own_may_stay_there() -> None:
    """Three GPUs are not on the curve; its own plan says what they are worth, and only two are free."""
    job = runs("j", "t0", 3, steps=10**6, least=3, model="llama-2-7b", global_batch=8)
    snapshot = a_snapshot(FLEET, [job], curves={job.spec.curve_key: curve(6)})
    assert flexible_counts(snapshot, (), 2, SETTINGS) == {"j": 3}
    assert flexible_counts(snapshot, (), 3, SETTINGS) == {"j": 6}


def test_room_is_made_where_a_gpu_gains_least() -> None:
    jobs = [runs("dear", "t0", 8, steps=10**6), runs("cheap", "t1", 8, steps=10**3)]
    snapshot = a_snapshot(FLEET, jobs)
    assert least_gain_first(snapshot, 3, SETTINGS) == {"cheap": 5}
    assert least_gain_first(snapshot, 9, SETTINGS) == {"cheap": 1, "dear": 6}
    assert least_gain_first(snapshot, 99, SETTINGS) == {"cheap": 1, "dear": 1}


def test_nobody_is_shrunk_below_what_his_plans_allow() -> None:
    job = runs("j", "t0", 8, steps=10**6, model="llama-2-7b", global_batch=8)
    snapshot = a_snapshot(FLEET, [job], curves={job.spec.curve_key: curve(4, 8, infeasible=(1,))})
    assert least_gain_first(snapshot, 8, SETTINGS) == {"j": 4}
