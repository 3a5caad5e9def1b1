"""Saving of checkpoints that are complete or absent."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from ebbtide.checkpoints import checkpoint_folders
from ebbtide.checkpoints.coordination import compute_on_rank_0, is_distributed
from ebbtide.checkpoints.errors import CheckpointError, describe_os_error
from ebbtide.checkpoints.piece_writer import PieceWriter

logger = logging.getLogger(__name__)


def save_checkpoint(state: Mapping[str, Any], folder: Path, *, step: int, keep: int = 2) -> Path:
    """Save a checkpoint as `folder/step-<N>` and return its path. Collective, if there is a process group.

    All files are on disk before the directory gets its name. A checkpoint of this step that is already complete is not
    written again.

    Args:
        state: what `torch.distributed.checkpoint.save` takes.
        step: number of completed steps.
        keep: number of complete checkpoints to keep; older ones are deleted.

    Raises:
        CheckpointError: a file cannot be written, or `folder` holds a checkpoint of a later step. Nothing was
            overwritten.
        ValueError: `step` is negative, or `keep` is below 1.
    """
    if step < 0 or keep < 1:
        raise ValueError(f"`step` is {step} and `keep` is {keep}. `step` must be 0 or more, `keep` 1 or more.")
    folder = Path(folder)
    path = checkpoint_folders.checkpoint_path(folder, step)
    try:
        partial = compute_on_rank_0(lambda: checkpoint_folders.create_partial(folder, step))
        if partial is None:
            return path
        _write_durably(state, partial, folder, step)
    except (OSError, CheckpointException) as error:
        raise CheckpointError(f"Cannot save the checkpoint {path}: {describe_failure(error)}.") from error
    compute_on_rank_0(lambda: checkpoint_folders.prune(folder, keep))
    logger.info("Saved %s", path)
    return path


def _write_durably(state: Mapping[str, Any], partial: Path, folder: Path, step: int) -> None:
    try:
        write_files(state, PieceWriter(partial, node=get_node()))
        compute_on_rank_0(lambda: checkpoint_folders.complete(partial, folder, step))
    except (OSError, CheckpointException):
        compute_on_rank_0(lambda: checkpoint_folders.discard_partial(partial))
        raise


def write_files(state: Mapping[str, Any], writer: PieceWriter) -> None:
    with warnings.catch_warnings():
        # torch warns that a process without a group saves alone, which is intended.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        save_state(dict(state), storage_writer=writer, no_dist=not is_distributed())


def get_node() -> str:
    """Return the executor's name for this node, or the host name without an executor."""
    return os.environ.get("EBBTIDE_NODE") or os.uname().nodename


def describe_failure(failure: OSError | CheckpointException) -> str:
    """Describe the first failed rank, without the stack traces in torch's message."""
    if isinstance(failure, CheckpointException):
        rank, (error, _) = min(failure.failures.items())
        text = describe_os_error(error) if isinstance(error, OSError) else str(error)
        return f"rank {rank}: {text}".removesuffix(".")
    return describe_os_error(failure)
