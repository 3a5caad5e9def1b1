"""The layer figures of a decoder-only transformer, derived from its architecture by published formulas."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.solver.profiles.model_profile import REFERENCE_VALUE_BYTES, Attachment, LayerProfile, ModelProfile
from scheduler.solver.profiles.profile_error import ProfileError, require_positive

LOSS_VALUE_BYTES = 4
"""The loss is computed on fp32 logits."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder-only transformer with `layers` equal layers; sizes are counts of values, not bytes."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    sequence_length: int
    gated_mlp: bool = False
    biases: bool = False
    dropout: bool = False
    learned_positions: bool = False
    tied_embedding: bool = False

    def __post_init__(self) -> None:
        require_positive(
            "architecture",
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.kv_heads,
            ffn=self.ffn,
            vocabulary=self.vocabulary,
            sequence_length=self.sequence_length,
        )
        if self.hidden % self.heads:
            raise ProfileError(f"architecture: heads is {self.heads}; it must divide hidden, which is {self.hidden}")
        if self.heads % self.kv_heads:
            raise ProfileError(f"architecture: kv_heads is {self.kv_heads}; it must divide heads ({self.heads})")


def transformer_profile(name: str, architecture: Architecture) -> ModelProfile:
    """The ModelProfile of `architecture` at its sequence length."""
    positions = architecture.sequence_length if architecture.learned_positions else 0
    embedding = Attachment(parameters=(architecture.vocabulary + positions) * architecture.hidden)
    return ModelProfile(
        name=name,
        sequence_length=architecture.sequence_length,
        layers=(_layer(architecture),),
        embedding=embedding,
        head=_head(architecture),
        tied_embedding=architecture.tied_embedding,
    )


def _layer(of: Architecture) -> LayerProfile:
    """One decoder layer.

    Flops: 2 per weight of a matrix and token, and 4 s^2 h for the two products of attention, counted in full as
    in Narayanan et al., SC'21 (arXiv 2104.04473), section 5.1. Activations: Korthikanti et al. (arXiv 2205.05198),
    section 4.1, without the 5 a s^2 term, which FlashAttention (arXiv 2205.14135) never stores.
    """
    s, h = of.sequence_length, of.hidden
    kv = h * of.kv_heads // of.heads
    mlp_matrices = 3 if of.gated_mlp else 2
    matrices = 2 * h * h + 2 * h * kv + mlp_matrices * h * of.ffn
    # Biases: of query and output, key and value, the MLP's inner matrices and its last one, and the two norms.
    vectors = 2 * h + 2 * kv + (mlp_matrices - 1) * of.ffn + h + 2 * h if of.biases else 0
    # A gated MLP keeps gate, activated gate, up and their product; a plain one its two intermediate values.
    mlp_values = (4 if of.gated_mlp else 2) * of.ffn
    masks = 2 * h if of.dropout else 0
    return LayerProfile(
        layers=of.layers,
        flops_per_sample=2.0 * s * matrices + 4.0 * s * s * h,
        parameters=matrices + vectors + 2 * h,
        activation_bytes_per_sample=s * REFERENCE_VALUE_BYTES * (2 * h + 2 * kv + mlp_values),
        replicated_activation_bytes_per_sample=s * (REFERENCE_VALUE_BYTES * 4 * h + masks),
        boundary_bytes_per_sample=s * h * REFERENCE_VALUE_BYTES,
        heads=of.kv_heads,
    )


def _head(of: Architecture) -> Attachment:
    """Final norm, projection to the vocabulary and cross-entropy: logits once in bf16 and once in fp32."""
    logits = of.sequence_length * of.vocabulary
    return Attachment(
        flops_per_sample=2.0 * logits * of.hidden,
        parameters=of.vocabulary * of.hidden + (2 if of.biases else 1) * of.hidden,
        activation_bytes_per_sample=logits * (REFERENCE_VALUE_BYTES + LOSS_VALUE_BYTES),
    )
