"""Which GPUs a shrinking job keeps: the rules of placement first, then the fewest moved bytes."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.domain import gpu_sets
from scheduler.domain.gpu_sets import Gpus, GpuShape
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan
from scheduler.domain.scaling_curve import ScalingCurve
from scheduler.domain.snapshot import Snapshot
from scheduler.resharding.placement import GpuSlot, Placement, build_layer_tensors
from scheduler.resharding.rank_mapping import map_ranks
from scheduler.scheduling.cycle import SchedulingCycle
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.scheduling.shrink_selection import select_cheapest_part, select_part
from scheduler.scheduling.target_selection import reduce_target
from tests.builders import GPU, a_fleet, a_job, a_loan, a_snapshot
from tests.builders_resharding import a_plan, a_random_plan

LAYERS = 8
FOUR = (0, 1, 2, 3)
EIGHT = tuple(range(8))


def staged(stages: int, dp: int) -> ParallelPlan:
    """Return a plan of equal stages of `dp` replicas each. Rank r belongs to stage r // dp."""
    return on_gpu(a_plan([[LayerStrategy(LAYERS // stages, dp=dp)]] * stages))


def on_gpu(plan: ParallelPlan) -> ParallelPlan:
    return replace(plan, stages=tuple(replace(stage, gpu=GPU) for stage in plan.stages))


def running(on: Gpus, plan: ParallelPlan, fewer: Mapping[GpuShape, ParallelPlan]) -> tuple[SchedulingCycle, Job]:
    job = a_job("j", 1, 64, state=JobState.RUNNING, on=on, model="llama-2-7b", global_batch=8)
    job = replace(job, allocation=replace(job.allocation, plan=plan))
    lent = [name for name in on if name.startswith("i")]
    snapshot = a_snapshot(a_fleet(training=4, inference=4), [job], [a_loan(name) for name in lent])
    curve = ScalingCurve({snapshot.shape_of(on): plan, **fewer})
    return SchedulingCycle(replace(snapshot, curves={job.spec.curve_key: curve}), load_policy_set("ebbtide")), job


def kept(on: Gpus, plan: ParallelPlan, count: int, fewer: ParallelPlan, *, state: JobState = JobState.RUNNING) -> Gpus:
    """Return what the job keeps of `on` when it shrinks to `count` GPUs, on as few nodes as possible."""
    cycle, job = running(on, plan, {GpuShape.packed(GPU, count, 8): fewer})
    target = reduce_target(cycle, replace(job, state=state), on, count)
    assert target is not None
    assert target[1] is fewer
    return target[0]


def test_one_replica_of_each_stage_is_kept() -> None:
    assert kept({"t0": FOUR}, staged(2, 2), 2, staged(2, 1)) == {"t0": (0, 2)}


def test_one_node_of_each_stage_is_kept() -> None:
    on = {"t0": EIGHT, "t1": EIGHT, "t2": EIGHT, "t3": EIGHT}
    assert kept(on, staged(2, 16), 16, staged(2, 8)) == {"t0": EIGHT, "t2": EIGHT}


def test_lent_nodes_are_given_up_first() -> None:
    """The second stage runs on the lent nodes i0 and i1; t0 and t1 are kept."""
    on = {"t0": EIGHT, "t1": EIGHT, "i0": EIGHT, "i1": EIGHT}
    assert kept(on, staged(2, 16), 16, staged(2, 8)) == {"t0": EIGHT, "t1": EIGHT}


def test_node_with_most_gpus_of_the_job_is_kept() -> None:
    """The second stage runs on the node with more GPUs."""
    on = {"t0": FOUR, "t1": EIGHT}
    assert kept(on, on_gpu(a_plan([[LayerStrategy(4, dp=4)], [LayerStrategy(4, dp=8)]])), 8, staged(2, 4)) == {
        "t1": EIGHT
    }


def test_loading_and_replicated_jobs_keep_the_first_gpus() -> None:
    assert kept({"t0": FOUR}, staged(2, 2), 2, staged(2, 1), state=JobState.STARTING) == {"t0": (0, 1)}
    assert kept({"t0": FOUR}, staged(1, 4), 2, staged(1, 2)) == {"t0": (0, 1)}


def test_part_is_unchanged_for_a_plan_of_another_size() -> None:
    """The part has three GPUs, the plan is for two."""
    cycle, job = running({"t0": FOUR}, staged(2, 2), {})
    assert select_cheapest_part(cycle.view, job, {"t0": FOUR}, {"t0": FOUR[:3]}, staged(2, 1)) == {"t0": FOUR[:3]}


def test_partial_node_stays_last_in_the_order_of_ranks() -> None:
    """Keeping the second stage and half of the others would move least, but a partial node in front would shift every
    group of ranks."""
    on = {"t0": EIGHT, "t1": EIGHT, "t2": EIGHT}
    fewer = on_gpu(a_plan([[LayerStrategy(2, dp=8)], [LayerStrategy(4, dp=8)], [LayerStrategy(2, dp=4)]]))
    part = kept(on, on_gpu(a_plan([[LayerStrategy(n, dp=8)] for n in (2, 4, 2)])), 20, fewer)
    assert [len(indices) for _, indices in sorted(part.items())] == [8, 8, 4]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6))
def test_kept_part_obeys_the_rules_and_moves_no_more_bytes(seed: int) -> None:
    seeded = random.Random(seed)
    names = seeded.sample(["t0", "t1", "t2", "t3", "i0", "i1"], seeded.randint(1, 4))
    on = {name: EIGHT[: seeded.choice([4, 8, 8])] for name in sorted(names)}
    width = gpu_sets.count(on)
    old, fewer = (on_gpu(a_random_plan(seeded, gpus, LAYERS)) for gpus in (width, seeded.randint(1, width)))
    cycle, job = running(on, old, {})
    usual = select_part(cycle.view, on, fewer.world_size)
    part = select_cheapest_part(cycle.view, job, on, usual, fewer)
    view = cycle.view
    assert describe_nodes(view, part) == describe_nodes(view, usual)
    assert moved_bytes(view, job, old, fewer, part) <= moved_bytes(view, job, old, fewer, usual)


def describe_nodes(view: Snapshot, part: Gpus) -> list[tuple[bool, int]]:
    """Return whether each node is lent and how many GPUs it has, in the order of ranks."""
    nodes = dict.fromkeys(node for node, _ in view.default_rank_placement(part))
    return [(view.is_lent(view.nodes[name]), len(part[name])) for name in nodes]


def moved_bytes(view: Snapshot, job: Job, old: ParallelPlan, new: ParallelPlan, part: Gpus) -> float:
    held, seats = (
        tuple(GpuSlot(*seat) for seat in view.default_rank_placement(gpus)) for gpus in (job.allocation.target, part)
    )
    return map_ranks(Placement(old, held), new, seats, build_layer_tensors([1e9] * LAYERS)).moved_bytes
