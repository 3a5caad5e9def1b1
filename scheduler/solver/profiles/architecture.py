"""The architecture of a transformer, from which the costs of its layers are derived, and its JSON form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import ceil
from typing import Any

from scheduler.solver.profiles.profile_document import (
    ProfileError,
    read_count,
    read_flag,
    read_number,
    require_fields,
    require_non_negative,
    require_positive,
    unwrap_value,
)


class Family(StrEnum):
    """The kind of a transformer.

    Decoder (GPT, Llama), encoder (BERT), both (T5), or encoder over image patches (ViT).
    """

    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_DECODER = "encoder-decoder"
    VISION = "vision"


@dataclass(frozen=True, slots=True)
class Architecture:
    """A transformer. Sizes count values, not bytes; 0 means that the transformer has no such part.

    Attributes:
        layers: of the encoder if there are two stacks; `decoder_layers` are then those of the decoder.
        kv_heads: fewer than `heads` in grouped-query attention (arXiv 2305.13245); 0 for as many.
        head_dim: width of one head; 0 for hidden / heads.
        sequence_length: tokens that enter the first stack; `target_length` tokens enter the decoder of two stacks.
        positions: rows of a learned position table. `token_types`: rows of BERT's segment table.
        relative_buckets: rows of a stack's relative position table (T5).
        classes: of a classification head; without it, the head predicts tokens.
        image_size, patch_size: pixels along one side of a square; `channels` is the number of values per pixel.
        experts, experts_per_token: of a mixture of experts in each feed-forward block; the latter is a mean, so it may
            be a fraction.
        frozen_layers: number of layers, from the first one on, that are not trained.
        biases: each matrix product has a bias, and norms shift (LayerNorm); `qkv_biases`: only query, key and value
            have one.
        stored_scores: attention stores its scores in memory; otherwise they are recomputed in blocks, as in
            FlashAttention (arXiv 2205.14135).
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
    experts_per_token: float = 0
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
        if self.heads % self.num_kv_heads:
            raise ProfileError(f"architecture: kv_heads is {self.kv_heads}; it must divide heads ({self.heads})")
        self._check_experts()
        if self.frozen_layers > self.layers + self.decoder_layers:
            allowed = f"it must be at most {self.layers + self.decoder_layers}, the layers there are"
            raise ProfileError(f"architecture: frozen_layers is {self.frozen_layers}; {allowed}")
        if self.tied_embedding and self.classes:
            raise ProfileError("architecture: tied_embedding is true; it must be false with a head of classes")

    def _check_experts(self) -> None:
        per_token = self.experts_per_token
        if self.experts and not 1 <= per_token <= self.experts:
            allowed = f"it must be from 1 to experts ({self.experts})"
            raise ProfileError(f"architecture: experts_per_token is {per_token}; {allowed}")
        if per_token and not self.experts:
            raise ProfileError(f"architecture: experts_per_token is {per_token}; it must be 0 without experts")

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def query_width(self) -> int:
        """Values of one token's queries, over all heads."""
        return self.heads * (self.head_dim or self.hidden // self.heads)

    @property
    def key_width(self) -> int:
        """Values of one token's keys, which is also the width of its values."""
        return self.query_width // self.heads * self.num_kv_heads

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm: a scale, and a shift if the model has biases."""
        return (2 if self.biases else 1) * self.hidden


_UNITS = {
    "layers": "layers",
    "decoder_layers": "layers",
    "frozen_layers": "layers",
    "hidden": "values",
    "heads": "heads",
    "kv_heads": "heads",
    "head_dim": "values",
    "ffn": "values",
    "experts": "experts",
    "vocabulary": "tokens",
    "sequence_length": "tokens",
    "target_length": "tokens",
    "token_types": "types",
    "relative_buckets": "buckets",
    "classes": "classes",
    "image_size": "pixels",
    "patch_size": "pixels",
    "channels": "values",
}
_TOKEN_FIELDS = {"vocabulary", "sequence_length"}
_REQUIRED = {
    Family.DECODER: _TOKEN_FIELDS,
    Family.ENCODER: _TOKEN_FIELDS,
    Family.ENCODER_DECODER: _TOKEN_FIELDS | {"decoder_layers"},
    Family.VISION: {"image_size", "patch_size", "channels", "classes"},
}
_OPTIONAL = {
    Family.DECODER: {"learned_positions", "tied_embedding"},
    Family.ENCODER: {"learned_positions", "tied_embedding", "token_types", "classes"},
    Family.ENCODER_DECODER: {"tied_embedding", "target_length", "relative_buckets"},
    Family.VISION: set[str](),
}
_COMMON_FIELDS = {"layers", "hidden", "heads", "ffn"}
_OPTIONAL_COUNTS = {"kv_heads", "head_dim", "experts", "experts_per_token", "frozen_layers"}
_FLAGS = {"gated_mlp", "biases", "qkv_biases", "dropout", "stored_scores"}


def parse_architecture(given: Mapping[str, Any], owner: str, sequence_length: int) -> Architecture:
    """Parse an architecture at `sequence_length` tokens; 0 keeps its own length.

    Targets scale with the sequence. A learned position table grows if it would be too short.

    Raises:
        ProfileError: a field is missing, unknown in this family or out of range, or images have another number of
            tokens.
    """
    family = _parse_family(given, owner)
    optional = _OPTIONAL[family] | _OPTIONAL_COUNTS | _FLAGS | {"family"}
    require_fields(given, owner, _COMMON_FIELDS | _REQUIRED[family], optional)
    counts: dict[str, Any] = {
        field: read_count(given, field, unit, owner) for field, unit in _UNITS.items() if field in given
    }
    if "experts_per_token" in given:
        counts["experts_per_token"] = read_number(given, "experts_per_token", "experts", owner)
    require_non_negative(owner, frozen_layers=counts.get("frozen_layers", 0))
    require_positive(owner, **{field: value for field, value in counts.items() if field != "frozen_layers"})
    flags: dict[str, Any] = {field: read_flag(given, field, owner) for field in sorted(_FLAGS | {"tied_embedding"})}
    own_length = (
        _count_image_tokens(counts, owner, sequence_length) if family is Family.VISION else counts["sequence_length"]
    )
    length = sequence_length or own_length
    learned = family is Family.VISION or read_flag(given, "learned_positions", owner)
    counts |= {"sequence_length": length, "positions": max(length, own_length) if learned else 0}
    if family is Family.ENCODER_DECODER:
        counts["target_length"] = ceil(counts.get("target_length", own_length) * length / own_length)
    return Architecture(family=family, **counts, **flags)


def _parse_family(given: Mapping[str, Any], owner: str) -> Family:
    value = unwrap_value(given.get("family", Family.DECODER.value))
    if value not in list(Family):
        raise ProfileError(f"{owner}: family is {value!r}; allowed are {', '.join(Family)}")
    return Family(value)


def _count_image_tokens(counts: Mapping[str, int], owner: str, sequence_length: int) -> int:
    """Return one token per patch, plus the class token (ViT, arXiv 2010.11929, section 3.1)."""
    image, patch = counts["image_size"], counts["patch_size"]
    if image % patch:
        raise ProfileError(f"{owner}: patch_size is {patch}; it must divide image_size, which is {image}")
    tokens = (image // patch) ** 2 + 1
    if sequence_length not in (0, tokens):
        raise ProfileError(
            f"sequence_length is {sequence_length}; images of {image} pixels in patches of {patch} give {tokens} tokens"
        )
    return tokens
