"""GPU and model profiles by name: shipped with Ebbtide, in your own profiles folder, or estimated for a machine.

`EBBTIDE_PROFILES_DIR` names a folder with `gpus/NAME.json` and `models/NAME.json`. A profile in this folder replaces
the shipped profile of the same name. Files are read once per process, so restart the service after you change one.

A quantity in a profile is either a bare number or `{"value": ..., "unit": ..., "source": ...}`. The unit is checked.
A model profile holds either an architecture, from which every value is derived at any sequence length:

    {"name": "my-gpt", "architecture": {"layers": 12, "hidden": 768, "heads": 12, "ffn": 3072, "vocabulary": 50257,
     "sequence_length": 1024, "learned_positions": true, "tied_embedding": true}}

or the values of its layers at one sequence length, as in LayerProfile and Attachment. `forward_s_per_sample` holds
measured seconds by tensor-parallel degree:

    {"name": "my-net", "sequence_length": 512, "tied_embedding": false, "layers": [{"layers": 4,
     "flops_per_sample": 1e9, "parameters": 1000000, "activation_bytes_per_sample": 4000000,
     "replicated_activation_bytes_per_sample": 0, "boundary_bytes_per_sample": 500000, "heads": 8,
     "forward_s_per_sample": {"1": 0.004, "2": 0.0025}}],
     "embedding": {"parameters": 500000}, "head": {"flops_per_sample": 1e8, "parameters": 500000}}

`source` next to `name` states the origin of all values that do not state their own.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from scheduler.domain.suggestions import suggest
from scheduler.solver.profiles.architecture import parse_architecture
from scheduler.solver.profiles.hardware_profile import (
    Collective,
    CollectiveTable,
    Dimension,
    HardwareProfile,
    Precision,
    require_plausible,
)
from scheduler.solver.profiles.model_profile import Attachment, LayerProfile, ModelProfile, TrainingOptimizer
from scheduler.solver.profiles.profile_document import (
    ProfileError,
    parse_object,
    read_count,
    read_flag,
    read_name,
    read_number,
    require_fields,
    require_object,
    unwrap_value,
)
from scheduler.solver.profiles.training_software import SOFTWARE_FIELDS, TrainingSoftware, parse_software
from scheduler.solver.profiles.transformer import build_transformer_profile

__all__ = [
    "GPU_UNITS",
    "PROFILES_DIR",
    "Attachment",
    "Dimension",
    "HardwareProfile",
    "LayerProfile",
    "ModelProfile",
    "Precision",
    "ProfileError",
    "ProfilesFolder",
    "add_estimated_gpus",
    "find_profiles_folder",
    "is_estimated_gpu",
    "list_estimated_gpus",
    "list_gpu_names",
    "list_model_names",
    "load_gpu",
    "load_model",
    "parse_gpu",
    "parse_model",
    "read_own_files",
    "read_profiles_folder",
]

PROFILES_DIR = "EBBTIDE_PROFILES_DIR"
_GPUS, _MODELS = "gpus", "models"


@dataclass(frozen=True, slots=True)
class ProfilesFolder:
    """The profiles in a folder by name; `replaced` are the names that hide a shipped profile."""

    gpus: tuple[str, ...]
    models: tuple[str, ...]
    replaced: tuple[str, ...]


def list_gpu_names(folder: Path | None = None) -> tuple[str, ...]:
    """Return the GPU models that `load_gpu` knows, sorted; raises ProfileError as `read_profiles_folder`."""
    return _list_names(_GPUS, folder)


def list_model_names(folder: Path | None = None) -> tuple[str, ...]:
    """Return the models that `load_model` knows, sorted; raises ProfileError as `read_profiles_folder`."""
    return _list_names(_MODELS, folder)


def load_gpu(name: str, folder: Path | None = None) -> HardwareProfile:
    """Return the profile of one GPU model.

    Args:
        folder: your own profiles; by default the folder in `EBBTIDE_PROFILES_DIR`, if set.

    Raises:
        ProfileError: the name is unknown, or the file in `folder` is invalid. The message lists the known names, or
            names the file and the field.
    """
    return _load_gpu(name, folder or find_profiles_folder())


def load_model(name: str, sequence_length: int = 0, folder: Path | None = None) -> ModelProfile:
    """Return the profile of one model at `sequence_length` tokens; 0 keeps the profile's own length.

    Raises:
        ProfileError: as `load_gpu`, or the sequence length is negative or not available for this model.
    """
    return _load_model(name, sequence_length, folder or find_profiles_folder())


def find_profiles_folder() -> Path | None:
    """Return the folder in `EBBTIDE_PROFILES_DIR`, or None if the variable is unset or empty."""
    return Path(os.environ[PROFILES_DIR]) if os.environ.get(PROFILES_DIR) else None


def read_profiles_folder(folder: Path) -> ProfilesFolder:
    """Check every profile in `folder`, so that a mistake shows when a service starts and not when a job needs it.

    Raises:
        ProfileError: the folder cannot be read, or a profile in it is invalid. The message names file and field.
    """
    gpus, models = tuple(_list_own(_GPUS, folder)), tuple(_list_own(_MODELS, folder))
    for gpu in gpus:
        load_gpu(gpu, folder)
    for model in models:
        load_model(model, folder=folder)
    shipped = {*_list_shipped(_GPUS), *_list_shipped(_MODELS)}
    return ProfilesFolder(gpus, models, tuple(name for name in (*gpus, *models) if name in shipped))


def read_own_files(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield relative path and content of each profile in `folder`; raises ProfileError as `read_profiles_folder`."""
    for kind in (_GPUS, _MODELS):
        for name in _list_own(kind, folder):
            yield f"{kind}/{name}.json", (folder / kind / f"{name}.json").read_bytes()


