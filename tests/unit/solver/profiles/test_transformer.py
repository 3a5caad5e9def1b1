"""Flops, traffic and kept activations of an architecture's layers, compared with published formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.solver.profiles.architecture import Architecture, Family
from scheduler.solver.profiles.transformer import build_transformer_profile

GPT3 = Architecture(
    family=Family.DECODER,
    layers=96,
    hidden=12288,
    heads=96,
    ffn=4 * 12288,
    vocabulary=51200,
    sequence_length=2048,
    positions=2048,
    biases=True,
    dropout=True,
    stored_scores=True,
    tied_embedding=True,
)
S, H, A = 2048, 12288, 96


def test_a_gpt_layer_keeps_34_sh_and_5_ass_bytes() -> None:
    layer = build_transformer_profile("gpt3", GPT3).layers[0]
    kept = layer.activation_bytes_per_sample + layer.replicated_activation_bytes_per_sample
    assert kept == 34 * S * H + 5 * A * S * S
    assert layer.replicated_activation_bytes_per_sample == 10 * S * H
    assert layer.selective_bytes_per_sample == 5 * A * S * S


def test_an_iteration_of_gpt_costs_72_bslhh_and_attention_and_logits() -> None:
    # SC'21, equation 3 has 96 with full recompute, which is four forward passes.
    full = 96 * S * 96 * H * H * (1 + S / (6 * H) + 51200 / (16 * 96 * H))
    # Its last term leaves the head out of the recomputed pass: three passes instead of four.
    model = build_transformer_profile("gpt3", GPT3)
    assert 4 * model.flops_per_sample - model.head.flops_per_sample == pytest.approx(full, rel=1e-9)


def test_without_stored_scores_attention_keeps_none_and_skips_what_the_mask_hides() -> None:
    stored = build_transformer_profile("gpt3", GPT3).layers[0]
    fused = build_transformer_profile("gpt3", replace(GPT3, stored_scores=False)).layers[0]
    assert fused.selective_bytes_per_sample == 0
    assert fused.activation_bytes_per_sample == stored.activation_bytes_per_sample - stored.selective_bytes_per_sample
    assert fused.attention_flops_per_sample == stored.attention_flops_per_sample / 2 == 2 * S * S * H
    assert stored.traffic_bytes_per_sample - fused.traffic_bytes_per_sample == 13 * A * S * S


def test_without_dropout_a_score_keeps_its_softmax_alone() -> None:
    layer = build_transformer_profile("gpt3", replace(GPT3, dropout=False)).layers[0]
    assert layer.selective_bytes_per_sample == 2 * A * S * S
    assert layer.replicated_activation_bytes_per_sample == 8 * S * H


def test_element_wise_kernels_of_a_gpt_layer_move_50_bytes_a_token_and_hidden_value() -> None:
    layer = build_transformer_profile("gpt3", replace(GPT3, stored_scores=False)).layers[0]
    # Two norms 8, two bias-dropout-residuals 14, transposes 12, GeLU over four times the width 16.
    assert layer.traffic_bytes_per_sample == 50 * S * H


def test_a_head_of_a_width_of_its_own_widens_the_attention_products() -> None:
    wide = build_transformer_profile("wide", replace(GPT3, head_dim=256)).layers[0]
    plain = build_transformer_profile("plain", GPT3).layers[0]
    assert wide.parameters - plain.parameters == 4 * H * H + 3 * H
    assert wide.attention_flops_per_sample == 2 * plain.attention_flops_per_sample


def test_grouped_queries_share_keys_and_values() -> None:
    grouped = build_transformer_profile("grouped", replace(GPT3, kv_heads=8, biases=False)).layers[0]
    plain = build_transformer_profile("plain", replace(GPT3, biases=False)).layers[0]
    saved = H - 8 * 128
    assert plain.parameters - grouped.parameters == 2 * H * saved
    assert plain.activation_bytes_per_sample - grouped.activation_bytes_per_sample == 4 * S * saved
    assert plain.attention_flops_per_sample == grouped.attention_flops_per_sample


def test_a_mixture_computes_chosen_experts_and_keeps_the_copies_of_each_token() -> None:
    dense = build_transformer_profile("dense", replace(GPT3, biases=False)).layers[0]
    mixed = build_transformer_profile("mixed", replace(GPT3, biases=False, experts=4, experts_per_token=2)).layers[0]
    feed_forward, router = 8 * H * H, 4 * H
    assert mixed.parameters - dense.parameters == 3 * feed_forward + router
    assert mixed.expert_parameters == 4 * feed_forward
    assert mixed.flops_per_sample - dense.flops_per_sample == 2.0 * S * (feed_forward + router)
    assert mixed.replicated_activation_bytes_per_sample - dense.replicated_activation_bytes_per_sample == 8 * S * H


@pytest.mark.parametrize(
    ("frozen", "runs"),
    [
        (0, [(6, False), (4, False)]),
        (2, [(2, True), (4, False), (4, False)]),
        (6, [(6, True), (4, False)]),
        (7, [(6, True), (1, True), (3, False)]),
        (10, [(6, True), (4, True)]),
    ],
)
def test_layers_freeze_from_the_first_one_on(frozen: int, runs: list[tuple[int, bool]]) -> None:
    sizes = {"layers": 6, "decoder_layers": 4, "target_length": 64, "frozen_layers": frozen}
    model = build_transformer_profile("t5", replace(GPT3, family=Family.ENCODER_DECODER, **sizes))  # type: ignore[arg-type]  # any field
    assert [(run.layers, run.frozen) for run in model.layers] == runs


def test_an_encoder_decoder_reduces_the_gradient_of_the_encoders_output_too() -> None:
    sizes = {"decoder_layers": 4, "target_length": S}
    encoder, decoder = build_transformer_profile(
        "t5",
        replace(GPT3, family=Family.ENCODER_DECODER, **sizes),  # type: ignore[arg-type]  # any field
    ).layers
    # Boundaries of 2 S tokens: 2 S a pass in the encoder, 3 S forward and 4 S backward in the decoder, rounded up.
    assert (encoder.tensor_messages, decoder.tensor_messages) == (1, 2)


def test_a_head_of_classes_reads_one_token() -> None:
    encoder = replace(GPT3, family=Family.ENCODER, classes=2, tied_embedding=False)
    assert build_transformer_profile("bert", encoder).head.flops_per_sample == 2 * (H * H + 2 * H)
