"""The JSON form of an architecture: which sizes each family of transformers has, and what follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

from scheduler.solver.profiles.architecture import Architecture, Family
from scheduler.solver.profiles.profile_document import count, flag, flat, require_fields
from scheduler.solver.profiles.profile_error import ProfileError, require_not_negative, require_positive

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
    "experts_per_token": "experts",
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
_TOKENS = {"vocabulary", "sequence_length"}
_REQUIRED = {
    Family.DECODER: _TOKENS,
    Family.ENCODER: _TOKENS,
    Family.ENCODER_DECODER: _TOKENS | {"decoder_layers"},
    Family.VISION: {"image_size", "patch_size", "channels", "classes"},
}
_OPTIONAL = {
    Family.DECODER: {"learned_positions", "tied_embedding"},
    Family.ENCODER: {"learned_positions", "tied_embedding", "token_types", "classes"},
    Family.ENCODER_DECODER: {"tied_embedding", "target_length", "relative_buckets"},
    Family.VISION: set[str](),
}
_ALWAYS = {"layers", "hidden", "heads", "ffn"}
_COUNTS = {"kv_heads", "head_dim", "experts", "experts_per_token", "frozen_layers"}
_FLAGS = {"gated_mlp", "biases", "qkv_biases", "dropout", "stored_scores"}


def read_architecture(given: Mapping[str, Any], owner: str, sequence_length: int) -> Architecture:
    """The architecture in `given`, at `sequence_length` tokens (0 = its own).

    Targets grow with the sequence; a learned position table grows where it would be too short.

    Raises:
        ProfileError: a field is missing, unknown in its family or cannot be, or images do not have this many tokens.
    """
    family = _family(given, owner)
    optional = _OPTIONAL[family] | _COUNTS | _FLAGS | {"family"}
    require_fields(given, owner, _ALWAYS | _REQUIRED[family], optional)
    counts: dict[str, Any] = {
        field: count(given, field, unit, owner) for field, unit in _UNITS.items() if field in given
    }
    require_not_negative(owner, frozen_layers=counts.get("frozen_layers", 0))
    require_positive(owner, **{field: value for field, value in counts.items() if field != "frozen_layers"})
    flags: dict[str, Any] = {field: flag(given, field, owner) for field in sorted(_FLAGS | {"tied_embedding"})}
    own_length = _image_tokens(counts, owner, sequence_length) if family is Family.VISION else counts["sequence_length"]
    length = sequence_length or own_length
    learned = family is Family.VISION or flag(given, "learned_positions", owner)
    counts |= {"sequence_length": length, "positions": max(length, own_length) if learned else 0}
    if family is Family.ENCODER_DECODER:
        counts["target_length"] = ceil(counts.get("target_length", own_length) * length / own_length)
    return Architecture(family=family, **counts, **flags)


def _family(given: Mapping[str, Any], owner: str) -> Family:
    value = flat(given.get("family", Family.DECODER.value))
    if value not in list(Family):
        raise ProfileError(f"{owner}: family is {value!r}; allowed are {', '.join(Family)}")
    return Family(value)


def _image_tokens(counts: Mapping[str, int], owner: str, sequence_length: int) -> int:
    """One for each patch, and one that stands for the class (ViT, arXiv 2010.11929, section 3.1)."""
    image, patch = counts["image_size"], counts["patch_size"]
    if image % patch:
        raise ProfileError(f"{owner}: patch_size is {patch}; it must divide image_size, which is {image}")
    tokens = (image // patch) ** 2 + 1
    if sequence_length not in (0, tokens):
        raise ProfileError(
            f"sequence_length is {sequence_length}; images of {image} pixels in patches of {patch} give {tokens} tokens"
        )
    return tokens
