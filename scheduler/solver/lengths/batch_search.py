"""Search for the sequence-parallel groups of one batch of sequences of unlike lengths (FlexSP).

The sequences are sorted by length and cut into micro-batches by dynamic programming over lower bounds, which are raised
where the best cuts rely on them. In each micro-batch, the multisets of groups that a fluid bound leaves are tried with
an assignment by earliest completion. Source: FlexSP (ASPLOS'25, arXiv 2412.01523), sections 4.2 and 4.3, which solves
the assignment as a mixed-integer program instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf

import numpy as np

from scheduler.solver.lengths.batch_plan import BatchPlan
from scheduler.solver.lengths.exact_assignment import EXACT_SEQUENCES_MAX
from scheduler.solver.lengths.fluid_bound import (
    SortedBatch,
    compute_batch_bound,
    compute_range_bounds,
    count_micro_batches_min,
)
from scheduler.solver.lengths.group_assignment import ROUNDING, list_multisets
from scheduler.solver.lengths.micro_batch_cuts import CutGraph, Edge, balance_tokens
from scheduler.solver.lengths.micro_batch_search import MicroBatchSolution, bound_multisets, search_micro_batch
from scheduler.solver.lengths.sequence_costs import Counts, SequenceCosts

TOLERANCE = 5e-3
"""A large batch's search ends when the plan is proven to be this close to the best."""
ROUNDS_MAX = 16
"""Cuts that are examined before the search of a large batch ends."""
SOLUTIONS_MAX = 5
"""Micro-batches that are solved before the search of a large batch ends."""
EXTRA_MICRO_BATCHES = 2
"""Micro-batches beyond the smallest feasible number that are tried with balanced tokens."""

Borders = tuple[int, ...]


def search_batch_plan(costs: SequenceCosts, lengths: Sequence[int]) -> BatchPlan:
    """Return a fast plan for one batch, at least as fast as `search_uniform_plan` for every degree.

    The fastest plan for up to EXACT_SEQUENCES_MAX sequences, apart from rounding.

    Args:
        lengths: tokens of each sequence.

    Raises:
        ValueError: there is no sequence, or a length is below 1 or above what the largest group can hold.
    """
    order, batch = sort_batch(costs, lengths)
    search = _BatchSearch(batch, is_exact=len(lengths) <= EXACT_SEQUENCES_MAX)
    search.run()
    return search.build_plan(order)


def sort_batch(costs: SequenceCosts, lengths: Sequence[int]) -> tuple[Counts, SortedBatch]:
    """Return the batch in descending order of length, and the position in `lengths` of each of its sequences.

    Raises:
        ValueError: as `search_batch_plan`.
    """
    if not lengths:
        raise ValueError("lengths is empty; it must have at least one sequence")
    for position, tokens in enumerate(lengths):
        if not 1 <= tokens <= costs.sequence_tokens_max:
            raise ValueError(
                f"lengths[{position}] is {tokens}; it must be from 1 to {costs.sequence_tokens_max}, the tokens that "
                f"{costs.degrees[-1]} GPUs hold"
            )
    given = np.array(lengths, np.int64)
    order = np.argsort(-given, kind="stable")
    return order, SortedBatch.from_lengths(costs, given[order])


