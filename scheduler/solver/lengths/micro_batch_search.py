"""Search for the groups of one micro-batch: the multiset of degrees, and the group of each sequence."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from scheduler.solver.lengths.exact_assignment import EXACT_SEQUENCES_MAX, assign_exactly
from scheduler.solver.lengths.fluid_bound import SortedBatch, compute_range_bounds
from scheduler.solver.lengths.group_assignment import GroupAssignment, assign_earliest, list_multisets
from scheduler.solver.lengths.sequence_costs import Counts

MULTISETS_MAX = 32
"""Multisets that are tried at once, those with the most time to spare first."""
LIMIT_FACTORS = (1.0, 1.01, 1.04, 1.16, 1.5, 2.0, 4.0)
"""Multisets are tried up to these multiples of the smallest limit that any multiset meets."""
TOLERANCE = 2e-3
"""The smallest limit is found within this fraction. A search ends when it is this close to its bound."""


@dataclass(frozen=True, slots=True)
class MicroBatchSolution:
    """The best assignment found, None if none fits in memory, and a lower bound on the seconds of every assignment.

    Both without `micro_batch_s`.
    """

    assignment: GroupAssignment | None
    bound_s: float

    @property
    def time_s(self) -> float:
        return inf if self.assignment is None else self.assignment.time_s


def search_micro_batch(batch: SortedBatch) -> MicroBatchSolution:
    """Search an assignment of `batch` as one micro-batch, at least as fast as with one degree for all groups.

    For up to EXACT_SEQUENCES_MAX sequences, the result is the fastest.
    """
    tokens = int(batch.token_sums[-1])
    if tokens > batch.costs.gpus * batch.costs.gpu_tokens_max:
        return MicroBatchSolution(None, inf)
    bound_s, limit_s = bound_multisets(batch)
    best, uniform = None, list_uniform_multisets(batch, batch.costs.degrees)
    for factor in LIMIT_FACTORS:
        if best is not None and best.time_s <= max(bound_s * (1 + TOLERANCE), limit_s * factor):
            break
        multisets = list_multisets(batch, limit_s * factor)[:MULTISETS_MAX]
        best = _keep_fastest(best, batch, multisets if best else np.concatenate([multisets, uniform]))
    if len(batch.lengths) <= EXACT_SEQUENCES_MAX:
        best = assign_exactly(batch, best)
        bound_s = inf if best is None else best.time_s
    return MicroBatchSolution(best, bound_s)


def list_uniform_multisets(batch: SortedBatch, degrees: tuple[int, ...]) -> Counts:
    """Return the multisets of one of `degrees` that use all GPUs and hold the longest sequence.

    The result has the form of `list_multisets`, and no rows if there is none.
    """
    costs = batch.costs
    rows = [
        [costs.gpus // degree if other == degree else 0 for other in costs.degrees]
        for degree in degrees
        if degree in costs.degrees and costs.gpus % degree == 0 and degree * costs.gpu_tokens_max >= batch.lengths[0]
    ]
    return np.array(rows, np.int64).reshape(-1, len(costs.degrees))


def bound_multisets(batch: SortedBatch) -> tuple[float, float]:
    """Return a lower bound on the seconds over all multisets, and a limit just above it that some multiset meets."""
    low = float(compute_range_bounds(batch, np.array([0]), np.array([len(batch.lengths)]))[0])
    high = low
    while not len(list_multisets(batch, high)):
        low, high = high, high * 1.25
    while high > low * (1 + TOLERANCE):
        middle = (low + high) / 2
        low, high = (low, middle) if len(list_multisets(batch, middle)) else (middle, high)
    return low, high


def _keep_fastest(best: GroupAssignment | None, batch: SortedBatch, multisets: Counts) -> GroupAssignment | None:
    found = [best, *assign_earliest(batch, multisets)]
    return min((one for one in found if one is not None), key=lambda one: one.time_s, default=None)
