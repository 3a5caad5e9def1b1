"""Kernels of attention and loss in the cost model: laws that need no measured run."""

from __future__ import annotations

from dataclasses import replace

import pytest

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
from scheduler.solver.profiles.training_software import AttentionKernel, LossKernel, TrainingSoftware
from scheduler.solver.profiles.transformer import build_transformer_profile

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
