"""The residual blocks that a transformer layer is made of: what each computes, moves and keeps, by published formulas.

Kept activations follow Korthikanti et al. (arXiv 2205.05198), section 4.1 and its equation 2, and flops follow
Narayanan et al., SC'21 (arXiv 2104.04473), section 5.1. Traffic is counted from the element-wise kernels of a block as
Megatron-LM runs them: bias, dropout and residual fused into one, all others alone. Each reads its inputs and writes
its output once; what a matrix product or a fused attention kernel reads and writes is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.solver.profiles.architecture import Architecture
from scheduler.solver.profiles.model_profile import REFERENCE_VALUE_BYTES as VALUE

MASK = 1
"""Bytes of a dropout mask for one value."""


@dataclass(frozen=True, slots=True)
class Block:
    """One block of one layer; figures of one sample in the forward pass, activations at two bytes a value.

    Attributes:
        flops: of the products with weights; `attention_flops` of the attention core.
        split_bytes: kept, and split by tensor parallelism; `score_bytes` of them are attention scores and their masks.
        replicated_bytes: kept, and held in full by each tensor-parallel rank.
        expert_parameters: those of `parameters` that lie in experts.
    """

    parameters: int
    flops: float
    traffic_bytes: int
    split_bytes: int
    replicated_bytes: int
    attention_flops: float = 0.0
    score_bytes: int = 0
    expert_parameters: int = 0


def attention_block(of: Architecture, queries: int, keys: int, *, causal: bool = False, cross: bool = False) -> Block:
    """Norm, projections and attention of `queries` tokens over `keys` tokens, added to its input.

    With `cross` the keys and values come from the encoder's output. That tensor is counted with each layer, though
    the layers of a stage share it: an upper bound, which also leaves room for its gradient.

    The core costs 4 flops for each pair of query and key and each value of their heads. That is what runs, so it is in
    full where scores are stored, also under a `causal` mask (as SC'21 counts), but half of it where FlashAttention-2
    skips the pairs that the mask hides (arXiv 2307.08691, section 3.1). A stored score keeps 5 bytes: the softmax, its
    dropout's mask and output; 2 without dropout.
    """
    h, query, key = of.hidden, of.query_width, of.key_width
    biases = query + 2 * key + (h if of.biases else 0) if of.biases or of.qkv_biases else 0
    scores = of.heads * queries * keys if of.stored_scores else 0
    score_bytes = scores * (2 * VALUE + MASK if of.dropout else VALUE)
    # Product writes, softmax reads and writes, dropout reads, writes and masks, product reads.
    score_traffic = scores * (6 * VALUE + MASK if of.dropout else 4 * VALUE)
    return Block(
        parameters=2 * h * query + 2 * h * key + biases + of.norm_parameters,
        flops=2.0 * (queries * 2 * h * query + keys * 2 * h * key),
        attention_flops=(2.0 if causal and not of.stored_scores else 4.0) * queries * keys * query,
        # Query and key are rotated or transposed, the context transposed back; values are read where they lie.
        traffic_bytes=_residual_traffic(of, queries) + 2 * VALUE * (2 * queries * query + keys * key) + score_traffic,
        split_bytes=VALUE * (2 * queries * query + 2 * keys * key) + score_bytes,
        replicated_bytes=_residual_bytes(of, queries) + (VALUE * keys * h if cross else 0),
        score_bytes=score_bytes,
    )


def feed_forward_block(of: Architecture, tokens: int) -> Block:
    """Norm and two products with an activation function between them (three where it is gated), added to its input.

    A gated one keeps gate, activated gate, up and their product; a plain one its two intermediate values. In a mixture
    of experts a router picks `experts_per_token` of them for each token; no token is dropped, and each copy of a token
    is kept on the way in and on the way out (MegaBlocks, arXiv 2211.15841).
    """
    h, matrices = of.hidden, 3 if of.gated_mlp else 2
    copies = of.experts_per_token or 1
    biases = (matrices - 1) * of.ffn + h if of.biases else 0
    expert = matrices * h * of.ffn + biases
    router = h * of.experts
    inner = tokens * copies * of.ffn
    # GeLU reads and writes. SiLU and product: between the 3 of one fused kernel and the 5 of two.
    traffic = VALUE * inner * (4 if of.gated_mlp else 2)
    copied = tokens * copies * h if of.experts else 0
    return Block(
        parameters=expert * (of.experts or 1) + router + of.norm_parameters,
        flops=2.0 * tokens * (copies * matrices * h * of.ffn + router),
        # Copies are read and written once on the way in, and read on the way out to give one sum.
        traffic_bytes=_residual_traffic(of, tokens) + traffic + VALUE * 3 * copied,
        split_bytes=VALUE * inner * (4 if of.gated_mlp else 2),
        replicated_bytes=_residual_bytes(of, tokens) + VALUE * 2 * copied,
        expert_parameters=expert * of.experts,
    )


def _residual_bytes(of: Architecture, tokens: int) -> int:
    """Kept outside tensor parallelism: the input of the norm, that of the block's products, and a dropout mask."""
    return tokens * of.hidden * (2 * VALUE + (MASK if of.dropout else 0))


def _residual_traffic(of: Architecture, tokens: int) -> int:
    """The norm reads and writes; the fused end reads two values and writes one, and a mask where it drops."""
    return tokens * of.hidden * (5 * VALUE + (MASK if of.dropout else 0))
