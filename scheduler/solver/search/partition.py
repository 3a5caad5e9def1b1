"""The best contiguous partition of the layers into stages, given the time of every candidate stage."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scheduler.solver.costs.cost_tables import Floats


@dataclass(frozen=True, slots=True)
class Partition:
    """`borders` are layer numbers 0 = b0 < b1 < ... < bP = L; stage i holds the layers b(i) to b(i+1) - 1."""

    cost_s: float
    borders: tuple[int, ...]


def best_partition(stages_s: Floats, hand_over_s: Floats, micro_batches: int) -> Partition | None:
    """Least sum + (c - 1) x largest over all partitions; None where no partition is finite.

    `stages_s` [P, L+1, L+1] holds the time of stage i over the layers a to b-1; `hand_over_s` [P-1, L+1] that of
    border i if the next stage begins with layer a.

    The bottleneck is swept upwards. With limit x on every stage and hand-over the least sum S(x) is a shortest
    path. S never rises with x, so no limit beyond (best - S(infinity)) / (c - 1) can win, and the sweep is short.
    """
    free = _least_sum(stages_s, hand_over_s, np.inf)
    if free is None:
        return None
    best = _with_bottleneck(free, stages_s, hand_over_s, micro_batches)
    for limit_s in _limits(stages_s, hand_over_s):
        if free.cost_s + (micro_batches - 1) * limit_s >= best.cost_s:
            break
        found = _least_sum(stages_s, hand_over_s, limit_s)
        assert found is not None, "the smallest limit admits a partition"
        priced = _with_bottleneck(found, stages_s, hand_over_s, micro_batches)
        if priced.cost_s < best.cost_s:
            best = priced
    return best


def _limits(stages_s: Floats, hand_over_s: Floats) -> Floats:
    """The values that the largest stage or hand-over can take, from the smallest possible one upwards."""
    reach_s = stages_s[0, 0]
    for stage, gap_s in zip(stages_s[1:], hand_over_s, strict=True):
        reach_s = np.maximum(np.maximum(reach_s, gap_s)[:, None], stage).min(axis=0)
    values = np.unique(np.concatenate([stages_s.ravel(), hand_over_s.ravel()]))
    return np.asarray(values[(values >= reach_s[-1]) & np.isfinite(values)])


def _least_sum(stages_s: Floats, hand_over_s: Floats, limit_s: float) -> Partition | None:
    """The partition of least sum in which nothing exceeds `limit_s`: a shortest path, stage by stage."""
    stages_s = np.where(stages_s <= limit_s, stages_s, np.inf)
    hand_over_s = np.where(hand_over_s <= limit_s, hand_over_s, np.inf)
    sum_s = stages_s[0, 0]
    came_from = []
    for stage, gap_s in zip(stages_s[1:], hand_over_s, strict=True):
        totals = (sum_s + gap_s)[:, None] + stage
        came_from.append(totals.argmin(axis=0))
        sum_s = totals.min(axis=0)
    if not np.isfinite(sum_s[-1]):
        return None
    borders = [len(sum_s) - 1]
    for origins in reversed(came_from):
        borders.append(int(origins[borders[-1]]))
    return Partition(float(sum_s[-1]), (0, *reversed(borders)))


def _with_bottleneck(found: Partition, stages_s: Floats, hand_over_s: Floats, micro_batches: int) -> Partition:
    borders = found.borders
    largest_s = max(float(stages_s[i, borders[i], borders[i + 1]]) for i in range(len(stages_s)))
    for i in range(len(hand_over_s)):
        largest_s = max(largest_s, float(hand_over_s[i, borders[i + 1]]))
    return Partition(found.cost_s + (micro_batches - 1) * largest_s, borders)
