"""seating: which rank of a resized job goes to which of its GPUs, so that the fewest bytes of its state move."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from scheduler.domain.decisions import ResizeJob
from scheduler.domain.gpu_sets import RankPlacement
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.resharding.placement import (
    GpuSlot,
    LayerSharding,
    Placement,
    build_equal_layer_tensors,
    compute_layer_placements,
)
from scheduler.resharding.rank_mapping import RankMapping, find_best_order
from scheduler.resharding.shards import StateOverlap, compute_overlap
from scheduler.scheduling.mutable_snapshot import MutableSnapshot


def place_ranks(snapshot: MutableSnapshot, resize: ResizeJob) -> ResizeJob:
    """The legal decision, completed by the seats of its ranks where the default order would move more."""
    job, view = snapshot.jobs[resize.job_id], snapshot.view()
    if resize.gpus.keys().isdisjoint(job.allocation.target) or not knows_shards(job, resize.plan):
        return resize
    assert job.allocation.plan is not None
    given = view.default_rank_placement(resize.gpus)
    old_alike, given_alike = canonicalize_seats(view.rank_placement(job.allocation), given)
    mapping = find_best_mapping(job.allocation.plan, old_alike, resize.plan, given_alike)
    numbers = {seat: number for number, seat in enumerate(given_alike)}
    seats = tuple(given[numbers[seat]] for seat in mapping.slots)
    return resize if seats == given else replace(resize, seats=seats)


def knows_shards(job: Job, new: ParallelPlan) -> bool:
    """It is known what each GPU of the job holds, and it makes a difference which of them ranks of `new` go to.

    Nothing is gained or known where the job loads only now, where a plan has one layer (as a linear curve's), the plans
    have unlike numbers of layers or contradict themselves, and where each rank holds all, before and after.
    """
    old = job.allocation.plan
    if job.state is JobState.STARTING or old is None:
        return False
    if old.stages[-1].last_layer == 0 or old.stages[-1].last_layer != new.stages[-1].last_layer:
        return False
    was, now = _layer_spreads(old), _layer_spreads(new)
    return len(was) == len(now) > 1 and not (_is_replicated(was, old) and _is_replicated(now, new))


def canonicalize_seats(*orders: RankPlacement) -> tuple[tuple[GpuSlot, ...], ...]:
    """The same seats with nodes and GPUs named by where they stand first: jobs that change alike have equal ones."""
    nodes, gpus = dict[str, str](), dict[tuple[str, int], int]()
    return tuple(
        tuple(GpuSlot(nodes.setdefault(seat[0], f"{len(nodes)}"), gpus.setdefault(seat, len(gpus))) for seat in order)
        for order in orders
    )


@lru_cache(maxsize=1024)
def find_best_mapping(
    old_plan: ParallelPlan, old_seats: tuple[GpuSlot, ...], new_plan: ParallelPlan, new_seats: tuple[GpuSlot, ...]
) -> RankMapping:
    """The order of `new_seats` that moves least. Layers count as equally large: an order depends on ratios alone."""
    both = compute_cached_overlap(old_plan, old_seats, new_plan)
    return find_best_order(both, Placement(old_plan, old_seats), new_plan, new_seats)


@lru_cache(maxsize=256)
def compute_cached_overlap(
    old_plan: ParallelPlan, old_seats: tuple[GpuSlot, ...], new_plan: ParallelPlan
) -> StateOverlap:
    return compute_overlap(
        Placement(old_plan, old_seats), new_plan, build_equal_layer_tensors(len(_layer_spreads(old_plan)))
    )


@lru_cache(maxsize=1024)
def _layer_spreads(plan: ParallelPlan) -> tuple[LayerSharding, ...]:
    """How each layer lies; empty for a plan that contradicts itself, because a decision must not fail over it."""
    try:
        return tuple(place.sharding for place in compute_layer_placements(plan))
    except ValueError:
        return ()


def _is_replicated(spreads: Iterable[LayerSharding], plan: ParallelPlan) -> bool:
    """Each rank holds all of the state."""
    return all((spread.tp, spread.shard_group, spread.gpus) == (1, 1, plan.world_size) for spread in spreads)
