"""Costs of the residual blocks of a transformer's layer, by published formulas.

Kept activations follow Korthikanti et al. (arXiv 2205.05198), section 4.1 and equation 2; flops follow Narayanan et
al., SC'21 (arXiv 2104.04473), section 5.1. Traffic is counted from the element-wise kernels of a block as Megatron-LM
runs them: bias, dropout and residual fused into one kernel, all others separate. Each kernel reads its inputs and
writes its output once. Reads and writes of matrix products and of fused attention are not counted.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

from scheduler.solver.profiles.architecture import Architecture
from scheduler.solver.profiles.model_profile import REFERENCE_VALUE_BYTES as VALUE_BYTES

MASK_BYTES = 1
"""Bytes of a dropout mask per value."""


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


def sum_blocks(blocks: tuple[Block, ...]) -> Block:
    return Block(*map(sum, zip(*map(astuple, blocks), strict=True)))


def build_attention_block(
    architecture: Architecture, queries: int, keys: int, *, causal: bool = False, cross: bool = False, window: int = 0
) -> Block:
    """Return the block of norm, projections and attention of `queries` tokens over `keys` tokens, with its residual.

    With `cross`, keys and values come from the encoder's output. That tensor counts once per layer, although the layers
    of a stage share it. This upper bound also leaves room for its gradient.

    A stored score keeps 5 bytes (softmax, dropout mask and dropout output), or 2 without dropout.
    """
    h, query, key = architecture.hidden, architecture.query_width, architecture.key_width
    value, context = architecture.value_width, architecture.context_width
    scores = architecture.heads * queries * keys if architecture.stored_scores else 0
    score_bytes = scores * (2 * VALUE_BYTES + MASK_BYTES if architecture.dropout else VALUE_BYTES)
    # Product writes, softmax reads and writes, dropout reads, writes and masks, product reads.
    score_traffic = scores * (6 * VALUE_BYTES + MASK_BYTES if architecture.dropout else 4 * VALUE_BYTES)
    latent = _count_latent_values(architecture)
    normed = queries * query + keys * key if architecture.qk_norms else 0
    from_queries, from_keys = _count_projection_weights(architecture)
    pairs = _count_pairs(architecture, queries, keys, causal=causal, window=window)
    return Block(
        parameters=from_queries + from_keys + _count_small_parameters(architecture),
        flops=2.0 * (queries * from_queries + keys * from_keys),
        attention_flops=2.0 * pairs * (query + context),
        # Query and key are rotated or transposed, the context transposed back; values are read in place.
        traffic_bytes=_compute_residual_traffic(architecture, queries)
        + 2 * VALUE_BYTES * (queries * (query + context) + keys * key + normed + queries * latent)
        + score_traffic,
        split_bytes=VALUE_BYTES * (queries * (query + context) + keys * (key + value) + normed) + score_bytes,
        # A latent vector is kept before and behind its norm.
        replicated_bytes=_compute_residual_bytes(architecture, queries)
        + 2 * VALUE_BYTES * queries * latent
        + (VALUE_BYTES * keys * h if cross else 0),
        score_bytes=score_bytes,
    )


def _count_pairs(architecture: Architecture, queries: int, keys: int, *, causal: bool, window: int) -> float:
    """Return the pairs of query and key that attention computes.

    These are all pairs if scores are stored, also under a causal mask (as SC'21 counts), but only those that the mask
    leaves where FlashAttention-2 skips the others (arXiv 2307.08691, section 3.1).
    """
    if architecture.stored_scores:
        return queries * keys
    if not causal:
        return queries * min(window or keys, keys)
    return window * (keys - window / 2) if 0 < window < keys else queries * keys / 2


def _count_projection_weights(architecture: Architecture) -> tuple[int, int]:
    """Return the weights of products with the tokens that ask (query, output), and with those that are asked."""
    h, latent = architecture.hidden, architecture.latent_attention
    output = architecture.context_width * h
    if latent is None:
        return h * architecture.query_width + output, h * (architecture.key_width + architecture.value_width)
    rank = latent.query_rank
    query = (h + architecture.query_width) * rank if rank else h * architecture.query_width
    expanded = architecture.heads * (architecture.head_width - latent.rotary_dim) + architecture.context_width
    return query + output, h * (latent.key_rank + latent.rotary_dim) + latent.key_rank * expanded


def _count_latent_values(architecture: Architecture) -> int:
    latent = architecture.latent_attention
    return latent.query_rank + latent.key_rank if latent else 0


def _count_small_parameters(architecture: Architecture) -> int:
    """Return the biases and norms of an attention block."""
    output = architecture.hidden if architecture.biases else 0
    has_biases = architecture.biases or architecture.qkv_biases
    inputs = architecture.query_width + architecture.key_width + architecture.value_width if has_biases else 0
    norms = 2 * architecture.head_width if architecture.qk_norms else 0
    return inputs + output + norms + _count_latent_values(architecture) + _count_norm_parameters(architecture)


def build_feed_forward_block(architecture: Architecture, tokens: int, *, has_experts: bool) -> Block:
    """Return the block of norm and two matrix products (three if gated) with an activation function, with its residual.

    A gated block keeps gate, activated gate, up projection and their product; a plain one keeps its two intermediate
    values. In a mixture of experts, a router selects `experts_per_token` experts for each token. No token is dropped,
    and each copy of a token is kept on the way to its expert and on the way back (MegaBlocks, arXiv 2211.15841).
    """
    h, matrices = architecture.hidden, 3 if architecture.gated_mlp else 2
    experts, copies = (architecture.experts, architecture.experts_per_token) if has_experts else (0, 1)
    width = (architecture.expert_ffn or architecture.ffn) if has_experts else architecture.ffn
    shared = architecture.shared_ffn if has_experts else 0
    expert = _count_weights(architecture, width)
    inner = round(tokens * (copies * width + shared))
    copied = round(tokens * copies * h) if has_experts else 0
    router = h * experts
    # GeLU reads and writes once. SiLU and product take between 3 (one fused kernel) and 5 (two kernels).
    kept = VALUE_BYTES * inner * (4 if architecture.gated_mlp else 2)
    return Block(
        parameters=expert * (experts or 1)
        + router
        + _count_norm_parameters(architecture)
        + (_count_weights(architecture, shared) if shared else 0),
        flops=2.0 * tokens * (matrices * h * (copies * width + shared) + router),
        # A copy is read and written on the way to its expert, and read again for the sum on the way back.
        traffic_bytes=_compute_residual_traffic(architecture, tokens) + kept + VALUE_BYTES * 3 * copied,
        split_bytes=kept,
        replicated_bytes=_compute_residual_bytes(architecture, tokens) + VALUE_BYTES * 2 * copied,
        expert_parameters=expert * experts,
    )


def _count_weights(architecture: Architecture, width: int) -> int:
    """Return the parameters of the products of a feed-forward block of this inner width."""
    h, matrices = architecture.hidden, 3 if architecture.gated_mlp else 2
    return matrices * h * width + ((matrices - 1) * width + h if architecture.biases else 0)


def build_modulation_block(architecture: Architecture, factors: int) -> Block:
    """Return the product of the time step's embedding that scales, shifts and gates a denoiser's blocks.

    It yields `factors` vectors per sample (adaLN-Zero of DiT, arXiv 2212.09748, section 3.2). Each one is applied to
    every token by a kernel that the residual and norm are fused with, so only its parameters and flops count.
    """
    weights = factors * architecture.hidden**2
    return Block(weights + factors * architecture.hidden, 2.0 * weights, 0, 0, 0)


def _count_norm_parameters(architecture: Architecture) -> int:
    return architecture.norm_parameters * (2 if architecture.output_norms else 1)


def _compute_residual_bytes(architecture: Architecture, tokens: int) -> int:
    """Return the bytes that tensor parallelism does not split: inputs of norms and products, and a dropout mask."""
    values = 3 if architecture.output_norms else 2
    return tokens * architecture.hidden * (values * VALUE_BYTES + (MASK_BYTES if architecture.dropout else 0))


def _compute_residual_traffic(architecture: Architecture, tokens: int) -> int:
    """Return the traffic of norms (one read, one write) and of the fused end (two reads, one write, and a mask)."""
    values = 7 if architecture.output_norms else 5
    return tokens * architecture.hidden * (values * VALUE_BYTES + (MASK_BYTES if architecture.dropout else 0))