@dataclass(slots=True)
class _BatchSearch:
    """State of one search.

    Attributes:
        best: borders of the best cuts so far, which take `best_s` seconds.
        bound_s: proven lower bound on the seconds of every plan.
    """

    batch: SortedBatch
    is_exact: bool
    solutions: dict[tuple[int, int], MicroBatchSolution] = field(default_factory=dict)
    bounded: set[tuple[int, int]] = field(default_factory=set)
    best: Borders = ()
    best_s: float = inf
    bound_s: float = 0.0

    @property
    def useful_s(self) -> float:
        """Time that a plan must fall below to be worth finding."""
        return self.best_s * (1 - (ROUNDING if self.is_exact else TOLERANCE))

    def run(self) -> None:
        """Find `best` and `bound_s`."""
        batch = self.batch
        first, fixed_s = count_micro_batches_min(batch), batch.costs.micro_batch_s
        fluid_s = compute_batch_bound(batch)
        balanced = self._try_balanced_cuts(first, fluid_s)
        # All sequences at once have their own bound; more micro-batches have the fluid bound and more fixed time.
        at_once_s = self.solutions[0, len(batch.lengths)].bound_s + fixed_s if first == 1 else inf
        self.bound_s = min(at_once_s, fluid_s + (fixed_s if first == 1 else 0.0))
        if self.bound_s < self.useful_s:
            graph = CutGraph(batch, balanced)
            if first == 1:
                graph.record(graph.whole, bound_s=at_once_s - fixed_s, time_s=self.best_s - fixed_s)
            self._improve_cuts(graph)
            self.bound_s = max(self.bound_s, graph.find_path(graph.bounds)[0])
        self.bound_s = min(self.bound_s, self.best_s)

    def build_plan(self, order: Counts) -> BatchPlan:
        """Return the best plan, with the positions that `order` gives the sequences."""
        parts = []
        for begin, end in pairwise(self.best):
            found = self.solutions[begin, end].assignment
            assert found is not None, "the best cuts have assignments"
            parts.append(found.build_micro_batch(self.batch.restrict(begin, end), order[begin:end]))
        return BatchPlan(tuple(parts), self.best_s, self.bound_s)

    def _try_balanced_cuts(self, first: int, fluid_s: float) -> tuple[int, ...]:
        """Try cuts that balance tokens, and return their positions. At least one of them fits in memory.

        `fluid_s` bounds the time with `first` micro-batches, the fewest.
        """
        positions: set[int] = set()
        for count in range(first, len(self.batch.lengths) + 1):
            extra = count - first
            is_useless = extra > EXTRA_MICRO_BATCHES or fluid_s + extra * self.batch.costs.micro_batch_s >= self.best_s
            if self.best and is_useless:
                break
            borders = balance_tokens(self.batch, count)
            positions |= {*borders}
            ranges = np.array(borders)
            bounds = compute_range_bounds(self.batch, ranges[:-1], ranges[1:])
            if bounds.sum() + count * self.batch.costs.micro_batch_s < self.best_s:
                self._try_cuts(borders)
        return tuple(sorted(positions))

    def _try_cuts(self, borders: Borders) -> None:
        """Keep the cuts if they are the fastest so far."""
        times = [self._solve(begin, end).time_s for begin, end in pairwise(borders)]
        time_s = sum(times) + len(times) * self.batch.costs.micro_batch_s
        if time_s < self.best_s:
            self.best, self.best_s = borders, time_s

    def _solve(self, begin: int, end: int) -> MicroBatchSolution:
        if (begin, end) not in self.solutions:
            self.solutions[begin, end] = search_micro_batch(self.batch.restrict(begin, end))
        return self.solutions[begin, end]

    def _improve_cuts(self, graph: CutGraph) -> None:
        """Try the cuts that are fastest by estimate, until none could be faster than the best."""
        rounds, tried = 0, list[Edge]()
        while self.is_exact or (rounds < ROUNDS_MAX and len(self.solutions) < SOLUTIONS_MAX):
            rounds += 1
            length_s, path = graph.find_path(graph.estimates)
            if length_s >= self.useful_s or path == tried:
                return
            if self._raise_bound(graph, path, self.useful_s - length_s):
                continue
            tried = path
            for edge in path:
                if edge.begin < edge.end:
                    found = self._solve(edge.begin, edge.end)
                    graph.record(edge, bound_s=found.bound_s, time_s=found.time_s)
            borders = sorted({0, len(self.batch.lengths), *(edge.begin for edge in path)})
            self._try_cuts(tuple(borders))

    def _raise_bound(self, graph: CutGraph, path: Iterable[Edge], spare_s: float) -> bool:
        """Raise the bound of one edge of the path by the multisets of its groups. Return whether there was one."""
        for edge in path:
            part = (edge.begin, edge.end)
            if edge.begin >= edge.end or part in self.bounded or part in self.solutions:
                continue
            batch = self.batch.restrict(*part)
            limit_s = float(graph.estimates[edge.source, edge.target]) - self.batch.costs.micro_batch_s + spare_s
            if len(list_multisets(batch, limit_s)):
                self.bounded.add(part)
                limit_s = bound_multisets(batch)[0]
            graph.record(edge, bound_s=limit_s, time_s=limit_s)
            return True
        return False
