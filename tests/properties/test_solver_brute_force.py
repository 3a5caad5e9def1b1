"""The search against brute force on thousands of tiny instances. The two share the evaluator alone.

4,400 instances are arrays without any physical sense, judged by `price`; 800 are requests, judged by `evaluate`. 440
arrays and 80 requests more have three or four GPU models.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf

import numpy as np
import pytest

from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.solver.evaluate import evaluate
from scheduler.solver.instance import Floats, Solution, evaluate_solution
from scheduler.solver.request import Infeasibility, SolveRequest
from scheduler.solver.search.pipeline_search import MAX_LABELS, PipelineSearch, search_best_first
from scheduler.solver.search.plan_search import search_plan
from tests.builders_enumeration import PricedPartition, price_partitions, random_instance
from tests.properties.plan_space import Pipe, enumerate_pipes
from tests.properties.toy_requests import toy_request

ARRAYS, PLANS = 4400, 800
MANY_ARRAYS, MANY_PLANS = 440, 80
MANY_COUNTS = ((1, 1, 1), (2, 1, 1), (1, 1, 2), (1, 2, 1), (1, 1, 1, 1))
"""Devices of each group in instances of three and four groups."""
CHUNKS = 4
QUARTERS = [0, *(pytest.param(chunk, marks=pytest.mark.full) for chunk in range(1, CHUNKS))]
"""One quarter of the instances runs in `make test`, all of them in `make test-full`."""
MANY_CHUNKS = 10
TENTHS = [0, *(pytest.param(chunk, marks=pytest.mark.full) for chunk in range(1, MANY_CHUNKS))]
"""The same for requests of three and four GPU models, whose plans take long to enumerate."""
CHOICES_MAX = 3000
"""Choices of strategies for the layers of a request's pipeline; requests with more are drawn again."""

SAME = 1e-9


@dataclass
class Shares:
    """Counts what the instances exercised."""

    instances: int = 0
    binding: int = 0
    uneven_or_mixed: int = 0
    infeasible: int = 0
    unproven: int = 0

    def count(self, best_s: float, unlimited_s: float) -> None:
        self.instances += 1
        self.binding += best_s > unlimited_s
        self.infeasible += best_s == inf

    def check(self, count: int) -> None:
        assert self.instances == count
        assert self.binding >= 0.4 * count
        assert self.uneven_or_mixed >= 0.2 * count
        assert 0.005 * count <= self.infeasible <= 0.2 * count
        assert self.unproven > 0


