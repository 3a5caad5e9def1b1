"""The JSON form of a model profile: an architecture, or a list of layers.

From an architecture, every value is derived at any sequence length:

    {"name": "my-gpt", "architecture": {"layers": 12, "hidden": 768, "heads": 12, "ffn": 3072, "vocabulary": 50257,
     "sequence_length": 1024, "learned_positions": true, "tied_embedding": true}}

Otherwise the values of the layers are given at one sequence length, as in LayerProfile and Attachment.
`forward_s_per_sample` holds measured seconds by tensor-parallel degree:

    {"name": "my-net", "sequence_length": 512, "tied_embedding": false, "layers": [{"layers": 4,
     "flops_per_sample": 1e9, "parameters": 1000000, "activation_bytes_per_sample": 4000000,
     "replicated_activation_bytes_per_sample": 0, "boundary_bytes_per_sample": 500000, "heads": 8,
     "forward_s_per_sample": {"1": 0.004, "2": 0.0025}}],
     "embedding": {"parameters": 500000}, "head": {"flops_per_sample": 1e8, "parameters": 500000}}

`source` next to `name` states the origin of all values that do not state their own.

The `config.json` of a Hugging Face model is another form of an architecture (`hugging_face`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from scheduler.solver.profiles.architecture_document import parse_architecture
from scheduler.solver.profiles.hugging_face import is_configuration, translate_configuration
from scheduler.solver.profiles.model_profile import Attachment, LayerProfile, ModelProfile, TrainingOptimizer
from scheduler.solver.profiles.profile_document import (
    ProfileError,
    parse_object,
    read_count,
    read_flag,
    read_number,
    require_fields,
    require_object,
    unwrap_value,
)
from scheduler.solver.profiles.training_software import SOFTWARE_FIELDS, TrainingSoftware, parse_software
from scheduler.solver.profiles.transformer import build_transformer_profile

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
    "head_width": "values",
    "tensor_messages": "messages",
    "traffic_bytes_per_sample": "bytes",
    "selective_bytes_per_sample": "bytes",
    "tokens_per_sample": "tokens",
    "expert_parameters": "parameters",
    "experts": "experts",
}
_FLOPS = ("flops_per_sample", "attention_flops_per_sample")
_LAYER_FLAGS = ("frozen", "cached")
_PER_TOKEN = "experts_per_token"
_CACHE_FLAG = "cache_frozen_layers"
_OPTIMIZER, _SOFTWARE, _IMBALANCE = "optimizer", "software", "expert_imbalance"
_TOP_LEVEL = {_CACHE_FLAG, _OPTIMIZER, _SOFTWARE, _IMBALANCE}


def parse_model(json_text: str, sequence_length: int = 0) -> ModelProfile:
    """Parse the JSON text of a model profile, which holds either an architecture or a list of layers.

    Args:
        sequence_length: tokens of a sample; 0 keeps the profile's own length.

    Raises:
        ProfileError: the text is not JSON, a field is missing, unknown or out of range, or the layers are given for
            another sequence length. The message names the field.
    """
    return parse_model_document(parse_object(json_text, "model profile"), sequence_length)


def parse_model_document(document: Mapping[str, Any], sequence_length: int = 0) -> ModelProfile:
    """The profile that `document` describes, at `sequence_length` tokens (0 = its own).

    Raises:
        ProfileError: a field is missing, unknown or cannot be; the message names it.
    """
    if sequence_length < 0:
        raise ProfileError(f"sequence_length is {sequence_length}; it must be 0 (the profile's own) or above")
    if is_configuration(document):
        document = translate_configuration(document)
    if "architecture" in document:
        require_fields(document, "model profile", {"name", "architecture"}, {"source", *_TOP_LEVEL})
        name = str(document["name"])
        owner = f"architecture of {name!r}"
        given = require_object(document["architecture"], owner)
        model = build_transformer_profile(name, parse_architecture(given, owner, sequence_length))
    else:
        model = _parse_layer_model(document, sequence_length)
    cached = read_flag(document, _CACHE_FLAG, "model profile")
    software = _parse_software(document.get(_SOFTWARE, {}))
    imbalance = read_number(document, _IMBALANCE, "ratio", "model profile") if _IMBALANCE in document else 0.0
    model = replace(
        model,
        cache_frozen_layers=cached,
        optimizer=_parse_optimizer(document),
        software=software,
        expert_imbalance=imbalance,
    )
    return model.with_frozen_layers(0)


def _parse_optimizer(document: Mapping[str, Any]) -> TrainingOptimizer:
    value = unwrap_value(document.get(_OPTIMIZER, TrainingOptimizer.ADAMW.value))
    if value not in list(TrainingOptimizer):
        raise ProfileError(f"model profile: {_OPTIMIZER} is {value!r}; allowed are {', '.join(TrainingOptimizer)}")
    return TrainingOptimizer(value)


def _parse_software(item: Any) -> TrainingSoftware:
    owner = f"model profile: {_SOFTWARE}"
    given = require_object(item, owner)
    require_fields(given, owner, (), SOFTWARE_FIELDS)
    try:
        return parse_software({field: unwrap_value(value) for field, value in given.items()})
    except ValueError as error:
        raise ProfileError(f"{owner}: {error}") from None


def _parse_layer_model(document: Mapping[str, Any], sequence_length: int) -> ModelProfile:
    owner = "model profile"
    optional = {"embedding", "head", "tied_embedding", "source", *_TOP_LEVEL}
    require_fields(document, owner, {"name", "sequence_length", "layers"}, optional)
    own_length = read_count(document, "sequence_length", "tokens", owner)
    if sequence_length not in (0, own_length):
        raise ProfileError(
            f"sequence_length is {sequence_length}; the layers of {document['name']!r} are given only for {own_length}"
        )
    runs = document["layers"]
    if not isinstance(runs, list):
        raise ProfileError(f"{owner}: layers is {runs!r}; it must be a list of runs of equal layers")
    return ModelProfile(
        name=str(document["name"]),
        sequence_length=own_length,
        layers=tuple(_parse_layer_run(item, f"layers[{index}]") for index, item in enumerate(runs)),
        embedding=_parse_attachment(document.get("embedding", {}), "embedding"),
        head=_parse_attachment(document.get("head", {}), "head"),
        tied_embedding=read_flag(document, "tied_embedding", owner),
    )


def _parse_layer_run(item: Any, owner: str) -> LayerProfile:
    given = require_object(item, owner)
    optional = {*_LAYER_OPTIONS, _PER_TOKEN, *_FLOPS, *_LAYER_FLAGS, "forward_s_per_sample"}
    require_fields(given, owner, {_FLOPS[0], *_LAYER_COUNTS}, optional)
    units = _LAYER_COUNTS | _LAYER_OPTIONS
    values: dict[str, Any] = {
        field: read_count(given, field, unit, owner) for field, unit in units.items() if field in given
    }
    values |= {field: read_number(given, field, "flop", owner) for field in _FLOPS if field in given}
    if _PER_TOKEN in given:
        values[_PER_TOKEN] = read_number(given, _PER_TOKEN, "experts", owner)
    values |= {field: read_flag(given, field, owner) for field in _LAYER_FLAGS}
    measured = _parse_measured_s(given.get("forward_s_per_sample", {}), f"{owner}: forward_s_per_sample")
    try:
        return LayerProfile(**values, forward_s_per_sample=measured)
    except ProfileError as error:
        raise ProfileError(f"{owner}: {error}") from None


def _parse_measured_s(item: Any, owner: str) -> tuple[tuple[int, float], ...]:
    given = require_object(unwrap_value(item), owner)
    for degree in given:
        if not degree.isdecimal():
            raise ProfileError(f"{owner}: degree is {degree!r}; it must be a whole number above 0")
    return tuple(sorted((int(degree), read_number(given, degree, "s", owner)) for degree in given))


def _parse_attachment(item: Any, owner: str) -> Attachment:
    given = require_object(item, owner)
    units = {"parameters": "parameters", "activation_bytes_per_sample": "bytes", "columns": "columns"}
    require_fields(given, owner, (), {"flops_per_sample", *units})
    counts = {field: read_count(given, field, unit, owner) for field, unit in units.items() if field in given}
    flops = read_number(given, "flops_per_sample", "flop", owner) if "flops_per_sample" in given else 0.0
    return Attachment(flops_per_sample=flops, **counts)
