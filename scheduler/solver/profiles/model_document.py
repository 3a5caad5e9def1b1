"""The JSON form of a model profile.

Either an architecture, from which every figure is derived at any sequence length:

    {"name": "my-gpt", "architecture": {"layers": 12, "hidden": 768, "heads": 12, "kv_heads": 12, "ffn": 3072,
     "vocabulary": 50257, "sequence_length": 1024, "gated_mlp": false, "tied_embedding": true}}

or the figures of its layers at one sequence length, as in LayerProfile and Attachment:

    {"name": "my-net", "sequence_length": 512, "tied_embedding": false, "layers": [{"layers": 4,
     "flops_per_sample": 1e9, "parameters": 1000000, "activation_bytes_per_sample": 4000000,
     "replicated_activation_bytes_per_sample": 0, "boundary_bytes_per_sample": 500000, "heads": 8}],
     "embedding": {"parameters": 500000}, "head": {"flops_per_sample": 1e8, "parameters": 500000}}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from scheduler.solver.profiles.model_profile import Attachment, LayerProfile, ModelProfile
from scheduler.solver.profiles.profile_document import count, figure, flag, require_fields, require_object
from scheduler.solver.profiles.profile_error import ProfileError
from scheduler.solver.profiles.transformer import Architecture, transformer_profile

_COUNT_UNITS = {
    "layers": "layers",
    "hidden": "values",
    "heads": "heads",
    "kv_heads": "heads",
    "ffn": "values",
    "vocabulary": "tokens",
    "sequence_length": "tokens",
}
_FLAGS = ("gated_mlp", "biases", "dropout", "learned_positions", "tied_embedding")
_LAYER_COUNTS = {
    "layers": "layers",
    "parameters": "parameters",
    "activation_bytes_per_sample": "bytes",
    "replicated_activation_bytes_per_sample": "bytes",
    "boundary_bytes_per_sample": "bytes",
}
_LAYER_OPTIONS = {"heads": "heads", "tensor_messages": "messages"}


def model_from_document(document: Mapping[str, Any], sequence_length: int = 0) -> ModelProfile:
    """The profile that `document` describes, at `sequence_length` tokens (0 = its own).

    Raises:
        ProfileError: a field is missing, unknown or cannot be; the message names it.
    """
    if sequence_length < 0:
        raise ProfileError(f"sequence_length is {sequence_length}; it must be 0 (the profile's own) or above")
    if "architecture" in document:
        return _from_architecture(document, sequence_length)
    return _from_layers(document, sequence_length)


def _from_architecture(document: Mapping[str, Any], sequence_length: int) -> ModelProfile:
    require_fields(document, "model profile", {"name", "architecture"})
    owner = f"architecture of {document['name']!r}"
    given = require_object(document["architecture"], owner)
    require_fields(given, owner, _COUNT_UNITS, _FLAGS)
    counts = {field: count(given, field, unit, owner) for field, unit in _COUNT_UNITS.items()}
    gated, biases, dropout, learned, tied = (flag(given, field, owner) for field in _FLAGS)
    architecture = Architecture(
        **counts, gated_mlp=gated, biases=biases, dropout=dropout, learned_positions=learned, tied_embedding=tied
    )
    if sequence_length:
        architecture = replace(architecture, sequence_length=sequence_length)
    return transformer_profile(str(document["name"]), architecture)


def _from_layers(document: Mapping[str, Any], sequence_length: int) -> ModelProfile:
    owner = "model profile"
    require_fields(document, owner, {"name", "sequence_length", "layers"}, {"embedding", "head", "tied_embedding"})
    own_length = count(document, "sequence_length", "tokens", owner)
    if sequence_length not in (0, own_length):
        raise ProfileError(
            f"sequence_length is {sequence_length}; the layers of {document['name']!r} are given for {own_length} alone"
        )
    runs = document["layers"]
    if not isinstance(runs, list):
        raise ProfileError(f"{owner}: layers is {runs!r}; it must be a list of runs of equal layers")
    return ModelProfile(
        name=str(document["name"]),
        sequence_length=own_length,
        layers=tuple(_layer_run(item, f"layers[{index}]") for index, item in enumerate(runs)),
        embedding=_attachment(document.get("embedding", {}), "embedding"),
        head=_attachment(document.get("head", {}), "head"),
        tied_embedding=flag(document, "tied_embedding", owner),
    )


def _layer_run(item: Any, owner: str) -> LayerProfile:
    given = require_object(item, owner)
    require_fields(given, owner, {"flops_per_sample", *_LAYER_COUNTS}, _LAYER_OPTIONS)
    counts = {field: count(given, field, unit, owner) for field, unit in _LAYER_COUNTS.items()}
    options = {field: count(given, field, unit, owner) for field, unit in _LAYER_OPTIONS.items() if field in given}
    return LayerProfile(flops_per_sample=figure(given, "flops_per_sample", "flop", owner), **counts, **options)


def _attachment(item: Any, owner: str) -> Attachment:
    given = require_object(item, owner)
    units = {"parameters": "parameters", "activation_bytes_per_sample": "bytes"}
    require_fields(given, owner, (), {"flops_per_sample", *units})
    counts = {field: count(given, field, unit, owner) for field, unit in units.items() if field in given}
    flops = figure(given, "flops_per_sample", "flop", owner) if "flops_per_sample" in given else 0.0
    return Attachment(flops_per_sample=flops, **counts)
