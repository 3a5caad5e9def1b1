"""The search against brute force on thousands of tiny instances. The two share the evaluator alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, product
from math import inf

import pytest

from scheduler.domain.gpu_shape import GpuShape
from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan, Recompute, Schedule, Stage
from scheduler.solver.evaluate import evaluate
from scheduler.solver.profiles.hardware_profile import Dimension, HardwareProfile, Precision
from scheduler.solver.profiles.model_profile import Attachment, LayerProfile, ModelProfile
from scheduler.solver.request import Infeasible, SolveRequest
from scheduler.solver.search.search import search

INSTANCES = 2000
PLANS_MAX = 220
CHUNKS = 4

_DIMENSIONS = (Dimension.FSDP, Dimension.TENSOR, Dimension.PIPELINE, Dimension.RECOMPUTE)


@dataclass(frozen=True)
class Judged:
    """One plan of the enumeration with the evaluator's verdict."""

    plan: ParallelPlan
    time_s: float
    peak_bytes: int


@dataclass
class Shares:
    """What the instances exercised."""

    instances: int = 0
    binding: int = 0
    uneven_or_mixed: int = 0
    infeasible: int = 0


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_the_search_equals_brute_force_where_memory_binds_and_where_plans_are_uneven(chunk: int) -> None:
    seeded = random.Random(f"brute force {chunk}")
    shares = Shares()
    while shares.instances < INSTANCES // CHUNKS:
        free = _request(seeded)
        judged = _all_plans(free)
        if judged:
            _compare(seeded, free, judged, shares)
    print(shares)
    assert shares.binding >= 0.4 * shares.instances
    assert shares.uneven_or_mixed >= 0.2 * shares.instances
    assert shares.infeasible > 0


def _compare(seeded: random.Random, free: SolveRequest, judged: list[Judged], shares: Shares) -> None:
    """Draws a memory limit between the leanest and the fastest plan, or a loose one, and solves."""
    fastest = min(judged, key=lambda item: item.time_s)
    leanest_bytes = min(item.peak_bytes for item in judged)
    tight = round(leanest_bytes + (fastest.peak_bytes - leanest_bytes) * seeded.uniform(-0.03, 1.0))
    limit = tight if seeded.random() < 0.8 else fastest.peak_bytes
    request = replace(free, memory_bytes_max=limit)
    fitting = [item for item in judged if item.peak_bytes <= limit]
    best_s = min((item.time_s for item in fitting), default=inf)
    found = search(request).result

    shares.instances += 1
    shares.binding += best_s > fastest.time_s
    if isinstance(found, Infeasible):
        assert found.constraint == "memory"
        assert not fitting, f"the search missed {fitting[0].plan} of {request}"
        shares.infeasible += 1
        return
    own = evaluate(found, request)
    assert own.fits
    assert found.optimality_gap == 0.0
    assert found.iteration_time_s == own.iteration_time_s
    assert found.peak_bytes_per_gpu == own.peak_bytes_per_gpu <= limit
    assert own.iteration_time_s == pytest.approx(best_s, rel=1e-9), f"{found} for {request}"
    shares.uneven_or_mixed += _is_uneven_or_mixed(found)


def _is_uneven_or_mixed(plan: ParallelPlan) -> bool:
    sizes = {stage.last_layer - stage.first_layer for stage in plan.stages}
    kinds = {replace(run, layers=1) for stage in plan.stages for run in stage.strategies}
    return len(sizes) > 1 or len(kinds) > 1


def _request(seeded: random.Random) -> SolveRequest:
    gpus = seeded.choice([1, 2, 2, 2, 3, 4, 4])
    dimensions = {Dimension.DATA, *seeded.sample(_DIMENSIONS, k=seeded.randint(1, 3))}
    hardware = HardwareProfile(
        gpu="toy",
        memory_bytes=10**15,
        reserve_bytes=seeded.choice([0, 700]),
        precision=seeded.choice([Precision.BF16, Precision.FP32]),
        peak_flops_per_s=seeded.choice([1e6, 1e7]),
        efficiency=0.5,
        memory_bandwidth_bytes_per_s=1e7,
        intra_bandwidth_bytes_per_s=seeded.choice([1e5, 1e6, 1e7]),
        intra_latency_s=seeded.choice([1e-6, 1e-3]),
        inter_bandwidth_bytes_per_s=seeded.choice([1e4, 1e5, 1e6]),
        inter_latency_s=1e-3,
        overlap_coefficient=seeded.choice([1.0, 1.3]),
        dimensions=frozenset(dimensions),
    )
    return SolveRequest(
        model=_model(seeded), hardware=hardware, shape=_shape(seeded, gpus), global_batch=seeded.choice([1, 2, 4, 4, 6])
    )


