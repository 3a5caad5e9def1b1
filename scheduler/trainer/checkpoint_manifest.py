"""The manifest of a checkpoint. It is written last, so a directory without one is an unfinished checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ebbtide.status_file import write_json_atomically

MANIFEST_NAME = "manifest.json"
_FORMAT = 3
_DIRECTORY_PATTERN = re.compile(r"step-(\d{8,})")


class CheckpointError(ValueError):
    """A checkpoint cannot be written or read, or belongs to another training."""


@dataclass(frozen=True, slots=True)
class TrainingPosition:
    """Progress of a training.

    Attributes:
        step: number of completed steps.
        samples: number of samples seen, which is also the number of the next sample.
        frozen: number of frozen blocks.
    """

    step: int
    samples: int
    frozen: int = 0


@dataclass(frozen=True, slots=True)
class BatchChange:
    """A change of the global batch from `before` to `after` after `step`. It scales the learning rate by `factor`."""

    step: int
    before: int
    after: int
    rule: str
    factor: float


@dataclass(frozen=True, slots=True)
class StoredFile:
    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """Contents of a checkpoint. `settings` must be equal for the training to continue (model, seed, dtype ...)."""

    position: TrainingPosition
    world_size: int
    settings: Mapping[str, str | int | float]
    files: tuple[StoredFile, ...]
    batch_changes: tuple[BatchChange, ...] = ()


def checkpoint_path(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def list_checkpoint_steps(root: Path) -> list[int]:
    """Return the steps that have a directory, complete or not, newest first."""
    if not root.is_dir():
        return []
    matches = (_DIRECTORY_PATTERN.fullmatch(entry.name) for entry in root.iterdir() if entry.is_dir())
    return sorted((int(match[1]) for match in matches if match), reverse=True)


def iterate_complete_checkpoints(root: Path) -> Iterator[Manifest]:
    """Yield the manifests of complete checkpoints, newest first."""
    for step in list_checkpoint_steps(root):
        manifest = read_manifest(checkpoint_path(root, step))
        if manifest is not None:
            yield manifest


def find_latest_manifest(root: Path) -> Manifest | None:
    """Return the manifest of the newest complete checkpoint, or None."""
    return next(iterate_complete_checkpoints(root), None)


def read_manifest(directory: Path) -> Manifest | None:
    """Return the manifest, or None if the checkpoint is incomplete.

    A checkpoint is incomplete without a manifest, or if a file has another size than recorded.

    Raises:
        CheckpointError: the manifest has a format that this version does not read.
    """
    path = directory / MANIFEST_NAME
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    manifest = _parse_manifest(path, text)
    is_complete = all(_file_size_bytes(directory / file.name) == file.size_bytes for file in manifest.files)
    return manifest if is_complete else None


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Complete the checkpoint, which makes it the one to load."""
    write_json_atomically(directory / MANIFEST_NAME, {"format": _FORMAT, **asdict(manifest)}, durable=True)


def list_stored_files(directory: Path) -> tuple[StoredFile, ...]:
    files = sorted(entry for entry in directory.iterdir() if entry.is_file() and entry.name != MANIFEST_NAME)
    return tuple(StoredFile(file.name, file.stat().st_size) for file in files)


def _parse_manifest(path: Path, text: str) -> Manifest:
    try:
        document: dict[str, Any] = json.loads(text)
        if document["format"] != _FORMAT:
            raise CheckpointError(f"{path}: `format` is {document['format']!r}, but this version reads {_FORMAT}.")
        return Manifest(
            position=TrainingPosition(**document["position"]),
            world_size=document["world_size"],
            settings=document["settings"],
            files=tuple(StoredFile(**file) for file in document["files"]),
            batch_changes=tuple(BatchChange(**change) for change in document["batch_changes"]),
        )
    except KeyError as error:
        raise CheckpointError(f"{path}: field {error} is missing.") from None
    except (TypeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: {error}") from None


def _file_size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1
