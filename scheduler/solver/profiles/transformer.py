"""The profile of a transformer, derived from its architecture by published formulas.

A layer consists of residual blocks. Kept activations follow Korthikanti et al. (arXiv 2205.05198), section 4.1 and
equation 2; flops follow Narayanan et al., SC'21 (arXiv 2104.04473), section 5.1. Traffic is counted from the
element-wise kernels of a block as Megatron-LM runs them: bias, dropout and residual fused into one kernel, all others
separate. Each kernel reads its inputs and writes its output once. Reads and writes of matrix products and of fused
attention are not counted.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace

from scheduler.solver.profiles.architecture import Architecture, Family
from scheduler.solver.profiles.model_profile import REFERENCE_VALUE_BYTES as VALUE_BYTES
from scheduler.solver.profiles.model_profile import (
    Attachment,
    LayerProfile,
    ModelProfile,
    freeze_layers,
)

MASK_BYTES = 1
"""Bytes of a dropout mask per value."""

LOSS_VALUE_BYTES = 4
"""The loss is computed on fp32 logits."""


@dataclass(frozen=True, slots=True)
class Block:
    """One residual block of one layer: costs of one sample's forward pass, with two bytes per activation value.

    Attributes:
        flops: of the products with weights; `attention_flops` are those of the attention core.
        split_bytes: kept, and split by tensor parallelism; `score_bytes` of them are attention scores and their masks.
        replicated_bytes: kept in full by each tensor-parallel rank.
        expert_parameters: part of `parameters` that belongs to experts.
    """

    parameters: int
    flops: float
    traffic_bytes: int
    split_bytes: int
    replicated_bytes: int
    attention_flops: float = 0.0
    score_bytes: int = 0
    expert_parameters: int = 0


def build_attention_block(
    architecture: Architecture, queries: int, keys: int, *, causal: bool = False, cross: bool = False
) -> Block:
    """Return the block of norm, projections and attention of `queries` tokens over `keys` tokens, with its residual.

    With `cross`, keys and values come from the encoder's output. That tensor counts once per layer, although the layers
    of a stage share it. This upper bound also leaves room for its gradient.

    The core costs 4 flops per pair of query and key and per value of their heads. The count is what actually runs: all
    pairs if scores are stored, also under a `causal` mask (as SC'21 counts), but half of them where FlashAttention-2
    skips the masked pairs (arXiv 2307.08691, section 3.1). A stored score keeps 5 bytes (softmax, dropout mask and
    dropout output), or 2 without dropout.
    """
    h, query, key = architecture.hidden, architecture.query_width, architecture.key_width
    biases = (
        query + 2 * key + (h if architecture.biases else 0) if architecture.biases or architecture.qkv_biases else 0
    )
    scores = architecture.heads * queries * keys if architecture.stored_scores else 0
    score_bytes = scores * (2 * VALUE_BYTES + MASK_BYTES if architecture.dropout else VALUE_BYTES)
    # Product writes, softmax reads and writes, dropout reads, writes and masks, product reads.
    score_traffic = scores * (6 * VALUE_BYTES + MASK_BYTES if architecture.dropout else 4 * VALUE_BYTES)
    return Block(
        parameters=2 * h * query + 2 * h * key + biases + architecture.norm_parameters,
        flops=2.0 * (queries * 2 * h * query + keys * 2 * h * key),
        attention_flops=(2.0 if causal and not architecture.stored_scores else 4.0) * queries * keys * query,
        # Query and key are rotated or transposed, the context transposed back; values are read in place.
        traffic_bytes=_compute_residual_traffic(architecture, queries)
        + 2 * VALUE_BYTES * (2 * queries * query + keys * key)
        + score_traffic,
        split_bytes=VALUE_BYTES * (2 * queries * query + 2 * keys * key) + score_bytes,
        replicated_bytes=_compute_residual_bytes(architecture, queries) + (VALUE_BYTES * keys * h if cross else 0),
        score_bytes=score_bytes,
    )


def build_feed_forward_block(architecture: Architecture, tokens: int) -> Block:
    """Return the block of norm and two matrix products (three if gated) with an activation function, with its residual.

    A gated block keeps gate, activated gate, up projection and their product; a plain one keeps its two intermediate
    values. In a mixture of experts, a router selects `experts_per_token` experts for each token. No token is dropped,
    and each copy of a token is kept on the way to its expert and on the way back (MegaBlocks, arXiv 2211.15841).
    """
    h, matrices = architecture.hidden, 3 if architecture.gated_mlp else 2
    copies = architecture.experts_per_token or 1
    biases = (matrices - 1) * architecture.ffn + h if architecture.biases else 0
    expert = matrices * h * architecture.ffn + biases
    router = h * architecture.experts
    inner = round(tokens * copies * architecture.ffn)
    # GeLU reads and writes once. SiLU and product take between 3 (one fused kernel) and 5 (two kernels).
    traffic = VALUE_BYTES * inner * (4 if architecture.gated_mlp else 2)
    copied = round(tokens * copies * h) if architecture.experts else 0
    return Block(
        parameters=expert * (architecture.experts or 1) + router + architecture.norm_parameters,
        flops=2.0 * tokens * (copies * matrices * h * architecture.ffn + router),
        # A copy is read and written on the way to its expert, and read again for the sum on the way back.
        traffic_bytes=_compute_residual_traffic(architecture, tokens) + traffic + VALUE_BYTES * 3 * copied,
        split_bytes=VALUE_BYTES * inner * (4 if architecture.gated_mlp else 2),
        replicated_bytes=_compute_residual_bytes(architecture, tokens) + VALUE_BYTES * 2 * copied,
        expert_parameters=expert * architecture.experts,
    )


def _compute_residual_bytes(architecture: Architecture, tokens: int) -> int:
    """Return the bytes that tensor parallelism does not split: inputs of norm and products, and a dropout mask."""
    return tokens * architecture.hidden * (2 * VALUE_BYTES + (MASK_BYTES if architecture.dropout else 0))


def _compute_residual_traffic(architecture: Architecture, tokens: int) -> int:
    """Return the traffic of the norm (one read, one write) and of the fused end (two reads, one write, and a mask)."""
    return tokens * architecture.hidden * (5 * VALUE_BYTES + (MASK_BYTES if architecture.dropout else 0))


def build_transformer_profile(name: str, architecture: Architecture) -> ModelProfile:
    """Return the ModelProfile of `architecture` at its sequence length."""
    runs = (
        _build_encoder_decoder(architecture)
        if architecture.family is Family.ENCODER_DECODER
        else [_build_single_stack(architecture)]
    )
    return ModelProfile(
        name=name,
        sequence_length=architecture.sequence_length,
        layers=freeze_layers(runs, architecture.frozen_layers),
        embedding=_build_embedding(architecture),
        head=_build_class_head(architecture) if architecture.classes else _build_token_head(architecture),
        tied_embedding=architecture.tied_embedding,
    )


def _build_single_stack(architecture: Architecture) -> LayerProfile:
    tokens, causal = architecture.sequence_length, architecture.family is Family.DECODER
    blocks = (
        build_attention_block(architecture, tokens, tokens, causal=causal),
        build_feed_forward_block(architecture, tokens),
    )
    return _build_layer_run(architecture, architecture.layers, tokens, blocks)


def _build_encoder_decoder(architecture: Architecture) -> list[LayerProfile]:
    """Return encoder and decoder, with cross attention over the encoder's output, as two runs of one chain.

    The boundary is the same along the chain. The first stage embeds both inputs and targets, so only this stage holds
    the table. The embedded targets pass through the encoder, and the encoder's output passes through the decoder. Full
    recompute keeps that whole boundary with each layer. This is an upper bound, since the tensor passed along is one.
    """
    inputs, targets = architecture.sequence_length, architecture.target_length
    encoder = _build_layer_run(
        architecture,
        architecture.layers,
        inputs,
        (build_attention_block(architecture, inputs, inputs), build_feed_forward_block(architecture, inputs)),
    )
    blocks = (
        build_attention_block(architecture, targets, targets, causal=True),
        build_attention_block(architecture, targets, inputs, cross=True),
        build_feed_forward_block(architecture, targets),
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
        boundary_bytes_per_sample=VALUE_BYTES * tokens * architecture.hidden,
        tokens_per_sample=tokens,
        heads=architecture.num_kv_heads,
        attention_heads=architecture.heads,
        head_width=architecture.query_width // architecture.heads,
        expert_parameters=layer.expert_parameters,
        experts=architecture.experts,
        experts_per_token=architecture.experts_per_token,
    )


def _build_embedding(architecture: Architecture) -> Attachment:
    """Return the tables of tokens, positions and token types (with BERT's norm), or ViT's product with patches."""
    h, tokens = architecture.hidden, architecture.sequence_length + architecture.target_length
    masks = MASK_BYTES * tokens * h if architecture.dropout else 0
    positions = architecture.positions * h + architecture.relative_buckets * architecture.heads * (
        2 if architecture.decoder_layers else 1
    )
    if architecture.family is Family.VISION:
        patches, pixels = tokens - 1, architecture.patch_size**2 * architecture.channels
        return Attachment(
            flops_per_sample=2.0 * patches * pixels * h,
            parameters=pixels * h + h + h + positions,
            activation_bytes_per_sample=VALUE_BYTES * patches * pixels + masks,
        )
    rows = architecture.vocabulary + architecture.token_types
    if architecture.family is not Family.ENCODER:
        return Attachment(parameters=rows * h + positions, activation_bytes_per_sample=masks)
    return Attachment(
        parameters=rows * h + positions + architecture.norm_parameters,
        activation_bytes_per_sample=VALUE_BYTES * tokens * h + masks,
    )


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
