"""Manifest: the file of a checkpoint that is written last. A directory without one was never finished."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scheduler.worker.status import write_json_atomically

MANIFEST_NAME = "manifest.json"
_FORMAT = 3
_DIRECTORY_PATTERN = re.compile(r"step-(\d{8,})")


class CheckpointError(ValueError):
    """A checkpoint cannot be written, read, or belongs to another training."""


@dataclass(frozen=True, slots=True)
class TrainingPosition:
    """How far the training is: finished steps, samples seen, which is the number of the next sample, and how many
    blocks at the front no longer learn."""

    step: int
    samples: int
    frozen: int = 0


@dataclass(frozen=True, slots=True)
class BatchChange:
    """From `step` on another global batch, and the learning rate times `factor` by the rule that was named."""

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
    """`settings` are what must be equal for the training to go on as it began (model, seed, precision ...)."""

    position: TrainingPosition
    world_size: int
    settings: Mapping[str, str | int | float]
    files: tuple[StoredFile, ...]
    batch_changes: tuple[BatchChange, ...] = ()


def checkpoint_path(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def list_checkpoint_steps(root: Path) -> list[int]:
    """Steps that have a directory, complete or not, newest first."""
    if not root.is_dir():
        return []
    matches = (_DIRECTORY_PATTERN.fullmatch(entry.name) for entry in root.iterdir() if entry.is_dir())
    return sorted((int(match[1]) for match in matches if match), reverse=True)


def iterate_complete_checkpoints(root: Path) -> Iterator[Manifest]:
    """Newest first."""
    for step in list_checkpoint_steps(root):
        manifest = read_manifest(checkpoint_path(root, step))
        if manifest is not None:
            yield manifest


def find_latest_manifest(root: Path) -> Manifest | None:
    """The newest complete checkpoint, or None where there is none."""
    return next(iterate_complete_checkpoints(root), None)


def read_manifest(directory: Path) -> Manifest | None:
    """None where the checkpoint is not complete: no manifest, or a file that is not there in its full size.

    Raises:
        CheckpointError: the manifest is there and not in a form that this version reads.
    """
    path = directory / MANIFEST_NAME
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    manifest = _parse_manifest(path, text)
    whole = all(_file_size_bytes(directory / file.name) == file.size_bytes for file in manifest.files)
    return manifest if whole else None


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Completes a checkpoint: after this it is the one to load."""
    write_json_atomically(directory / MANIFEST_NAME, {"format": _FORMAT, **asdict(manifest)}, durable=True)


def list_stored_files(directory: Path) -> tuple[StoredFile, ...]:
    files = sorted(entry for entry in directory.iterdir() if entry.is_file() and entry.name != MANIFEST_NAME)
    return tuple(StoredFile(file.name, file.stat().st_size) for file in files)


def _parse_manifest(path: Path, text: str) -> Manifest:
    try:
        document: dict[str, Any] = json.loads(text)
        if document["format"] != _FORMAT:
            raise CheckpointError(f"{path}: format is {document['format']!r}, this version reads {_FORMAT}")
        return Manifest(
            position=TrainingPosition(**document["position"]),
            world_size=document["world_size"],
            settings=document["settings"],
            files=tuple(StoredFile(**file) for file in document["files"]),
            batch_changes=tuple(BatchChange(**change) for change in document["batch_changes"]),
        )
    except KeyError as missing:
        raise CheckpointError(f"{path}: field {missing} is missing") from None
    except (TypeError, json.JSONDecodeError) as wrong:
        raise CheckpointError(f"{path}: {wrong}") from None


def _file_size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1