_estimates: dict[str, str] = {}


def add_estimated_gpus(profiles: Mapping[str, str]) -> None:
    """Make estimated GPU profiles known to this process, as JSON text by name.

    They are rows of the database, not files, because processes on other hosts need them too. A shipped profile or one
    in your own folder takes precedence. The first profile of a name stays, so that solved plans stay valid.
    """
    for name, text in profiles.items():
        _estimates.setdefault(name, text)


def list_estimated_gpus(names: Iterable[str] | None = None) -> Mapping[str, str]:
    """Return the estimated profiles that this process knows, those of `names` or all, as JSON text by name."""
    return {name: text for name, text in _estimates.items() if names is None or name in names}


def is_estimated_gpu(name: str, folder: Path | None = None) -> bool:
    """Return whether the profile of this name was estimated from what a machine reported; false for unknown names."""
    return name in _estimates and load_gpu(name, folder).estimated


@cache
def _load_gpu(name: str, folder: Path | None) -> HardwareProfile:
    text, file = _read_profile(_GPUS, name, folder)
    with _naming(file):
        profile = parse_gpu(text)
        if profile.gpu != name:
            raise ProfileError(f"GPU profile: gpu is {profile.gpu!r}; it must be the name of the file, {name!r}")
    return profile


@cache
def _load_model(name: str, sequence_length: int, folder: Path | None) -> ModelProfile:
    text, file = _read_profile(_MODELS, name, folder)
    with _naming(file):
        return parse_model(text, sequence_length)


def _list_names(kind: str, folder: Path | None) -> tuple[str, ...]:
    folder = folder or find_profiles_folder()
    own = _list_own(kind, folder) if folder else ()
    return tuple(sorted({*_list_shipped(kind), *own, *(_estimates if kind == _GPUS else ())}))


def _list_shipped(kind: str) -> Iterable[str]:
    entries = files("scheduler.solver.profiles").joinpath("data", kind).iterdir()
    return [entry.name.removesuffix(".json") for entry in entries if entry.name.endswith(".json")]


