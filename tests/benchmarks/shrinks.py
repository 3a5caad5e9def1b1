"""Bytes moved when a job shrinks: the product's decision against the best possible decisions.

A job runs a solver plan of a shipped model on as few nodes of 8 GPUs as possible, and shrinks. The shrink selection
decides which GPUs it keeps, and the rank placement decides the order of ranks, both as in a tick and without layer
sizes. Here layers have the sizes of their model, at 12 bytes per parameter. The new plan is the same for all choices:
that of as few nodes as possible. Pairs of plans are random, or the smaller one is the next point of the curve.

Moved bytes are those that a GPU needs and does not hold, including those on its node. `over the network` counts those
that no GPU of its node holds. `by time` weighs bytes of neighbours by the ratio of the A100 profile's bandwidths.
References:

* rank order: the job keeps the GPUs of its first ranks, and new rank i takes that of old rank i.
* equal choices, groups together: every equivalent set of nodes, each in the best order that keeps together the ranks
  that communicate most. The product chooses from these.
* equal choices, any order: the same sets, each in the best of all orders, including those that split groups.
* all choices, any order: a linear programme (HiGHS) over all GPUs of the job. Nothing can move less.
* m of n GPUs kept: if n GPUs hold a state without copies in equal parts, m of them hold m/n of it, so 1 - m/n moves
  with any choice. A shrink to m of n GPUs saves at most m/n of the bytes that rank order moves.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import inf
from statistics import median, quantiles
from time import perf_counter

import numpy as np
from scipy.optimize import linear_sum_assignment, linprog
from scipy.sparse import eye_array, kron

from scheduler.domain.decisions import Reason, ReasonCode, ResizeJob
from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.job_state import JobState
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.domain.scaling_curve import ScalingCurve
from scheduler.resharding.placement import GpuSlot, Placement, TensorSpec
from scheduler.resharding.rank_mapping import compute_bytes_by_slot, find_best_order
from scheduler.resharding.shards import Floats, StateOverlap, compute_overlap
from scheduler.scheduling.cycle import SchedulingCycle
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.scheduling.rank_placement import place_ranks
from scheduler.scheduling.target_selection import reduce_target
from scheduler.solver.profiles.catalog import load_gpu
from tests.benchmarks.resharding import MODELS, curve_of, state_tensors
from tests.builders import a_fleet, a_job, a_snapshot
from tests.builders_resharding import NODE_GPUS

SHRINKS = 200
PROFILE = load_gpu("a100-80g")
NEAR = PROFILE.inter_bandwidth_bytes_per_s / PROFILE.intra_bandwidth_bytes_per_s
"""Cost of a byte from the same node, in bytes over the network."""
SUBSETS_MAX = 70
"""All choices of up to 8 nodes are tried."""
OTHERS = ("baichuan2-13b", "bert-large", "codeqwen1.5-7b", "llama-3-8b", "t5-large")
Curve = tuple[Sequence[TensorSpec], list[ParallelPlan]]


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes moved, in total, over the network and by time, and the `least_` values of each reference."""

    old_gpus: int
    gpus: int
    moved: float
    network: float
    rank_order: float
    rank_order_network: float
    least_together: float
    least_alike: float
    least: float
    timed: float
    least_timed: float
    taken_s: float


def rows() -> Iterator[tuple[str, str, str]]:
    """Return the shares saved against rank order, and the ratios to each reference."""
    measured = [_load_pairs(name, "a100-80g") for name in MODELS]
    yield from _rows("any smaller plan", _sample_pairs("shrinks", measured, _random_smaller_plan))
    yield from _rows("the next smaller plan", _sample_pairs("shrinks", measured, _next_smaller_plan))
    others = [_load_pairs(name, "h100-80g") for name in OTHERS]
    yield from _rows(
        "other seeds, models and GPU, any smaller plan", _sample_pairs("more shrinks", others, _random_smaller_plan)
    )
    yield from _rows(
        "other seeds, models and GPU, the next smaller", _sample_pairs("more shrinks", others, _next_smaller_plan)
    )


def _load_pairs(name: str, gpu: str) -> Curve:
    model, plans = curve_of(name, gpu)
    return state_tensors(model), sorted(plans, key=lambda plan: plan.world_size)


