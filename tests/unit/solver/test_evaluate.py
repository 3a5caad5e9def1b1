"""The evaluator: by hand on a small plan, and the plans that it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.domain.gpu_shape import GpuShape
from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan, Recompute, Schedule, ScheduleName, Stage
from scheduler.solver.evaluate import PlanError, evaluate
from scheduler.solver.profiles.shipped import load_gpu, load_model
from scheduler.solver.request import SolveRequest

TP2 = LayerStrategy(layers=16, tp=2)
DP2 = LayerStrategy(layers=16, dp=2)


def _request() -> SolveRequest:
    return SolveRequest(load_model("llama-2-7b"), load_gpu("a100-80g"), GpuShape.packed("a100-80g", 4, 8), 64)


def _plan(first: LayerStrategy = TP2, second: LayerStrategy = DP2) -> ParallelPlan:
    return ParallelPlan(
        schedule=Schedule(),
        micro_batches=16,
        micro_batch_size=4,
        iteration_time_s=0.0,
        samples_per_s=0.0,
        peak_bytes_per_gpu=0,
        stages=(Stage(0, 15, "a100-80g", 2, (first,)), Stage(16, 31, "a100-80g", 2, (second,))),
    )


def test_an_iteration_is_the_sum_and_the_bottleneck_for_each_further_micro_batch() -> None:
    judged = evaluate(_plan(), _request())
    times = [stage.time_s for stage in judged.stages] + list(judged.hand_overs_s)
    assert len(times) == 3
    assert judged.iteration_time_s == pytest.approx(sum(times) + 15 * max(times))
    assert [stage.in_flight for stage in judged.stages] == [2, 1]


def test_splitting_a_run_of_one_strategy_changes_nothing() -> None:
    halves = (replace(TP2, layers=8), replace(TP2, layers=8))
    split = replace(_plan(), stages=(replace(_plan().stages[0], strategies=halves), _plan().stages[1]))
    assert evaluate(split, _request()) == evaluate(_plan(), _request())


def test_a_plan_beyond_the_limit_does_not_fit() -> None:
    judged = evaluate(_plan(), _request())
    peak = judged.peak_bytes_per_gpu
    assert evaluate(_plan(), replace(_request(), memory_bytes_max=peak)).fits
    assert not evaluate(_plan(), replace(_request(), memory_bytes_max=peak - 1)).fits


def test_recompute_saves_memory_and_costs_time() -> None:
    again = evaluate(_plan(replace(TP2, recompute=Recompute.FULL)), _request()).stages[0]
    plain = evaluate(_plan(), _request()).stages[0]
    assert again.memory_bytes < plain.memory_bytes
    assert again.time_s > plain.time_s


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (replace(_plan(), micro_batches=15), "it must be the global batch, 64"),
        (replace(_plan(), stages=_plan().stages[:1]), "the plan has 2 GPUs"),
        (replace(_plan(), schedule=Schedule(ScheduleName.GPIPE)), "schedule is 'gpipe'"),
        (replace(_plan(), stages=_plan().stages[::-1]), "does not hold the layers it should"),
        (_plan(replace(TP2, layers=15)), "does not hold the layers it should"),
        (_plan(replace(DP2, zero=2, shard_group=2)), "is not allowed"),
        (_plan(replace(DP2, recompute=Recompute.SELECTIVE)), "is not allowed"),
    ],
)
def test_a_plan_that_cannot_be_carried_out_is_refused(plan: ParallelPlan, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        evaluate(plan, _request())


def test_a_plan_for_another_gpu_is_refused() -> None:
    other = replace(_plan(), stages=tuple(replace(stage, gpu="h100-80g") for stage in _plan().stages))
    with pytest.raises(PlanError, match="all must have as many of one model"):
        evaluate(other, _request())


def test_a_plan_that_lacks_the_last_layers_is_refused() -> None:
    short = replace(TP2, layers=15)
    stages = (_plan().stages[0], Stage(16, 30, "a100-80g", 2, (short,)))
    with pytest.raises(PlanError, match="covers 31 layers; the model has 32"):
        evaluate(replace(_plan(), stages=stages), _request())
