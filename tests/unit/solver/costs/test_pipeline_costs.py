"""Layer chains, candidates, hand-overs and micro-batches in flight."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from scheduler.domain.parallel_plan import Schedule, ScheduleName
from scheduler.solver.costs.collectives import StageSetting
from scheduler.solver.costs.layer_chain import build_layer_chain
from scheduler.solver.costs.pipeline_costs import (
    CostedStrategies,
    StageGroup,
    compute_hand_over_table_s,
    compute_stage_costs,
    count_in_flight,
)
from scheduler.solver.profiles.catalog import load_gpu, load_model
from scheduler.solver.profiles.hardware_profile import Dimension, Precision

A100, H100 = load_gpu("a100-80g"), load_gpu("h100-80g")


def _degrees(model: str, *, gpus: int, node_gpus: int = 8, batch: int = 64, field: str = "tp") -> set[int]:
    layers = build_layer_chain(load_model(model), Precision.BF16, stages=1)
    found = compute_stage_costs(
        layers, StageSetting.for_stage(A100, node_gpus=node_gpus, gpus=gpus, global_batch=batch)
    )
    return {getattr(strategy, field) for costed in found.values() for strategy in _strategies(costed)}


def _strategies(costed: CostedStrategies) -> list[object]:
    return [costed.build_strategy(number) for number in range(costed.costs.strategies)]


def test_tied_head_is_copied_only_in_a_pipeline() -> None:
    gpt2 = load_model("gpt2")
    alone, split = (build_layer_chain(gpt2, Precision.BF16, stages=stages) for stages in (1, 2))
    assert split[-1].parameters - alone[-1].parameters == gpt2.head.parameters
    assert (alone[0].tied_parameters, split[0].tied_parameters) == (0, gpt2.embedding.parameters)


def test_fp32_doubles_activations() -> None:
    bf16, fp32 = (
        build_layer_chain(load_model("gpt2"), precision, stages=1)[1] for precision in (Precision.BF16, Precision.FP32)
    )
    assert (fp32.activation_bytes, fp32.boundary_bytes) == (2 * bf16.activation_bytes, 2 * bf16.boundary_bytes)


def test_layers_before_the_first_trained_one_have_no_backward_pass() -> None:
    model = load_model("gpt2")
    frozen, rest = replace(model.layers[0], layers=4, frozen=True), replace(model.layers[0], layers=8)
    layers = build_layer_chain(replace(model, layers=(frozen, rest, frozen)), Precision.BF16, stages=1)
    assert [layer.backward for layer in layers] == [False] * 4 + [True] * 12
    assert [layer.trained for layer in layers] == [False] * 4 + [True] * 8 + [False] * 4


def test_tensor_groups_divide_heads_and_nodes_and_need_no_power_of_two() -> None:
    assert _degrees("gpt2", gpus=6, node_gpus=6, batch=6) == {1, 2, 3, 6}
    assert _degrees("llama-2-7b", gpus=6, node_gpus=6, batch=6) == {1, 2}
    assert _degrees("gpt2", gpus=6, node_gpus=3, batch=6) == {1, 3}
    assert _degrees("gpt2", gpus=6, node_gpus=3, batch=6, field="shard_group") >= {3, 6}


def test_samples_are_split_first_and_tokens_where_samples_run_out() -> None:
    layers = build_layer_chain(load_model("llama-2-7b"), Precision.BF16, stages=1)
    found = compute_stage_costs(layers, StageSetting.for_stage(A100, node_gpus=8, gpus=8, global_batch=8))
    single = [found[8].build_strategy(number) for number in range(found[8].costs.strategies)]
    assert {strategy.dp for strategy in single} == {1}
    assert {strategy.ulysses * strategy.ring for strategy in single if strategy.tp == 1} == {8}
    assert all(found[1].build_strategy(n).ulysses == 1 for n in range(found[1].costs.strategies))


def test_unsupported_dimensions_yield_no_strategies() -> None:
    layers = build_layer_chain(load_model("mixtral-8x7b"), Precision.BF16, stages=1)
    bare = replace(A100, dimensions=frozenset({Dimension.DATA}))
    found = compute_stage_costs(layers, StageSetting.for_stage(bare, node_gpus=8, gpus=8, global_batch=16))
    assert sorted(found) == [1, 2]
    assert {found[1].costs.strategies, found[2].costs.strategies} == {1}
    assert compute_stage_costs(layers, StageSetting.for_stage(bare, node_gpus=8, gpus=8, global_batch=12)) == {}


def test_costs_have_a_row_for_each_layer_type() -> None:
    layers = build_layer_chain(load_model("gpt2"), Precision.BF16, stages=2)
    costed = compute_stage_costs(layers, StageSetting.for_stage(A100, node_gpus=8, gpus=4, global_batch=16))[4]
    assert costed.costs.time_s.shape == (3, costed.costs.strategies)
    assert costed.costs.reshard_s.shape[1] == costed.costs.layouts.max() + 1
    assert (np.diagonal(costed.costs.reshard_s, axis1=1, axis2=2) == 0).all()


def test_earlier_devices_hold_more_micro_batches() -> None:
    flow = Schedule()
    assert [count_in_flight(flow, micro_batches=8, devices=4, position=i) for i in range(4)] == [4, 3, 2, 1]
    assert [count_in_flight(flow, micro_batches=2, devices=4, position=i) for i in range(4)] == [2, 2, 2, 1]
    assert count_in_flight(Schedule(ScheduleName.GPIPE), micro_batches=8, devices=4, position=3) == 8


def test_interleaved_in_flight_matches_korthikanti() -> None:
    woven = Schedule(ScheduleName.INTERLEAVED, 3)
    first = count_in_flight(woven, micro_batches=64, devices=8, position=0)
    assert first == pytest.approx(8 * (1 + 7 / (8 * 3)))
    assert count_in_flight(woven, micro_batches=1, devices=8, position=0) == 1


def test_a_cut_inside_a_node_uses_its_links_and_any_other_the_network() -> None:
    layers = build_layer_chain(load_model("gpt2"), Precision.BF16, stages=4)
    table = compute_hand_over_table_s(layers, (StageGroup(A100, node_gpus=8, gpus=4, count=4),), 8)
    assert table.shape == (3, 1, 1, 13)
    assert np.isinf(table[:, :, :, [0, 12]]).all()
    assert table[0, 0, 0, 1] < table[1, 0, 0, 1]
    assert table[0, 0, 0, 1] == table[2, 0, 0, 1]


def test_an_interleaved_pipeline_has_a_link_back() -> None:
    layers = build_layer_chain(load_model("gpt2"), Precision.BF16, stages=2)
    table = compute_hand_over_table_s(layers, (StageGroup(A100, node_gpus=8, gpus=4, count=2),), 8, interleave=3)
    assert table.shape[0] == 2
    assert table[1, 0, 0, 1] == table[0, 0, 0, 1]


def test_between_groups_the_slower_side_sets_the_pace() -> None:
    layers = build_layer_chain(load_model("gpt2"), Precision.BF16, stages=3)
    groups = StageGroup(A100, node_gpus=8, gpus=8, count=1), StageGroup(H100, node_gpus=8, gpus=4, count=2)
    table = compute_hand_over_table_s(layers, groups, 8)
    share = layers[0].boundary_bytes * 8 / 4
    slow = 2 * (A100.inter_latency_s + share / A100.inter_bandwidth_bytes_per_s)
    assert table[0, 0, 1, 1] == pytest.approx(slow) == table[0, 1, 0, 1]
    assert table[0, 1, 1, 1] == pytest.approx(2 * (H100.intra_latency_s + share / H100.intra_bandwidth_bytes_per_s))