def _list_own(kind: str, folder: Path) -> Iterable[str]:
    """Return the names of the profiles in `folder`; the subfolder of a kind without profiles may be absent."""
    try:
        kinds = {entry.name for entry in folder.iterdir()}
        return sorted(entry.stem for entry in (folder / kind).glob("*.json")) if kind in kinds else []
    except OSError as error:
        allowed = "it must be a readable folder with gpus/*.json and models/*.json"
        raise ProfileError(f"{PROFILES_DIR} is {str(folder)!r}: {error.strerror}; {allowed}") from None


def _read_profile(kind: str, name: str, folder: Path | None) -> tuple[str, Path | None]:
    """Return the JSON text of a profile, and its file if it comes from `folder`."""
    known = _list_names(kind, folder)
    if name not in known:
        raise ProfileError(f"{kind[:-1]} is {name!r}; allowed are {', '.join(known)}{suggest(name, known)}")
    if folder and name in _list_own(kind, folder):
        file = folder / kind / f"{name}.json"
        try:
            return file.read_text(encoding="utf-8"), file
        except (OSError, UnicodeDecodeError) as error:
            raise ProfileError(f"{file}: cannot be read: {error}") from None
    if kind == _GPUS and name in _estimates and name not in _list_shipped(kind):
        return _estimates[name], None
    return files("scheduler.solver.profiles").joinpath("data", kind, f"{name}.json").read_text(encoding="utf-8"), None


@contextmanager
def _naming(file: Path | None) -> Iterator[None]:
    """Put the name of the file in front of every ProfileError of the block; None leaves errors as they are."""
    try:
        yield
    except ProfileError as error:
        if file is None:
            raise
        raise ProfileError(f"{file}: {error}") from None


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
    "attention_generation": "generation",
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


_GPU_OTHER_OPTIONS = ("expert_priority", "estimated", "collectives", "precisions")
GPU_UNITS = {**_GPU_FIELD_UNITS, **_GPU_OPTIONAL_UNITS}
"""Units of the quantities in a GPU profile, by field."""


def parse_gpu(json_text: str) -> HardwareProfile:
    """A hardware profile from its JSON form.

    Raises:
        ProfileError: malformed JSON, a missing or unknown field, or a value that is out of range; the message names it.
    """
    document, owner = parse_object(json_text, "GPU profile"), "GPU profile"
    required = {"gpu", "precision", "dimensions", *_GPU_FIELD_UNITS}
    require_fields(document, owner, required, {*_GPU_OTHER_OPTIONS, *_GPU_OPTIONAL_UNITS})
    values: dict[str, Any] = {
        field: (read_count if unit == "bytes" else read_number)(document, field, unit, owner)
        for field, unit in GPU_UNITS.items()
        if field in document
    }
    profile = HardwareProfile(
        gpu=read_name(document, "gpu", owner),
        precision=_parse_precision(document),
        precisions=_parse_precisions(document),
        dimensions=_parse_dimensions(document),
        expert_priority=read_flag(document, "expert_priority", owner),
        estimated=read_flag(document, "estimated", owner),
        collectives=_parse_collectives(unwrap_value(document.get("collectives", []))),
        **values,
    )
    require_plausible(profile)
    return profile


def _parse_precision(document: Mapping[str, Any]) -> Precision:
    value = unwrap_value(document["precision"])
    if value not in list(Precision):
        raise ProfileError(f"GPU profile: precision is {value!r}; allowed are {', '.join(Precision)}")
    return Precision(value)


def _parse_precisions(document: Mapping[str, Any]) -> frozenset[Precision]:
    value = unwrap_value(document.get("precisions", []))
    if not isinstance(value, list) or any(item not in list(Precision) for item in value):
        raise ProfileError(f"GPU profile: precisions is {value!r}; allowed is a list of {', '.join(Precision)}")
    return frozenset(Precision(item) for item in value)


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
