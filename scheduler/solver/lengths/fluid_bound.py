"""Lower bounds on the step time from the fluid relaxation: sequences divide freely among groups.

In the relaxation, a sequence may be divided among groups of every degree on which it would fit and finish in time, and
groups take any fraction of the GPUs. The exchange cost per token rises with the degree, so the smallest such degree
takes the fewest GPU-seconds, and the linear program has a closed solution for each step time.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import numpy as np

from scheduler.solver.lengths.sequence_costs import Counts, Floats, SequenceCosts

BISECTIONS = 14
"""Halvings of the interval that holds the bound. The lower end is returned, which is a valid bound at any number."""


@dataclass(frozen=True, slots=True)
class SortedBatch:
    """The sequences of a batch in descending order of length, with what bounds and searches need of them.

    Attributes:
        lengths: tokens, shape [sequences].
        times: seconds by degree, shape [degrees, sequences]; descending along the sequences.
        time_sums: sums of `times` over the sequences before each position, shape [degrees, sequences + 1].
        token_sums: the same sums of `lengths`.
        fitting: first sequence that fits in the memory of a group, by degree.
    """

    costs: SequenceCosts
    lengths: Counts
    times: Floats
    time_sums: Floats
    token_sums: Counts
    fitting: Counts

    @staticmethod
    def from_lengths(costs: SequenceCosts, lengths: Counts) -> SortedBatch:
        """Prepare `lengths`, which are sorted in descending order."""
        times = costs.compute_times(lengths)
        limits = np.array(costs.degrees) * costs.gpu_tokens_max
        return SortedBatch(
            costs,
            lengths,
            times,
            np.concatenate([np.zeros((len(times), 1)), times.cumsum(axis=1)], axis=1),
            np.concatenate([[0], lengths.cumsum()]),
            len(lengths) - np.searchsorted(lengths[::-1], limits, side="right"),
        )

    def restrict(self, begin: int, end: int) -> SortedBatch:
        """Return the batch of the sequences from `begin` to `end`, exclusive."""
        return SortedBatch.from_lengths(self.costs, self.lengths[begin:end])

    def find_first_fast(self, limits_s: Floats) -> list[Counts]:
        """Return the first sequence that a group of each degree, or of a smaller one, finishes within each limit.

        The result has one array per degree, of the shape of `limits_s`.
        """
        size, result = len(self.lengths), list[Counts]()
        for times, fitting in zip(self.times, self.fitting, strict=True):
            fast = size - times[::-1].searchsorted(limits_s, side="right")
            first = np.maximum(fast, fitting)
            result.append(np.minimum(first, result[-1]) if result else first)
        return result


def compute_range_bounds(batch: SortedBatch, begins: Counts, ends: Counts) -> Floats:
    """Return a lower bound on the seconds of one micro-batch for each range of sequences, without `micro_batch_s`.

    A range whose tokens do not fit on all GPUs has the bound infinity.

    Args:
        begins, ends: ranges [begin, end) of positions in `batch`, none empty. Every sequence must fit on the largest
            group.
    """
    tokens = batch.token_sums[ends] - batch.token_sums[begins]
    capacity = batch.costs.gpus * batch.costs.gpu_tokens_max
    return np.where(tokens > capacity, np.inf, _bound_times(batch, begins, ends))


def compute_batch_bound(batch: SortedBatch) -> float:
    """Return a lower bound on the seconds of the step, however the batch is cut into micro-batches.

    The times of the micro-batches add up to at least the time that all sequences would need at once, and none of them
    is longer than that sum, so no sequence has more time.
    """
    at_once = _bound_times(batch, np.array([0]), np.array([len(batch.lengths)]))
    return float(at_once[0]) + batch.costs.micro_batch_s * count_micro_batches_min(batch)


def count_micro_batches_min(batch: SortedBatch) -> int:
    """Return the number of micro-batches that memory requires at least."""
    return ceil(int(batch.token_sums[-1]) / (batch.costs.gpus * batch.costs.gpu_tokens_max))


def compute_work(batch: SortedBatch, limits_s: Floats, begins: Counts, ends: Counts) -> Floats:
    """Return the least GPU-seconds of each range if every sequence must finish within the limit.

    Infinite if a sequence of the range is slower on every group.
    """
    work, last = np.zeros(begins.shape), ends
    for degree, sums, first in zip(batch.costs.degrees, batch.time_sums, batch.find_first_fast(limits_s), strict=True):
        begin = np.minimum(np.maximum(first, begins), last)
        work = work + degree * (sums[last] - sums[begin])
        last = begin
    return np.where(last > begins, np.inf, work)


def _bound_times(batch: SortedBatch, begins: Counts, ends: Counts) -> Floats:
    gpus = batch.costs.gpus
    low = compute_work(batch, np.full(begins.shape, np.inf), begins, ends) / gpus
    # With this much time, every sequence can use the smallest degree on which it fits.
    longest = np.maximum(batch.fitting[:, None], begins)
    padded = np.concatenate([batch.times, np.zeros((len(batch.times), 1))], axis=1)
    slowest = np.where(longest < ends, np.take_along_axis(padded, longest, axis=1), 0.0).max(axis=0)
    high = np.maximum(low, slowest)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        is_enough = compute_work(batch, middle, begins, ends) <= gpus * middle
        low, high = np.where(is_enough, low, middle), np.where(is_enough, middle, high)
    return low
