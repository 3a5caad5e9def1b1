"""The cost model: collectives, links, memory and time of one layer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.domain.gpu_shape import GpuGroup, GpuShape
from scheduler.domain.parallel_plan import LayerStrategy, Recompute
from scheduler.solver.costs.chain import Layer, chain
from scheduler.solver.costs.collectives import Link, all_gather_s, all_reduce_s, reduce_scatter_s, send_s
from scheduler.solver.costs.memory_cost import kept_bytes, state_bytes, working_bytes
from scheduler.solver.costs.setting import Setting
from scheduler.solver.costs.strategies import strategies
from scheduler.solver.costs.time_cost import border_time_s, hand_over_time_s, layer_time_s, reshard_time_s
from scheduler.solver.costs.topology import Topology
from scheduler.solver.profiles.hardware_profile import Precision
from scheduler.solver.profiles.shipped import load_gpu, load_model
from scheduler.solver.request import RequestError, SolveRequest

LINK = Link(bandwidth_bytes_per_s=1e9, latency_s=1e-3)
DP8 = LayerStrategy(layers=1, dp=8)
FSDP8 = LayerStrategy(layers=1, dp=8, zero=3, shard_group=8)
TP2 = LayerStrategy(layers=1, tp=2, dp=4)
TP8 = LayerStrategy(layers=1, tp=8)


def _request(shape: GpuShape, model: str = "llama-2-7b") -> SolveRequest:
    return SolveRequest(load_model(model), load_gpu("a100-80g"), shape, 64)


def _setting(*, stages: int = 1, micro_batches: int = 8, gpus: int = 8) -> Setting:
    request = _request(GpuShape.packed("a100-80g", gpus, 8))
    return Setting(
        hardware=request.hardware,
        topology=Topology.of(request),
        stages=stages,
        stage_gpus=gpus // stages,
        micro_batches=micro_batches,
        micro_batch_size=64 // micro_batches,
    )


def _layer() -> Layer:
    return chain(load_model("llama-2-7b"), Precision.BF16, stages=1)[1]


def test_a_ring_moves_each_share_once_and_an_all_reduce_twice() -> None:
    assert all_gather_s(4e9, 4, LINK) == pytest.approx(3 * (1e-3 + 1.0))
    assert reduce_scatter_s(4e9, 4, LINK) == all_gather_s(4e9, 4, LINK)
    assert all_reduce_s(4e9, 4, LINK) == pytest.approx(6 * (1e-3 + 1.0))
    assert send_s(1e9, LINK) == pytest.approx(1.001)


def test_a_group_of_one_sends_nothing() -> None:
    assert all_reduce_s(1e9, 1, LINK) == 0.0


def test_uneven_nodes_count_as_nodes_of_their_greatest_common_divisor() -> None:
    uneven = GpuShape((GpuGroup("a100-80g", 1, 2), GpuGroup("a100-80g", 2, 1)))
    assert _request(uneven).node_gpus == 1
    assert _request(GpuShape((GpuGroup("a100-80g", 1, 6), GpuGroup("a100-80g", 1, 4)))).node_gpus == 2


def test_a_stage_inside_a_node_uses_the_links_inside_and_any_other_the_network() -> None:
    topology = Topology.of(_request(GpuShape.packed("a100-80g", 16, 8)))
    assert topology.data_link(stage_gpus=8, tp=1) == topology.intra
    assert topology.data_link(stage_gpus=16, tp=8) == topology.inter
    shared = topology.data_link(stage_gpus=16, tp=2)
    assert shared.bandwidth_bytes_per_s == 4 * topology.inter.bandwidth_bytes_per_s
    assert topology.hand_over_link(cut=0, stage_gpus=4) == topology.intra
    assert topology.hand_over_link(cut=1, stage_gpus=4) == topology.inter


def test_a_tensor_group_never_leaves_a_node_and_divides_the_heads() -> None:
    six = Setting(
        hardware=load_gpu("a100-80g"),
        topology=Topology.of(_request(GpuShape.packed("a100-80g", 6, 6))),
        stages=1,
        stage_gpus=6,
        micro_batches=1,
        micro_batch_size=6,
    )
    gpt2 = chain(load_model("gpt2"), Precision.BF16, stages=1)
    llama = chain(load_model("llama-2-7b"), Precision.BF16, stages=1)
    assert {option.tp for option in strategies(gpt2, six)} == {1, 2, 3, 6}
    assert {option.tp for option in strategies(llama, six)} == {1, 2}
    spread = replace(six, topology=Topology.of(_request(GpuShape.packed("a100-80g", 6, 3))))
    assert {option.tp for option in strategies(gpt2, spread)} == {1, 3}


def test_the_data_degree_divides_the_micro_batch() -> None:
    layers = chain(load_model("llama-2-7b"), Precision.BF16, stages=1)
    assert {option.dp for option in strategies(layers, _setting(micro_batches=32))} == {1, 2}


def test_a_cpu_worker_gets_neither_tensor_nor_pipeline_degrees() -> None:
    cpu = replace(_setting(), hardware=load_gpu("cpu"))
    layers = chain(load_model("tiny-gpt"), Precision.FP32, stages=1)
    assert {(option.tp, option.zero, option.recompute) for option in strategies(layers, cpu)} == {
        (1, zero, again) for zero in (0, 3) for again in (Recompute.NONE, Recompute.FULL)
    }


def test_a_tied_head_is_held_again_only_by_a_pipeline() -> None:
    gpt2 = load_model("gpt2")
    alone = chain(gpt2, Precision.BF16, stages=1)
    split = chain(gpt2, Precision.BF16, stages=2)
    assert split[-1].parameters - alone[-1].parameters == gpt2.head.parameters
    assert split[0] == alone[0]


def test_fp32_doubles_activations() -> None:
    gpt2 = load_model("gpt2")
    bf16, fp32 = (chain(gpt2, precision, stages=1)[1] for precision in Precision)
    assert (fp32.activation_bytes, fp32.boundary_bytes) == (2 * bf16.activation_bytes, 2 * bf16.boundary_bytes)


def test_sharding_divides_state_and_needs_a_buffer() -> None:
    setting, layer = _setting(), _layer()
    assert state_bytes(layer, DP8, setting) == 16 * layer.parameters
    assert state_bytes(layer, FSDP8, setting) == state_bytes(layer, TP8, setting) == 2 * layer.parameters
    assert working_bytes([layer], DP8, setting) == 0
    assert working_bytes([layer], FSDP8, setting) == 3 * 2 * layer.parameters


def test_full_recompute_keeps_the_boundary_and_needs_one_layer_again() -> None:
    setting, layer = _setting(), _layer()
    again = replace(DP8, recompute=Recompute.FULL)
    assert kept_bytes(layer, again, setting) == layer.boundary_bytes
    assert kept_bytes(layer, DP8, setting) == working_bytes([layer], again, setting)
    assert kept_bytes(layer, DP8, setting) == layer.replicated_bytes + layer.activation_bytes


def test_early_stages_hold_more_micro_batches() -> None:
    assert [_setting(stages=4).in_flight(stage) for stage in range(4)] == [4, 3, 2, 1]
    assert [_setting(stages=4, micro_batches=2).in_flight(stage) for stage in range(4)] == [2, 2, 2, 1]


def test_a_layer_costs_three_forward_passes_and_four_with_recompute() -> None:
    setting, layer = _setting(), _layer()
    quiet = replace(setting, hardware=replace(setting.hardware, memory_bandwidth_bytes_per_s=1e30))
    alone = replace(quiet, stage_gpus=1)
    single = LayerStrategy(layers=1)
    forward_s = 8 * layer.flops / quiet.hardware.flops_per_s
    assert layer_time_s(layer, single, alone) == pytest.approx(3 * forward_s)
    assert layer_time_s(layer, replace(single, recompute=Recompute.FULL), alone) == pytest.approx(4 * forward_s)


def test_the_exposed_gradient_reduction_is_spread_over_the_micro_batches() -> None:
    slow = Link(1e6, 1e-3)
    few, many = (
        replace(_setting(micro_batches=count), micro_batch_size=8, topology=Topology(8, slow, slow)) for count in (1, 4)
    )
    quiet = layer_time_s(_layer(), DP8, replace(many, micro_batches=10**12))
    assert layer_time_s(_layer(), DP8, few) - quiet == pytest.approx(4 * (layer_time_s(_layer(), DP8, many) - quiet))


def test_changing_the_tensor_degree_costs_one_gather_either_way() -> None:
    setting, layer = _setting(), _layer()
    there = reshard_time_s(layer, before=DP8, after=TP2, setting=setting)
    assert there == reshard_time_s(layer, before=TP2, after=DP8, setting=setting) > 0
    assert reshard_time_s(layer, before=DP8, after=FSDP8, setting=setting) == 0.0


def test_a_border_gathers_over_the_tensor_group_alone() -> None:
    assert border_time_s(_layer(), DP8, _setting()) == 0.0
    assert border_time_s(_layer(), TP2, _setting()) > 0


def test_a_hand_over_across_nodes_is_slower() -> None:
    setting = _setting(stages=4, gpus=16)
    near, far = (hand_over_time_s(_layer(), cut=cut, setting=setting) for cut in (0, 1))
    assert far > near > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"global_batch": 0}, "global_batch is 0; it must be at least 1"),
        ({"memory_bytes_max": -1}, "memory_bytes_max is -1"),
        ({"shape": GpuShape(())}, "shape is empty"),
        ({"shape": GpuShape.packed("cpu", 2, 2)}, "must contain the profiled GPU 'a100-80g'"),
    ],
)
def test_a_contradictory_request_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        replace(_request(GpuShape.packed("a100-80g", 8, 8)), **change)  # type: ignore[arg-type]  # one field of many types
