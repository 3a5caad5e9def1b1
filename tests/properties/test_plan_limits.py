"""The search under limits against brute force: every plan of a tiny request, kept if it breaks no limit."""

from __future__ import annotations

import random
from dataclasses import replace
from math import inf

import numpy as np
import pytest

from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.domain.plan_limits import (
    DEGREES,
    NO_LIMITS,
    PlanDimension,
    PlanLimits,
    list_pipeline_dimensions,
    list_strategy_dimensions,
)
from scheduler.solver.evaluate import evaluate
from scheduler.solver.plan_rules import PlanError
from scheduler.solver.request import Infeasibility, SolveRequest
from scheduler.solver.search.plan_search import search_plan
from scheduler.solver.search.simple_plan import count_strategies, find_simplest_plan
from tests.builders_enumeration import PricedPartition, price_partitions
from tests.properties.plan_space import Pipe, enumerate_pipes
from tests.properties.toy_requests import toy_request

REQUESTS, CHUNKS = 10, 50
CHOICES_MAX = 2500
PLANS_MIN = 200
LIMITS_PER_REQUEST = 3
SIMPLE_REQUESTS = 15
SAME = 1e-9


@pytest.mark.parametrize("first", [0, *(pytest.param(at, marks=pytest.mark.full) for at in range(1, CHUNKS))])
def test_search_within_limits_matches_brute_force(first: int) -> None:
    count = {"feasible": 0, "infeasible": 0, "slower": 0}
    for number in range(first * REQUESTS, (first + 1) * REQUESTS):
        rng = random.Random(f"limits {number}")
        free, every = _enumerable(rng)
        for _ in range(LIMITS_PER_REQUEST):
            _compare(rng, free, every, count)
    assert count["feasible"] >= 0.3 * REQUESTS * LIMITS_PER_REQUEST
    assert count["slower"] > 0


def _compare(
    rng: random.Random, free: SolveRequest, every: list[tuple[Pipe, PricedPartition]], count: dict[str, int]
) -> None:
    times_s = np.concatenate([pipe.time_s(part) for pipe, part in every])
    sizes = np.concatenate([pipe.peak_bytes(part) for pipe, part in every])
    leanest, fastest = sizes.min(), sizes[times_s.argmin()]
    memory_bytes = max(1, round(float(leanest + rng.uniform(0.2, 1.5) * (fastest - leanest))))
    request = replace(
        free,
        memory_bytes_max=memory_bytes,
        limits=random_limits(rng, _list_dimensions(_plan(every, int(times_s.argmin())))),
    )
    best_s = _find_best_s(request, every, np.where(sizes <= memory_bytes, times_s, inf))
    found = search_plan(request).result
    if isinstance(found, Infeasibility):
        assert best_s == inf, f"{request.limits}: the search missed a plan of {best_s} s"
        count["infeasible"] += 1
        return
    assert evaluate(found, request).fits
    assert found.iteration_time_s == pytest.approx(best_s, rel=SAME), request.limits
    assert found.optimality_gap == 0.0
    count["feasible"] += 1
    count["slower"] += found.iteration_time_s > float(times_s[sizes <= memory_bytes].min()) * (1 + SAME)


def _find_best_s(request: SolveRequest, every: list[tuple[Pipe, PricedPartition]], fitting_s: np.ndarray) -> float:
    """Return the time of the fastest plan that fits and breaks no limit."""
    for at in np.argsort(fitting_s, kind="stable").tolist():
        if fitting_s[at] == inf:
            break
        if not request.limits.find_violation(_plan(every, at)):
            return float(fitting_s[at])
    return inf