def _shape(seeded: random.Random, gpus: int) -> GpuShape:
    counts = seeded.choice([[gpus], [1] * gpus, [gpus - gpus // 2, gpus // 2]])
    return GpuShape.of_counts([("toy", count) for count in counts if count])


def _model(seeded: random.Random) -> ModelProfile:
    runs, left = [], seeded.randint(2, 5)
    while left:
        count = seeded.randint(1, left)
        runs.append(_layers(seeded, count))
        left -= count
    head = Attachment(seeded.choice([0.0, 2000.0]), seeded.choice([0, 300]), seeded.choice([0, 4000]))
    return ModelProfile(
        name="toy",
        sequence_length=1,
        layers=tuple(runs),
        embedding=Attachment(parameters=seeded.choice([0, 300])),
        head=head,
        tied_embedding=seeded.random() < 0.3,
    )


def _layers(seeded: random.Random, count: int) -> LayerProfile:
    return LayerProfile(
        layers=count,
        flops_per_sample=seeded.uniform(500, 5000),
        parameters=seeded.randint(20, 800),
        activation_bytes_per_sample=seeded.randint(500, 9000),
        replicated_activation_bytes_per_sample=seeded.randint(0, 2000),
        boundary_bytes_per_sample=seeded.randint(50, 500),
        heads=seeded.choice([2, 4, 6]),
    )


def _all_plans(request: SolveRequest) -> list[Judged]:
    """Every plan of the instance, or none if there are more than `PLANS_MAX` (too many to enumerate)."""
    plans: list[ParallelPlan] = []
    for plan in _enumerate(request):
        if len(plans) == PLANS_MAX:
            return []
        plans.append(plan)
    verdicts = [(plan, evaluate(plan, request)) for plan in plans]
    return [Judged(plan, verdict.iteration_time_s, verdict.peak_bytes_per_gpu) for plan, verdict in verdicts]


def _enumerate(request: SolveRequest) -> Iterator[ParallelPlan]:
    layers, batch = request.model.layer_count, request.global_batch
    for stages in range(1, min(request.gpus, layers) + 1):
        if request.gpus % stages or (stages > 1 and Dimension.PIPELINE not in request.hardware.dimensions):
            continue
        for micro_batches in range(1, batch + 1):
            if batch % micro_batches:
                continue
            size, gpus = batch // micro_batches, request.gpus // stages
            options = _options(request, gpus, size)
            for cuts in combinations(range(1, layers), stages - 1):
                for spread in product(options, repeat=layers):
                    yield _plan(micro_batches, size, gpus, (0, *cuts, layers), spread)


def _options(request: SolveRequest, gpus: int, micro_batch_size: int) -> list[LayerStrategy]:
    """Written anew from the definition of the strategy space, not taken from the solver."""
    dimensions = request.hardware.dimensions
    per_node = [group.gpus_per_node for group in request.shape.groups]
    return [
        LayerStrategy(layers=1, tp=tp, dp=dp, zero=zero, shard_group=dp if zero else 1, recompute=again)
        for tp, dp in product(range(1, gpus + 1), repeat=2)
        for zero in (0, 3)
        for again in (Recompute.NONE, Recompute.FULL)
        if tp * dp == gpus
        and micro_batch_size % dp == 0
        and (tp == 1 or Dimension.TENSOR in dimensions)
        and all(count % tp == 0 for count in per_node)
        and all(run.heads % tp == 0 for run in request.model.layers)
        and (zero == 0 or (dp > 1 and Dimension.FSDP in dimensions))
        and (again is Recompute.NONE or Dimension.RECOMPUTE in dimensions)
    ]


def _plan(
    micro_batches: int, size: int, gpus: int, borders: tuple[int, ...], spread: tuple[LayerStrategy, ...]
) -> ParallelPlan:
    return ParallelPlan(
        schedule=Schedule(),
        micro_batches=micro_batches,
        micro_batch_size=size,
        iteration_time_s=0.0,
        samples_per_s=0.0,
        peak_bytes_per_gpu=0,
        stages=tuple(Stage(first, end - 1, "toy", gpus, spread[first:end]) for first, end in pairwise(borders)),
    )
