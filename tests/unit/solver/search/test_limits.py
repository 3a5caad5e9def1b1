"""The search under limits on real profiles: plans, reasons, the simplest plan and prices."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from scheduler.domain.gpu_sets import GpuGroup, GpuShape
from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan, Schedule, Stage, plan_to_json
from scheduler.domain.plan_limits import NO_LIMITS, PlanDimension, PlanLimits
from scheduler.domain.scaling_curve import CurveRequest
from scheduler.solver.curve import solve_point
from scheduler.solver.plan_pricing import price_plan
from scheduler.solver.profiles.catalog import load_gpu, load_model
from scheduler.solver.request import Infeasibility, SolveRequest
from scheduler.solver.search.plan_search import search_plan
from scheduler.solver.search.simple_plan import count_strategies, find_simplest_plan
from scheduler.solver.search.stage_oracle import OracleCache

D = PlanDimension
GB = 10**9
GOLDEN = Path(__file__).parent / "unlimited_plans.json"
"""Plans as they were before limits existed. EBBTIDE_GOLDEN=write rewrites them after a change of the cost model."""


def _request(model: str = "llama-2-7b", gpus: int = 8, batch: int = 64, memory_gb: int = 0) -> SolveRequest:
    shape = GpuShape.packed("a100-80g", gpus, 8)
    return SolveRequest(load_model(model), (load_gpu("a100-80g"),), shape, batch, memory_gb * GB)


def _solve(request: SolveRequest, limits: PlanLimits) -> ParallelPlan:
    found = search_plan(replace(request, limits=limits), tolerance=1e-3).result
    assert isinstance(found, ParallelPlan), found
    assert not limits.find_violation(found)
    return found


def test_plans_without_limits_have_not_changed() -> None:
    recorded = json.loads(GOLDEN.read_text())
    for case in recorded:
        model, groups, batch, memory_bytes = case["request"]
        shape = GpuShape(tuple(GpuGroup(*group) for group in groups))
        hardware = tuple(load_gpu(group.gpu) for group in shape.groups)
        outcome = search_plan(SolveRequest(load_model(model), hardware, shape, batch, memory_bytes), tolerance=1e-3)
        assert isinstance(outcome.result, ParallelPlan)
        document = json.loads(json.dumps(plan_to_json(outcome.result)))
        if os.environ.get("EBBTIDE_GOLDEN") == "write":
            case |= {"plan": document, "labels": outcome.stats.labels, "candidates": outcome.stats.candidates}
            continue
        assert (outcome.stats.labels, outcome.stats.candidates) == (case["labels"], case["candidates"])
        for name, value in case["plan"].items():
            expected = pytest.approx(value, rel=1e-12) if isinstance(value, float) else value
            assert document[name] == expected, (case["request"], name)
    if os.environ.get("EBBTIDE_GOLDEN") == "write":
        GOLDEN.write_text(json.dumps(recorded, separators=(",", ":")) + "\n")


@pytest.mark.parametrize(
    ("limits", "uses"),
    [
        (PlanLimits(excluded=(D.FSDP, D.HYBRID_SHARD, D.ZERO1, D.ZERO2)), {0}),
        (PlanLimits.allow_only([D.FSDP]), {3}),
        (PlanLimits(is_uniform=True), {1}),
        (PlanLimits(excluded=(D.DATA, D.PIPELINE)), {0, 1, 2, 3}),
        (PlanLimits(degrees_max=((D.DATA, 2), (D.TENSOR, 2)), has_equal_stages=True), {0, 1, 2, 3}),
    ],
)
def test_a_limited_plan_is_no_faster_and_keeps_the_limits(limits: PlanLimits, uses: set[int]) -> None:
    plan, free = _solve(_request(), limits), _solve(_request(), NO_LIMITS)
    assert {run.zero for stage in plan.stages for run in stage.strategies} <= uses
    assert plan.iteration_time_s >= free.iteration_time_s * (1 - free.optimality_gap)


def test_requests_with_different_limits_share_a_cache() -> None:
    cache = OracleCache()
    for limits in (NO_LIMITS, PlanLimits(excluded=(D.FSDP,)), PlanLimits(is_uniform=True), NO_LIMITS):
        request = replace(_request(memory_gb=40), limits=limits)
        shared, alone = search_plan(request, oracle_cache=cache).result, search_plan(request).result
        assert isinstance(shared, ParallelPlan)
        assert isinstance(alone, ParallelPlan)
        assert shared.iteration_time_s == pytest.approx(alone.iteration_time_s, rel=1e-12)


@pytest.mark.parametrize(
    ("limits", "change"),
    [
        (PlanLimits.allow_only([D.DATA]), "allow zero1"),
        (PlanLimits(excluded=(D.DATA, D.PIPELINE), degrees_max=((D.TENSOR, 1), (D.ULYSSES, 1), (D.RING, 1))), "allow "),
        (PlanLimits(micro_batches_min=128), "allow fewer than 128 micro-batches"),
        (PlanLimits.allow_only([D.RECOMPUTE]), "allow "),
    ],
)
def test_a_reason_names_the_smallest_change_of_the_limits(limits: PlanLimits, change: str) -> None:
    request = replace(_request(), limits=limits)
    found = search_plan(request).result
    assert isinstance(found, Infeasibility)
    assert found.constraint == "limits"
    changes = found.reason.rpartition("; ")[2]
    assert changes.startswith(change)
    lifted = [single for name, single in limits.list_single_limits() if name not in changes.split(" and ")]
    kept = NO_LIMITS
    for single in lifted:
        kept = kept.combine(single)
    assert isinstance(search_plan(replace(request, limits=kept)).result, ParallelPlan)


def test_a_request_that_is_infeasible_anyway_keeps_its_reason() -> None:
    request = replace(_request("llama-2-70b", gpus=1, batch=8), limits=PlanLimits(excluded=(D.RING,)))
    found = search_plan(request).result
    assert isinstance(found, Infeasibility)
    assert found.constraint == "memory"


@pytest.mark.parametrize(("model", "gpus", "memory_gb"), [("llama-2-13b", 16, 40), ("llama-2-13b", 8, 70)])
def test_the_simplest_plan_is_nearly_as_fast(model: str, gpus: int, memory_gb: int) -> None:
    request = _request(model, gpus=gpus, memory_gb=memory_gb)
    fastest = _solve(request, NO_LIMITS)
    assert count_strategies(fastest) > 1
    found = find_simplest_plan(request, fastest, ratio=0.02)
    assert (count_strategies(found.plan), found.strategies, found.strategies_min) == (1, 1, 1)
    assert fastest.iteration_time_s < found.plan.iteration_time_s <= 1.02 * fastest.iteration_time_s
    uniform = _solve(request, PlanLimits(is_uniform=True))
    assert found.plan.iteration_time_s <= uniform.iteration_time_s * (1 + 1e-9)
    assert find_simplest_plan(request, fastest, ratio=0.0).strategies > 1


def test_a_curve_prefers_the_simplest_plan() -> None:
    shape, request = GpuShape.packed("t4", 4, 4), CurveRequest("gpt2", "", 32, 0)
    plain, simple = solve_point(request, shape), solve_point(replace(request, simplicity=0.5), shape)
    assert isinstance(plain, ParallelPlan)
    assert isinstance(simple, ParallelPlan)
    assert count_strategies(simple) == 1 <= count_strategies(plain)
    assert simple.iteration_time_s <= 1.5 * plain.iteration_time_s


def _own_plan(tp: int, stages: int = 2) -> ParallelPlan:
    length = 32 // stages
    held = tuple(
        Stage(number * length, (number + 1) * length - 1, "a100-80g", tp, (LayerStrategy(length, tp=tp),))
        for number in range(stages)
    )
    return ParallelPlan(Schedule(), 8, 8, 0.0, 0.0, 0, held)


def test_the_price_of_the_fastest_plan_is_its_prediction() -> None:
    fastest = _solve(_request(), NO_LIMITS)
    priced = price_plan(fastest, _request())
    assert (priced.violation, priced.fits) == ("", True)
    assert priced.plan.iteration_time_s == fastest.iteration_time_s


def test_a_price_says_by_which_rule_a_plan_cannot_run() -> None:
    beyond_memory = price_plan(_own_plan(4), _request())
    assert beyond_memory.violation.startswith("stage 0 needs ")
    assert not beyond_memory.fits
    assert beyond_memory.inspection is not None
    limits = PlanLimits(excluded=(D.PIPELINE,))
    limited = price_plan(_own_plan(4), replace(_request(), limits=limits))
    assert "pipeline" in limited.violation
    assert limited.inspection is not None
    impossible = price_plan(_own_plan(3), _request(gpus=6))
    assert "tp is 3" in impossible.violation
    assert impossible.inspection is None
