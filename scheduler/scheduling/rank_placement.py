"""Choose the GPU of each rank of a resized job, so that the fewest bytes of its state move."""

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
    """Return the decision with the rank placement that moves the fewest bytes of the job's state.

    It is returned unchanged if the default placement moves as little, or if nothing is known about the shards.
    """
    job, view = snapshot.jobs[resize.job_id], snapshot.view()
    if resize.gpus.keys().isdisjoint(job.allocation.target) or not knows_shards(job, resize.plan):
        return resize
    assert job.allocation.plan is not None
    default = view.default_rank_placement(resize.gpus)
    old_slots, default_slots = canonicalize_slots(view.rank_placement(job.allocation), default)
    mapping = find_best_mapping(job.allocation.plan, old_slots, resize.plan, default_slots)
    positions = {slot: position for position, slot in enumerate(default_slots)}
    placement = tuple(default[positions[slot]] for slot in mapping.slots)
    return resize if placement == default else replace(resize, seats=placement)


def knows_shards(job: Job, new: ParallelPlan) -> bool:
    """Return whether the shards on each GPU are known, and whether the placement of the new ranks matters.

    It does not matter while the job is still loading, for plans of one layer (those of linear curves) or of different
    numbers of layers, for inconsistent plans, and if every rank holds the full state before and after.
    """
    old = job.allocation.plan
    if job.state is JobState.STARTING or old is None:
        return False
    if old.stages[-1].last_layer == 0 or old.stages[-1].last_layer != new.stages[-1].last_layer:
        return False
    before, after = _shard_layers(old), _shard_layers(new)
    return len(before) == len(after) > 1 and not (_is_replicated(before, old) and _is_replicated(after, new))


def canonicalize_slots(*orders: RankPlacement) -> tuple[tuple[GpuSlot, ...], ...]:
    """Rename nodes and GPUs by first appearance, so that equivalent changes of different jobs share a cache entry."""
    nodes, gpus = dict[str, str](), dict[tuple[str, int], int]()
    return tuple(
        tuple(GpuSlot(nodes.setdefault(seat[0], f"{len(nodes)}"), gpus.setdefault(seat, len(gpus))) for seat in order)
        for order in orders
    )


@lru_cache(maxsize=1024)
def find_best_mapping(
    old_plan: ParallelPlan, old_slots: tuple[GpuSlot, ...], new_plan: ParallelPlan, new_slots: tuple[GpuSlot, ...]
) -> RankMapping:
    """Return the order of `new_slots` that moves the fewest bytes.

    All layers count as equally large, because the best order depends on ratios alone.
    """
    overlap = compute_cached_overlap(old_plan, old_slots, new_plan)
    return find_best_order(overlap, Placement(old_plan, old_slots), new_plan, new_slots)


@lru_cache(maxsize=256)
def compute_cached_overlap(
    old_plan: ParallelPlan, old_slots: tuple[GpuSlot, ...], new_plan: ParallelPlan
) -> StateOverlap:
    tensors = build_equal_layer_tensors(len(_shard_layers(old_plan)))
    return compute_overlap(Placement(old_plan, old_slots), new_plan, tensors)


@lru_cache(maxsize=1024)
def _shard_layers(plan: ParallelPlan) -> tuple[LayerSharding, ...]:
    """Return the sharding of each layer. An inconsistent plan has none, because a decision must not fail over it."""
    try:
        return tuple(place.sharding for place in compute_layer_placements(plan))
    except ValueError:
        return ()


def _is_replicated(shardings: Iterable[LayerSharding], plan: ParallelPlan) -> bool:
    """Return whether every rank holds the full state."""
    return all((each.tp, each.shard_group, each.gpus) == (1, 1, plan.world_size) for each in shardings)
