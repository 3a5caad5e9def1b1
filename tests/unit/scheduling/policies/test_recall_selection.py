"""Selection of the lent nodes that are returned first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scheduler.domain.fleet import LoanState
from scheduler.domain.gpu_sets import Gpus, GpuShape
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.policies.recall_selection import (
    RecallNeed,
    build_recall_cost,
    least_preemption_cost,
    transfer_time_by_node_s,
)
from scheduler.scheduling.policies.settings import PolicySettings
from tests.builders import GPU, a_curve, a_fleet, a_job, a_loan, a_snapshot
from tests.builders_resharding import a_plan

SETTINGS = PolicySettings(reconfiguration_s=30.0)
WAITS = a_job("waits", 99)
EIGHT = (0, 1, 2, 3, 4, 5, 6, 7)
FOUR = (0, 1, 2, 3)


def runs(job_id: str, least: int, on: Gpus, *, saved_at_s: float = 0.0, **more: Any) -> Job:
    width = sum(map(len, on.values()))
    return a_job(job_id, least, max(least, width), state=JobState.RUNNING, on=on, now_s=saved_at_s, **more)


def world(nodes: int, jobs: list[Job], offered: tuple[str, ...] = (), owned: int = 0) -> Snapshot:
    loans = [a_loan(f"i{at}", LoanState.OFFERED if f"i{at}" in offered else LoanState.ACTIVE) for at in range(nodes)]
    return a_snapshot(a_fleet(training=owned, inference=nodes), jobs, loans, now_s=1000.0)


def chosen(snapshot: Snapshot, count: int) -> tuple[str, ...]:
    return least_preemption_cost(snapshot, "inference", RecallNeed(count), SETTINGS)


def test_unused_nodes_go_first_then_idle_ones() -> None:
    snapshot = world(3, [runs("j", 8, {"i0": EIGHT})], offered=("i2",))
    assert [chosen(snapshot, count) for count in (1, 2)] == [("i2",), ("i2", "i1")]
    assert set(chosen(snapshot, 3)) == set(chosen(snapshot, 9)) == {"i0", "i1", "i2"}


def test_shrinking_a_job_comes_before_preempting_one() -> None:
    wide = runs("wide", 8, {"t0": EIGHT, "i0": EIGHT})
    base = runs("base", 8, {"i1": EIGHT}, saved_at_s=990.0)
    assert chosen(world(2, [wide, base], owned=1), 1) == ("i0",)


def test_recently_saved_job_loses_least() -> None:
    jobs = [runs("old", 8, {"i0": EIGHT}, saved_at_s=0.0), runs("saved", 8, {"i1": EIGHT}, saved_at_s=900.0)]
    assert chosen(world(2, jobs), 1) == ("i1",)


def test_nodes_of_one_job_are_weighed_together() -> None:
    """Preempting it costs 640 GPU-seconds for two nodes, 320 each; the other job's single node costs 400."""
    spread = runs("spread", 16, {"i0": EIGHT, "i2": EIGHT}, saved_at_s=990.0)
    other = runs("other", 8, {"i1": EIGHT}, saved_at_s=980.0)
    assert chosen(world(3, [spread, other]), 2) == ("i0", "i2")
    assert chosen(world(3, [spread, other]), 1) == ("i1",)


def test_preempted_job_frees_its_other_nodes_at_no_cost() -> None:
    spread = runs("spread", 24, {"i0": EIGHT, "i2": EIGHT, "t0": EIGHT}, saved_at_s=990.0)
    cheaper = [runs(name, 8, {node: EIGHT}, saved_at_s=950.0) for name, node in (("a", "i1"), ("b", "i3"))]
    snapshot = world(4, [spread, *cheaper], owned=1)
    assert chosen(snapshot, 1) == ("i1",)
    assert chosen(snapshot, 2) == ("i0", "i2")


