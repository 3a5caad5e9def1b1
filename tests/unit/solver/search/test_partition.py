"""The best cuts and the best order of the groups, compared with enumeration."""

from __future__ import annotations

from itertools import combinations, pairwise, permutations

import numpy as np
import pytest

from scheduler.solver.instance import Objective
from scheduler.solver.search.partition import (
    StageTimes,
    compute_quick_bound_s,
    compute_smallest_bottleneck_s,
    find_best_partition,
)

LAYERS = 7
COUNTS = ((1,), (4,), (2,), (1, 2), (2, 1), (2, 2), (1, 1, 1), (2, 1, 2), (1, 3, 1), (1, 1, 1, 1), (1, 1, 2, 1))
"""Devices of each group."""


def _drawn(seed: int) -> tuple[StageTimes, Objective]:
    """1 to 5 devices in 1 to 4 groups; some stages fit nowhere, some hand-overs are the slowest part."""
    generator = np.random.default_rng(seed)
    counts = COUNTS[seed % len(COUNTS)]
    devices, groups, depth = sum(counts), len(counts), LAYERS - sum(counts) + 1
    stages_s = np.full((devices, groups, depth, depth), np.inf)
    first, last = np.triu_indices(depth)
    stages_s[:, :, first, last] = generator.uniform(0, 1, (devices, groups, len(first))) + 0.3 * (last - first)
    stages_s[generator.uniform(size=stages_s.shape) < 0.15] = np.inf
    hand_over_s = generator.uniform(0, 1.5, (devices - 1, groups, groups, depth))
    return StageTimes(stages_s, hand_over_s, counts), Objective(int(generator.choice([1, 2, 8, 64])))


def _enumerated(times: StageTimes) -> list[tuple[float, float]]:
    """(sum, largest part) of every partition that is finite."""
    devices = len(times.stages_s)
    found = []
    for order in set(permutations([group for group, count in enumerate(times.counts) for _ in range(count)])):
        for cuts in combinations(range(1, LAYERS), devices - 1):
            spans = list(pairwise((0, *cuts, LAYERS)))
            parts_s = [times.stages_s[i, order[i], a - i, b - i - 1] for i, (a, b) in enumerate(spans)]
            parts_s += [times.hand_over_s[i, order[i], order[i + 1], cut - i - 1] for i, cut in enumerate(cuts)]
            found.append((float(sum(parts_s)), float(max(parts_s))))
    return [entry for entry in found if np.isfinite(entry[0])]


@pytest.mark.parametrize("seed", range(90))
def test_best_partition_matches_enumeration(seed: int) -> None:
    times, objective = _drawn(seed)
    every = _enumerated(times)
    best_s = min((objective.compute_time_s(*entry) for entry in every), default=np.inf)
    found, bound_s = find_best_partition(times, objective)
    assert bound_s == pytest.approx(best_s, rel=1e-12)
    assert compute_quick_bound_s(times, objective) <= best_s * (1 + 1e-12)
    assert compute_smallest_bottleneck_s(times) == pytest.approx(min((most for _, most in every), default=np.inf))
    if found is None:
        assert not every
        return
    assert objective.compute_time_s(found.sum_s, found.largest_s) == pytest.approx(best_s, rel=1e-12)
    assert (found.borders[0], found.borders[-1], len(found.borders)) == (0, LAYERS, len(times.stages_s) + 1)
    assert tuple(map(found.order.count, range(len(times.counts)))) == times.counts


@pytest.mark.parametrize("seed", range(90))
def test_early_end_still_gives_a_valid_bound(seed: int) -> None:
    times, objective = _drawn(seed)
    best_s = min((objective.compute_time_s(*entry) for entry in _enumerated(times)), default=np.inf)
    for useful_s in (0.5 * best_s, best_s, 2 * best_s):
        found, bound_s = find_best_partition(times, objective, useful_s=useful_s)
        assert bound_s <= best_s * (1 + 1e-12)
        if best_s < useful_s < np.inf:
            assert found is not None
            assert objective.compute_time_s(found.sum_s, found.largest_s) == pytest.approx(best_s, rel=1e-12)


def test_infeasible_partition_has_an_infinite_bound() -> None:
    times = StageTimes(np.full((2, 1, 3, 3), np.inf), np.zeros((1, 1, 1, 3)), (2,))
    assert find_best_partition(times, Objective(4)) == (None, np.inf)
