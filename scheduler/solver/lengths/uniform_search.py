"""Plans in which all groups of a batch have one degree, as without FlexSP: what unlike degrees are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from scheduler.solver.lengths.batch_plan import BatchPlan
from scheduler.solver.lengths.batch_search import EXTRA_MICRO_BATCHES, sort_batch
from scheduler.solver.lengths.fluid_bound import SortedBatch, compute_batch_bound, count_micro_batches_min
from scheduler.solver.lengths.group_assignment import GroupAssignment, assign_earliest
from scheduler.solver.lengths.micro_batch_cuts import balance_tokens
from scheduler.solver.lengths.micro_batch_search import list_uniform_multisets
from scheduler.solver.lengths.sequence_costs import SequenceCosts


def search_uniform_plan(costs: SequenceCosts, lengths: Sequence[int], degree: int) -> BatchPlan | None:
    """Return the fastest plan with groups of `degree` GPUs only, over cuts that balance tokens.

    Sequences are assigned by earliest completion. As many micro-batches are tried as memory requires at least, and up
    to EXTRA_MICRO_BATCHES more.

    Returns:
        None if none of these plans fits in memory, or `degree` does not divide the GPUs.

    Raises:
        ValueError: as `search_batch_plan`.
    """
    order, batch = sort_batch(costs, lengths)
    first, best = count_micro_batches_min(batch), None
    for count in range(first, min(first + EXTRA_MICRO_BATCHES, len(lengths)) + 1):
        borders = balance_tokens(batch, count)
        parts = [batch.restrict(begin, end) for begin, end in pairwise(borders)]
        found = [assignment for part in parts if (assignment := _assign(part, degree)) is not None]
        if len(found) < count:
            continue
        micro_batches = tuple(
            assignment.build_micro_batch(part, order[begin:end])
            for assignment, part, (begin, end) in zip(found, parts, pairwise(borders), strict=True)
        )
        time_s = sum(micro_batch.time_s for micro_batch in micro_batches)
        if best is None or time_s < best.time_s:
            best = BatchPlan(micro_batches, time_s, compute_batch_bound(batch))
    return best


def _assign(batch: SortedBatch, degree: int) -> GroupAssignment | None:
    found = assign_earliest(batch, list_uniform_multisets(batch, (degree,)))
    return found[0] if found else None
