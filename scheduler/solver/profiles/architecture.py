"""Architecture: the sizes of a transformer, from which the figures of its layers are derived."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from scheduler.solver.profiles.profile_error import ProfileError, require_positive


class Family(StrEnum):
    """Which stacks a transformer has: GPT and Llama; BERT; T5; ViT."""

    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_DECODER = "encoder-decoder"
    VISION = "vision"


@dataclass(frozen=True, slots=True)
class Architecture:
    """A transformer; sizes are counts of values, not bytes, and 0 stands for what it does not have.

    Attributes:
        layers: of the encoder where there are two stacks, with `decoder_layers` in the other one.
        kv_heads: fewer than `heads` in grouped-query attention (arXiv 2305.13245); 0 for as many.
        head_dim: width of one head; 0 for hidden / heads.
        sequence_length: tokens that enter the first stack; `target_length` those that enter the decoder of two.
        positions: rows of a learned position table. `token_types`: rows of BERT's segment table.
        relative_buckets: rows of a stack's relative position table (T5).
        classes: of a classification head; without it the head predicts tokens.
        image_size, patch_size: pixels along one side of a square. `channels` of a pixel.
        experts, experts_per_token: of a mixture of experts in each feed-forward block.
        frozen_layers: so many layers from the first one on are not trained.
        biases: in each product, with norms that shift (LayerNorm); `qkv_biases` in those of query, key and value alone.
        stored_scores: attention writes its scores to memory and keeps them; without it they are computed again in
            blocks, as in FlashAttention (arXiv 2205.14135).
    """

    family: Family
    layers: int
    hidden: int
    heads: int
    ffn: int
    sequence_length: int
    kv_heads: int = 0
    head_dim: int = 0
    vocabulary: int = 0
    decoder_layers: int = 0
    target_length: int = 0
    positions: int = 0
    token_types: int = 0
    relative_buckets: int = 0
    classes: int = 0
    image_size: int = 0
    patch_size: int = 0
    channels: int = 0
    experts: int = 0
    experts_per_token: int = 0
    frozen_layers: int = 0
    gated_mlp: bool = False
    biases: bool = False
    qkv_biases: bool = False
    dropout: bool = False
    stored_scores: bool = False
    tied_embedding: bool = False

    def __post_init__(self) -> None:
        sizes = ("layers", "hidden", "heads", "ffn", "sequence_length")
        require_positive("architecture", **{field: getattr(self, field) for field in sizes})
        if not self.head_dim and self.hidden % self.heads:
            allowed = f"it must divide hidden, which is {self.hidden}, or head_dim must be given"
            raise ProfileError(f"architecture: heads is {self.heads}; {allowed}")
        if self.heads % self.key_heads:
            raise ProfileError(f"architecture: kv_heads is {self.kv_heads}; it must divide heads ({self.heads})")
        self._check_experts()
        if self.frozen_layers > self.layers + self.decoder_layers:
            allowed = f"it must be at most {self.layers + self.decoder_layers}, the layers there are"
            raise ProfileError(f"architecture: frozen_layers is {self.frozen_layers}; {allowed}")
        if self.tied_embedding and self.classes:
            raise ProfileError("architecture: tied_embedding is true; it must be false with a head of classes")

    def _check_experts(self) -> None:
        chosen = self.experts_per_token
        if self.experts and not 1 <= chosen <= self.experts:
            allowed = f"it must be from 1 to experts ({self.experts})"
            raise ProfileError(f"architecture: experts_per_token is {chosen}; {allowed}")
        if chosen and not self.experts:
            raise ProfileError(f"architecture: experts_per_token is {chosen}; it must be 0 without experts")

    @property
    def key_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def query_width(self) -> int:
        """Values of one token's queries, all heads together."""
        return self.heads * (self.head_dim or self.hidden // self.heads)

    @property
    def key_width(self) -> int:
        """Values of one token's keys; its values are as wide."""
        return self.query_width // self.heads * self.key_heads

    @property
    def norm_parameters(self) -> int:
        """Scale, and shift where there are biases."""
        return (2 if self.biases else 1) * self.hidden
