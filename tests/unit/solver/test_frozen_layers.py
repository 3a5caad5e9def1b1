"""Models whose first layers are frozen, as PipeTransformer (ICML'21) freezes them during training."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan
from scheduler.domain.scaling_curve import CurveRequest
from scheduler.solver.costs.collectives import StageSetting
from scheduler.solver.costs.layer_chain import build_layer_chain
from scheduler.solver.costs.layer_memory import compute_activation_bytes, compute_buffer_bytes, compute_state_bytes
from scheduler.solver.costs.layer_time import LayerTimes, compute_layer_times
from scheduler.solver.costs.strategy_space import StrategyCandidates
from scheduler.solver.curve import solve_point
from scheduler.solver.evaluate import evaluate
from scheduler.solver.profiles.catalog import ProfileError, load_gpu, load_model
from scheduler.solver.profiles.hardware_profile import Precision
from scheduler.solver.profiles.model_profile import ModelProfile
from scheduler.solver.request import SolveRequest
from scheduler.solver.search.plan_search import solve_plan

SCHEDULE = (0, 4, 7, 9, 10, 11, 11, 12)
"""Frozen layers of 12 over the events of a training, each freezing a third of what is left (alpha = 1/3)."""
T4, SHAPE = load_gpu("t4"), GpuShape.packed("t4", 8, 8)
GPT2 = load_model("gpt2")
FSDP8 = LayerStrategy(layers=1, dp=8, zero=3, shard_group=8)


def asked(layers: int, model: ModelProfile = GPT2) -> SolveRequest:
    """A limit of 3 GB, at which the unfrozen model needs two pipeline stages."""
    return SolveRequest(model.with_frozen_layers(layers), (T4,), SHAPE, global_batch=64, memory_bytes_max=3 * 10**9)


def planned(layers: int) -> ParallelPlan:
    plan = solve_plan(asked(layers))
    assert isinstance(plan, ParallelPlan)
    return plan


def test_the_published_schedule_turns_pipeline_stages_into_replicas() -> None:
    plans = [planned(layers) for layers in SCHEDULE]
    assert [plan.summarize() for plan in plans] == [
        "pp2 · tp2 dp2 zero2 · 16 micro-batches",
        "pp2 · dp4 · 16 micro-batches",
        "pp2 · dp4 · 16 micro-batches",
        "tp2 dp4 · 8 micro-batches",
        "dp8 · 8 micro-batches",
        "dp8 · 8 micro-batches",
        "dp8 · 8 micro-batches",
        "dp8 · 8 micro-batches",
    ]
    for before, after in pairwise(plans):
        assert after.iteration_time_s <= before.iteration_time_s
        assert after.pipeline_devices <= before.pipeline_devices
        assert _replicas(after) >= _replicas(before)


def _replicas(plan: ParallelPlan) -> int:
    """Return the largest data-parallel degree; layers with embedding or head may have smaller ones."""
    return max(run.dp for stage in plan.stages for run in stage.strategies)


@pytest.mark.parametrize("layers", [0, 7, 11])
def test_no_plan_takes_longer_or_more_memory_with_more_layers_frozen(layers: int) -> None:
    """From the first frozen layer on: a tied head's copy is one more, so that a single stage may hold more with one."""
    plan, first = planned(layers), 1 if layers == 0 else layers
    judged = [evaluate(plan, asked(count)) for count in range(first, 13)]
    for before, after in pairwise(judged):
        assert after.iteration_time_s < before.iteration_time_s
        assert after.peak_bytes_per_gpu <= before.peak_bytes_per_gpu


@pytest.mark.parametrize("layers", [-1, 13])
def test_frozen_layers_must_exist(layers: int) -> None:
    message = f"model 'gpt2': frozen_layers is {layers}; it must be from 0 to the number of layers, 12"
    with pytest.raises(ProfileError, match=message):
        GPT2.with_frozen_layers(layers)


