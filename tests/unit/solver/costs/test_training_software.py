"""Kernels of attention and loss in the cost model: laws that need no measured run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.parallel_plan import LayerStrategy
from scheduler.solver.costs.collectives import StageSetting
from scheduler.solver.costs.layer_chain import Layer, build_layer_chain
from scheduler.solver.costs.layer_memory import compute_activation_bytes
from scheduler.solver.costs.layer_time import compute_layer_times
from scheduler.solver.costs.strategy_space import StrategyCandidates
from scheduler.solver.profiles.architecture import Architecture, Family
from scheduler.solver.profiles.catalog import load_gpu, load_model
from scheduler.solver.profiles.hardware_profile import HardwareProfile, Precision
from scheduler.solver.profiles.model_profile import ModelProfile
from scheduler.solver.profiles.training_software import (
    AttentionKernel,
    LossKernel,
    MatrixProducts,
    TensorMessages,
    TrainingSoftware,
)
from scheduler.solver.profiles.transformer import build_transformer_profile
from scheduler.solver.request import RequestError, SolveRequest

A100, H100 = load_gpu("a100-80g"), load_gpu("h100-80g")
KERNELS = (AttentionKernel.FLASH_1, AttentionKernel.FLASH_2, AttentionKernel.FLASH_3, AttentionKernel.NEWEST)


def _compute_s(layer: Layer, hardware: HardwareProfile) -> float:
    setting = StageSetting.for_stage(hardware, node_gpus=8, gpus=1, global_batch=1)
    chosen = StrategyCandidates.from_strategies([LayerStrategy(layers=1)], micro_batches=1, batch=1)
    return float(compute_layer_times((layer,), chosen, setting).compute_s[0, 0])


def _core_s(kernel: AttentionKernel, hardware: HardwareProfile, *, width: int = 128, tokens: int = 8192) -> float:
    """Return the time of the attention core alone, forward and backward."""
    architecture = Architecture(Family.DECODER, 2, 4096, 4096 // width, 16_384, tokens, vocabulary=50_304)
    model = replace(build_transformer_profile("net", architecture), software=TrainingSoftware(attention=kernel))
    layer = build_layer_chain(model, Precision.BF16, stages=1)[0]
    return _compute_s(layer, hardware) - _compute_s(replace(layer, attention_flops=0.0), hardware)


def _last_layer(model: ModelProfile, loss: LossKernel, precision: Precision = Precision.BF16) -> Layer:
    return build_layer_chain(replace(model, software=TrainingSoftware(loss=loss)), precision, stages=1)[-1]


def _kept_bytes(layer: Layer) -> int:
    setting = StageSetting.for_stage(A100, node_gpus=8, gpus=1, global_batch=1)
    chosen = StrategyCandidates.from_strategies([LayerStrategy(layers=1)], micro_batches=1, batch=1)
    return int(compute_activation_bytes((layer,), chosen, setting)[0, 0])


def test_newer_attention_kernels_are_faster_as_far_as_the_gpu_has_them() -> None:
    ampere, hopper = ([_core_s(kernel, gpu) for kernel in KERNELS] for gpu in (A100, H100))
    assert [hopper[0] / each for each in hopper] == pytest.approx([1, 2, 3, 3])
    assert [ampere[0] / each for each in ampere] == pytest.approx([1, 2, 2, 2])
    assert _core_s(AttentionKernel.PROFILE, H100) == pytest.approx(hopper[0])


def test_no_kernel_exceeds_the_peak_of_the_gpu() -> None:
    quick = replace(H100, attention_efficiency=0.9)
    peak = replace(H100, attention_efficiency=1.0)
    assert _core_s(AttentionKernel.NEWEST, quick) == pytest.approx(_core_s(AttentionKernel.PROFILE, peak))


def test_narrow_heads_are_slower_where_exponentials_limit_the_kernel() -> None:
    by_width = [_core_s(AttentionKernel.FLASH_3, H100, width=width) for width in (32, 64, 128, 256)]
    assert by_width == sorted(by_width, reverse=True)
    assert by_width[1] / by_width[2] == pytest.approx(4 / 3)  # One part in three doubles.
    assert _core_s(AttentionKernel.FLASH_1, H100, width=64) == pytest.approx(_core_s(AttentionKernel.FLASH_1, H100))


def test_products_in_fp8_are_up_to_twice_as_fast_and_leave_the_head_alone() -> None:
    """torchtitan measured 1.28 for a whole step of Llama 3.1 8B on 8 H100, whose head is in bf16 (arXiv 2410.06511)."""
    plain = load_model("llama-3-8b", 8192)
    in_fp8 = replace(plain, software=replace(plain.software, products=MatrixProducts.FP8))
    chains = [build_layer_chain(model, Precision.BF16, stages=1) for model in (plain, in_fp8)]
    bf16_s, fp8_s = (_compute_s(chain[1], H100) for chain in chains)
    assert 1.2 < bf16_s / fp8_s < 2.0
    heads_s = [_compute_s(chain[-1], H100) - _compute_s(chain[1], H100) for chain in chains]
    assert heads_s[0] == pytest.approx(heads_s[1], rel=0.02)
    whole_s = [sum(_compute_s(layer, H100) for layer in chain) for chain in chains]
    assert whole_s[0] / whole_s[1] == pytest.approx(1.28, rel=0.05)


def test_fp8_is_refused_on_a_gpu_without_it() -> None:
    plain = load_model("llama-3-8b")
    in_fp8 = replace(plain, software=replace(plain.software, products=MatrixProducts.FP8))
    with pytest.raises(RequestError, match="fp8_speedup"):
        SolveRequest(in_fp8, (A100,), GpuShape.packed("a100-80g", 8, 8), 64)


def test_attention_grows_with_the_square_of_the_sequence() -> None:
    short, long = (_core_s(AttentionKernel.PROFILE, A100, tokens=tokens) for tokens in (4096, 65_536))
    assert long / short == pytest.approx(256)


def test_attention_efficiency_leaves_stored_scores_alone() -> None:
    architecture = Architecture(Family.DECODER, 2, 4096, 32, 16_384, 2048, vocabulary=50_304, stored_scores=True)
    layer = build_layer_chain(build_transformer_profile("net", architecture), Precision.BF16, stages=1)[0]
    assert _compute_s(layer, A100) == _compute_s(layer, replace(A100, attention_efficiency=0.9))


@pytest.mark.parametrize("precision", list(Precision))
def test_a_fused_loss_keeps_one_value_of_a_logit(precision: Precision) -> None:
    model = load_model("llama-2-7b")
    logits = model.sequence_length * model.head.columns
    body = _kept_bytes(replace(_last_layer(model, LossKernel.FUSED, precision), attached_bytes=0))
    fused, stored = (
        _kept_bytes(_last_layer(model, loss, precision)) - body for loss in (LossKernel.FUSED, LossKernel.STORED)
    )
    assert fused == logits * precision.value_bytes
    assert stored == 6 * fused


def test_a_fused_loss_is_faster_and_touches_no_other_layer() -> None:
    model = load_model("llama-2-7b")
    fused, stored = (_last_layer(model, loss) for loss in (LossKernel.FUSED, LossKernel.STORED))
    assert _compute_s(fused, A100) < _compute_s(stored, A100)
    chains = [
        build_layer_chain(replace(model, software=TrainingSoftware(loss=loss)), Precision.BF16, stages=1)
        for loss in LossKernel
    ]
    assert chains[0][:-1] == chains[1][:-1]


def _tensor_s(strategy: LayerStrategy, messages: TensorMessages, hardware: HardwareProfile = H100) -> float:
    model = replace(load_model("llama-2-7b"), software=TrainingSoftware(tensor_messages=messages))
    layer = build_layer_chain(model, Precision.BF16, stages=1)[1]
    setting = StageSetting.for_stage(hardware, node_gpus=8, gpus=8, global_batch=8)
    chosen = StrategyCandidates.from_strategies([strategy], micro_batches=1, batch=8)
    return float(compute_layer_times((layer,), chosen, setting).tensor_s[0, 0])


SHARDED = LayerStrategy(layers=1, tp=8, sequence_sharding=True)


@pytest.mark.parametrize("coefficient", [1.0, 1.3, 2.5])
def test_overlapped_tensor_messages_leave_the_first_piece_and_the_slowdown(coefficient: float) -> None:
    gpu = replace(H100, overlap_coefficient=coefficient)
    exposed, hidden = (_tensor_s(SHARDED, messages, gpu) for messages in TensorMessages)
    rest = min(coefficient - 1, 1.0)  # Software that is slower together sends first.
    assert hidden == pytest.approx(exposed * (1 / 8 + 7 / 8 * rest))


def test_messages_longer_than_the_products_hide_only_as_much_as_there_are_products() -> None:
    gpu = replace(H100, overlap_coefficient=1.0, intra_bandwidth_bytes_per_s=1e9)
    exposed, hidden = (_tensor_s(SHARDED, messages, gpu) for messages in TensorMessages)
    assert 0.9 * exposed < hidden < exposed


@pytest.mark.parametrize("strategy", [replace(SHARDED, sequence_sharding=False), LayerStrategy(layers=1, dp=8)])
def test_only_messages_of_a_sharded_sequence_overlap(strategy: LayerStrategy) -> None:
    exposed, hidden = (_tensor_s(strategy, messages) for messages in TensorMessages)
    assert hidden == exposed


def _mixture_s(imbalance: float, per_token: float, strategy: LayerStrategy) -> tuple[float, float]:
    """Return compute and dispatch times of one layer of a mixture of experts."""
    architecture = Architecture(
        *(Family.DECODER, 2, 4096, 32, 14_336, 4096), vocabulary=32_000, experts=8, experts_per_token=per_token
    )
    model = replace(build_transformer_profile("mixture", architecture), expert_imbalance=imbalance)
    layer = build_layer_chain(model, Precision.BF16, stages=1)[0]
    setting = StageSetting.for_stage(H100, node_gpus=8, gpus=8, global_batch=8)
    times = compute_layer_times(
        (layer,), StrategyCandidates.from_strategies([strategy], micro_batches=1, batch=8), setting
    )
    return float(times.compute_s[0, 0]), float(times.expert_s[0, 0])


EXPERTS = LayerStrategy(layers=1, dp=8, ep=8)


def test_the_fullest_rank_sets_the_pace_of_experts() -> None:
    known, even, uneven = (_mixture_s(imbalance, 2, EXPERTS) for imbalance in (H100.expert_imbalance, 1.0, 1.7))
    assert _mixture_s(0.0, 2, EXPERTS) == known
    assert even[0] < known[0] < uneven[0]
    assert even[1] < known[1] < uneven[1]
    alone = replace(EXPERTS, ep=1)
    assert _mixture_s(1.7, 2, alone) == _mixture_s(1.0, 2, alone)  # All experts are on every rank.


def test_experts_per_token_may_be_a_fraction() -> None:
    fewer, between, more = (_mixture_s(1.0, per_token, EXPERTS) for per_token in (2, 2.5, 3))
    assert between[0] == pytest.approx((fewer[0] + more[0]) / 2)
    assert fewer[1] < between[1] < more[1]
