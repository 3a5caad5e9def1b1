"""The profile of a transformer, derived from its architecture: layers from their blocks, and what hangs on the ends."""

from __future__ import annotations

from dataclasses import astuple, replace

from scheduler.solver.profiles.architecture import Architecture, Family
from scheduler.solver.profiles.layer_blocks import MASK, Block, attention_block, feed_forward_block
from scheduler.solver.profiles.model_profile import (
    REFERENCE_VALUE_BYTES,
    Attachment,
    LayerProfile,
    ModelProfile,
    frozen_runs,
)

LOSS_VALUE_BYTES = 4
"""The loss is computed on fp32 logits."""


def transformer_profile(name: str, architecture: Architecture) -> ModelProfile:
    """The ModelProfile of `architecture` at its sequence length."""
    runs = _two_stacks(architecture) if architecture.family is Family.ENCODER_DECODER else [_one_stack(architecture)]
    return ModelProfile(
        name=name,
        sequence_length=architecture.sequence_length,
        layers=frozen_runs(runs, architecture.frozen_layers),
        embedding=_embedding(architecture),
        head=_class_head(architecture) if architecture.classes else _token_head(architecture),
        tied_embedding=architecture.tied_embedding,
    )


def _one_stack(of: Architecture) -> LayerProfile:
    tokens, causal = of.sequence_length, of.family is Family.DECODER
    blocks = attention_block(of, tokens, tokens, causal=causal), feed_forward_block(of, tokens)
    return _run(of, of.layers, tokens, blocks)


def _two_stacks(of: Architecture) -> list[LayerProfile]:
    """Encoder, then decoder with cross attention over the encoder's output, as two runs of one chain.

    The boundary is the same all along the chain: the first stage embeds inputs and targets alike, the embedded targets
    pass through the encoder, and the encoder's output passes through the decoder. So the table lies in the first stage
    alone. Full recompute keeps that boundary with each layer: an upper bound, since the passenger is one tensor.
    """
    inputs, targets = of.sequence_length, of.target_length
    encoder = _run(of, of.layers, inputs, (attention_block(of, inputs, inputs), feed_forward_block(of, inputs)))
    blocks = (
        attention_block(of, targets, targets, causal=True),
        attention_block(of, targets, inputs, cross=True),
        feed_forward_block(of, targets),
    )
    decoder = _run(of, of.decoder_layers, targets, blocks)
    boundary = REFERENCE_VALUE_BYTES * (inputs + targets) * of.hidden
    # Forward, each block reduces its output; backward, the gradient of its inputs. Rounded up to whole boundaries.
    return [
        replace(encoder, boundary_bytes_per_sample=boundary, tensor_messages=-(-2 * inputs // (inputs + targets))),
        replace(
            decoder,
            boundary_bytes_per_sample=boundary,
            tensor_messages=-(-(6 * targets + inputs) // (2 * (inputs + targets))),
        ),
    ]


def _run(of: Architecture, layers: int, tokens: int, blocks: tuple[Block, ...]) -> LayerProfile:
    layer = Block(*map(sum, zip(*map(astuple, blocks), strict=True)))
    return LayerProfile(
        layers=layers,
        flops_per_sample=layer.flops,
        attention_flops_per_sample=layer.attention_flops,
        traffic_bytes_per_sample=layer.traffic_bytes,
        parameters=layer.parameters,
        activation_bytes_per_sample=layer.split_bytes,
        selective_bytes_per_sample=layer.score_bytes,
        replicated_activation_bytes_per_sample=layer.replicated_bytes,
        boundary_bytes_per_sample=REFERENCE_VALUE_BYTES * tokens * of.hidden,
        tokens_per_sample=tokens,
        heads=of.key_heads,
        attention_heads=of.heads,
        expert_parameters=layer.expert_parameters,
        experts=of.experts,
        experts_per_token=of.experts_per_token,
    )


def _embedding(of: Architecture) -> Attachment:
    """Tables of tokens, positions and token types (with BERT's norm behind them), or ViT's product with patches."""
    h, tokens = of.hidden, of.sequence_length + of.target_length
    masks = MASK * tokens * h if of.dropout else 0
    positions = of.positions * h + of.relative_buckets * of.heads * (2 if of.decoder_layers else 1)
    if of.family is Family.VISION:
        patches, pixels = tokens - 1, of.patch_size**2 * of.channels
        return Attachment(
            flops_per_sample=2.0 * patches * pixels * h,
            parameters=pixels * h + h + h + positions,
            activation_bytes_per_sample=REFERENCE_VALUE_BYTES * patches * pixels + masks,
        )
    rows = of.vocabulary + of.token_types
    if of.family is not Family.ENCODER:
        return Attachment(parameters=rows * h + positions, activation_bytes_per_sample=masks)
    return Attachment(
        parameters=rows * h + positions + of.norm_parameters,
        activation_bytes_per_sample=REFERENCE_VALUE_BYTES * tokens * h + masks,
    )


def _token_head(of: Architecture) -> Attachment:
    """Projection to the vocabulary and cross-entropy: logits once in bf16 and once in fp32.

    In front of it stands the final norm of each stack, or BERT's dense layer and norm with the bias of each token. What
    these keep is left out; it is small beside the logits.
    """
    h, tokens = of.hidden, of.target_length or of.sequence_length
    logits = tokens * of.vocabulary
    dense = h * h if of.family is Family.ENCODER else 0
    biases = h + of.vocabulary if dense else 0
    norms = of.norm_parameters * (2 if of.decoder_layers else 1)
    return Attachment(
        flops_per_sample=2.0 * (logits * h + tokens * dense),
        parameters=of.vocabulary * h + dense + biases + norms,
        activation_bytes_per_sample=logits * (REFERENCE_VALUE_BYTES + LOSS_VALUE_BYTES),
        columns=of.vocabulary,
    )


def _class_head(of: Architecture) -> Attachment:
    """One product with the first token: behind a final norm in ViT, behind a dense layer (the pooler) in BERT."""
    h = of.hidden
    front = h * h + h if of.family is Family.ENCODER else of.norm_parameters
    dense = h * h if of.family is Family.ENCODER else 0
    return Attachment(
        flops_per_sample=2.0 * (dense + h * of.classes),
        parameters=front + h * of.classes + of.classes,
        activation_bytes_per_sample=of.classes * (REFERENCE_VALUE_BYTES + LOSS_VALUE_BYTES),
    )