def test_frozen_layers_are_another_type_and_another_curve() -> None:
    kinds = build_layer_chain(GPT2.with_frozen_layers(6), Precision.BF16, stages=2).kinds
    assert [(kind.trained, kind.backward) for kind in kinds] == [(False, False)] * 2 + [(True, True)] * 2
    requests = [CurveRequest("tiny-gpt", "", 8, 0, frozen_layers=layers) for layers in (0, 2)]
    assert [request.key for request in requests] == ["tiny-gpt/batch-8/seq-0", "tiny-gpt/batch-8/seq-0/frozen-2"]
    points = [solve_point(request, GpuShape.packed("t4", 2, 8)) for request in requests]
    assert isinstance(points[0], ParallelPlan)
    assert isinstance(points[1], ParallelPlan)
    assert points[1].iteration_time_s < points[0].iteration_time_s


def test_freezing_adds_to_what_is_frozen_already() -> None:
    again, once = (
        build_layer_chain(model, Precision.BF16, stages=2)
        for model in (GPT2.with_frozen_layers(9).with_frozen_layers(4), GPT2.with_frozen_layers(9))
    )
    assert again == once
    assert GPT2.with_frozen_layers(0) == GPT2


def test_tied_head_is_untied_from_a_frozen_embedding() -> None:
    frozen = GPT2.with_frozen_layers(1)
    assert frozen.parameters == GPT2.parameters + GPT2.head.parameters
    one, two = (build_layer_chain(frozen, Precision.BF16, stages=stages) for stages in (1, 2))
    assert one == two
    assert one[-1].tied_parameters == 0


def test_useful_work_shrinks_from_three_passes_to_one_and_the_heads_two() -> None:
    assert GPT2.training_flops_per_sample == pytest.approx(3 * GPT2.flops_per_sample)
    forward, head = GPT2.flops_per_sample, GPT2.head.flops_per_sample
    assert GPT2.with_frozen_layers(12).training_flops_per_sample == pytest.approx(forward + head)


def _costs(model: ModelProfile, strategy: LayerStrategy, batch: int = 8) -> tuple[LayerTimes, list[int], int]:
    """Of the last layer: times, state and kept bytes; and the buffer."""
    kinds = (build_layer_chain(model, T4.precision, stages=1)[-1],)
    setting = StageSetting.for_stage(T4, node_gpus=8, gpus=strategy.gpus, global_batch=batch)
    chosen = StrategyCandidates.from_strategies([strategy], micro_batches=1, batch=batch)
    held = [int(costs(kinds, chosen, setting)[0, 0]) for costs in (compute_state_bytes, compute_activation_bytes)]
    return compute_layer_times(kinds, chosen, setting), held, int(compute_buffer_bytes(kinds, chosen, setting)[0])


def test_with_all_layers_frozen_the_head_alone_has_gradients_state_and_traffic() -> None:
    untied = replace(GPT2, tied_embedding=False)
    times, (state, kept), _ = _costs(untied.with_frozen_layers(12), LayerStrategy(layers=1, dp=8))
    layer, head, value = untied.layers[0].parameters, untied.head, T4.precision.value_bytes
    per_weight = value + T4.precision.gradient_bytes + T4.precision.master_bytes + 8
    assert state == layer * value + head.parameters * per_weight
    assert kept == pytest.approx(2 * head.activation_bytes_per_sample * value / 2)
    whole = _costs(untied, LayerStrategy(layers=1, dp=8))[0]
    share = head.parameters / (head.parameters + layer)
    assert float(times.other_s[0, 0]) == pytest.approx(share * float(whole.other_s[0, 0]))
    assert 0 < float(times.data_s[0, 0]) < float(whole.data_s[0, 0])


def test_frozen_layers_are_gathered_but_not_scattered() -> None:
    """Under FSDP one gather a micro-batch is left of two gathers and a scatter."""
    exposed = replace(T4, overlap_coefficient=2.0)
    kinds = tuple(build_layer_chain(model, T4.precision, stages=1)[1] for model in (GPT2, GPT2.with_frozen_layers(4)))
    setting = StageSetting.for_stage(exposed, node_gpus=8, gpus=8, global_batch=8)
    chosen = StrategyCandidates.from_strategies([FSDP8], micro_batches=1, batch=8)
    trained_s, frozen_s = np.ravel(compute_layer_times(kinds, chosen, setting).data_s)
    assert frozen_s == pytest.approx(trained_s / 3)
    buffers = [int(compute_buffer_bytes((kind,), chosen, setting)[0]) for kind in kinds]
    assert buffers == [kinds[0].parameters * size for size in (3 * 2 + T4.precision.gradient_bytes, 2 * 2)]
