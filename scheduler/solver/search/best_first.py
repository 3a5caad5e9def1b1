"""Best first: the one loop that every exact search here runs, over pairs in order of their lower bound.

The proof is a chain of lower bounds, each looser and cheaper than the next:

1. pair (pipeline, micro-batches): all layers at their fastest, perfectly even stages        (pair_search)
2. pair: the best partition when every stage takes only its Lagrangian bound                 (stage_bounds, partition)
3. pair: the same when the stages that this partition uses take their proven time            (stage_search)

Pairs wait in a heap by their bound. The one with the least bound is refined by one step and goes back; the search ends
when the least bound in the heap has reached the best plan found. No pair that is left can then hold a faster plan.
There is no clock in here: the search stops by the number of labels it makes, and then reports the gap it has proven.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from scheduler.solver.search.pair_search import PairSearch
from scheduler.solver.search.stage_search import CLOSER_THAN

LABELS_MAX = 20_000_000
"""Default budget of work, in labels of the stage search; seconds of it on one core, so that it ends no usual search."""

_ROUNDING = 1e-11
"""Gaps up to here are rounding: stages, pairs and the loop over them each call only gains of 1e-12 faster."""


@dataclass(frozen=True, slots=True)
class Found:
    """The fastest pair (None where nothing was found), a time that no plan can beat, and the labels made."""

    best: PairSearch | None
    bound_s: float
    labels: int

    @property
    def gap(self) -> float:
        """Proven: no plan is faster than the best one by more than this ratio."""
        if self.best is None:
            return 0.0
        gap = 1.0 - self.bound_s / self.best.cost_s
        return gap if gap > _ROUNDING else 0.0


def best_first(pairs: Sequence[PairSearch], *, tolerance: float = 0.0, labels_max: int = LABELS_MAX) -> Found:
    """The fastest plan of all pairs, proven within `tolerance` unless `labels_max` runs out first.

    What an earlier call with a looser tolerance has found and proven of the pairs still holds.
    """
    heap = [(pair.bound_s, number) for number, pair in enumerate(pairs)]
    heapq.heapify(heap)
    best = min((pair for pair in pairs if pair.cost_s < inf), key=lambda pair: pair.cost_s, default=None)
    closer, labels, floor_s = min(CLOSER_THAN, 1.0 - tolerance), 0, inf
    while heap and labels < labels_max:
        target_s = inf if best is None else best.cost_s
        if heap[0][0] >= target_s * closer:
            break
        number = heapq.heappop(heap)[1]
        pair = pairs[number]
        labels += pair.refine(target_s=target_s, tolerance=tolerance, labels_max=labels_max - labels)
        if pair.cost_s < target_s:
            best = pair
        if pair.closed:
            floor_s = min(floor_s, pair.bound_s)
        else:
            heapq.heappush(heap, (pair.bound_s, number))
    left_s = [heap[0][0]] if heap else []
    bound_s = min([inf if best is None else best.cost_s, floor_s, *left_s])
    return Found(best, bound_s, labels)
