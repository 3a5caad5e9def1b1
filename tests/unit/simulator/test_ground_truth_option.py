"""GroundTruth: distributions of its draws, and parsing of the option."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import mean, stdev

import pytest

from scheduler.documents.trace_files import JobRow
from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.domain.scaling_curve import CurveRequest
from scheduler.simulator.ground_truth import NOTHING_HIDDEN, GroundTruth, parse_ground_truth
from scheduler.solver.curve import solve_point

SIZES = (2, 4, 8, 16, 32)


def row(gpus: int, job_id: str = "a", model: str = "") -> JobRow:
    return JobRow(2, job_id, 0.0, 600.0, gpus, model=model, global_batch=8 if model else 0)


def test_option_is_parsed() -> None:
    assert parse_ground_truth("models, error=0.15,duration=0.5") == GroundTruth(models=True, error=0.15, duration=0.5)
    assert parse_ground_truth("") == NOTHING_HIDDEN


@pytest.mark.parametrize(
    "text", ["model", "models=1", "error", "error=", "error=x", "error=1", "duration=-0.1", "error=0.1,error=0.2"]
)
def test_invalid_option_is_refused_with_accepted_values(text: str) -> None:
    with pytest.raises(ValueError, match=r"models, error=S, duration=S, compute=R"):
        parse_ground_truth(text)


def test_step_time_errors_have_mean_1() -> None:
    truth = GroundTruth(error=0.15, seed=3)
    factors = [truth.draw_step_time_factor(f"job-{number}", gpus) for number in range(1000) for gpus in (4, 8)]
    assert len(set(factors)) == len(factors)
    assert mean(factors) == pytest.approx(1.0, abs=0.01)
    assert stdev(map(math.log, factors)) == pytest.approx(0.15, abs=0.01)
    assert (
        factors[0]
        == truth.draw_step_time_factor("job-0", 4)
        != replace(truth, seed=4).draw_step_time_factor("job-0", 4)
    )


def test_declared_lengths_are_uniform_around_the_true_ones() -> None:
    ratios = [GroundTruth(duration=0.5).draw_declared_ratio(f"job-{number}") for number in range(1000)]
    assert min(ratios) == pytest.approx(0.5, abs=0.01)
    assert max(ratios) == pytest.approx(1.5, abs=0.01)
    assert mean(ratios) == pytest.approx(1.0, abs=0.02)


def test_default_has_no_errors() -> None:
    assert NOTHING_HIDDEN.matches_declaration
    assert NOTHING_HIDDEN.draw_step_time_factor("a", 4) == NOTHING_HIDDEN.draw_declared_ratio("a") == 1.0
    assert not list(NOTHING_HIDDEN.draw_models(row(8)))


def test_each_model_of_the_size_is_drawn_once() -> None:
    truth = GroundTruth(models=True)
    assert not list(truth.draw_models(row(1)))
    assert not list(truth.draw_models(row(8, model="gpt2")))
    offered = [(model.model, model.global_batch) for model in truth.draw_models(row(8))]
    assert len(set(offered)) == len(offered) > 4
    assert offered == [(model.model, model.global_batch) for model in truth.draw_models(row(8))]
    firsts = [next(truth.draw_models(row(8, f"job-{number}"))).model for number in range(400)]
    assert firsts.count("llama-2-7b") > firsts.count("vit-huge") > 20, "two parts in ten against one"


@pytest.mark.parametrize("gpus", SIZES)
def test_every_model_has_a_plan_at_its_size(gpus: int) -> None:
    shape = GpuShape.packed("a100-80g", gpus, 8)
    for model in GroundTruth(models=True).draw_models(row(gpus)):
        request = CurveRequest(model.model, "", model.global_batch, model.sequence_length)
        assert isinstance(solve_point(request, shape), ParallelPlan), model