@pytest.mark.parametrize("first", [0, *(pytest.param(at, marks=pytest.mark.full) for at in range(1, CHUNKS))])
def test_simplest_plan_matches_brute_force(first: int) -> None:
    counts: set[int] = set()
    for number in range(first * SIMPLE_REQUESTS, (first + 1) * SIMPLE_REQUESTS):
        rng = random.Random(f"simplest {number}")
        free, every = _enumerable(rng)
        times_s = np.concatenate([pipe.time_s(part) for pipe, part in every])
        sizes = np.concatenate([pipe.peak_bytes(part) for pipe, part in every])
        leanest, fastest_bytes = sizes.min(), sizes[times_s.argmin()]
        memory_bytes = max(1, round(float(leanest + rng.uniform(0.1, 0.9) * (fastest_bytes - leanest))))
        request, ratio = replace(free, memory_bytes_max=memory_bytes), rng.choice([0.0, 0.02, 0.1, 0.3])
        fastest = search_plan(request).result
        if isinstance(fastest, Infeasibility):
            continue
        found = find_simplest_plan(request, fastest, ratio=ratio)
        limit_s = fastest.iteration_time_s * (1 + ratio) * (1 + SAME)
        near = np.flatnonzero((sizes <= memory_bytes) & (times_s <= limit_s)).tolist()
        least = min(count_strategies(_plan(every, at)) for at in near)
        assert evaluate(found.plan, request).fits
        assert found.plan.iteration_time_s <= limit_s
        assert count_strategies(found.plan) == found.strategies
        assert found.strategies_min <= least <= found.strategies
        if least == 1 or (least == 2 and len(request.groups) == 1):
            assert found.strategies == found.strategies_min == least
        counts.add(least)
    assert first or len(counts) > 1


def _list_dimensions(plan: ParallelPlan) -> list[PlanDimension]:
    layers = [list_strategy_dimensions(strategy) for stage in plan.stages for strategy in stage.strategies]
    return sorted({*list_pipeline_dimensions(plan), *(each for used in layers for each in used)})


def random_limits(rng: random.Random, used: list[PlanDimension]) -> PlanLimits:
    """Return random limits. Many of them are about `used` dimensions, those of the fastest plan."""
    dimensions = list(PlanDimension)
    likely = [rng.choice(used) if used and rng.random() < 0.8 else rng.choice(dimensions) for _ in range(3)]
    pair = rng.choice(used or dimensions), rng.choice(used or dimensions)
    limits = PlanLimits(
        excluded=(*likely[: rng.choice([0, 1, 1, 2])], *rng.sample(dimensions, k=rng.choice([0, 1]))),
        exclusive=(pair,) if rng.random() < 0.4 and pair[0] is not pair[1] else (),
        degrees_max=tuple((rng.choice(DEGREES), rng.choice([1, 2, 3])) for _ in range(rng.choice([0, 0, 1, 2]))),
        is_uniform=rng.random() < 0.4,
        has_equal_stages=rng.random() < 0.3,
    )
    if rng.random() < 0.3:
        limits = replace(limits, micro_batches_max=rng.choice([1, 2, 4]), replica_samples_max=rng.choice([None, 1, 2]))
    if rng.random() < 0.3:
        limits = replace(limits, fills_pipeline=rng.random() < 0.5, has_whole_rounds=rng.random() < 0.5)
    return limits


def _enumerable(rng: random.Random) -> tuple[SolveRequest, list[tuple[Pipe, PricedPartition]]]:
    """Draw requests until one has many plans, and few enough to enumerate."""
    while True:
        models = 2 if rng.random() < 0.15 else 1
        gpus, layers = ([1, 2], [2, 3]) if models > 1 else ([2, 2, 4, 4], [2, 3, 4])
        request = toy_request(rng, gpus=gpus, layers=layers, models=models)
        pipes = list(enumerate_pipes(request))
        choices = [max(map(len, pipe.options)) ** request.model.layer_count for pipe in pipes]
        if pipes and sum(choices) >= PLANS_MIN and max(choices) <= CHOICES_MAX:
            return request, [(pipe, part) for pipe in pipes for part in price_partitions(pipe.instance)]


def _plan(every: list[tuple[Pipe, PricedPartition]], at: int) -> ParallelPlan:
    for pipe, part in every:
        if at < len(part.time_s):
            return pipe.plan(part, at)
        at -= len(part.time_s)
    raise IndexError(at)


@pytest.mark.parametrize("seed", range(10))
def test_evaluation_rejects_what_the_limits_forbid(seed: int) -> None:
    rng = random.Random(f"limits of evaluation {seed}")
    request = toy_request(rng, gpus=[4], layers=[4])
    plan = search_plan(request).result
    assert isinstance(plan, ParallelPlan)
    limits = random_limits(rng, _list_dimensions(plan))
    if limits.find_violation(plan):
        with pytest.raises(PlanError):
            evaluate(plan, replace(request, limits=limits))
    else:
        assert evaluate(plan, replace(request, limits=limits)) == evaluate(plan, replace(request, limits=NO_LIMITS))
