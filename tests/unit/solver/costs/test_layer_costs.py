"""Time and memory of one layer: single terms computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.domain.parallel_plan import LayerStrategy, Recompute
from scheduler.solver.costs.collectives import StageSetting
from scheduler.solver.costs.layer_chain import Layer, build_layer_chain
from scheduler.solver.costs.layer_memory import compute_activation_bytes, compute_buffer_bytes, compute_state_bytes
from scheduler.solver.costs.layer_time import LayerTimes, compute_layer_times
from scheduler.solver.costs.strategy_space import StrategyCandidates
from scheduler.solver.profiles.catalog import load_gpu, load_model
from scheduler.solver.profiles.hardware_profile import HardwareProfile, Precision

A100 = load_gpu("a100-80g")
DP8 = LayerStrategy(layers=1, dp=8)
FSDP8 = LayerStrategy(layers=1, dp=8, zero=3, shard_group=8)
TP8 = LayerStrategy(layers=1, tp=8, sequence_sharding=True)


def _layer(model: str = "llama-2-7b") -> Layer:
    return build_layer_chain(load_model(model), Precision.BF16, stages=1)[1]


def _chosen(strategy: LayerStrategy, micro_batches: int = 8, batch: int = 8) -> StrategyCandidates:
    return StrategyCandidates.from_strategies([strategy], micro_batches=micro_batches, batch=batch)


def _times(
    strategy: LayerStrategy, *, layer: Layer | None = None, hardware: HardwareProfile = A100, micro_batches: int = 8
) -> LayerTimes:
    setting = StageSetting.for_stage(hardware, node_gpus=8, gpus=strategy.gpus, global_batch=8 * micro_batches)
    return compute_layer_times((layer or _layer(),), _chosen(strategy, micro_batches), setting)


def _bytes(strategy: LayerStrategy, layer: Layer | None = None) -> tuple[int, int, int]:
    setting = StageSetting.for_stage(A100, node_gpus=8, gpus=strategy.gpus, global_batch=64)
    kinds, chosen = (layer or _layer(),), _chosen(strategy)
    state, kept = compute_state_bytes(kinds, chosen, setting), compute_activation_bytes(kinds, chosen, setting)
    return int(state[0, 0]), int(kept[0, 0]), int(compute_buffer_bytes(kinds, chosen, setting)[0])


def test_small_products_lose_efficiency_to_their_operands() -> None:
    layer = replace(_layer(), attention_flops=0.0, traffic_bytes=0)
    one = LayerStrategy(layers=1)
    ideal_s = 3 * 8 * layer.flops / (A100.peak_flops_per_s * A100.efficiency)
    large, small = (float(_times(one, layer=replace(layer, flops=layer.flops * k)).compute_s[0, 0]) for k in (100, 1))
    assert large == pytest.approx(100 * ideal_s, rel=0.01)
    assert 1.02 * ideal_s < small < 1.5 * ideal_s


def test_unaligned_head_columns_are_slower() -> None:
    """50,257 columns are unaligned on one GPU, and padded if they are split."""
    flops, even = 1e12, replace(A100, unaligned_slowdown=1.0)
    head = replace(_layer(), attached_flops=flops, columns=50_257)
    for tp, columns, slower in ((1, 50_257, True), (2, 50_257, False), (2, 50_264, True), (2, 50_304, False)):
        times_s = [
            float(_times(LayerStrategy(1, tp=tp), layer=replace(head, columns=columns), hardware=one).compute_s[0, 0])
            for one in (A100, even)
        ]
        extra_s = (A100.unaligned_slowdown - 1) * 3 * 8 * flops / tp / (A100.peak_flops_per_s * A100.efficiency)
        assert times_s[0] - times_s[1] == pytest.approx(slower * extra_s)


def test_no_pass_is_faster_than_its_launches() -> None:
    tiny = replace(_layer(), flops=1.0, attention_flops=0.0, traffic_bytes=0, parameters=1)
    slow = replace(A100, launch_s=0.01)
    assert _times(LayerStrategy(layers=1), layer=tiny, hardware=slow).compute_s == pytest.approx(0.03)
    full = LayerStrategy(layers=1, recompute=Recompute.FULL)
    assert _times(full, layer=tiny, hardware=slow).compute_s == pytest.approx(0.04)


def test_full_recompute_repeats_the_forward_pass_and_its_messages() -> None:
    none, full = _times(TP8), _times(replace(TP8, recompute=Recompute.FULL))
    assert full.tensor_s == pytest.approx(1.5 * none.tensor_s)
    assert 1.25 < float(full.compute_s[0, 0] / none.compute_s[0, 0]) < 1.35


def test_selective_recompute_repeats_the_attention_core_where_scores_are_stored() -> None:
    layer = replace(_layer(), selective_bytes=10**8)
    none, again = (_times(replace(DP8, recompute=one), layer=layer) for one in (Recompute.NONE, Recompute.SELECTIVE))
    core_s = layer.attention_flops / (A100.peak_flops_per_s * A100.efficiency)
    core_s += 2.6e8 / A100.memory_bandwidth_bytes_per_s
    assert float((again.compute_s - none.compute_s)[0, 0]) == pytest.approx(core_s)
    kept = [_bytes(replace(DP8, recompute=one), layer)[1] for one in (Recompute.NONE, Recompute.SELECTIVE)]
    assert kept[0] - kept[1] == 10**8


def test_a_measured_time_replaces_the_analytic_one() -> None:
    layer = replace(_layer(), measured_s=((1, 0.1), (2, 0.06)), attention_flops=0.0)
    assert _times(DP8, layer=layer).compute_s == pytest.approx(0.3)
    assert _times(LayerStrategy(layers=1, tp=2, dp=4), layer=layer).compute_s == pytest.approx(2 * 0.18)


def test_a_reduction_that_cannot_hide_is_spread_over_the_micro_batches() -> None:
    slow = replace(A100, intra_bandwidth_bytes_per_s=1e9, gradient_overlap=1.0)
    few, many = (float(_times(DP8, hardware=slow, micro_batches=count).data_s[0, 0]) for count in (1, 8))
    assert few == pytest.approx(8 * many)
    exposed = replace(slow, gradient_overlap=0.0)
    assert float(_times(DP8, hardware=exposed).data_s[0, 0]) > many


def test_zero_2_reduces_with_each_micro_batch_and_zero_1_once() -> None:
    exposed = replace(A100, gradient_overlap=0.0)
    one, two = (
        float(_times(replace(FSDP8, zero=zero), hardware=exposed, micro_batches=4).data_s[0, 0]) for zero in (1, 2)
    )
    assert two == pytest.approx(2.5 * one)  # Per micro-batch: (4 + 1) / 4 of a message instead of (1 + 1) / 4


def test_a_hybrid_shard_keeps_most_messages_inside_the_node() -> None:
    full = LayerStrategy(layers=1, dp=16, zero=3, shard_group=16)
    hybrid = replace(full, shard_group=8)
    layer = _layer()
    setting = StageSetting.for_stage(A100, node_gpus=8, gpus=16, global_batch=128)
    slow, quick = (
        float(compute_layer_times((layer,), _chosen(one, batch=16), setting).data_s[0, 0]) for one in (full, hybrid)
    )
    assert quick < slow
    states = [int(compute_state_bytes((layer,), _chosen(one, batch=16), setting)[0, 0]) for one in (full, hybrid)]
    assert states[1] == 2 * states[0]


def test_experts_cost_messages_and_imbalance_and_priority_spares_the_contention() -> None:
    layer = _layer("mixtral-8x7b")
    alone, spread = _times(DP8, layer=layer), _times(replace(DP8, ep=8), layer=layer)
    assert float(alone.expert_s[0, 0]) == 0.0
    assert float(spread.expert_s[0, 0]) > 0.0
    overlapping = replace(A100, gradient_overlap=1.0)
    shared, first = (
        _times(replace(DP8, ep=2), layer=layer, hardware=replace(overlapping, expert_priority=priority))
        for priority in (False, True)
    )
    assert float(first.expert_s[0, 0]) < float(shared.expert_s[0, 0])
    assert _bytes(replace(DP8, ep=8), layer)[0] < _bytes(DP8, layer)[0] / 4


def test_sequence_parallelism_costs_messages_that_ring_attention_hides() -> None:
    ulysses, ring = LayerStrategy(layers=1, dp=4, ulysses=2), LayerStrategy(layers=1, dp=4, ring=2)
    assert float(_times(ulysses).sequence_s[0, 0]) > float(_times(ring).sequence_s[0, 0]) > 0.0
    assert _bytes(ulysses)[:2] == _bytes(ring)[:2] == _bytes(DP8)[:2]


def test_a_frozen_layer_holds_weights_alone_and_passes_gradients_only_behind_a_trained_one() -> None:
    trained = _layer()
    behind = replace(trained, trained=False)
    first = replace(behind, backward=False)
    forward_s = float(_times(DP8, layer=first).compute_s[0, 0])
    assert 2 * forward_s < float(_times(DP8, layer=behind).compute_s[0, 0]) < float(_times(DP8).compute_s[0, 0])
    assert abs(float(_times(DP8, layer=behind).data_s[0, 0])) < 1e-15  # A difference of sums, with a rounding error
    assert float(_times(DP8, layer=behind).other_s[0, 0]) == 0.0
    assert _bytes(DP8, first)[:2] == (2 * trained.parameters, 0)


def test_state_shrinks_stage_by_stage() -> None:
    weights = _layer().parameters
    states = [_bytes(replace(FSDP8, zero=zero))[0] for zero in (1, 2, 3)]
    assert _bytes(DP8)[0] == 18 * weights
    assert states == pytest.approx([(6 + 12 / 8) * weights, (2 + 16 / 8) * weights, 16 / 8 * weights])
    assert _bytes(replace(FSDP8, zero=1, offload=True))[0] == 6 * weights
    assert _bytes(replace(FSDP8, offload=True))[0] == pytest.approx(6 / 8 * weights)


def test_offload_costs_host_time() -> None:
    own, host = _times(FSDP8), _times(replace(FSDP8, offload=True))
    held = _layer().parameters / 8
    expected = held * (4 / A100.host_bandwidth_bytes_per_s + A100.host_optimizer_s_per_parameter) / 8
    assert float(host.other_s[0, 0]) == pytest.approx(expected)
    assert float(own.other_s[0, 0]) < expected


def test_activations_split_as_korthikanti_counts_them() -> None:
    layer = _layer()
    whole = layer.replicated_bytes + layer.activation_bytes
    assert _bytes(DP8)[1] == whole
    assert _bytes(replace(DP8, recompute=Recompute.FULL))[1] == layer.boundary_bytes
    assert _bytes(TP8)[1] == pytest.approx(8 * whole / 8)
    assert _bytes(replace(TP8, sequence_sharding=False))[1] == pytest.approx(
        8 * (layer.replicated_bytes + layer.activation_bytes / 8)
    )


def test_buffers_hold_gathered_units_and_one_layer_again() -> None:
    layer = _layer()
    assert _bytes(DP8)[2] == 0
    assert _bytes(FSDP8)[2] == (3 * 2 + 4) * layer.parameters
    assert _bytes(replace(DP8, recompute=Recompute.FULL))[2] == _bytes(DP8)[1]
