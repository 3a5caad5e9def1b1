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

The shipped profiles, and the reader of their JSON form.

A figure in a profile is either a bare value or `{"value": ..., "unit": ..., "source": ...}`; shipped files always
say unit and source. The unit is checked, so that a figure in other units cannot slip in.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from scheduler.domain.suggestions import suggest
from scheduler.solver.profiles.architecture import parse_architecture
from scheduler.solver.profiles.hardware_profile import (
    Collective,
    CollectiveTable,
    Dimension,
    HardwareProfile,
    Precision,
)
from scheduler.solver.profiles.model_profile import Attachment, LayerProfile, ModelProfile
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
    "tensor_messages": "messages",
    "traffic_bytes_per_sample": "bytes",
    "selective_bytes_per_sample": "bytes",
    "tokens_per_sample": "tokens",
    "expert_parameters": "parameters",
    "experts": "experts",
    "experts_per_token": "experts",
}
_FLOPS = ("flops_per_sample", "attention_flops_per_sample")


def parse_model_document(document: Mapping[str, Any], sequence_length: int = 0) -> ModelProfile:
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
        return build_transformer_profile(name, parse_architecture(given, owner, sequence_length))
    return _parse_layer_model(document, sequence_length)


def _parse_layer_model(document: Mapping[str, Any], sequence_length: int) -> ModelProfile:
    owner = "model profile"
    optional = {"embedding", "head", "tied_embedding", "source"}
    require_fields(document, owner, {"name", "sequence_length", "layers"}, optional)
    own_length = read_count(document, "sequence_length", "tokens", owner)
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
        layers=tuple(_parse_layer_run(item, f"layers[{index}]") for index, item in enumerate(runs)),
        embedding=_parse_attachment(document.get("embedding", {}), "embedding"),
        head=_parse_attachment(document.get("head", {}), "head"),
        tied_embedding=read_flag(document, "tied_embedding", owner),
    )


def _parse_layer_run(item: Any, owner: str) -> LayerProfile:
    given = require_object(item, owner)
    optional = {*_LAYER_OPTIONS, *_FLOPS, "frozen", "forward_s_per_sample"}
    require_fields(given, owner, {_FLOPS[0], *_LAYER_COUNTS}, optional)
    units = _LAYER_COUNTS | _LAYER_OPTIONS
    figures: dict[str, Any] = {
        field: read_count(given, field, unit, owner) for field, unit in units.items() if field in given
    }
    figures |= {field: read_number(given, field, "flop", owner) for field in _FLOPS if field in given}
    measured = _parse_measured_s(given.get("forward_s_per_sample", {}), f"{owner}: forward_s_per_sample")
    try:
        return LayerProfile(**figures, frozen=read_flag(given, "frozen", owner), forward_s_per_sample=measured)
    except ProfileError as wrong:
        raise ProfileError(f"{owner}: {wrong}") from None


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


__all__ = [
    "Attachment",
    "Dimension",
    "HardwareProfile",
    "LayerProfile",
    "ModelProfile",
    "Precision",
    "ProfileError",
    "list_gpu_names",
    "list_model_names",
    "load_gpu",
    "load_model",
    "parse_gpu",
    "parse_model",
]

_GPU_FIELD_UNITS = {
    "memory_bytes": "bytes",
    "reserve_bytes": "bytes",
    "peak_flops_per_s": "flop/s",
    "efficiency": "ratio",
    "memory_bandwidth_bytes_per_s": "bytes/s",
    "intra_bandwidth_bytes_per_s": "bytes/s",
    "intra_latency_s": "s",
    "inter_bandwidth_bytes_per_s": "bytes/s",
    "inter_latency_s": "s",
    "overlap_coefficient": "ratio",
}
_GPU_OPTIONAL_UNITS = {
    "reserve_ratio": "ratio",
    "attention_efficiency": "ratio",
    "unaligned_slowdown": "ratio",
    "launch_s": "s",
    "iteration_overhead_s": "s",
    "intra_hop_s": "s",
    "inter_hop_s": "s",
    "gradient_overlap": "ratio",
    "gpus_per_nic": "ratio",
    "expert_imbalance": "ratio",
    "host_bandwidth_bytes_per_s": "bytes/s",
    "host_optimizer_s_per_parameter": "s/parameter",
}


def list_gpu_names() -> tuple[str, ...]:
    """GPU models that `load_gpu` knows, sorted."""
    return _list_profile_names("gpus")


def list_model_names() -> tuple[str, ...]:
    """Models that `load_model` knows, sorted."""
    return _list_profile_names("models")


