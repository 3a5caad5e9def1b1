"""The checkpoints in a folder: names, completeness and retention.

A checkpoint is written to a hidden directory and renamed to `step-<N>` when all of it is on disk. A checkpoint that
cannot be used is renamed to `step-<N>.damaged` or `step-<N>.nonfinite`, so that it can be examined.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path

from ebbtide.checkpoints.errors import CheckpointError

logger = logging.getLogger(__name__)

METADATA_NAME = ".metadata"
_COMPLETE = re.compile(r"step-(\d+)")
_REJECTED = re.compile(r"step-(\d+)\.(?:damaged|nonfinite)(?:\.\d+)?")
_REMAINS = re.compile(r"\.step-\d+(?:\.\w+)*\.(?:partial|deleted)")


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step}"


def list_steps(folder: Path) -> list[int]:
    """Return the steps of complete checkpoints, newest first."""
    return sorted((step for step, path in _match(folder, _COMPLETE) if (path / METADATA_NAME).exists()), reverse=True)


def find_newest(folder: Path) -> Path | None:
    """Return the newest complete checkpoint, whatever the number of digits in its name."""
    complete = [(step, path) for step, path in _match(folder, _COMPLETE) if (path / METADATA_NAME).exists()]
    return max(complete, default=(0, None))[1]


def create_partial(folder: Path, step: int) -> Path | None:
    """Return an empty directory for the files of a checkpoint, or None if the checkpoint is already complete.

    Raises:
        CheckpointError: the folder holds a checkpoint of a later step, which this training did not load.
        OSError: the directory cannot be created.
    """
    steps = list_steps(folder)
    if step in steps:
        return None
    if steps and steps[0] > step:
        raise CheckpointError(
            f"Cannot save step {step} in {folder}: it holds the later step {steps[0]} of another training. "
            "Load that checkpoint first, or use an empty folder."
        )
    folder.mkdir(parents=True, exist_ok=True)
    for entry in folder.iterdir():
        if _REMAINS.fullmatch(entry.name):
            shutil.rmtree(entry)
    partial = folder / f".step-{step}.partial"
    partial.mkdir()
    return partial


def complete(partial: Path, folder: Path, step: int) -> Path:
    """Give the checkpoint its name, durably. All its files must be on disk."""
    path = checkpoint_path(folder, step)
    _sync_directory(partial)
    # A directory without metadata has this name, but is no checkpoint.
    if path.exists():
        set_aside(path, "damaged")
    partial.rename(path)
    _sync_directory(folder)
    return path


def discard_partial(partial: Path) -> None:
    """Delete the files of a checkpoint that could not be saved, because the next save may need their space."""
    try:
        shutil.rmtree(partial)
    except OSError as error:
        logger.warning("Cannot delete an unfinished checkpoint: %s", error)


def set_aside(path: Path, reason: str) -> None:
    """Rename a checkpoint that cannot be used, so that its step can be saved again. `reason` ends the new name."""
    for number in range(1000):
        target = path.with_name(f"{path.name}.{reason}" + (f".{number}" if number else ""))
        if not target.exists():
            path.rename(target)
            return
    raise CheckpointError(f"{path} cannot be set aside, because there are 1000 like it. Delete {path.name}.{reason}*.")


def try_set_aside(path: Path, reason: str) -> None:
    """Do the same as `set_aside`, but only log a failure, as in a folder that must not be written to."""
    try:
        set_aside(path, reason)
    except (OSError, CheckpointError) as error:
        logger.warning("Cannot rename %s: %s", path, error)


def prune(folder: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints, and rejected ones that are older than these.

    A failure to delete one of them is not a failure of the save that just succeeded.
    """
    kept = list_steps(folder)[:keep]
    if not kept:
        return
    for step, path in _match(folder, _COMPLETE):
        if step < kept[-1]:
            _remove(path)
    remove_rejected(folder, before=kept[-1])


def remove_rejected(folder: Path, *, before: int) -> None:
    """Delete checkpoints that were set aside and are of earlier steps than `before`. A failure is logged."""
    for step, path in _match(folder, _REJECTED):
        if step < before:
            _remove(path)


def _remove(path: Path) -> None:
    try:
        # A partly deleted checkpoint must not count as complete.
        hidden = path.with_name(f".{path.name}.deleted")
        path.rename(hidden)
        shutil.rmtree(hidden)
    except OSError as error:
        logger.warning("Cannot delete an obsolete checkpoint: %s", error)


def _match(folder: Path, pattern: re.Pattern[str]) -> list[tuple[int, Path]]:
    if not folder.is_dir():
        return []
    matches = ((pattern.fullmatch(entry.name), entry) for entry in folder.iterdir() if entry.is_dir())
    return [(int(match[1]), entry) for match, entry in matches if match]


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
