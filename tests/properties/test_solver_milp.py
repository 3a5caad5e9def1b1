"""The exact search against HiGHS: the whole loop over pipeline degree and micro-batches, 6 to 24 layers.

What HiGHS proves is the optimum up to its tolerance, so that its answer may be slower by as much, never faster.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from math import inf

import numpy as np
import pytest

from baselines.milp.solver import OBJECTIVE_TOLERANCE, MilpOutcome, solve_instances
from scheduler.solver.instance import Instance, evaluate_solution
from scheduler.solver.search.pipeline_search import PipelineSearch, search_best_first
from tests.builders_loop import a_loop

LOOPS, LOOPS_FULL, MIXED, EQUAL, HOSTS = 20, 200, 3, 8, 8
CHUNKS = 4
TIME_LIMIT_S = 12.0
PROVEN_SHARE_MIN = 0.6


@pytest.mark.parametrize("chunk", [0, *(pytest.param(chunk, marks=pytest.mark.full) for chunk in range(1, CHUNKS))])
def test_search_matches_highs(chunk: int) -> None:
    _compare_all(range(chunk, LOOPS, CHUNKS))


@pytest.mark.full
@pytest.mark.parametrize("chunk", range(10 * CHUNKS))
def test_search_matches_highs_on_many_instances(chunk: int) -> None:
    _compare_all(range(LOOPS + chunk, LOOPS + LOOPS_FULL, 10 * CHUNKS))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, MIXED))])
def test_search_matches_highs_on_two_groups(seed: int) -> None:
    rng = random.Random(f"referee mixed {seed}")
    _compare(a_loop(rng, layers=rng.choice([6, 8]), kinds=rng.choice([1, 3]), gpus=4, batch=4, groups=2))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, EQUAL))])
def test_search_of_equal_stages_matches_highs(seed: int) -> None:
    rng = random.Random(f"referee equal {seed}")
    groups = 2 if seed % 2 else 1
    loop = a_loop(rng, layers=8, kinds=rng.choice([1, 3]), gpus=4 if groups > 1 else 8, batch=8, groups=groups)
    _compare(
        [
            replace(instance, stage_layers=instance.layers // instance.devices)
            for instance in loop
            if instance.interleave == 1 and instance.layers % instance.devices == 0
        ]
    )


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, HOSTS))])
def test_search_with_limited_hosts_matches_highs(seed: int) -> None:
    rng = random.Random(f"referee hosts {seed}")
    loop = a_loop(rng, layers=8, kinds=rng.choice([1, 3]), gpus=rng.choice([4, 8]), batch=8)
    _compare([_limit_hosts(instance, rng) for instance in loop])


def _limit_hosts(instance: Instance, rng: random.Random) -> Instance:
    """Let half of the strategies use memory of hosts that have too little for all layers of a device."""
    costs = []
    for known in instance.costs:
        used = [[rng.randint(50, 100) * (number % 2) for number in range(known.strategies)] for _ in known.time_s]
        costs.append(replace(known, host_bytes=np.array(used, dtype=np.int64)))
    layers = instance.layers / instance.devices
    limits = tuple(round(75 * layers * rng.uniform(0.2, 0.9)) for _ in costs)
    return replace(instance, costs=tuple(costs), host_capacity_bytes=limits)


def _compare_all(seeds: Sequence[int]) -> None:
    proven = [_compare(_loop(seed)) for seed in seeds]
    assert sum(proven) >= PROVEN_SHARE_MIN * len(proven)


def _loop(seed: int) -> list[Instance]:
    rng = random.Random(f"referee {seed}")
    layers = rng.choice([6, 8, 12, 16, 20, 24])
    kinds = rng.choice([1, 2, 3, layers])
    return a_loop(rng, layers=layers, kinds=kinds, gpus=rng.choice([4, 8, 8, 16, 32]), batch=rng.choice([8, 16, 32]))


def _compare(loop: list[Instance]) -> bool:
    """Return whether HiGHS proved its result, and check that the search has the same one."""
    best = search_best_first([PipelineSearch.from_instance(instance) for instance in loop]).best
    time_s = inf
    if best and best.solution:
        judged = evaluate_solution(best.instance, best.solution)
        assert judged.fits
        time_s = judged.time_s
    referee = solve_instances(loop, time_limit_s=TIME_LIMIT_S)
    assert time_s <= referee.objective_s * (1 + 1e-9), "HiGHS found a faster one"
    if referee.proven:
        assert time_s == referee.objective_s or time_s >= referee.objective_s * (1 - OBJECTIVE_TOLERANCE), _lost(
            referee
        )
    return referee.proven


def _lost(referee: MilpOutcome) -> str:
    return f"a solution that fits is faster than what HiGHS proved, {referee}: look at the tolerance of memory rows"
