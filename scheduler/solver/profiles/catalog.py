"""GPU and model profiles by name.

A GPU profile comes from the first of these sources that has its name: set on the service (`fleet_hardware`), a file of
your own, shipped with Ebbtide, estimated for a machine.

`EBBTIDE_PROFILES_DIR` names a folder with GPU profiles in `gpus` (`gpu_files`) and `models/NAME.json`. Files are read
once per process, so restart the service after you change one.

The JSON forms are described in `gpu_document` and `model_document`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib.resources import files
from pathlib import Path

from scheduler.domain.suggestions import suggest
from scheduler.solver.profiles.fleet_hardware import get_fleet_hardware, with_kept_memory, with_slowest_network
from scheduler.solver.profiles.gpu_document import GPU_UNITS, parse_gpu
from scheduler.solver.profiles.gpu_files import list_profile_files, read_gpu_files
from scheduler.solver.profiles.hardware_profile import Dimension, HardwareProfile, Precision
from scheduler.solver.profiles.model_document import parse_model
from scheduler.solver.profiles.model_profile import Attachment, LayerProfile, ModelProfile
from scheduler.solver.profiles.profile_document import ProfileError

__all__ = [
    "GPU_UNITS",
    "PROFILES_DIR",
    "Attachment",
    "Dimension",
    "GpuSource",
    "HardwareProfile",
    "LayerProfile",
    "ModelProfile",
    "Precision",
    "ProfileError",
    "ProfilesFolder",
    "add_estimated_gpus",
    "find_gpu_source",
    "find_profiles_folder",
    "is_estimated_gpu",
    "list_estimated_gpus",
    "list_gpu_names",
    "list_model_names",
    "load_gpu",
    "load_model",
    "parse_gpu",
    "parse_model",
    "read_gpu_json",
    "read_own_files",
    "read_profiles_folder",
]

PROFILES_DIR = "EBBTIDE_PROFILES_DIR"
_GPUS, _MODELS = "gpus", "models"


class GpuSource(StrEnum):
    """Where the profile of a GPU model comes from, in order of precedence."""

    SET = "set"
    FILE = "file"
    SHIPPED = "shipped"
    ESTIMATED = "estimated"


@dataclass(frozen=True, slots=True)
class ProfilesFolder:
    """The profiles in a folder by name; `replaced` are the names that hide a shipped profile."""

    gpus: tuple[str, ...]
    models: tuple[str, ...]
    replaced: tuple[str, ...]


def list_gpu_names(folder: Path | None = None) -> tuple[str, ...]:
    """Return the GPU models that `load_gpu` knows, sorted; raises ProfileError as `read_profiles_folder`."""
    was_set = get_fleet_hardware().profiles if folder is None else ()
    return tuple(sorted({*_list_names(_GPUS, folder), *was_set}))


def list_model_names(folder: Path | None = None) -> tuple[str, ...]:
    """Return the models that `load_model` knows, sorted; raises ProfileError as `read_profiles_folder`."""
    return _list_names(_MODELS, folder)


def load_gpu(name: str, folder: Path | None = None) -> HardwareProfile:
    """Return the profile of one GPU model, with network and kept memory of the fleet that this process plans for.

    Args:
        folder: your own profiles; by default the folder in `EBBTIDE_PROFILES_DIR`, if set. With it, the profile is as
            written, whatever was set on the service.

    Raises:
        ProfileError: the name is unknown, or the file in `folder` is invalid. The message lists the known names, or
            names the file and the field.
    """
    if folder is not None:
        return _load_gpu(name, folder)
    fleet = get_fleet_hardware()
    if (text := fleet.profiles.get(name)) is not None:
        profile = _parse_set_gpu(text)
    else:
        profile = _load_gpu(name, find_profiles_folder())
    profile = with_slowest_network(profile, fleet.networks.get(name, ()))
    return with_kept_memory(profile, fleet.kept_bytes.get(name, 0))


def find_gpu_source(name: str, *, is_set_ignored: bool = False) -> GpuSource | None:
    """Return where the profile of a GPU model comes from, or None if there is none.

    With `is_set_ignored`, the source is the one that counts once no profile is set for the GPU model.
    """
    if name in get_fleet_hardware().profiles and not is_set_ignored:
        return GpuSource.SET
    folder = find_profiles_folder()
    if folder and name in _list_own(_GPUS, folder):
        return GpuSource.FILE
    if name in _list_shipped(_GPUS):
        return GpuSource.SHIPPED
    return GpuSource.ESTIMATED if name in _estimates else None


def read_gpu_json(name: str) -> str:
    """Return the profile of a GPU model as JSON text, without the network of the fleet; raises as `load_gpu`."""
    if (text := get_fleet_hardware().profiles.get(name)) is not None:
        return text
    return _read_profile(_GPUS, name, find_profiles_folder())[0]


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
    models = [folder / _MODELS / f"{name}.json" for name in _list_own(_MODELS, folder)]
    for path in (*list_profile_files(folder / _GPUS), *models):
        yield path.relative_to(folder).as_posix(), path.read_bytes()


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
        return parse_gpu(text)


@cache
def _parse_set_gpu(text: str) -> HardwareProfile:
    return parse_gpu(text)


@cache
def _load_model(name: str, sequence_length: int, folder: Path | None) -> ModelProfile:
    text, file = _read_profile(_MODELS, name, folder)
    with _naming(file):
        return parse_model(text, sequence_length)


def _list_names(kind: str, folder: Path | None) -> tuple[str, ...]:
    folder = folder or find_profiles_folder()
    own = _list_own(kind, folder) if folder else ()
    return tuple(sorted({*_list_shipped(kind), *own, *(_estimates if kind == _GPUS else ())}))


@cache
def _list_shipped(kind: str) -> frozenset[str]:
    entries = files("scheduler.solver.profiles").joinpath("data", kind).iterdir()
    return frozenset(entry.name.removesuffix(".json") for entry in entries if entry.name.endswith(".json"))


def _list_own(kind: str, folder: Path) -> Iterable[str]:
    """Return the names of the profiles in `folder`; the subfolder of a kind without profiles may be absent."""
    try:
        kinds = {entry.name for entry in folder.iterdir()}
        if kind == _GPUS:
            return sorted(read_gpu_files(folder / kind))
        return sorted(entry.stem for entry in (folder / kind).glob("*.json")) if kind in kinds else []
    except OSError as error:
        allowed = "it must be a readable folder with the folders gpus and models"
        raise ProfileError(f"{PROFILES_DIR} is {str(folder)!r}: {error.strerror}; {allowed}") from None


def _read_profile(kind: str, name: str, folder: Path | None) -> tuple[str, Path | None]:
    """Return the JSON text of a profile, and its file if it comes from `folder`."""
    known = _list_names(kind, folder)
    if name not in known:
        raise ProfileError(f"{kind[:-1]} is {name!r}; allowed are {', '.join(known)}{suggest(name, known)}")
    if folder and kind == _GPUS and name in (own := read_gpu_files(folder / kind)):
        return own[name].profile_json, own[name].path
    if folder and kind == _MODELS and name in _list_own(kind, folder):
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
