"""The manifest of a checkpoint. It is written last, so a directory without one is an unfinished checkpoint.

The manifest has a checksum of its own. The other files are verified by the checksums that `ebbtide.checkpoints` keeps.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

from ebbtide.checkpoints.errors import CheckpointError as CheckpointError
from ebbtide.checkpoints.errors import DamagedCheckpointError
from ebbtide.status_file import write_json_atomically

logger = logging.getLogger(__name__)

MANIFEST_NAME = "manifest.json"
_FORMAT = 4
_FORMAT_WITHOUT_CHECKSUM = 3
_DIRECTORY_PATTERN = re.compile(r"step-(\d{8,})")


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
    """Yield the manifests of complete checkpoints, newest first, without those whose manifest is damaged.

    Raises:
        CheckpointError: a manifest has a format that this version does not read.
    """
    for step in list_checkpoint_steps(root):
        try:
            manifest = read_manifest(checkpoint_path(root, step))
        except DamagedCheckpointError as error:
            logger.error("%s It is skipped.", error)
        else:
            if manifest is not None:
                yield manifest


def find_latest_manifest(root: Path) -> Manifest | None:
    """Return the manifest of the newest complete checkpoint, or None.

    Raises:
        CheckpointError: a manifest has a format that this version does not read.
    """
    return next(iterate_complete_checkpoints(root), None)


def read_manifest(directory: Path) -> Manifest | None:
    """Return the manifest, or None if the checkpoint is incomplete.

    A checkpoint is incomplete without a manifest, or if a file has another size than recorded.

    Raises:
        DamagedCheckpointError: the manifest is not as it was written.
        CheckpointError: it has a format that this version does not read.
    """
    path = directory / MANIFEST_NAME
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    manifest = _parse_manifest(path, content)
    is_complete = all(_file_size_bytes(directory / file.name) == file.size_bytes for file in manifest.files)
    return manifest if is_complete else None


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Complete the checkpoint, which makes it the one to load."""
    document = {"format": _FORMAT, **asdict(manifest)}
    write_json_atomically(directory / MANIFEST_NAME, {**document, "crc32": _compute_checksum(document)}, durable=True)


def list_stored_files(directory: Path) -> tuple[StoredFile, ...]:
    files = sorted(entry for entry in directory.iterdir() if entry.is_file() and entry.name != MANIFEST_NAME)
    return tuple(StoredFile(file.name, file.stat().st_size) for file in files)


def _parse_manifest(path: Path, content: bytes) -> Manifest:
    try:
        document: dict[str, Any] = json.loads(content)
        _verify_checksum(path, document)
        return Manifest(
            position=TrainingPosition(**document["position"]),
            world_size=document["world_size"],
            settings=document["settings"],
            files=tuple(StoredFile(**file) for file in document["files"]),
            batch_changes=tuple(BatchChange(**change) for change in document["batch_changes"]),
        )
    except KeyError as error:
        raise DamagedCheckpointError(f"{path} is damaged: field {error} is missing.") from None
    except (TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DamagedCheckpointError(f"{path} is damaged: {error}.") from None


def _verify_checksum(path: Path, document: dict[str, Any]) -> None:
    version, checksum = document["format"], document.pop("crc32", None)
    if version == _FORMAT_WITHOUT_CHECKSUM and checksum is None:
        return
    if checksum is not None and checksum != _compute_checksum(document):
        raise DamagedCheckpointError(f"{path} is damaged: its content does not match its checksum.")
    if version != _FORMAT:
        raise CheckpointError(
            f"{path}: `format` is {version!r}, but this version reads {_FORMAT_WITHOUT_CHECKSUM} and {_FORMAT}. "
            "Use the version of Ebbtide that saved the checkpoint, or a newer one."
        )
    if checksum is None:
        raise DamagedCheckpointError(f"{path} is damaged: it has no checksum.")


def _compute_checksum(document: Mapping[str, Any]) -> int:
    return crc32(json.dumps(document, sort_keys=True).encode())


def _file_size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1