@pytest.mark.parametrize("chunk", QUARTERS)
def test_pipeline_search_matches_brute_force_on_arrays(chunk: int) -> None:
    shares = Shares()
    for number in range(chunk, ARRAYS, CHUNKS):
        _compare_arrays(np.random.default_rng(number), shares)
    shares.check(ARRAYS // CHUNKS)


@pytest.mark.parametrize("chunk", QUARTERS)
def test_plan_search_matches_brute_force(chunk: int) -> None:
    shares = Shares()
    for number in range(chunk, PLANS, CHUNKS):
        _compare_plans(random.Random(f"plans {number}"), shares)
    shares.check(PLANS // CHUNKS)


@pytest.mark.parametrize("chunk", QUARTERS)
def test_pipeline_search_matches_brute_force_on_arrays_of_many_groups(chunk: int) -> None:
    shares = Shares()
    for number in range(chunk, MANY_ARRAYS, CHUNKS):
        _compare_arrays(np.random.default_rng(10_000 + number), shares, MANY_COUNTS[number % len(MANY_COUNTS)])
    assert shares.instances == MANY_ARRAYS // CHUNKS
    assert shares.binding >= 0.3 * shares.instances


@pytest.mark.parametrize("chunk", TENTHS)
def test_plan_search_matches_brute_force_on_three_and_four_gpu_models(chunk: int) -> None:
    shares = Shares()
    for number in range(chunk, MANY_PLANS, MANY_CHUNKS):
        _compare_plans(random.Random(f"many {number}"), shares, models=3 + number // MANY_CHUNKS % 2)
    assert shares.instances == MANY_PLANS // MANY_CHUNKS
    assert shares.binding >= 1


def _compare_arrays(generator: np.random.Generator, shares: Shares, counts: tuple[int, ...] = ()) -> None:
    free = random_instance(generator, counts)
    every = list(price_partitions(free))
    sizes = np.concatenate([part.memory_bytes.max(axis=1) for part in every])
    times_s = np.concatenate([part.time_s for part in every])
    limits = tuple(_limit(sizes, times_s, generator.uniform(-0.06, 1.1)) for _ in free.counts)
    instance = replace(free, capacity_bytes=limits)
    fitting_s = np.where(np.concatenate([part.fitting(limits) for part in every]), times_s, inf)
    best_s = float(fitting_s.min())
    tolerance, labels_max = _terms(generator.random(), generator.random())
    found = search_best_first([PipelineSearch.from_instance(instance)], tolerance=tolerance, labels_max=labels_max)
    shares.count(best_s, float(times_s.min()))
    for at in (int(fitting_s.argmin()), int(generator.integers(len(times_s)))):
        solution = _entry(every, at)
        judged = evaluate_solution(instance, solution)
        assert judged.time_s == pytest.approx(times_s[at], rel=SAME)
        assert judged.fits == np.isfinite(fitting_s[at])
    if found.best is None:
        assert found.bound_s <= best_s * (1 + SAME)
        assert best_s == inf or labels_max < MAX_LABELS
        return
    assert found.best.solution
    judged = evaluate_solution(instance, found.best.solution)
    assert judged.fits
    assert judged.time_s == pytest.approx(found.best.cost_s, rel=SAME)
    _check_gap(judged.time_s, found.gap, best_s, tolerance if labels_max == MAX_LABELS else 1.0)
    shares.unproven += found.gap > 0
    shares.uneven_or_mixed += _is_uneven_or_mixed(_entry(every, int(fitting_s.argmin())))


def _entry(every: list[PricedPartition], at: int) -> Solution:
    for part in every:
        if at < len(part.time_s):
            return part.solution(at)
        at -= len(part.time_s)
    raise IndexError(at)


def _limit(sizes: Floats, times_s: Floats, position: float) -> int:
    """Return a limit between the needs of the leanest and the fastest solution, or slightly outside."""
    leanest, fastest = sizes.min(), sizes[times_s.argmin()]
    return max(1, round(float(leanest + position * (fastest - leanest))))


def _terms(one: float, two: float) -> tuple[float, int]:
    """Return tolerance and budget: mostly exact and unlimited."""
    return (0.0 if one < 0.7 else one * 0.1), (MAX_LABELS if two < 0.9 else int((two - 0.9) * 1000))


def _check_gap(found_s: float, gap: float, best_s: float, allowed: float) -> None:
    assert best_s * (1 - SAME) <= found_s
    assert found_s * (1 - gap) <= best_s * (1 + SAME), "the gap is not proven"
    assert gap <= allowed * (1 + SAME), f"{gap} is more than the tolerance {allowed}"


def _is_uneven_or_mixed(solution: Solution) -> bool:
    runs = [solution.choice[first:end] for first, end in pairwise(solution.borders)]
    return len({len(run) for run in runs}) > 1 or any(len(set(run)) > 1 for run in runs)


def _compare_plans(rng: random.Random, shares: Shares, models: int = 0) -> None:
    free, every = _enumerable(rng, models)
    times_s = np.concatenate([pipe.time_s(part) for pipe, part in every])
    sizes = np.concatenate([pipe.peak_bytes(part) for pipe, part in every])
    limit = _limit(sizes, times_s, rng.uniform(-0.06, 1.1))
    request = replace(free, memory_bytes_max=limit)
    fitting_s = np.where(sizes <= limit, times_s, inf)
    best_s = float(fitting_s.min())
    shares.count(best_s, float(times_s.min()))
    for at in (int(fitting_s.argmin()), rng.randrange(len(times_s))):
        verdict = evaluate(_plan(every, at), request)
        assert verdict.iteration_time_s == pytest.approx(times_s[at], rel=SAME)
        assert verdict.fits == (sizes[at] <= limit)
    tolerance, labels_max = _terms(rng.random(), rng.random())
    found = search_plan(request, tolerance=tolerance, labels_max=labels_max).result
    if isinstance(found, Infeasibility):
        assert found.constraint == ("memory" if labels_max == MAX_LABELS else "budget") or best_s == inf
        assert best_s == inf or labels_max < MAX_LABELS, f"the search missed {_plan(every, int(fitting_s.argmin()))}"
        return
    verdict = evaluate(found, request)
    assert verdict.fits
    assert found.iteration_time_s == verdict.iteration_time_s
    assert found.peak_bytes_per_gpu == verdict.peak_bytes_per_gpu <= limit
    _check_gap(found.iteration_time_s, found.optimality_gap, best_s, tolerance if labels_max == MAX_LABELS else 1.0)
    shares.unproven += found.optimality_gap > 0
    shares.uneven_or_mixed += _is_an_uneven_or_mixed_plan(_plan(every, int(fitting_s.argmin())))


def _enumerable(rng: random.Random, many: int = 0) -> tuple[SolveRequest, list[tuple[Pipe, PricedPartition]]]:
    """Draw requests until one has plans, and few enough to enumerate; of `many` GPU models, or else of one or two."""
    while True:
        models = many or (2 if rng.random() < 0.1 else 1)
        gpus, layers = ([1, 2, 2], [1, 2, 3]) if models > 1 else ([1, 2, 2, 3, 4, 4, 6], [1, 2, 3, 3, 4, 4, 4, 6])
        if many:
            gpus, layers = [1, 1, 2], [many, many + 1]
        request = toy_request(rng, gpus=gpus, layers=layers, models=models)
        pipes = list(enumerate_pipes(request))
        choices = (max(map(len, pipe.options)) ** request.model.layer_count for pipe in pipes)
        if pipes and max(choices) <= CHOICES_MAX:
            return request, [(pipe, part) for pipe in pipes for part in price_partitions(pipe.instance)]


def _plan(every: list[tuple[Pipe, PricedPartition]], at: int) -> ParallelPlan:
    for pipe, part in every:
        if at < len(part.time_s):
            return pipe.plan(part, at)
        at -= len(part.time_s)
    raise IndexError(at)


def _is_an_uneven_or_mixed_plan(plan: ParallelPlan) -> bool:
    sizes = {len(stage.strategies) for stage in plan.stages}
    return len(sizes) > 1 or any(len(set(stage.strategies)) > 1 for stage in plan.stages)