def test_recalled_nodes_and_other_pools_are_not_selected() -> None:
    snapshot = world(1, [])
    recalled = a_snapshot(a_fleet(training=1, inference=1), (), [a_loan("i0", LoanState.RECALLED, return_by_s=1.0)])
    assert chosen(recalled, 1) == ()
    assert least_preemption_cost(snapshot, "elsewhere", RecallNeed(1), SETTINGS) == ()


def test_node_whose_job_can_move_goes_first() -> None:
    """Eight GPUs are free on t0: the job of 4 moves for 120 GPU-seconds, the one of 12 would be preempted."""
    fits = runs("fits", 4, {"i0": FOUR})
    wide = runs("wide", 12, {"i1": EIGHT, "i2": FOUR}, saved_at_s=1000.0)
    assert chosen(world(3, [fits, wide], owned=1), 1) == ("i0",)


def test_free_gpus_count_once_and_leave_with_their_node() -> None:
    jobs = [runs(f"j{at}", 8, {f"i{at}": EIGHT}, saved_at_s=saved_at_s) for at, saved_at_s in enumerate((0, 900, 990))]
    one_room = build_recall_cost(world(4, jobs, owned=1), ["i0", "i1", "i2", "i3"], SETTINGS)
    # t0 and i3 each have GPUs for one job, and the first submission gets them.
    assert one_room.compute([0, 1]) == 2 * 240.0
    assert one_room.compute([0, 3]) == 240.0
    assert one_room.compute([0, 1, 3]) == 240.0 + (100.0 + 30.0) * 8


def test_job_refills_from_free_gpus_unless_others_wait() -> None:
    """It can shrink to 4; on t0 it can get the other 4 back."""
    job = runs("j", 2, {"i0": FOUR, "i1": FOUR})
    assert build_recall_cost(world(2, [job], owned=1), ["i0", "i1"], SETTINGS).compute([0]) == 30.0 * 8
    assert build_recall_cost(world(2, [job, WAITS], owned=1), ["i0", "i1"], SETTINGS).compute([0]) == 30.0 * 4


def test_non_fungible_job_finds_no_free_gpus() -> None:
    bound = runs("bound", 8, {"i0": EIGHT}, saved_at_s=1000.0, fungible=False)
    assert build_recall_cost(world(1, [bound], owned=1), ["i0"], SETTINGS).compute([0]) == 30.0 * 8


def test_starting_job_loses_only_its_start() -> None:
    starting = replace(runs("starting", 8, {"i0": EIGHT}), state=JobState.STARTING)
    assert build_recall_cost(world(1, [starting]), ["i0"], SETTINGS).compute([0]) == 30.0 * 8


def test_job_shrinks_only_to_counts_with_a_plan() -> None:
    """It has no plan on 1 to 5 GPUs: with 4 left it can neither shrink nor be restored to its minimum of 1."""
    job = runs("j", 1, {"i0": FOUR, "t0": FOUR}, model="llama-2-7b", global_batch=8)
    curve = a_curve({GpuShape.packed(GPU, 6, 8): 1.0, GpuShape.packed(GPU, 8, 8): 0.8})
    for gpus in range(1, 6):
        curve = curve.with_infeasible(GpuShape.packed(GPU, gpus, 8), "too big")
    snapshot = replace(world(1, [job, WAITS], owned=1), curves={job.spec.curve_key: curve})
    assert build_recall_cost(snapshot, ["i0"], SETTINGS).compute([0]) == (1000.0 + 30.0) * 8


def test_job_that_must_leave_anyway_costs_nothing_more() -> None:
    """One node that it needs is already being returned."""
    doomed = runs("doomed", 16, {"i0": EIGHT, "i1": EIGHT})
    other = runs("other", 8, {"i2": EIGHT}, saved_at_s=1000.0)
    snapshot = world(3, [doomed, other])
    loans = {**snapshot.loans, "i1": a_loan("i1", LoanState.RECALLED, return_by_s=1100.0)}
    assert chosen(replace(snapshot, loans=loans), 1) == ("i0",)


