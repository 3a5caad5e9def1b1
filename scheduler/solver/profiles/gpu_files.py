"""GPU profiles in files of your own: as `ebbtide profile` writes them, or YAML.

A file may have any name, because a profile states its GPU model. Files are read once per process.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from scheduler.solver.profiles.gpu_document import parse_gpu
from scheduler.solver.profiles.profile_document import ProfileError

_SUFFIXES = frozenset({".json", ".yaml", ".yml"})
_YAML_FLOAT = re.compile(r"^[-+]?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][-+]?\d+)?$")


@dataclass(frozen=True, slots=True)
class ProfileFile:
    """A GPU profile in a file, as JSON text."""

    path: Path
    profile_json: str


@cache
def read_gpu_files(folder: Path) -> Mapping[str, ProfileFile]:
    """Return the GPU profiles in a folder by GPU model. Only files that end in .json, .yaml or .yml are read.

    Raises:
        ProfileError: a file cannot be read, a profile is invalid, or two files have the same GPU model.
            The message names file and field.
    """
    found: dict[str, ProfileFile] = {}
    for path in list_profile_files(folder):
        try:
            text = json.dumps(parse_profile_text(path.read_text(encoding="utf-8")))
            name = parse_gpu(text).gpu
        except (OSError, UnicodeDecodeError) as error:
            raise ProfileError(f"{path}: cannot be read: {error}") from None
        except ProfileError as error:
            raise ProfileError(f"{path}: {error}") from None
        if name in found:
            raise ProfileError(f"{path}: gpu is {name!r}, as in {found[name].path.name}; keep one of the two files")
        found[name] = ProfileFile(path, text)
    return found


def parse_profile_text(text: str) -> Any:
    """Return the value of JSON or YAML text. In YAML, numbers such as 1e9 are accepted as in JSON.

    Raises:
        ProfileError: the text is neither.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        """Reads numbers with an exponent as YAML 1.2 does. PyYAML follows YAML 1.1, where 1e9 is text."""

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _YAML_FLOAT, list("-+0123456789."))
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as not_json:
        try:
            return yaml.load(text, Loader)
        except (yaml.YAMLError, ValueError, RecursionError):
            raise ProfileError(f"GPU profile: neither JSON nor YAML: {not_json}") from None


def list_profile_files(folder: Path) -> list[Path]:
    """Return the files of GPU profiles in a folder, by name; none if it does not exist."""
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in _SUFFIXES) if folder.is_dir() else []
