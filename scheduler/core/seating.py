"""seating: which rank of a resized job goes to which of its GPUs, so that the fewest bytes of its state move."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from scheduler.core.draft import Draft
from scheduler.domain.decision import ResizeJob
from scheduler.domain.gpus import Seats
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.resharding.mapping import Mapping, best_order
from scheduler.resharding.overlap import Overlap, overlap
from scheduler.resharding.placement import Placement, Seat, Spread, layer_places
from scheduler.resharding.tensors import equal_layers


def seated(draft: Draft, resize: ResizeJob) -> ResizeJob:
    """The legal decision, completed by the seats of its ranks where the default order would move more."""
    job, view = draft.jobs[resize.job_id], draft.view()
    if resize.gpus.keys().isdisjoint(job.allocation.target) or not is_shard_known(job, resize.plan):
        return resize
    assert job.allocation.plan is not None
    given = view.default_seats(resize.gpus)
    old_alike, given_alike = alike(view.seats_of(job.allocation), given)
    mapping = mapped(job.allocation.plan, old_alike, resize.plan, given_alike)
    numbers = {seat: number for number, seat in enumerate(given_alike)}
    seats = tuple(given[numbers[seat]] for seat in mapping.seats)
    return resize if seats == given else replace(resize, seats=seats)


def is_shard_known(job: Job, new: ParallelPlan) -> bool:
    """It is known what each GPU of the job holds, and it makes a difference which of them ranks of `new` go to.

    Nothing is gained or known where the job loads only now, where a plan has one layer (as a linear curve's), the plans
    have unlike numbers of layers or contradict themselves, and where each rank holds all, before and after.
    """
    old = job.allocation.plan
    if job.state is JobState.STARTING or old is None:
        return False
    if old.stages[-1].last_layer == 0 or old.stages[-1].last_layer != new.stages[-1].last_layer:
        return False
    was, now = _spreads(old), _spreads(new)
    return len(was) == len(now) > 1 and not (_is_replicated(was, old) and _is_replicated(now, new))


def alike(*orders: Seats) -> tuple[tuple[Seat, ...], ...]:
    """The same seats with nodes and GPUs named by where they stand first: jobs that change alike have equal ones."""
    nodes, gpus = dict[str, str](), dict[tuple[str, int], int]()
    return tuple(
        tuple(Seat(nodes.setdefault(seat[0], f"{len(nodes)}"), gpus.setdefault(seat, len(gpus))) for seat in order)
        for order in orders
    )


@lru_cache(maxsize=1024)
def mapped(
    old_plan: ParallelPlan, old_seats: tuple[Seat, ...], new_plan: ParallelPlan, new_seats: tuple[Seat, ...]
) -> Mapping:
    """The order of `new_seats` that moves least. Layers count as equally large: an order depends on ratios alone."""
    both = overlapping(old_plan, old_seats, new_plan)
    return best_order(both, Placement(old_plan, old_seats), new_plan, new_seats)


@lru_cache(maxsize=256)
def overlapping(old_plan: ParallelPlan, old_seats: tuple[Seat, ...], new_plan: ParallelPlan) -> Overlap:
    return overlap(Placement(old_plan, old_seats), new_plan, equal_layers(len(_spreads(old_plan))))


@lru_cache(maxsize=1024)
def _spreads(plan: ParallelPlan) -> tuple[Spread, ...]:
    """How each layer lies; empty for a plan that contradicts itself, because a decision must not fail over it."""
    try:
        return tuple(place.spread for place in layer_places(plan))
    except ValueError:
        return ()


def _is_replicated(spreads: Iterable[Spread], plan: ParallelPlan) -> bool:
    """Each rank holds all of the state."""
    return all((spread.tp, spread.shard_group, spread.gpus) == (1, 1, plan.world_size) for spread in spreads)
