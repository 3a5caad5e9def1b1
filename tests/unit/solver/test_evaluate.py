"""The evaluation: small plans of every schedule computed by hand, mixed shapes, and invalid plans."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.domain.gpu_sets import GpuGroup, GpuShape
from scheduler.domain.parallel_plan import (
    STEP_TERMS,
    LayerStrategy,
    ParallelPlan,
    Recompute,
    Schedule,
    ScheduleName,
    Stage,
)
from scheduler.solver.calibration.measured_runs import build_even_plan
from scheduler.solver.evaluate import PlanError, evaluate
from scheduler.solver.profiles.catalog import load_gpu, load_model
from scheduler.solver.profiles.hardware_profile import Dimension
from scheduler.solver.request import SolveRequest

A100, H100 = load_gpu("a100-80g"), load_gpu("h100-80g")
TP2 = LayerStrategy(layers=16, tp=2, sequence_sharding=True)
DP2 = LayerStrategy(layers=16, dp=2)
WOVEN = Schedule(ScheduleName.INTERLEAVED, 2)
MIXED = GpuShape((GpuGroup("a100-80g", 1, 2), GpuGroup("h100-80g", 1, 4)))


def _request(model: str = "llama-2-7b") -> SolveRequest:
    return SolveRequest(load_model(model), (A100,), GpuShape.packed("a100-80g", 4, 8), 64)


def _plan(*strategies: LayerStrategy, schedule: Schedule | None = None) -> ParallelPlan:
    """Return stages of two A100 GPUs each, in chain order."""
    stages, first = [], 0
    for strategy in strategies or (TP2, DP2):
        stages.append(Stage(first, first + strategy.layers - 1, "a100-80g", strategy.gpus, (strategy,)))
        first += strategy.layers
    return ParallelPlan(
        schedule=schedule or Schedule(),
        micro_batches=16,
        micro_batch_size=4,
        iteration_time_s=0.0,
        samples_per_s=0.0,
        peak_bytes_per_gpu=0,
        stages=tuple(stages),
    )


def _mixed() -> tuple[ParallelPlan, SolveRequest]:
    quick = LayerStrategy(layers=20, tp=4, sequence_sharding=True)
    stages = Stage(0, 11, "a100-80g", 2, (replace(TP2, layers=12),)), Stage(12, 31, "h100-80g", 4, (quick,))
    return replace(_plan(), stages=stages), SolveRequest(load_model("llama-2-7b"), (A100, H100), MIXED, 64)


def test_iteration_time_is_sum_plus_bottleneck_per_further_micro_batch() -> None:
    judged = evaluate(_plan(), _request())
    times = [stage.time_s for stage in judged.stages] + list(judged.hand_overs_s)
    assert len(times) == 3
    assert judged.iteration_time_s == pytest.approx(sum(times) + 15 * max(times) + A100.iteration_overhead_s)
    assert [stage.in_flight for stage in judged.stages] == [2, 1]


def test_interleaving_divides_the_bubble_and_adds_hand_overs_and_memory() -> None:
    quarter = replace(TP2, layers=8)
    plain = evaluate(_plan(*[TP2] * 2), _request())
    woven = evaluate(_plan(*[quarter] * 4, schedule=WOVEN), _request())
    loads = [stage.time_s for stage in woven.stages] + list(woven.hand_overs_s)
    assert len(woven.stages) == len(woven.hand_overs_s) == 2
    assert woven.iteration_time_s == pytest.approx(sum(loads) / 2 + 15.5 * max(loads) + A100.iteration_overhead_s)
    assert woven.iteration_time_s < plain.iteration_time_s
    assert woven.hand_overs_s[0] == pytest.approx(2 * plain.hand_overs_s[0])
    assert woven.stages[0].memory_bytes > plain.stages[0].memory_bytes
    assert _plan(*[quarter] * 4, schedule=WOVEN).world_size == 4


def test_gpipe_takes_as_long_as_1f1b_and_holds_every_micro_batch() -> None:
    flow, all_at_once = (
        evaluate(replace(_plan(), schedule=Schedule(name)), _request()) for name in list(ScheduleName)[1::-1]
    )
    assert flow.iteration_time_s == all_at_once.iteration_time_s
    assert [stage.in_flight for stage in all_at_once.stages] == [16, 16]
    assert flow.peak_bytes_per_gpu < all_at_once.peak_bytes_per_gpu


def test_stages_on_different_gpus_have_their_own_times_and_memory() -> None:
    plan, request = _mixed()
    judged = evaluate(plan, request)
    assert judged.fits
    assert judged.stages[1].time_s / 20 < judged.stages[0].time_s / 12
    alone = replace(
        plan, stages=(Stage(0, 31, "h100-80g", 4, (LayerStrategy(layers=32, dp=4, zero=3, shard_group=4),)),)
    )
    assert (
        evaluate(alone, request).iteration_time_s
        == evaluate(alone, request.restrict_to_gpus(["h100-80g"])).iteration_time_s
    )


def test_time_parts_of_a_stage_add_up() -> None:
    first, second = evaluate(_plan(), _request()).stages
    assert first.time_s == pytest.approx(first.parts.compute_s + first.parts.communication_s + first.parts.other_s)
    assert first.parts.tensor_s > 0 == second.parts.tensor_s
    assert second.parts.data_s > 1e-9 > first.parts.data_s


def test_splitting_a_run_of_one_strategy_changes_nothing() -> None:
    halves = (replace(TP2, layers=8), replace(TP2, layers=8))
    split = replace(_plan(), stages=(replace(_plan().stages[0], strategies=halves), _plan().stages[1]))
    assert evaluate(split, _request()) == evaluate(_plan(), _request())


def test_a_change_of_layout_inside_a_stage_takes_time() -> None:
    whole = evaluate(_plan(), _request()).stages[0].time_s
    mixed = replace(_plan().stages[0], strategies=(replace(TP2, layers=15), replace(DP2, layers=1)))
    changed = evaluate(replace(_plan(), stages=(mixed, _plan().stages[1])), _request()).stages[0]
    assert changed.parts.other_s > 0
    assert changed.time_s != whole


def test_plan_beyond_the_limit_does_not_fit() -> None:
    lean = _plan(*[replace(TP2, recompute=Recompute.FULL)] * 2)
    peak = evaluate(lean, _request()).peak_bytes_per_gpu
    assert evaluate(lean, replace(_request(), memory_bytes_max=peak)).fits
    assert not evaluate(lean, replace(_request(), memory_bytes_max=peak - 1)).fits


def test_recompute_saves_memory_and_costs_time() -> None:
    none, selective, full = (
        evaluate(_plan(replace(TP2, recompute=again), DP2), _request()).stages[0] for again in Recompute
    )
    assert none.memory_bytes > selective.memory_bytes > full.memory_bytes
    assert none.time_s < selective.time_s < full.time_s


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (replace(_plan(), micro_batches=15), "it must be the global batch, 64"),
        (replace(_plan(), stages=_plan().stages[:1]), "the plan has 2 GPUs of a100-80g; the shape has 4"),
        (_plan(schedule=Schedule(interleave=2)), "interleave is 2; it must be 1 under 1f1b"),
        (_plan(schedule=WOVEN), "interleave is 2 over 2 stages"),
        (replace(_plan(*[replace(TP2, layers=8)] * 4, schedule=WOVEN), micro_batches=1, micro_batch_size=64),
         "micro_batches is 1"),
        (replace(_plan(), stages=_plan().stages[::-1]), "stage 16-31 has strategies for layers 0 to 15"),
        (_plan(TP2, replace(DP2, layers=15)), "covers 31 layers; the model has 32"),
        (_plan(TP2, replace(DP2, zero=2)), "shard_group is 1; it must be 2 at zero=2"),
        (_plan(TP2, replace(DP2, zero=3, shard_group=4)), "shard_group is 4"),
        (_plan(TP2, replace(DP2, zero=4, shard_group=2)), "zero is 4; it must be 0 to 3"),
        (_plan(replace(TP2, zero=1), DP2), "zero is 1"),
        (_plan(TP2, replace(DP2, offload=True)), "offload is true"),
        (_plan(TP2, replace(DP2, sequence_sharding=True)), "sequence_sharding is true"),
        (_plan(TP2, replace(DP2, ep=2)), "ep is 2"),
        (_plan(LayerStrategy(layers=16, dp=4), LayerStrategy(layers=16, dp=4)), "the plan has 8 GPUs"),
    ],
)  # fmt: skip
def test_invalid_plan_is_rejected(plan: ParallelPlan, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        evaluate(plan, _request())


@pytest.mark.parametrize(
    ("dimension", "plan"),
    [
        (Dimension.PIPELINE, _plan()),
        (Dimension.GPIPE, _plan(schedule=Schedule(ScheduleName.GPIPE))),
        (Dimension.INTERLEAVE, _plan(*[replace(TP2, layers=8)] * 4, schedule=WOVEN)),
        (Dimension.TENSOR, _plan()),
        (Dimension.SEQUENCE_SHARDING, _plan()),
        (Dimension.ZERO, _plan(TP2, replace(DP2, zero=1, shard_group=2))),
        (Dimension.FSDP, _plan(TP2, replace(DP2, zero=3, shard_group=2))),
        (Dimension.ULYSSES, _plan(TP2, replace(DP2, dp=1, ulysses=2))),
        (Dimension.RING, _plan(TP2, replace(DP2, dp=1, ring=2))),
        (Dimension.RECOMPUTE, _plan(TP2, replace(DP2, recompute=Recompute.FULL))),
        (Dimension.SELECTIVE_RECOMPUTE, _plan(TP2, replace(DP2, recompute=Recompute.SELECTIVE))),
        (Dimension.OFFLOAD, _plan(TP2, replace(DP2, zero=1, shard_group=2, offload=True))),
    ],
)
def test_worker_must_support_the_dimensions_of_a_plan(dimension: Dimension, plan: ParallelPlan) -> None:
    assert evaluate(plan, _request()).iteration_time_s > 0
    without = replace(A100, dimensions=A100.dimensions - {dimension})
    with pytest.raises(PlanError, match=f"does not support {dimension.value}"):
        evaluate(plan, replace(_request(), hardware=(without,)))


def test_degrees_must_divide_their_axes() -> None:
    mixtral = _request("mixtral-8x7b")
    three = _plan(LayerStrategy(layers=32, tp=2, sequence_sharding=True, dp=2, ep=2))
    assert evaluate(three, mixtral).iteration_time_s > 0
    with pytest.raises(PlanError, match="ep is 4; it must divide the 2 replicas"):
        evaluate(_plan(LayerStrategy(layers=32, tp=2, dp=2, ep=4)), mixtral)
    odd = replace(_request(), model=load_model("llama-2-7b", 4090))
    for tokens, ulysses, ring in ((4, 2, 2), (8, 1, 4)):
        pair = _plan(LayerStrategy(layers=32, tp=4 // (ulysses * ring), ulysses=ulysses, ring=ring))
        with pytest.raises(PlanError, match=f"tokens is 4090; it must be a multiple of {tokens}"):
            evaluate(pair, odd)
    with pytest.raises(PlanError, match="tp x ulysses x ring is 4"):
        evaluate(_plan(LayerStrategy(layers=32, tp=4, sequence_sharding=True)), odd)
    thin = replace(_request(), shape=GpuShape.packed("a100-80g", 4, 1))
    with pytest.raises(PlanError, match="tp is 2; it must divide the 1 GPUs"):
        evaluate(_plan(), thin)
    with pytest.raises(PlanError, match="dp is 2; it must divide the micro-batch of 1"):
        evaluate(replace(_plan(), micro_batches=64, micro_batch_size=1), _request())


def test_plan_for_another_gpu_is_rejected() -> None:
    other = replace(_plan(), stages=tuple(replace(stage, gpu="h100-80g") for stage in _plan().stages))
    with pytest.raises(PlanError, match="a stage is on 'h100-80g'; the shape has a100-80g"):
        evaluate(other, _request())


def test_mixed_shape_can_leave_out_only_a_whole_gpu_model() -> None:
    plan, request = _mixed()
    half = replace(
        plan, stages=(plan.stages[0], replace(plan.stages[1], gpus=2, strategies=(replace(TP2, layers=20),)))
    )
    with pytest.raises(PlanError, match="the plan has 2 GPUs of h100-80g; the shape has 4"):
        evaluate(half, request)


def test_terms_are_shares_of_the_iteration_by_cause() -> None:
    hardware = load_gpu("a100-80g")
    model = load_model("gpt2", 0)

    def judge(strategy: LayerStrategy, shape: GpuShape, *, pipeline: int = 1) -> dict[str, float]:
        plan = build_even_plan(
            strategy,
            layers=model.layer_count,
            gpu="a100-80g",
            pipeline=pipeline,
            interleave=1,
            micro_batches=4,
            samples_per_replica=1,
        )
        terms = evaluate(plan, SolveRequest(model, (hardware,), shape, plan.global_batch)).terms
        assert sum(terms) == pytest.approx(1.0)
        return dict(zip(STEP_TERMS, terms, strict=True))

    tensor = judge(LayerStrategy(1, tp=4), GpuShape.packed("a100-80g", 4, 8))
    assert tensor["node_links"] > 0.1
    assert tensor["network"] == 0.0
    across = judge(LayerStrategy(1, dp=4), GpuShape.packed("a100-80g", 4, 1))
    assert across["network"] > 0.0 == across["node_links"]
    handed_over = judge(LayerStrategy(1), GpuShape.packed("a100-80g", 4, 2), pipeline=4)
    assert handed_over["network"] > 0.0
    assert handed_over["node_links"] > 0.0