def _random_smaller_plan(seeded: random.Random, plans: Sequence[ParallelPlan]) -> tuple[ParallelPlan, ParallelPlan]:
    fewer, more = sorted(seeded.sample(range(len(plans)), 2))
    return plans[more], plans[fewer]


def _next_smaller_plan(seeded: random.Random, plans: Sequence[ParallelPlan]) -> tuple[ParallelPlan, ParallelPlan]:
    more = seeded.randrange(1, len(plans))
    return plans[more], plans[more - 1]


def _sample_pairs(
    seed: str,
    curves: Sequence[Curve],
    pair: Callable[[random.Random, Sequence[ParallelPlan]], tuple[ParallelPlan, ParallelPlan]],
) -> list[Moved]:
    found = list[Moved]()
    for number in range(SHRINKS):
        seeded = random.Random(f"{seed} {number}")
        tensors, plans = seeded.choice(curves)
        found.append(_shrink(*pair(seeded, plans), tensors))
    return found


def _shrink(old_plan: ParallelPlan, plan: ParallelPlan, tensors: Sequence[TensorSpec]) -> Moved:
    held, seats, taken_s = _decide_placement(old_plan, plan)
    old, gpus = Placement(old_plan, held), plan.world_size
    both = compute_overlap(old, plan, tensors)
    kept, near = compute_bytes_by_slot(both, old, held)
    columns, needed = [held.index(seat) for seat in seats], float(both.needed.sum())
    at = range(gpus)
    timed = NEAR * kept + (1 - NEAR) * near
    together, alike = _equal_choices(both, old, plan, kept)
    return Moved(
        old_gpus=len(held),
        gpus=gpus,
        moved=needed - float(kept[at, columns].sum()),
        network=needed - float(near[at, columns].sum()),
        rank_order=needed - float(kept[at, at].sum()),
        rank_order_network=needed - float(near[at, at].sum()),
        least_together=together,
        least_alike=needed - alike,
        least=needed - _maximum_kept(kept),
        timed=needed - float(timed[at, columns].sum()),
        least_timed=needed - _maximum_kept(timed),
        taken_s=taken_s,
    )