def test_reconfiguration_time_of_the_model_counts() -> None:
    slow = runs("slow", 4, {"i0": FOUR, "t0": FOUR}, model="llama-2-7b", global_batch=8)
    settings = replace(SETTINGS, reconfiguration_s_by_model={"llama-2-7b": 90.0})
    snapshot = replace(
        world(1, [slow, WAITS], owned=1), curves={slow.spec.curve_key: a_curve({GpuShape.packed(GPU, 4, 8): 1.0})}
    )
    assert build_recall_cost(snapshot, ["i0"], settings).compute([0]) == 90.0 * 4


def modelled(job: Job, plan: ParallelPlan, peak_gb: float = 80.0) -> Job:
    return replace(job, allocation=replace(job.allocation, plan=replace(plan, peak_bytes_per_gpu=round(peak_gb * 1e9))))


def test_node_with_replicated_state_goes_first() -> None:
    """`staged` has half of its layers on t0 and half on i0; `copied` has all of them on each GPU."""
    halves = a_plan([[LayerStrategy(4, dp=8)]] * 2)
    copies = a_plan([[LayerStrategy(8, dp=16)]])
    staged = modelled(runs("staged", 8, {"t0": EIGHT, "i0": EIGHT}), halves)
    copied = modelled(runs("copied", 8, {"t1": EIGHT, "i1": EIGHT}), copies)
    snapshot = world(2, [staged, copied, WAITS], owned=2)
    assert chosen(snapshot, 1) == ("i1",)
    cost = build_recall_cost(snapshot, ["i0", "i1"], SETTINGS)
    # Each GPU of i0 holds the same half of the model, of which eight ports of 10 GB/s send one copy.
    assert cost.compute([0]) == pytest.approx(30.0 * 8 + 80e9 / (8 * 10e9) * 16)
    assert cost.compute([1]) == 30.0 * 8


def test_only_running_jobs_with_a_full_plan_have_transfers() -> None:
    plan, on = a_plan([[LayerStrategy(4, dp=8)]] * 2), {"t0": EIGHT, "i0": EIGHT}
    job = modelled(runs("j", 8, on), plan)
    contradictory = replace(
        plan, stages=tuple(replace(stage, last_layer=stage.last_layer + 1) for stage in plan.stages)
    )
    one_layer = a_plan([[LayerStrategy(1, tp=8, dp=2)]])
    known, *unknown = (
        sum(transfer_time_by_node_s(world(1, [variant], owned=1), variant).values())
        for variant in (
            job,
            modelled(job, plan, peak_gb=0.0),
            modelled(job, one_layer),
            modelled(job, contradictory),
            replace(job, state=JobState.STARTING),
            runs("j", 8, on),
        )
    )
    assert known == pytest.approx(2.0)
    assert unknown == [0.0] * 5


def test_transfer_depends_on_the_present_rank_placement() -> None:
    """Two replicas of two stages, with a replica on each node instead of a stage."""
    seats = (("t0", 0), ("i0", 0), ("t0", 1), ("i0", 1))
    job = modelled(runs("j", 2, {"t0": (0, 1), "i0": (0, 1)}), a_plan([[LayerStrategy(4, dp=2)]] * 2))
    by_stage, by_replica = (
        transfer_time_by_node_s(world(1, [variant], owned=1), variant)
        for variant in (job, replace(job, allocation=replace(job.allocation, seats=seats)))
    )
    assert by_stage == {"t0": pytest.approx(4.0), "i0": pytest.approx(4.0)}
    assert by_replica == {"t0": 0.0, "i0": 0.0}


def test_large_fleet_of_single_job_nodes_is_solved_by_cost() -> None:
    """Nodes with a job each are independent: the cheapest are the best, however many there are."""
    jobs = [runs(f"j{at}", 8, {f"i{at}": EIGHT}, saved_at_s=float(7 * at % 60)) for at in range(60)]
    cheapest = sorted(range(60), key=lambda at: -(7 * at % 60))[:20]
    assert set(chosen(world(60, jobs), 20)) == {f"i{at}" for at in cheapest}
