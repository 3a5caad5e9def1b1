"""The shipped profiles, and the reader of their JSON form.

A figure in a profile is either a bare value or `{"value": ..., "unit": ..., "source": ...}`; shipped files always
say unit and source. The unit is checked, so that a figure in other units cannot slip in.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from scheduler.domain.spelling import meant
from scheduler.solver.profiles.hardware_profile import (
    Collective,
    CollectiveTable,
    Dimension,
    HardwareProfile,
    Precision,
)
from scheduler.solver.profiles.model_document import model_from_document
from scheduler.solver.profiles.model_profile import Attachment, LayerProfile, ModelProfile
from scheduler.solver.profiles.profile_document import (
    count,
    figure,
    flag,
    flat,
    parse_object,
    require_fields,
    require_object,
)
from scheduler.solver.profiles.profile_error import ProfileError

__all__ = [
    "Attachment",
    "Dimension",
    "HardwareProfile",
    "LayerProfile",
    "ModelProfile",
    "Precision",
    "ProfileError",
    "gpu_names",
    "load_gpu",
    "load_model",
    "model_names",
    "parse_gpu",
    "parse_model",
]

_GPU_UNITS = {
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
_GPU_OPTIONS = {
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


def gpu_names() -> tuple[str, ...]:
    """GPU models that `load_gpu` knows, sorted."""
    return _names("gpus")


def model_names() -> tuple[str, ...]:
    """Models that `load_model` knows, sorted."""
    return _names("models")


@cache
def load_gpu(name: str) -> HardwareProfile:
    """The shipped profile of one GPU model.

    Raises:
        ProfileError: there is none of this name; the message lists those there are.
    """
    return parse_gpu(_shipped("gpus", "gpu", name))


@cache
def load_model(name: str, sequence_length: int = 0) -> ModelProfile:
    """The shipped profile of one model; `sequence_length` 0 keeps the profile's own.

    Raises:
        ProfileError: there is none of this name (the message lists those there are), or the length is negative.
    """
    return parse_model(_shipped("models", "model", name), sequence_length)


def parse_gpu(json_text: str) -> HardwareProfile:
    """A hardware profile from its JSON form.

    Raises:
        ProfileError: malformed JSON, a missing or unknown field, or a figure that cannot be; the message names it.
    """
    document, owner = parse_object(json_text, "GPU profile"), "GPU profile"
    required = {"gpu", "precision", "dimensions", *_GPU_UNITS}
    require_fields(document, owner, required, {"expert_priority", "collectives", *_GPU_OPTIONS})
    units = {**_GPU_UNITS, **_GPU_OPTIONS}
    figures: dict[str, Any] = {
        field: figure(document, field, unit, owner) for field, unit in units.items() if field in document
    }
    return HardwareProfile(
        gpu=str(flat(document["gpu"])),
        precision=_precision(document),
        dimensions=_dimensions(document),
        expert_priority=flag(document, "expert_priority", owner),
        collectives=_collectives(flat(document.get("collectives", []))),
        **figures,
    )


def parse_model(json_text: str, sequence_length: int = 0) -> ModelProfile:
    """A model profile from its JSON form, which is either an architecture or a list of layers (see model_document).

    Raises:
        ProfileError: malformed JSON, a missing or unknown field, a figure that cannot be, or a `sequence_length`
            that a list of measured layers cannot be rescaled to; the message names it.
    """
    return model_from_document(parse_object(json_text, "model profile"), sequence_length)


def _precision(document: Mapping[str, Any]) -> Precision:
    value = flat(document["precision"])
    if value not in list(Precision):
        raise ProfileError(f"GPU profile: precision is {value!r}; allowed are {', '.join(Precision)}")
    return Precision(value)


def _dimensions(document: Mapping[str, Any]) -> frozenset[Dimension]:
    value = flat(document["dimensions"])
    if not isinstance(value, list) or any(item not in list(Dimension) for item in value):
        raise ProfileError(f"GPU profile: dimensions is {value!r}; allowed is a list of {', '.join(Dimension)}")
    return frozenset(Dimension(item) for item in value)


def _collectives(tables: Any) -> tuple[CollectiveTable, ...]:
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
        pairs = tuple((_number(size, owner), _number(seconds, owner)) for size, seconds in points)
        found.append(CollectiveTable(Collective(given["collective"]), count(given, "ranks", "ranks", owner), pairs))
    return tuple(found)


def _number(value: Any, owner: str) -> float:
    return figure({"points": value}, "points", "", owner)


def _names(folder: str) -> tuple[str, ...]:
    entries = files("scheduler.solver.profiles").joinpath("data", folder).iterdir()
    return tuple(sorted(entry.name.removesuffix(".json") for entry in entries if entry.name.endswith(".json")))


def _shipped(folder: str, field: str, name: str) -> str:
    known = _names(folder)
    if name not in known:
        raise ProfileError(f"{field} is {name!r}; allowed are {', '.join(known)}{meant(name, known)}")
    return files("scheduler.solver.profiles").joinpath("data", folder, f"{name}.json").read_text(encoding="utf-8")
