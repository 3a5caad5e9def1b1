"""The profile of a transformer, derived from its architecture: layers of residual blocks, embedding and head."""

from __future__ import annotations

from dataclasses import replace

from scheduler.solver.profiles.architecture import Architecture, Family
from scheduler.solver.profiles.model_profile import REFERENCE_VALUE_BYTES as VALUE_BYTES
from scheduler.solver.profiles.model_profile import (
    Attachment,
    LayerProfile,
    ModelProfile,
    freeze_layers,
)
from scheduler.solver.profiles.transformer_blocks import (
    MASK_BYTES,
    Block,
    build_attention_block,
    build_feed_forward_block,
    build_modulation_block,
    sum_blocks,
)

LOSS_VALUE_BYTES = 4
"""The loss is computed on fp32 logits."""
_TIME_WIDTH = 256
"""Values of a time step that enter its embedding (DiT, arXiv 2212.09748, section 3.2)."""
_MODULATED = 6
"""Vectors that modulate a layer of a denoiser: scale, shift and gate of attention and of the feed-forward block."""
_AUDIO_KERNEL, _AUDIO_STRIDE = 3, 2
"""Width of both convolutions before Whisper's encoder, and stride of the second (arXiv 2212.04356, section 2.2)."""


def build_transformer_profile(name: str, architecture: Architecture) -> ModelProfile:
    """Return the ModelProfile of `architecture` at its sequence length."""
    build_layers = _LAYERS.get(architecture.family, _build_single_stack)
    return ModelProfile(
        name=name,
        sequence_length=architecture.sequence_length,
        layers=freeze_layers(build_layers(architecture), architecture.frozen_layers),
        embedding=_EMBEDDINGS.get(architecture.family, _build_token_embedding)(architecture),
        head=_build_head(architecture),
        tied_embedding=architecture.tied_embedding,
    )


def _build_single_stack(architecture: Architecture) -> list[LayerProfile]:
    tokens, causal = architecture.sequence_length, architecture.family is Family.DECODER
    return [
        _build_layer_run(
            architecture,
            layers,
            tokens,
            (
                build_attention_block(architecture, tokens, tokens, causal=causal, window=kind.window),
                build_feed_forward_block(architecture, tokens, has_experts=kind.has_experts),
            ),
        )
        for kind, layers in architecture.list_layer_kinds()
    ]


