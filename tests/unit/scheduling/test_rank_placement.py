"""Rank placement of resized jobs: which GPU each rank gets."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.domain.codec import decode, encode
from scheduler.domain.decisions import Reason, ReasonCode, ResizeJob, StartJob
from scheduler.domain.gpu_sets import Gpus, RankPlacement
from scheduler.domain.job import Job
from scheduler.domain.job_state import Allocation, JobState
from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan
from scheduler.domain.scaling_curve import build_data_parallel_plan
from scheduler.domain.snapshot import Snapshot
from scheduler.resharding.placement import GpuSlot, Placement, build_layer_tensors
from scheduler.resharding.shards import compute_overlap
from scheduler.scheduling.cycle import SchedulingCycle
from scheduler.scheduling.legality import find_violation
from scheduler.scheduling.mutable_snapshot import MutableSnapshot
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.scheduling.rank_placement import place_ranks
from tests.builders import GPU, a_fleet, a_job, a_loan, a_node, a_snapshot
from tests.builders_resharding import Transition, a_plan, a_transition

WHY = Reason(ReasonCode.FIRST_IN_ORDER, "because")
LAYERS = 8
FOUR: Gpus = {"t0": (0, 1, 2, 3)}


def tensor_plan(tp: int, dp: int, *, layers: int = LAYERS, zero: int = 0) -> ParallelPlan:
    plan = a_plan([[LayerStrategy(layers, tp=tp, dp=dp, zero=zero, shard_group=dp if zero else 1)]])
    return replace(plan, stages=tuple(replace(stage, gpu=GPU) for stage in plan.stages))


def running(plan: ParallelPlan, on: Gpus, *, state: JobState = JobState.RUNNING, seats: RankPlacement = ()) -> Snapshot:
    job = a_job("j", 1, 64, state=state, on=on)
    job = replace(job, allocation=replace(job.allocation, plan=plan, seats=seats))
    return a_snapshot(a_fleet(training=2, inference=1), [job], [a_loan("i0")])


def placement_after(snapshot: Snapshot, gpus: Gpus, plan: ParallelPlan) -> RankPlacement:
    return place_ranks(MutableSnapshot(snapshot), ResizeJob("j", gpus, plan, 60.0, WHY)).seats


def test_tensor_parallel_gpus_keep_their_shards() -> None:
    """GPU 1 holds the second half of the tensors, and GPU 2 the first."""
    snapshot = running(tensor_plan(2, 2), FOUR)
    assert placement_after(snapshot, {"t0": (1, 2)}, tensor_plan(2, 1)) == (("t0", 2), ("t0", 1))


def test_present_placement_counts_not_the_default() -> None:
    seats = (("t0", 3), ("t0", 2), ("t0", 1), ("t0", 0))
    snapshot = running(tensor_plan(2, 2), FOUR, seats=seats)
    assert placement_after(snapshot, {"t0": (0, 1)}, tensor_plan(2, 1)) == (("t0", 1), ("t0", 0))


def test_default_placement_is_omitted() -> None:
    assert placement_after(running(tensor_plan(2, 2), FOUR), {"t0": (0, 1)}, tensor_plan(2, 1)) == ()


def test_change_to_sharding_reorders_the_same_gpus() -> None:
    """Rank 1 of tp2 x dp2 holds the third quarter of the rows, and rank 2 the second."""
    snapshot = running(tensor_plan(2, 2, zero=3), FOUR)
    assert placement_after(snapshot, FOUR, tensor_plan(1, 4, zero=3)) == (("t0", 0), ("t0", 2), ("t0", 1), ("t0", 3))


def miscounted(plan: ParallelPlan) -> ParallelPlan:
    """Return a plan whose stage has more layers than its strategies."""
    return replace(plan, stages=tuple(replace(stage, last_layer=stage.last_layer + 1) for stage in plan.stages))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (build_data_parallel_plan(GPU, 4), build_data_parallel_plan(GPU, 2)),
        (tensor_plan(1, 4), tensor_plan(1, 2)),
        (tensor_plan(2, 2, layers=1), tensor_plan(2, 1, layers=1)),
        (tensor_plan(2, 2), tensor_plan(2, 1, layers=7)),
        (tensor_plan(2, 2), miscounted(tensor_plan(2, 1, layers=7))),
    ],
    ids=["linear curve", "data parallel", "one layer", "other layers", "contradicts itself"],
)
def test_default_placement_without_known_shards_or_gain(old: ParallelPlan, new: ParallelPlan) -> None:
    assert placement_after(running(old, FOUR), {"t0": (1, 2)}, new) == ()


def test_loading_job_gets_the_default_placement() -> None:
    snapshot = running(tensor_plan(2, 2), FOUR, state=JobState.STARTING)
    assert placement_after(snapshot, {"t0": (1, 2)}, tensor_plan(2, 1)) == ()


def test_resize_gets_its_rank_placement_when_applied() -> None:
    cycle = SchedulingCycle(running(tensor_plan(2, 2), FOUR), load_policy_set("ebbtide"))
    cycle.apply(ResizeJob("j", {"t0": (1, 2)}, tensor_plan(2, 1), 60.0, WHY))
    swapped = (("t0", 2), ("t0", 1))
    assert [decision.seats for decision in cycle.decisions if isinstance(decision, ResizeJob)] == [swapped]
    assert cycle.view.jobs["j"].allocation.seats == swapped


def test_inapplicable_decision_is_recorded_but_not_applied() -> None:
    cycle = SchedulingCycle(running(tensor_plan(2, 2), FOUR), load_policy_set("ebbtide"))
    start = StartJob("j", {"t0": (1, 2)}, tensor_plan(2, 1), WHY)
    cycle.apply(start)
    assert cycle.decisions == [start]
    assert cycle.view.jobs["j"].state is JobState.RUNNING


def test_default_placement_starts_with_owned_nodes_by_name() -> None:
    snapshot = a_snapshot(a_fleet(training=2, inference=2))
    target = {"i0": (0,), "t1": (1, 3), "t0": (2,), "gone": (0,)}
    expected = (("t0", 2), ("t1", 1), ("t1", 3), ("gone", 0), ("i0", 0))
    assert snapshot.rank_placement(Allocation(1, target)) == snapshot.default_rank_placement(target) == expected


def test_allocation_stored_without_a_placement_decodes() -> None:
    allocation = Allocation(1, FOUR, {}, tensor_plan(2, 2), seats=(("t0", 3), ("t0", 2), ("t0", 1), ("t0", 0)))
    document = encode(allocation)
    assert decode(Allocation, document) == allocation
    del document["seats"]
    assert decode(Allocation, document) == replace(allocation, seats=())


@settings(max_examples=100, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6))
def test_placement_covers_the_target_and_moves_no_more_than_the_default(seed: int) -> None:
    seeded = random.Random(seed)
    change = a_transition(seeded, LAYERS, gpus_max=32)
    snapshot, resize = world_of(seeded, change)
    state = MutableSnapshot(snapshot)
    assert find_violation(state, resize) is None
    completed = place_ranks(state, resize)
    default = snapshot.default_rank_placement(resize.gpus)
    assert completed.seats != default
    assert find_violation(state, completed) is None
    held = Placement(change.old_plan, placed(snapshot.rank_placement(snapshot.jobs["j"].allocation)))
    chosen = completed.seats or default
    assert kept_bytes(held, change.new_plan, chosen) >= kept_bytes(held, change.new_plan, default)


def world_of(seeded: random.Random, change: Transition) -> tuple[Snapshot, ResizeJob]:
    """Return the running job with a random order of ranks, on nodes of which some are lent."""
    pools, _ = a_fleet(training=0, inference=0)
    names = sorted({seat.node for seat in (*change.old_slots, *change.new_slots)})
    lent = {name for name in names if seeded.random() < 0.4}
    nodes = {name: a_node(name, "inference" if name in lent else "training", gpu="gpu") for name in names}
    seats = [(seat.node, seat.gpu) for seat in change.old_slots]
    if seeded.random() < 0.5:
        seeded.shuffle(seats)
    job: Job = a_job("j", 1, 64, state=JobState.RUNNING, on=by_node(change.old_slots))
    job = replace(job, allocation=replace(job.allocation, plan=change.old_plan, seats=tuple(seats)))
    resize = ResizeJob("j", by_node(change.new_slots), change.new_plan, 60.0, WHY)
    return a_snapshot((pools, nodes), [job], [a_loan(name) for name in sorted(lent)]), resize


def by_node(seats: Sequence[GpuSlot]) -> Gpus:
    nodes = {seat.node for seat in seats}
    return {node: tuple(sorted(seat.gpu for seat in seats if seat.node == node)) for node in sorted(nodes)}


def placed(seats: RankPlacement) -> tuple[GpuSlot, ...]:
    return tuple(GpuSlot(node, gpu) for node, gpu in seats)


def kept_bytes(held: Placement, plan: ParallelPlan, seats: RankPlacement) -> float:
    both, ranks = (
        compute_overlap(held, plan, build_layer_tensors([1e9] * LAYERS)),
        {seat: at for at, seat in enumerate(held.slots)},
    )
    return sum(float(both.by_rank[rank, ranks[seat]]) for rank, seat in enumerate(placed(seats)) if seat in ranks)
