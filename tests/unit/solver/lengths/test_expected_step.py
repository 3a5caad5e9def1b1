"""Curves of jobs whose samples have unlike lengths: expected step times, plans and what cannot be planned."""

from __future__ import annotations

from collections import Counter
from random import Random
from statistics import fmean

import pytest

from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.domain.scaling_curve import CurveRequest, LengthHistogram
from scheduler.solver.curve import solve_point
from scheduler.solver.lengths.batch_search import search_batch_plan
from scheduler.solver.lengths.expected_step import BATCHES, SAMPLES_MAX, draw_batches
from scheduler.solver.lengths.sequence_costs import FLEXSP_GPT_7B_A100
from scheduler.solver.request import Infeasibility

CONTEXT = 32 * 1024
SKEWED: LengthHistogram = ((512, 80), (2_048, 15), (30_000, 5))


def solve(lengths: LengthHistogram, gpus: int, *, batch: int = 64, model: str = "gpt2") -> ParallelPlan | Infeasibility:
    request = CurveRequest(model, "", batch, CONTEXT, lengths=lengths)
    return solve_point(request, GpuShape.packed("a100-80g", gpus, 8))


def solve_plan(lengths: LengthHistogram, gpus: int, *, batch: int = 64) -> ParallelPlan:
    point = solve(lengths, gpus, batch=batch)
    assert isinstance(point, ParallelPlan)
    return point


def test_batches_have_the_distribution_of_the_histogram() -> None:
    batches = draw_batches(SKEWED, 100)
    assert len(batches) == BATCHES
    assert Counter(tokens for batch in batches for tokens in batch) == {512: 640, 2_048: 120, 30_000: 40}
    assert len({batch.count(30_000) for batch in batches}) > 1


def test_mean_of_the_batches_is_that_of_random_ones() -> None:
    random = Random(1)
    lengths = [min(CONTEXT, max(64, int(random.lognormvariate(7, 1.5)))) for _ in range(20_000)]
    histogram = tuple(sorted(Counter(lengths).items()))
    ours = fmean(search_batch_plan(FLEXSP_GPT_7B_A100, batch).time_s for batch in draw_batches(histogram, 256))
    drawn = [random.sample(lengths, 256) for _ in range(30)]
    assert ours == pytest.approx(
        fmean(search_batch_plan(FLEXSP_GPT_7B_A100, batch).time_s for batch in drawn), rel=0.03
    )


def test_plan_is_data_parallel_and_faster_with_more_gpus_and_shorter_samples() -> None:
    plans = {gpus: solve_plan(SKEWED, gpus) for gpus in (4, 8, 16)}
    assert all(plan.stages[0].strategies[0].dp == plan.world_size == gpus for gpus, plan in plans.items())
    assert plans[16].iteration_time_s < plans[8].iteration_time_s < plans[4].iteration_time_s
    assert (
        solve_plan(((512, 1),), 8).iteration_time_s
        < plans[8].iteration_time_s
        < solve_plan(((30_000, 1),), 8).iteration_time_s
    )
    assert all(0 < plan.peak_bytes_per_gpu <= 80 * 10**9 for plan in plans.values())


@pytest.mark.full
def test_large_batch_takes_time_in_proportion() -> None:
    searched, larger = (solve_plan(SKEWED, 8, batch=batch).iteration_time_s for batch in (SAMPLES_MAX, 4 * SAMPLES_MAX))
    assert larger == pytest.approx(4 * searched, rel=0.02)


@pytest.mark.parametrize(
    ("gpus", "batch", "model", "constraint"), [(3, 64, "gpt2", "batch"), (1, 64, "llama-2-7b", "memory")]
)
def test_shape_without_a_plan(gpus: int, batch: int, model: str, constraint: str) -> None:
    point = solve(SKEWED, gpus, batch=batch, model=model)
    assert isinstance(point, Infeasibility)
    assert point.constraint == constraint


def test_two_gpu_models_have_no_plan() -> None:
    request = CurveRequest("gpt2", "", 64, CONTEXT, lengths=SKEWED)
    point = solve_point(request, GpuShape.from_node_counts([("a100-80g", 8), ("h100-80g", 8)]))
    assert isinstance(point, Infeasibility)
    assert point.constraint == "shape"