def _build_denoiser(architecture: Architecture) -> list[LayerProfile]:
    """Return the layers with weights of their own for image and text, then those with the same for both (MM-DiT, Flux).

    Attention joins image and text. Without text, all layers have one set of weights (DiT).
    """
    tokens = architecture.sequence_length
    blocks = (
        build_attention_block(architecture, tokens, tokens),
        build_feed_forward_block(architecture, tokens, has_experts=False),
        build_modulation_block(architecture, _MODULATED),
    )
    streams = 2 if architecture.target_length else 1
    own = tuple(replace(block, parameters=streams * block.parameters) for block in blocks)
    runs = [_build_layer_run(architecture, architecture.layers, tokens, own)]
    if architecture.single_layers:
        shared = (*blocks[:2], build_modulation_block(architecture, _MODULATED // 2))
        runs.append(_build_layer_run(architecture, architecture.single_layers, tokens, shared))
    return runs


def _build_encoder_decoder(architecture: Architecture) -> list[LayerProfile]:
    """Return encoder and decoder, with cross attention over the encoder's output, as two runs of one chain.

    The boundary is the same along the chain. The first stage embeds both inputs and targets, so only this stage holds
    the table. The embedded targets pass through the encoder, and the encoder's output passes through the decoder. Full
    recompute keeps that whole boundary with each layer. This is an upper bound, since the tensor passed along is one.
    """
    inputs, targets, has_experts = architecture.sequence_length, architecture.target_length, architecture.experts > 0
    encoder = _build_layer_run(
        architecture,
        architecture.layers,
        inputs,
        (
            build_attention_block(architecture, inputs, inputs),
            build_feed_forward_block(architecture, inputs, has_experts=has_experts),
        ),
    )
    blocks = (
        build_attention_block(architecture, targets, targets, causal=True),
        build_attention_block(architecture, targets, inputs, cross=True),
        build_feed_forward_block(architecture, targets, has_experts=has_experts),
    )
    decoder = _build_layer_run(architecture, architecture.decoder_layers, targets, blocks)
    boundary = VALUE_BYTES * (inputs + targets) * architecture.hidden
    # Each block reduces its output forward, and the gradient of its inputs backward. Rounded up to whole boundaries.
    return [
        replace(encoder, boundary_bytes_per_sample=boundary, tensor_messages=-(-2 * inputs // (inputs + targets))),
        replace(
            decoder,
            boundary_bytes_per_sample=boundary,
            tensor_messages=-(-(6 * targets + inputs) // (2 * (inputs + targets))),
        ),
    ]


def _build_layer_run(architecture: Architecture, layers: int, tokens: int, blocks: tuple[Block, ...]) -> LayerProfile:
    layer, experts = sum_blocks(blocks), architecture.experts
    has_experts = layer.expert_parameters > 0
    return LayerProfile(
        layers=layers,
        flops_per_sample=layer.flops,
        attention_flops_per_sample=layer.attention_flops,
        traffic_bytes_per_sample=layer.traffic_bytes,
        parameters=layer.parameters,
        activation_bytes_per_sample=layer.split_bytes,
        selective_bytes_per_sample=layer.score_bytes,
        replicated_activation_bytes_per_sample=layer.replicated_bytes,
        boundary_bytes_per_sample=VALUE_BYTES * tokens * architecture.hidden,
        tokens_per_sample=tokens,
        heads=architecture.num_kv_heads,
        attention_heads=architecture.heads,
        head_width=architecture.head_width,
        expert_parameters=layer.expert_parameters,
        experts=experts if has_experts else 0,
        experts_per_token=architecture.experts_per_token if has_experts else 0,
    )


def _build_token_embedding(architecture: Architecture) -> Attachment:
    """Return the tables of tokens, positions and token types, with the norm behind BERT's."""
    h, tokens = architecture.hidden, architecture.sequence_length + architecture.target_length
    masks = _count_mask_bytes(architecture, tokens)
    tables = (architecture.vocabulary + architecture.token_types + architecture.positions) * h
    if architecture.family is not Family.ENCODER:
        return Attachment(parameters=tables, activation_bytes_per_sample=masks)
    return Attachment(
        parameters=tables + architecture.norm_parameters,
        activation_bytes_per_sample=VALUE_BYTES * tokens * h + masks,
    )


def _build_encoder_decoder_embedding(architecture: Architecture) -> Attachment:
    """Return the tables of tokens, positions and relative positions of two stacks, and the convolutions of audio."""
    h, inputs = architecture.hidden, architecture.sequence_length
    rows = architecture.vocabulary + architecture.positions
    tables = rows * h + 2 * architecture.relative_buckets * architecture.heads
    masks = _count_mask_bytes(architecture, inputs + architecture.target_length)
    if not architecture.channels:
        return Attachment(parameters=tables, activation_bytes_per_sample=masks)
    first, second = (_AUDIO_KERNEL * width * h for width in (architecture.channels, h))
    frames = _AUDIO_STRIDE * inputs
    return Attachment(
        flops_per_sample=2.0 * (frames * first + inputs * second),
        parameters=tables + first + second + 2 * h,
        # Input and output of the activation behind each convolution; the second reads the output of the first.
        activation_bytes_per_sample=2 * VALUE_BYTES * (frames + inputs) * h + masks,
    )


def _build_patch_embedding(architecture: Architecture) -> Attachment:
    """Return ViT's product with patches, its class token and its positions."""
    h, patches, pixels = architecture.hidden, architecture.sequence_length - 1, _count_patch_values(architecture)
    return Attachment(
        flops_per_sample=2.0 * patches * pixels * h,
        parameters=pixels * h + h + h + architecture.positions * h,
        activation_bytes_per_sample=VALUE_BYTES * patches * pixels
        + _count_mask_bytes(architecture, architecture.sequence_length),
    )


def _build_denoiser_embedding(architecture: Architecture) -> Attachment:
    """Return the products with patches and text, and two layers each for the time step and the summary of the text."""
    h, text, pixels = architecture.hidden, architecture.target_length, _count_patch_values(architecture)
    patches = architecture.sequence_length - text
    vectors = (2 if text else 1) * (_TIME_WIDTH + h) * h
    return Attachment(
        flops_per_sample=2.0 * (patches * pixels * h + text * architecture.target_width * h + vectors),
        parameters=(pixels + architecture.target_width) * h + vectors,
        activation_bytes_per_sample=VALUE_BYTES * (patches * pixels + text * architecture.target_width),
    )


def _count_patch_values(architecture: Architecture) -> int:
    return architecture.patch_size**2 * architecture.channels


def _count_mask_bytes(architecture: Architecture, tokens: int) -> int:
    return MASK_BYTES * tokens * architecture.hidden if architecture.dropout else 0


def _build_head(architecture: Architecture) -> Attachment:
    if architecture.family is Family.DIFFUSION:
        return _build_denoiser_head(architecture)
    return _build_class_head(architecture) if architecture.classes else _build_token_head(architecture)


def _build_token_head(architecture: Architecture) -> Attachment:
    """Return the projection to the vocabulary with cross-entropy, whose logits exist in bf16 and in fp32.

    It includes the final norm of each stack, or BERT's dense layer, norm and bias per token. Their activations are left
    out, because they are small compared to the logits.
    """
    h, tokens = architecture.hidden, architecture.target_length or architecture.sequence_length
    logits = tokens * architecture.vocabulary
    dense = h * h if architecture.family is Family.ENCODER else 0
    biases = h + architecture.vocabulary if dense else 0
    norms = architecture.norm_parameters * (2 if architecture.decoder_layers else 1)
    return Attachment(
        flops_per_sample=2.0 * (logits * h + tokens * dense),
        parameters=architecture.vocabulary * h + dense + biases + norms,
        activation_bytes_per_sample=logits * (VALUE_BYTES + LOSS_VALUE_BYTES),
        columns=architecture.vocabulary,
    )


def _build_class_head(architecture: Architecture) -> Attachment:
    """Return the head over the first token: behind a final norm in ViT, behind a dense layer (the pooler) in BERT."""
    h = architecture.hidden
    front = h * h + h if architecture.family is Family.ENCODER else architecture.norm_parameters
    dense = h * h if architecture.family is Family.ENCODER else 0
    return Attachment(
        flops_per_sample=2.0 * (dense + h * architecture.classes),
        parameters=front + h * architecture.classes + architecture.classes,
        activation_bytes_per_sample=architecture.classes * (VALUE_BYTES + LOSS_VALUE_BYTES),
    )


def _build_denoiser_head(architecture: Architecture) -> Attachment:
    """Return the scale and shift of the last norm, and the product that predicts the values of each patch."""
    h, pixels = architecture.hidden, _count_patch_values(architecture)
    patches = architecture.sequence_length - architecture.target_length
    return Attachment(
        flops_per_sample=2.0 * (2 * h * h + patches * h * pixels),
        parameters=2 * h * h + h * pixels + pixels,
        activation_bytes_per_sample=patches * pixels * (VALUE_BYTES + LOSS_VALUE_BYTES),
    )


_LAYERS = {Family.ENCODER_DECODER: _build_encoder_decoder, Family.DIFFUSION: _build_denoiser}
_EMBEDDINGS = {
    Family.ENCODER_DECODER: _build_encoder_decoder_embedding,
    Family.VISION: _build_patch_embedding,
    Family.DIFFUSION: _build_denoiser_embedding,
}
