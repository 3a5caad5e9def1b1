"""Bounds of pipelines without cuts: never above the optimum, and close to it where memory binds."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np
import pytest

from scheduler.domain.gpu_sets import GpuGroup, GpuShape
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.solver.instance import Instance
from scheduler.solver.profiles.catalog import load_gpu, load_model
from scheduler.solver.request import SolveRequest
from scheduler.solver.search.pipeline_bounds import PipelineOutline
from scheduler.solver.search.pipelines import Pipeline, enumerate_pipelines
from scheduler.solver.search.plan_search import search_plan
from scheduler.solver.search.stage_oracle import OracleCache, StageOracle
from tests.builders_enumeration import price_partitions, random_instance

SEEDS = range(120)
COUNTS = ((2,), (1, 1), (1, 2), (2, 2), (1, 1, 1), (2, 1, 1), (1, 1, 1, 1))


def _limited(seed: int) -> tuple[Instance, float]:
    """Return an instance with a memory limit of its own for each group, and its optimum, infinite if nothing fits."""
    generator = np.random.default_rng(seed)
    free = random_instance(generator, COUNTS[seed % len(COUNTS)])
    every = list(price_partitions(free))
    sizes = np.concatenate([part.memory_bytes.max(axis=1) for part in every])
    limits = tuple(int(np.quantile(sizes, share)) for share in generator.uniform(0, 0.6, len(free.counts)))
    best_s = min(float(np.where(part.fitting(limits), part.time_s, inf).min()) for part in every)
    return replace(free, capacity_bytes=limits), best_s


def _outline(instance: Instance) -> PipelineOutline:
    oracles = tuple(
        StageOracle(instance.types, costs, capacity_bytes=capacity, in_flight_max=max(instance.in_flight))
        for costs, capacity in zip(instance.costs, instance.capacity_bytes, strict=True)
    )
    return PipelineOutline(oracles, instance.counts, instance.in_flight, instance.objective)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_bound_is_above_the_optimum(seed: int) -> None:
    instance, best_s = _limited(seed)
    outline = _outline(instance)
    assert outline.compute_balanced_bound_s() <= best_s * (1 + 1e-12)
    assert outline.compute_capacity_bound_s() <= best_s * (1 + 1e-12)
    assert outline.compute_length_bound_s() <= best_s * (1 + 1e-12)


def test_the_bounds_consider_memory() -> None:
    bounds = [(_outline(instance), best_s) for instance, best_s in map(_limited, SEEDS[::4])]
    tighter = [each.compute_length_bound_s() > 1.01 * each.compute_balanced_bound_s() for each, _ in bounds]
    assert sum(tighter) >= 0.5 * len(tighter)
    instance = _limited(0)[0]
    nothing_fits = _outline(replace(instance, capacity_bytes=(0,) * len(instance.counts)))
    assert nothing_fits.compute_capacity_bound_s() == nothing_fits.compute_length_bound_s() == inf


def test_the_bound_by_length_leaves_few_pipelines_of_three_gpu_models() -> None:
    gpus, cache = ("v100-32g", "a100-80g", "h100-80g"), OracleCache()
    shape = GpuShape(tuple(GpuGroup(gpu, 1, 8) for gpu in gpus))
    hardware = tuple(replace(load_gpu(gpu).without_streaming(), host_memory_bytes=0) for gpu in gpus)
    request = SolveRequest(load_model("llama-2-70b"), hardware, shape, 64)
    found = search_plan(request, tolerance=1e-3, oracle_cache=cache).result
    assert isinstance(found, ParallelPlan)
    useful_s = found.iteration_time_s
    balanced = [each for each in enumerate_pipelines(request, cache) if each.search.bound_s < useful_s]
    by_capacity = [pipeline for pipeline in balanced if _refine_once(pipeline) < useful_s]
    by_length = [pipeline for pipeline in by_capacity if _refine_once(pipeline) < useful_s]
    assert len(balanced) > 100
    assert len(by_capacity) <= 0.4 * len(balanced)
    assert 0 < len(by_length) <= 0.1 * len(balanced)


def _refine_once(pipeline: Pipeline) -> float:
    """Return the next bound of the pipeline, which needs no partition."""
    pipeline.search.refine(target_s=inf, tolerance=0.0, labels_max=0)
    return pipeline.search.bound_s
