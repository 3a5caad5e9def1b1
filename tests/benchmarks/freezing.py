"""Predicted speed-up of PipeTransformer's published schedule (ICML'21), with plans of the solver.

The model is an encoder of 12 layers of width 2,048, on 8 T4 in one node with 64 samples per step. PipeTransformer
freezes once per pass over the data: 0, 4, 7, 9, 10, 11, 11, then all 12 layers. It reports a speed-up of 2.1 to 2.8.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace

from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.solver.profiles.catalog import load_gpu, parse_model
from scheduler.solver.profiles.model_profile import ModelProfile
from scheduler.solver.request import SolveRequest
from scheduler.solver.search.plan_search import solve_plan
from tests.simulation.test_freezing import PROFILE, SCHEDULE

LARGE_BERT = parse_model(json.dumps(PROFILE))


def rows() -> Iterator[tuple[str, str, str]]:
    yield "published schedule, frozen layers computed", "", f"{compute_speedup(computed()):.2f}"
    yield (
        "the same, frozen outputs cached, first pass after each freeze",
        "2.0",
        f"{compute_speedup(first_passes()):.2f}",
    )
    yield "the same, later passes", "", f"{compute_speedup(later_passes()):.2f}"


def computed() -> list[ModelProfile]:
    """Return the model after each freeze, without a cache."""
    return [LARGE_BERT.with_frozen_layers(layers) for layers in SCHEDULE]


def later_passes() -> list[ModelProfile]:
    """Return the model after each freeze, with the outputs of all frozen layers stored."""
    model = replace(LARGE_BERT, cache_frozen_layers=True)
    return [model.with_frozen_layers(layers) for layers in SCHEDULE]


def first_passes() -> list[ModelProfile]:
    """Return the model after each freeze, with the outputs that the pass before it has stored.

    The pass computes the newly frozen layers once more and stores their outputs.
    """
    stored = (0, *SCHEDULE[:-1])
    return [model.with_cached_layers(layers) for model, layers in zip(later_passes(), stored, strict=True)]


def compute_speedup(models: Sequence[ModelProfile]) -> float:
    """Return the speed-up over the first of the models, for equally many steps of each."""
    times_s = [_predict_step_s(model) for model in models]
    return len(times_s) * times_s[0] / sum(times_s)


def _predict_step_s(model: ModelProfile) -> float:
    plan = solve_plan(SolveRequest(model, (load_gpu("t4"),), GpuShape.packed("t4", 8, 8), global_batch=64))
    assert isinstance(plan, ParallelPlan)
    return plan.iteration_time_s
