"""The JSON form of a model profile.

Either an architecture, from which every figure is derived at any sequence length. Without `family` it is a decoder;
architecture_document says which sizes the other families have:

    {"name": "my-gpt", "architecture": {"layers": 12, "hidden": 768, "heads": 12, "ffn": 3072, "vocabulary": 50257,
     "sequence_length": 1024, "learned_positions": true, "tied_embedding": true}}

or the figures of its layers at one sequence length, as in LayerProfile and Attachment; `forward_s_per_sample` holds
measured seconds by tensor-parallel degree:

    {"name": "my-net", "sequence_length": 512, "tied_embedding": false, "layers": [{"layers": 4,
     "flops_per_sample": 1e9, "parameters": 1000000, "activation_bytes_per_sample": 4000000,
     "replicated_activation_bytes_per_sample": 0, "boundary_bytes_per_sample": 500000, "heads": 8,
     "forward_s_per_sample": {"1": 0.004, "2": 0.0025}}],
     "embedding": {"parameters": 500000}, "head": {"flops_per_sample": 1e8, "parameters": 500000}}

`source` beside `name` says where the figures come from that do not say so themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scheduler.solver.profiles.architecture_document import read_architecture
from scheduler.solver.profiles.model_profile import Attachment, LayerProfile, ModelProfile
from scheduler.solver.profiles.profile_document import count, figure, flag, flat, require_fields, require_object
from scheduler.solver.profiles.profile_error import ProfileError
from scheduler.solver.profiles.transformer import transformer_profile

_LAYER_COUNTS = {
    "layers": "layers",
    "parameters": "parameters",
    "activation_bytes_per_sample": "bytes",
    "replicated_activation_bytes_per_sample": "bytes",
    "boundary_bytes_per_sample": "bytes",
}
_LAYER_OPTIONS = {
    "heads": "heads",
    "attention_heads": "heads",
    "tensor_messages": "messages",
    "traffic_bytes_per_sample": "bytes",
    "selective_bytes_per_sample": "bytes",
    "tokens_per_sample": "tokens",
    "expert_parameters": "parameters",
    "experts": "experts",
    "experts_per_token": "experts",
}
_FLOPS = ("flops_per_sample", "attention_flops_per_sample")


def model_from_document(document: Mapping[str, Any], sequence_length: int = 0) -> ModelProfile:
    """The profile that `document` describes, at `sequence_length` tokens (0 = its own).

    Raises:
        ProfileError: a field is missing, unknown or cannot be; the message names it.
    """
    if sequence_length < 0:
        raise ProfileError(f"sequence_length is {sequence_length}; it must be 0 (the profile's own) or above")
    if "architecture" in document:
        require_fields(document, "model profile", {"name", "architecture"}, {"source"})
        name = str(document["name"])
        owner = f"architecture of {name!r}"
        given = require_object(document["architecture"], owner)
        return transformer_profile(name, read_architecture(given, owner, sequence_length))
    return _from_layers(document, sequence_length)


def _from_layers(document: Mapping[str, Any], sequence_length: int) -> ModelProfile:
    owner = "model profile"
    optional = {"embedding", "head", "tied_embedding", "source"}
    require_fields(document, owner, {"name", "sequence_length", "layers"}, optional)
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
    optional = {*_LAYER_OPTIONS, *_FLOPS, "frozen", "forward_s_per_sample"}
    require_fields(given, owner, {_FLOPS[0], *_LAYER_COUNTS}, optional)
    units = _LAYER_COUNTS | _LAYER_OPTIONS
    figures: dict[str, Any] = {
        field: count(given, field, unit, owner) for field, unit in units.items() if field in given
    }
    figures |= {field: figure(given, field, "flop", owner) for field in _FLOPS if field in given}
    measured = _measured_s(given.get("forward_s_per_sample", {}), f"{owner}: forward_s_per_sample")
    try:
        return LayerProfile(**figures, frozen=flag(given, "frozen", owner), forward_s_per_sample=measured)
    except ProfileError as wrong:
        raise ProfileError(f"{owner}: {wrong}") from None


def _measured_s(item: Any, owner: str) -> tuple[tuple[int, float], ...]:
    given = require_object(flat(item), owner)
    for degree in given:
        if not degree.isdecimal():
            raise ProfileError(f"{owner}: degree is {degree!r}; it must be a whole number above 0")
    return tuple(sorted((int(degree), figure(given, degree, "s", owner)) for degree in given))


def _attachment(item: Any, owner: str) -> Attachment:
    given = require_object(item, owner)
    units = {"parameters": "parameters", "activation_bytes_per_sample": "bytes", "columns": "columns"}
    require_fields(given, owner, (), {"flops_per_sample", *units})
    counts = {field: count(given, field, unit, owner) for field, unit in units.items() if field in given}
    flops = figure(given, "flops_per_sample", "flop", owner) if "flops_per_sample" in given else 0.0
    return Attachment(flops_per_sample=flops, **counts)
