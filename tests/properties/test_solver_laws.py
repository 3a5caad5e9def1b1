"""Metamorphic laws of the whole search: what a change of the question may do to the answer.

Searches stop within a tolerance, so that laws hold within the gap that the search itself has proven.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import lru_cache
from math import inf

import pytest

from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.solver.evaluate import evaluate
from scheduler.solver.profiles.hardware_profile import HardwareProfile
from scheduler.solver.request import Infeasibility, SolveRequest
from scheduler.solver.search.plan_search import SearchOutcome, search_plan
from scheduler.solver.search.stage_oracle import OracleCache
from tests.properties.toy_requests import toy_request

DRAWN, DRAWN_FULL = 8, 60
SEEDS = [*range(DRAWN), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(DRAWN, DRAWN_FULL))]
TOLERANCE = 1e-3
ROUNDING = 1e-9


@lru_cache(maxsize=DRAWN_FULL)
def _request(seed: int) -> SolveRequest:
    """Return a request for 4 to 16 GPUs, a third of them mixed, with memory that mostly binds."""
    rng = random.Random(f"laws {seed}")
    models = 2 if seed % 3 == 0 else 1
    gpus = [2, 4] if models > 1 else [4, 6, 8, 12]
    free = toy_request(rng, gpus=gpus, layers=range(4, 9), models=models)
    free = replace(free, global_batch=4 * free.global_batch)
    return replace(free, memory_bytes_max=_tight_bytes(free, rng.uniform(0.4, 1.1)))


def _tight_bytes(free: SolveRequest, share: float) -> int:
    found = search_plan(free, tolerance=TOLERANCE).result
    return round(share * found.peak_bytes_per_gpu) if isinstance(found, ParallelPlan) else 10**12


@lru_cache(maxsize=4 * DRAWN_FULL)
def _searched(request: SolveRequest) -> SearchOutcome:
    """Search and check the result by evaluation."""
    outcome = search_plan(request, tolerance=TOLERANCE)
    plan = outcome.result
    if isinstance(plan, ParallelPlan):
        judged = evaluate(plan, request)
        assert judged.fits
        assert (judged.iteration_time_s, judged.peak_bytes_per_gpu) == (plan.iteration_time_s, plan.peak_bytes_per_gpu)
        assert 0 <= plan.optimality_gap <= TOLERANCE * (1 + ROUNDING)
    return outcome


def _time_s(request: SolveRequest) -> float:
    """Return the time of a plan; infinite if none fits."""
    plan = _searched(request).result
    return plan.iteration_time_s if isinstance(plan, ParallelPlan) else inf


def _least_s(request: SolveRequest) -> float:
    """Return a time that no plan beats."""
    plan = _searched(request).result
    return plan.iteration_time_s * (1 - plan.optimality_gap) if isinstance(plan, ParallelPlan) else inf


def _no_slower(request: SolveRequest, than: SolveRequest, *, times: float = 1.0) -> None:
    assert _least_s(request) <= times * _time_s(than) * (1 + ROUNDING)


def test_most_requests_are_feasible() -> None:
    assert sum(_time_s(_request(seed)) < inf for seed in range(DRAWN)) >= 0.75 * DRAWN


BETTER = (
    "efficiency",
    "peak_flops_per_s",
    "memory_bandwidth_bytes_per_s",
    "intra_bandwidth_bytes_per_s",
    "inter_bandwidth_bytes_per_s",
    "host_bandwidth_bytes_per_s",
)
LESS = (
    "reserve_bytes",
    "reserve_ratio",
    "launch_s",
    "iteration_overhead_s",
    "intra_latency_s",
    "inter_latency_s",
    "intra_hop_s",
    "inter_hop_s",
    "host_optimizer_s_per_parameter",
)


@pytest.mark.parametrize("seed", SEEDS)
def test_better_gpus_and_better_links_are_never_slower(seed: int) -> None:
    request = _request(seed)
    for field in (*BETTER, *LESS):
        _no_slower(replace(request, hardware=tuple(_better(hardware, field) for hardware in request.hardware)), request)


def _better(hardware: HardwareProfile, field: str) -> HardwareProfile:
    value = getattr(hardware, field) * (0.5 if field in LESS else 1.6)
    changed: dict[str, int | float] = {field: int(value) if field == "reserve_bytes" else value}
    if field == "efficiency":
        changed[field] = min(1.0, value)
    return replace(hardware, **changed)  # type: ignore[arg-type]  # float fields alone


@pytest.mark.parametrize("seed", SEEDS)
def test_more_memory_is_never_slower(seed: int) -> None:
    request = _request(seed)
    for ratio in (1.05, 1.4, 4.0):
        _no_slower(replace(request, memory_bytes_max=round(ratio * request.memory_bytes_max)), request)


@pytest.mark.parametrize("seed", SEEDS)
def test_more_dimensions_are_never_slower(seed: int) -> None:
    request = _request(seed)
    for dimension in sorted(request.hardware[0].dimensions - {"data"}):
        narrow = tuple(replace(hardware, dimensions=hardware.dimensions - {dimension}) for hardware in request.hardware)
        _no_slower(request, replace(request, hardware=narrow))


@pytest.mark.parametrize("seed", SEEDS)
def test_twice_the_layers_take_at_most_twice_the_time_on_twice_the_memory(seed: int) -> None:
    """Each stage of the best plan can take each of its layers twice under the same strategy.

    This at most doubles its time and its memory: buffers, hand-overs, embedding, head, reserve and overhead count once.
    """
    request = _request(seed)
    runs = tuple(replace(run, layers=2 * run.layers) for run in request.model.layers)
    doubled = replace(request, model=replace(request.model, layers=runs), memory_bytes_max=2 * request.memory_bytes_max)
    _no_slower(doubled, request, times=2.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_names_and_grouping_of_layers_do_not_matter(seed: int) -> None:
    request = _request(seed)
    split = tuple(replace(run, layers=part) for run in request.model.layers for part in (1, run.layers - 1) if part > 0)
    renamed = replace(request.model, name="another")
    assert search_plan(replace(request, model=renamed), tolerance=TOLERANCE) == _searched(request)
    assert search_plan(replace(request, model=replace(renamed, layers=split)), tolerance=TOLERANCE) == _searched(
        request
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_order_of_groups_does_not_matter(seed: int) -> None:
    request = _request(seed)
    turned = replace(request, shape=GpuShape(request.shape.groups[::-1]), hardware=request.hardware[::-1])
    _no_slower(turned, request)
    _no_slower(request, turned)


@pytest.mark.parametrize("seed", SEEDS)
def test_search_is_deterministic_with_a_shared_cache(seed: int) -> None:
    request, bench = _request(seed), OracleCache()
    assert search_plan(request, tolerance=TOLERANCE) == _searched(request)
    search_plan(replace(request, memory_bytes_max=0), oracle_cache=bench)
    after = search_plan(request, oracle_cache=bench).result
    if isinstance(after, Infeasibility):
        assert after == _searched(request).result
        return
    assert after.optimality_gap == 0.0
    assert _least_s(request) <= after.iteration_time_s * (1 + ROUNDING) <= _time_s(request) * (1 + 2 * ROUNDING)


@pytest.mark.parametrize("seed", SEEDS)
def test_limited_budget_reports_a_valid_gap(seed: int) -> None:
    request = _request(seed)
    for labels_max in (1, 300):
        for tolerance in (0.0, 0.1):
            found = search_plan(request, tolerance=tolerance, labels_max=labels_max).result
            if isinstance(found, Infeasibility):
                assert found.constraint == "budget" or _time_s(request) == inf
            else:
                assert found.iteration_time_s * (1 - found.optimality_gap) <= _time_s(request) * (1 + ROUNDING)
                assert _least_s(request) <= found.iteration_time_s * (1 + ROUNDING)


@pytest.mark.parametrize("seed", SEEDS)
def test_mixed_shape_is_never_slower_than_its_parts(seed: int) -> None:
    request = _request(seed)
    for part in request.list_parts():
        _no_slower(request, part)
