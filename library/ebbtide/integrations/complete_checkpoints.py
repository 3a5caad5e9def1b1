"""Which checkpoints of a framework are complete.

A framework writes its checkpoint file by file, and a rank may be killed in between. Once all ranks have written, rank 0
adds a record with the size and the checksums of every file. A checkpoint without a valid record does not count.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger(__name__)

RECORD_NAME = "ebbtide.json"


@dataclass(frozen=True)
class BatchRecord:
    """The global batch of a training. `rank_batch` is what the script asked for: samples per rank and step."""

    global_batch: int
    rank_batch: int


@dataclass(frozen=True)
class CheckpointRecord:
    """Record of a complete checkpoint.

    `model` is the digest of the names and shapes of its parameters. `position` is what an integration needs to find its
    place in the data. `files` has the size of each file, and `checksums` those of its blocks.
    """

    step: int
    batch: BatchRecord
    model: str
    framework: str
    framework_version: str
    position: Mapping[str, int] = field(default_factory=dict)
    files: Mapping[str, int] = field(default_factory=dict)
    checksums: Mapping[str, Sequence[int]] = field(default_factory=dict)


class CheckpointMismatchError(ValueError):
    """A checkpoint that belongs to another training. Nothing was changed."""


def record_checkpoint(path: Path, record: CheckpointRecord) -> None:
    """Mark a checkpoint as complete: a folder, or a file. Call it on rank 0 once every rank has written."""
    files = measure_files(path)
    for name in files:
        _flush(path.parent / name)
    document = asdict(record) | {"files": files}
    place = _find_record(path)
    part = place.with_name(f"{place.name}.part")
    part.write_text(json.dumps(document), encoding="utf-8")
    _flush(part)
    part.replace(place)
    _flush(place.parent)


def measure_files(path: Path) -> dict[str, int]:
    """Return the size of each file of a checkpoint, by its name relative to the checkpoint's parent."""
    return {name: (path.parent / name).stat().st_size for name in _list_files(path)}


def discard_record(path: Path) -> None:
    """Mark a checkpoint as incomplete, before it is written again."""
    _find_record(path).unlink(missing_ok=True)


def list_complete_checkpoints(folder: Path, pattern: str) -> list[tuple[Path, CheckpointRecord]]:
    """Return the complete checkpoints, that of the most steps first. `pattern` matches their names in `folder`."""
    complete = [(path, record) for path in folder.glob(pattern) if (record := read_record(path)) is not None]
    return sorted(complete, key=lambda found: found[1].step, reverse=True)


def remove_old_checkpoints(folder: Path, pattern: str, *, keep: int) -> None:
    """Remove the oldest complete checkpoints, so that `keep` remain. Call it on rank 0 alone."""
    for path, _ in list_complete_checkpoints(folder, pattern)[keep:]:
        remove_checkpoint(path)


def remove_incomplete_checkpoints(folder: Path, pattern: str) -> None:
    """Remove checkpoints without a valid record, but only in a folder that has a complete one.

    Elsewhere they may be those of a training without Ebbtide. Call it on rank 0 alone.
    """
    if not list_complete_checkpoints(folder, pattern):
        return
    for path in folder.glob(pattern):
        if not path.name.endswith(f".{RECORD_NAME}") and read_record(path) is None:
            logger.warning("Removing the incomplete checkpoint %s.", path)
            remove_checkpoint(path)


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint and its record, the record first."""
    discard_record(path)
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def rename_checkpoint(path: Path, target: Path) -> None:
    """Rename a checkpoint and its record. One that has the name already is removed."""
    remove_checkpoint(target)
    record, is_folder = _find_record(path), path.is_dir()
    path.rename(target)
    if not is_folder:
        record.rename(_find_record(target))


def read_record(path: Path) -> CheckpointRecord | None:
    """Return the record of a checkpoint, None if it is missing, damaged, or contradicted by the size of a file."""
    try:
        document = json.loads(_find_record(path).read_text(encoding="utf-8"))
        record = CheckpointRecord(**document | {"batch": BatchRecord(**document["batch"])})
        sizes = {name: (path.parent / name).stat().st_size for name in record.files}
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return record if sizes == dict(record.files) else None


def check_record(path: Path, record: CheckpointRecord, *, model: str, framework: str, version: str) -> None:
    """Check that a checkpoint belongs to this model and to a compatible framework.

    Raises:
        CheckpointMismatchError: it does not.
    """
    remedy = "Use another output directory, or start the script that wrote it."
    if record.model != model:
        raise CheckpointMismatchError(
            f"The checkpoint {path} is of another model: its parameters have other names or shapes. {remedy}"
        )
    written = f"{record.framework} {record.framework_version}"
    if (record.framework, _major(record.framework_version)) != (framework, _major(version)):
        raise CheckpointMismatchError(
            f"The checkpoint {path} was written by {written}, but this is {framework} {version}. "
            f"Install {record.framework} {_major(record.framework_version)}.x, or use another output directory."
        )
    if record.framework_version != version:
        logger.warning("The checkpoint %s was written by %s; this is version %s.", path, written, version)


def digest_model(model: nn.Module) -> str:
    """Return a digest of the names and shapes of the parameters. The prefix of DistributedDataParallel is ignored."""
    shapes = sorted((name.removeprefix("module."), tuple(each.shape)) for name, each in model.named_parameters())
    return hashlib.sha256(repr(shapes).encode()).hexdigest()[:16]


def choose_global_batch(asked: int, recorded: BatchRecord | None, *, rank_batch: int, world_size: int) -> BatchRecord:
    """Return the global batch: as asked, else as recorded, else what the script trains with on the present ranks.

    Args:
        asked: `global_batch` of the script; 0 without one.
        rank_batch: samples per rank and step that the script asks for.

    Raises:
        ValueError: the script asks for another batch than when the training began.
    """
    if asked:
        return BatchRecord(asked, rank_batch)
    if recorded is None:
        return BatchRecord(rank_batch * world_size, rank_batch)
    if recorded.rank_batch != rank_batch:
        raise ValueError(
            f"The script now trains with {rank_batch} samples per rank and step, but the training began with "
            f"{recorded.rank_batch} and {recorded.global_batch} on all ranks. Restore the batch size, or pass "
            "`global_batch`."
        )
    return recorded


def _major(version: str) -> str:
    return version.partition(".")[0]


def _find_record(path: Path) -> Path:
    return path / RECORD_NAME if path.is_dir() else path.with_name(f"{path.name}.{RECORD_NAME}")


def _list_files(path: Path) -> Iterator[str]:
    """Yield the names of a checkpoint's files, relative to its parent."""
    if not path.is_dir():
        yield path.name
        return
    for each in sorted(path.rglob("*")):
        if each.is_file() and each.name != RECORD_NAME:
            yield str(each.relative_to(path.parent))


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
