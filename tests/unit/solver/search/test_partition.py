"""The bottleneck sweep against enumeration."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest

from scheduler.solver.costs.cost_tables import Floats
from scheduler.solver.search.partition import best_partition


def _random_tables(generator: np.random.Generator, stages: int, layers: int) -> tuple[Floats, Floats]:
    stages_s = np.full((stages, layers + 1, layers + 1), np.inf)
    first, end = np.triu_indices(layers + 1, k=1)
    stages_s[:, first, end] = generator.uniform(0, 1, (stages, len(first))) + 0.3 * (end - first)
    stages_s[generator.uniform(size=stages_s.shape) < 0.2] = np.inf
    hand_over_s = np.full((stages - 1, layers + 1), np.inf)
    hand_over_s[:, 1:-1] = generator.uniform(0, 1.5, (stages - 1, layers - 1))
    return stages_s, hand_over_s


def _enumerated(stages_s: Floats, hand_over_s: Floats, micro_batches: int) -> float:
    stages, layers = stages_s.shape[0], stages_s.shape[1] - 1
    best = np.inf
    for cuts in combinations(range(1, layers), stages - 1):
        borders = (0, *cuts, layers)
        times = [float(stages_s[i, a, b]) for i, (a, b) in enumerate(pairwise(borders))]
        times += [float(hand_over_s[i, a]) for i, a in enumerate(cuts)]
        if np.isfinite(times).all():
            best = min(best, sum(times) + (micro_batches - 1) * max(times))
    return best


@pytest.mark.parametrize("seed", range(60))
def test_the_best_partition_equals_enumeration(seed: int) -> None:
    generator = np.random.default_rng(seed)
    stages = int(generator.integers(1, 5))
    stages_s, hand_over_s = _random_tables(generator, stages, layers=7)
    micro_batches = int(generator.choice([1, 2, 8, 64]))
    expected = _enumerated(stages_s, hand_over_s, micro_batches)
    found = best_partition(stages_s, hand_over_s, micro_batches)
    assert (found.cost_s if found else np.inf) == pytest.approx(expected, rel=1e-12)
    if found:
        assert (found.borders[0], found.borders[-1], len(found.borders)) == (0, 7, stages + 1)


def test_no_finite_partition_is_none() -> None:
    assert best_partition(np.full((2, 4, 4), np.inf), np.zeros((1, 4)), 4) is None
