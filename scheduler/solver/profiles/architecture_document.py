"""The JSON form of an architecture."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

from scheduler.solver.profiles.architecture import Architecture, Family, LatentAttention
from scheduler.solver.profiles.profile_document import (
    ProfileError,
    read_count,
    read_flag,
    read_number,
    require_fields,
    require_non_negative,
    require_object,
    require_positive,
    unwrap_value,
)

_UNITS = {
    "layers": "layers",
    "decoder_layers": "layers",
    "single_layers": "layers",
    "frozen_layers": "layers",
    "hidden": "values",
    "heads": "heads",
    "kv_heads": "heads",
    "head_dim": "values",
    "value_dim": "values",
    "ffn": "values",
    "expert_ffn": "values",
    "shared_ffn": "values",
    "experts": "experts",
    "vocabulary": "tokens",
    "sequence_length": "tokens",
    "target_length": "tokens",
    "target_width": "values",
    "window": "tokens",
    "token_types": "types",
    "relative_buckets": "buckets",
    "classes": "classes",
    "image_size": "pixels",
    "patch_size": "pixels",
    "channels": "values",
}
_LATENT_UNITS = {"key_rank": "values", "rotary_dim": "values", "query_rank": "values"}
_TOKEN_FIELDS = {"vocabulary", "sequence_length"}
_IMAGE_FIELDS = {"image_size", "patch_size", "channels"}
_MIXTURE = {"experts", "experts_per_token", "expert_ffn", "shared_ffn", "dense_layers"}
_LOCAL = {"window", "global_layers"}
_REQUIRED = {
    Family.DECODER: _TOKEN_FIELDS,
    Family.ENCODER: _TOKEN_FIELDS,
    Family.ENCODER_DECODER: _TOKEN_FIELDS | {"decoder_layers"},
    Family.VISION: _IMAGE_FIELDS | {"classes"},
    Family.DIFFUSION: _IMAGE_FIELDS,
}
_OPTIONAL = {
    Family.DECODER: {"learned_positions", "tied_embedding", "latent_attention", "value_dim"} | _MIXTURE | _LOCAL,
    Family.ENCODER: {"learned_positions", "tied_embedding", "token_types", "classes"} | _MIXTURE | _LOCAL,
    Family.ENCODER_DECODER: {
        *("learned_positions", "tied_embedding", "target_length", "relative_buckets", "channels"),
        *("experts", "experts_per_token"),
    },
    Family.VISION: {"experts", "experts_per_token"},
    Family.DIFFUSION: {"single_layers", "target_length", "target_width"},
}
_COMMON_FIELDS = {"layers", "hidden", "heads", "ffn"}
_OPTIONAL_COUNTS = {"kv_heads", "head_dim", "frozen_layers"}
_FLAGS = {"gated_mlp", "biases", "qkv_biases", "qk_norms", "output_norms", "dropout", "stored_scores"}


def parse_architecture(given: Mapping[str, Any], owner: str, sequence_length: int) -> Architecture:
    """Parse an architecture at `sequence_length` tokens; 0 keeps its own length.

    Targets scale with the sequence. A learned position table grows if it would be too short.

    Raises:
        ProfileError: a field is missing, unknown in this family or out of range, or images have another number of
            tokens.
    """
    family = _parse_family(given, owner)
    require_fields(
        given, owner, _COMMON_FIELDS | _REQUIRED[family], _OPTIONAL[family] | _OPTIONAL_COUNTS | _FLAGS | {"family"}
    )
    values: dict[str, Any] = {
        field: read_count(given, field, unit, owner) for field, unit in _UNITS.items() if field in given
    }
    if "experts_per_token" in given:
        values["experts_per_token"] = read_number(given, "experts_per_token", "experts", owner)
    require_non_negative(owner, frozen_layers=values.get("frozen_layers", 0))
    require_positive(owner, **{field: value for field, value in values.items() if field != "frozen_layers"})
    values |= {field: read_flag(given, field, owner) for field in sorted(_FLAGS | {"tied_embedding"})}
    values |= {field: _parse_numbers(given, field, owner) for field in ("global_layers", "dense_layers")}
    if "latent_attention" in given:
        values["latent_attention"] = _parse_latent_attention(given["latent_attention"], f"{owner}: latent_attention")
    has_images = family in (Family.VISION, Family.DIFFUSION)
    own_length = _count_image_tokens(values, family, owner) if has_images else values["sequence_length"]
    length = sequence_length or own_length
    if has_images and length != own_length:
        raise ProfileError(
            f"sequence_length is {length}; images of {values['image_size']} pixels in patches of "
            f"{values['patch_size']} give {own_length} tokens"
        )
    learned = family is Family.VISION or read_flag(given, "learned_positions", owner)
    values |= {"sequence_length": length, "positions": max(length, own_length) if learned else 0}
    if family is Family.ENCODER_DECODER:
        values["target_length"] = ceil(values.get("target_length", own_length) * length / own_length)
    return Architecture(family=family, **values)


def _parse_family(given: Mapping[str, Any], owner: str) -> Family:
    value = unwrap_value(given.get("family", Family.DECODER.value))
    if value not in list(Family):
        raise ProfileError(f"{owner}: family is {value!r}; allowed are {', '.join(Family)}")
    return Family(value)


def _parse_numbers(given: Mapping[str, Any], field: str, owner: str) -> tuple[int, ...]:
    numbers = unwrap_value(given.get(field, []))
    if not isinstance(numbers, list):
        raise ProfileError(f"{owner}: {field} is {numbers!r}; it must be a list of layer numbers, the first one is 0")
    return tuple(read_count({field: number}, field, "layers", owner) for number in numbers)


def _parse_latent_attention(item: Any, owner: str) -> LatentAttention:
    given = require_object(item, owner)
    require_fields(given, owner, {"key_rank", "rotary_dim"}, {"query_rank"})
    return LatentAttention(**{field: read_count(given, field, _LATENT_UNITS[field], owner) for field in given})


def _count_image_tokens(values: Mapping[str, Any], family: Family, owner: str) -> int:
    """Return one token per patch, plus the class token (ViT, arXiv 2010.11929, section 3.1) or the text."""
    image, patch = values["image_size"], values["patch_size"]
    if image % patch:
        raise ProfileError(f"{owner}: patch_size is {patch}; it must divide image_size, which is {image}")
    others: int = 1 if family is Family.VISION else values.get("target_length", 0)
    patches: int = (image // patch) ** 2
    return patches + others
