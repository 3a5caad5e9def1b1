"""The search of one pipeline and the best-first loop over several: valid bounds at every step, and budgets."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import inf

import numpy as np
import pytest

from scheduler.solver.instance import Instance, evaluate_solution
from scheduler.solver.search.pipeline_search import MAX_LABELS, PipelineSearch, search_best_first
from tests.builders_enumeration import price_partitions, random_instance

SEEDS = range(60)


def _limited(seed: int) -> tuple[Instance, float]:
    """Return an instance whose memory binds, and its optimum."""
    generator = np.random.default_rng(seed)
    free = random_instance(generator)
    every = list(price_partitions(free))
    fastest = min(every, key=lambda part: float(part.time_s.min()))
    most = int(fastest.memory_bytes[fastest.time_s.argmin()].max())
    least = min(int(part.memory_bytes.max(axis=1).min()) for part in every)
    limits = (round(least + generator.uniform(0, 1) * (most - least)),) * len(free.counts)
    best_s = min(float(np.where(part.fitting(limits), part.time_s, inf).min()) for part in every)
    return replace(free, capacity_bytes=limits), best_s


@pytest.mark.parametrize("seed", SEEDS)
def test_each_step_raises_the_bound_up_to_the_optimum(seed: int) -> None:
    instance, best_s = _limited(seed)
    pair = PipelineSearch.from_instance(instance)
    bounds = [pair.bound_s]
    while not pair.closed:
        pair.refine(target_s=inf, tolerance=0.0, labels_max=MAX_LABELS)
        bounds.append(pair.bound_s)
        assert len(bounds) < 500
    assert all(low <= high for low, high in pairwise(bounds))
    assert bounds[-1] == pytest.approx(best_s, rel=1e-9)
    assert bounds[-1] <= best_s * (1 + 1e-9)
    assert pair.cost_s == pytest.approx(best_s, rel=1e-9)
    assert pair.solution is not None
    assert evaluate_solution(instance, pair.solution).fits


@pytest.mark.parametrize("seed", SEEDS)
def test_search_closes_once_it_cannot_beat_the_target(seed: int) -> None:
    instance, best_s = _limited(seed)
    pair = PipelineSearch.from_instance(instance)
    for _ in range(500):
        if pair.closed:
            break
        pair.refine(target_s=0.5 * best_s, tolerance=0.0, labels_max=MAX_LABELS)
    assert pair.closed
    assert 0.5 * best_s * (1 - 1e-9) <= pair.bound_s <= best_s * (1 + 1e-9)


def test_best_first_returns_the_best_pipeline_and_skips_others() -> None:
    drawn = [_limited(seed) for seed in SEEDS]
    pairs = [PipelineSearch.from_instance(instance) for instance, _ in drawn]
    found = search_best_first(pairs)
    best_s = min(best_s for _, best_s in drawn)
    assert found.best is not None
    assert found.best.cost_s == pytest.approx(best_s, rel=1e-9)
    assert found.gap == 0.0
    assert sum(pair.cost_s == inf for pair in pairs) > len(pairs) // 2


@pytest.mark.parametrize("labels_max", [0, 1, 30, 200])
def test_bound_holds_when_the_budget_runs_out(labels_max: int) -> None:
    drawn = [_limited(seed) for seed in SEEDS]
    best_s = min(best_s for _, best_s in drawn)
    found = search_best_first([PipelineSearch.from_instance(instance) for instance, _ in drawn], labels_max=labels_max)
    assert found.bound_s <= best_s * (1 + 1e-9)
    if found.best is not None:
        assert found.best.cost_s * (1 - found.gap) <= best_s * (1 + 1e-9)


def test_best_first_without_pipelines_finds_nothing() -> None:
    found = search_best_first([])
    assert (found.best, found.bound_s, found.gap, found.labels) == (None, inf, 0.0, 0)
