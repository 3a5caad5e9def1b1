"""Plans that stream state from the host, against enumeration of all plans of small requests."""

from __future__ import annotations

import random
from dataclasses import replace
from math import inf

import pytest

from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.solver.evaluate import Evaluation, evaluate
from scheduler.solver.profiles.hardware_profile import STREAMED_DIMENSIONS, Dimension
from scheduler.solver.request import Infeasibility, SolveRequest
from scheduler.solver.search.plan_search import search_plan
from tests.builders_enumeration import price_partitions
from tests.properties.plan_space import enumerate_pipes
from tests.properties.toy_requests import toy_request

DIMENSIONS = (
    {Dimension.DATA, Dimension.FSDP, Dimension.OFFLOAD, Dimension.OFFLOAD_PARAMETERS},
    {Dimension.DATA, Dimension.PIPELINE, Dimension.RECOMPUTE, Dimension.OFFLOAD_ACTIVATIONS},
    {Dimension.DATA, Dimension.RECOMPUTE, Dimension.OFFLOAD, *STREAMED_DIMENSIONS},
)
PLANS_MAX = 800
REQUESTS = 24


def _is_streamed(plan: ParallelPlan) -> bool:
    runs = [run for stage in plan.stages for run in stage.strategies]
    return any(run.offload_parameters or run.offload_activations for run in runs)


def _draw(rng: random.Random) -> tuple[SolveRequest, list[tuple[ParallelPlan, Evaluation]]]:
    while True:
        drawn = toy_request(rng, gpus=[1, 1, 2], layers=[3, 4, 5])
        dimensions = frozenset(rng.choice(DIMENSIONS))
        request = replace(drawn, hardware=(replace(drawn.hardware[0], dimensions=dimensions),))
        pipes = list(enumerate_pipes(request))
        if not pipes or sum(max(map(len, pipe.options)) ** request.model.layer_count for pipe in pipes) > PLANS_MAX:
            continue
        plans = [
            pipe.plan(part, number)
            for pipe in pipes
            for part in price_partitions(pipe.instance)
            for number in range(len(part.time_s))
        ]
        return request, [(plan, evaluate(plan, request)) for plan in plans]


def _host_bytes(evaluation: Evaluation) -> int:
    return max(stage.host_bytes for stage in evaluation.stages)


def test_search_finds_the_fastest_streamed_plan_where_no_other_fits() -> None:
    found_count = refused = 0
    for number in range(REQUESTS):
        rng = random.Random(f"streamed {number}")
        free, every = _draw(rng)
        peaks = [judged.peak_bytes_per_gpu for _, judged in every]
        plain = min(peak for peak, (plan, _) in zip(peaks, every, strict=True) if not _is_streamed(plan))
        limit = min(peaks) + round(rng.random() * max(0, plain - 1 - min(peaks)))
        if limit >= plain:
            continue
        within = [judged for _, judged in every if judged.peak_bytes_per_gpu <= limit]
        host_max = max(1, round(rng.uniform(0.9, 1.0) * max(map(_host_bytes, within))))
        request = replace(
            free, hardware=(replace(free.hardware[0], host_memory_bytes=host_max),), memory_bytes_max=limit
        )
        fitting_s = [judged.iteration_time_s for judged in within if _host_bytes(judged) <= host_max]
        result = search_plan(request).result
        if isinstance(result, Infeasibility):
            refused += 1
            assert not fitting_s
            assert result.constraint == "memory"
            continue
        found_count += 1
        assert _is_streamed(result)
        assert result.iteration_time_s == pytest.approx(min(fitting_s, default=inf), rel=1e-9)
    assert found_count >= 5
    assert refused >= 1


def test_plans_are_not_streamed_where_others_fit() -> None:
    for number in range(4):
        request, every = _draw(random.Random(f"roomy {number}"))
        result = search_plan(request).result
        assert isinstance(result, ParallelPlan)
        assert not _is_streamed(result)
        plain_s = [judged.iteration_time_s for plan, judged in every if not _is_streamed(plan)]
        assert result.iteration_time_s == pytest.approx(min(plain_s), rel=1e-9)