@cache
def load_gpu(name: str) -> HardwareProfile:
    """The shipped profile of one GPU model.

    Raises:
        ProfileError: there is none of this name; the message lists those there are.
    """
    return parse_gpu(_read_profile("gpus", "gpu", name))


@cache
def load_model(name: str, sequence_length: int = 0) -> ModelProfile:
    """The shipped profile of one model; `sequence_length` 0 keeps the profile's own.

    Raises:
        ProfileError: there is none of this name (the message lists those there are), or the length is negative.
    """
    return parse_model(_read_profile("models", "model", name), sequence_length)


def parse_gpu(json_text: str) -> HardwareProfile:
    """A hardware profile from its JSON form.

    Raises:
        ProfileError: malformed JSON, a missing or unknown field, or a figure that cannot be; the message names it.
    """
    document, owner = parse_object(json_text, "GPU profile"), "GPU profile"
    required = {"gpu", "precision", "dimensions", *_GPU_FIELD_UNITS}
    require_fields(document, owner, required, {"expert_priority", "collectives", *_GPU_OPTIONAL_UNITS})
    units = {**_GPU_FIELD_UNITS, **_GPU_OPTIONAL_UNITS}
    figures: dict[str, Any] = {
        field: read_number(document, field, unit, owner) for field, unit in units.items() if field in document
    }
    return HardwareProfile(
        gpu=str(unwrap_value(document["gpu"])),
        precision=_parse_precision(document),
        dimensions=_parse_dimensions(document),
        expert_priority=read_flag(document, "expert_priority", owner),
        collectives=_parse_collectives(unwrap_value(document.get("collectives", []))),
        **figures,
    )


def parse_model(json_text: str, sequence_length: int = 0) -> ModelProfile:
    """A model profile from its JSON form, which is either an architecture or a list of layers (see model_document).

    Raises:
        ProfileError: malformed JSON, a missing or unknown field, a figure that cannot be, or a `sequence_length`
            that a list of measured layers cannot be rescaled to; the message names it.
    """
    return parse_model_document(parse_object(json_text, "model profile"), sequence_length)


def _parse_precision(document: Mapping[str, Any]) -> Precision:
    value = unwrap_value(document["precision"])
    if value not in list(Precision):
        raise ProfileError(f"GPU profile: precision is {value!r}; allowed are {', '.join(Precision)}")
    return Precision(value)


def _parse_dimensions(document: Mapping[str, Any]) -> frozenset[Dimension]:
    value = unwrap_value(document["dimensions"])
    if not isinstance(value, list) or any(item not in list(Dimension) for item in value):
        raise ProfileError(f"GPU profile: dimensions is {value!r}; allowed is a list of {', '.join(Dimension)}")
    return frozenset(Dimension(item) for item in value)


def _parse_collectives(tables: Any) -> tuple[CollectiveTable, ...]:
    """From `[{"collective": "all_reduce", "ranks": 8, "points": [[bytes, seconds], ...]}, ...]`."""
    owner = "GPU profile: collectives"
    if not isinstance(tables, list):
        raise ProfileError(f"{owner} is {tables!r}; it must be a list of measured tables")
    found = []
    for table in tables:
        given = require_object(table, owner)
        require_fields(given, owner, {"collective", "ranks", "points"})
        points = given["points"]
        if given["collective"] not in list(Collective):
            raise ProfileError(f"{owner}: collective is {given['collective']!r}; allowed are {', '.join(Collective)}")
        if not isinstance(points, list) or any(not isinstance(point, list) or len(point) != 2 for point in points):
            raise ProfileError(f"{owner}: points is {points!r}; it must be a list of [bytes, seconds]")
        pairs = tuple((_parse_number(size, owner), _parse_number(seconds, owner)) for size, seconds in points)
        found.append(
            CollectiveTable(Collective(given["collective"]), read_count(given, "ranks", "ranks", owner), pairs)
        )
    return tuple(found)


def _parse_number(value: Any, owner: str) -> float:
    return read_number({"points": value}, "points", "", owner)


def _list_profile_names(folder: str) -> tuple[str, ...]:
    entries = files("scheduler.solver.profiles").joinpath("data", folder).iterdir()
    return tuple(sorted(entry.name.removesuffix(".json") for entry in entries if entry.name.endswith(".json")))


def _read_profile(folder: str, field: str, name: str) -> str:
    known = _list_profile_names(folder)
    if name not in known:
        raise ProfileError(f"{field} is {name!r}; allowed are {', '.join(known)}{suggest(name, known)}")
    return files("scheduler.solver.profiles").joinpath("data", folder, f"{name}.json").read_text(encoding="utf-8")