def _decide_placement(
    old_plan: ParallelPlan, plan: ParallelPlan
) -> tuple[tuple[GpuSlot, ...], tuple[GpuSlot, ...], float]:
    """Return the job's rank placement, the one that the scheduler decides, and the time of the decision."""
    gpu, width = plan.stages[0].gpu, old_plan.world_size
    on = {f"t{at}": tuple(range(min(NODE_GPUS, width - NODE_GPUS * at))) for at in range(-(-width // NODE_GPUS))}
    pools, nodes = a_fleet(training=len(on), inference=0)
    nodes = {name: replace(node, gpu=gpu) for name, node in nodes.items()}
    job = a_job("j", plan.world_size, 64, state=JobState.RUNNING, on=on, model="gpt2", global_batch=1)
    job = replace(job, allocation=replace(job.allocation, plan=old_plan))
    curve = ScalingCurve({GpuShape.packed(gpu, plan.world_size, NODE_GPUS): plan})
    snapshot = replace(a_snapshot((pools, nodes), [job]), curves={job.spec.curve_key: curve})
    course = SchedulingCycle(snapshot, load_policy_set("ebbtide"))
    begin_s = perf_counter()
    target = reduce_target(course, job, on, plan.world_size)
    assert target is not None
    resize = place_ranks(
        course.snapshot, ResizeJob("j", *target, 60.0, Reason(ReasonCode.MAKES_ROOM_FOR_WAITING_JOB, ""))
    )
    taken_s = perf_counter() - begin_s
    seats = resize.seats or snapshot.default_rank_placement(resize.gpus)
    held = tuple(GpuSlot(*seat) for seat in snapshot.default_rank_placement(on))
    return held, tuple(GpuSlot(*seat) for seat in seats), taken_s


def _equal_choices(both: StateOverlap, old: Placement, plan: ParallelPlan, kept: Floats) -> tuple[float, float]:
    """Return the fewest bytes moved with groups together, and the most kept in any order.

    Covers all sets of nodes with as many GPUs of the job, and all sets of GPUs if the job shrinks to part of a node.
    """
    gpus, nodes = plan.world_size, list(dict.fromkeys(seat.node for seat in old.slots))
    full = [node for node in nodes if sum(seat.node == node for seat in old.slots) == min(NODE_GPUS, len(old.slots))]
    sets = list(combinations(full, -(-gpus // NODE_GPUS)))
    assert len(sets) <= SUBSETS_MAX
    together, alike = inf, 0.0
    for chosen in sets:
        columns = [at for at, seat in enumerate(old.slots) if seat.node in chosen]
        rows, best = linear_sum_assignment(-kept[:, columns])
        alike = max(alike, float(kept[:, columns][rows, best].sum()))
        seats = [old.slots[at] for at in columns]
        if len(seats) > gpus:  # a part of one node, on which any order keeps groups together
            seats = [seats[at] for at in best]
        together = min(together, find_best_order(both, old, plan, seats).moved_bytes)
    return together, alike


def _maximum_kept(kept: Floats) -> float:
    rows, columns = kept.shape
    scale = kept.max() or 1.0
    each_rank = kron(eye_array(rows), np.ones((1, columns)))
    each_seat = kron(np.ones((1, rows)), eye_array(columns))
    once, most = np.ones(rows), np.ones(columns)
    solved = linprog(-kept.ravel() / scale, A_eq=each_rank, b_eq=once, A_ub=each_seat, b_ub=most, method="highs")
    assert solved.success, solved.message
    return float(kept.ravel()[solved.x > 0.5].sum())  # its corners are whole assignments


def _rows(kind: str, found: list[Moved]) -> Iterator[tuple[str, str, str]]:
    times_ms = sorted(1e3 * one.taken_s for one in found)
    half = [one for one in found if 2 * one.gpus >= one.old_gpus]
    yield f"{kind}: saved against rank order", "median 40%", _saved(found, lambda one: one.moved)
    yield f"{kind}: the most that any choice in any order could save", "", _saved(found, lambda one: one.least)
    counted = median(one.gpus / one.old_gpus for one in found)
    yield f"{kind}: m of n GPUs kept", "", f"median {counted:.1%}: nothing in equal parts without copies saves more"
    yield f"{kind}, at least half kept: saved", "", _saved(half, lambda one: one.moved)
    yield f"{kind}, at least half kept: could save", "", _saved(half, lambda one: one.least)
    yield (
        f"{kind}: over equal choices, groups together",
        "at most 1.05",
        _ratio_over(found, lambda one: one.least_together),
    )
    yield f"{kind}: over equal choices, any order", "", _ratio_over(found, lambda one: one.least_alike)
    yield f"{kind}: over all choices, any order", "at most 1.05", _ratio_over(found, lambda one: one.least)
    yield (
        f"{kind}, by time: over all choices, any order",
        "",
        _ratio_over(found, lambda one: one.least_timed, timed=True),
    )
    yield f"{kind}: saved over the network", "", _saved_over_network(found)
    yield (
        f"{kind}: time to choose and to seat",
        "",
        f"median {median(times_ms):.1f} ms, p99 {quantiles(times_ms, n=100)[98]:.1f} ms",
    )


def _saved(found: Sequence[Moved], moved: Callable[[Moved], float]) -> str:
    moving = [one for one in found if one.rank_order > 1.0]
    saved = [1 - moved(one) / one.rank_order for one in moving]
    total = 1 - sum(map(moved, moving)) / sum(one.rank_order for one in moving)
    above = sum(share >= 0.4 for share in saved)
    return f"median {median(saved):.1%}, {total:.1%} of all bytes; {above} of {len(saved)} save 40%"


def _saved_over_network(found: Sequence[Moved]) -> str:
    moving = [one for one in found if one.rank_order_network > 1.0]
    saved = [1 - one.network / one.rank_order_network for one in moving]
    total = 1 - sum(one.network for one in moving) / sum(one.rank_order_network for one in moving)
    return f"median {median(saved):.1%}, {total:.1%} of all bytes ({len(saved)} send any)"


def _ratio_over(found: Sequence[Moved], least: Callable[[Moved], float], *, timed: bool = False) -> str:
    pairs = [(one.timed if timed else one.moved, least(one)) for one in found]
    ratios = [moved / bound if bound > 1.0 else inf if moved > 1.0 else 1.0 for moved, bound in pairs]
    told = f"median {median(ratios):.4f}, worst {max(ratios):.4f}"
    return f"{told}; {sum(ratio > 1.05 for ratio in ratios)} of {len(ratios)} above 1.05"
