"""Checkpoints that any number of ranks can load, whichever number saved them.

torch.distributed.checkpoint stores each tensor once, by its name in the plain model, so a layout is nothing but a way
to read it. A checkpoint is a directory `step-NNNNNNNN` under a root; its manifest, written last, makes it count.
All functions need a process group; a lone process has a group of one.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state
from torch.optim import Optimizer

from scheduler.worker.manifest import (
    MANIFEST_NAME,
    CheckpointError,
    Manifest,
    Position,
    checkpoint_path,
    checkpoint_steps,
    complete_checkpoints,
    latest,
    read_manifest,
    stored_files,
    write_manifest,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Optimizer entries by parameter name, not by number: names stay the same however parameters are grouped.
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


def require_writable(root: Path) -> None:
    """Creates the root where it is missing; better told before the first step than at the first save.

    Raises:
        CheckpointError: it cannot be created, or no file can be written there.
    """
    probe = root / f".writable-{dist.get_rank()}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as failure:
        raise CheckpointError(f"checkpoint directory {root} cannot be written: {failure.strerror}") from None


def save(
    root: Path,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    position: Position,
    settings: Mapping[str, str | int | float],
    keep: int = 2,
) -> None:
    """Writes the checkpoint of `position.step`, then removes all but the newest `keep` complete ones. Collective.

    One that is complete already is left as it is: the same step of the same training holds the same state.

    Raises:
        CheckpointError: a file cannot be written, what was complete before stays so; or no step was made yet.
    """
    if position.step == 0:
        # To have something to store torch would make an empty first step, and Adam counts its steps.
        raise CheckpointError("step 0 is not saved: it holds nothing that a new start does not give")
    directory = checkpoint_path(root, position.step)
    if _from_rank_0(lambda: read_manifest(directory) is not None):
        return
    try:
        _from_rank_0(lambda: _make_empty(directory))
        save_state(_state(model, optimizer), checkpoint_id=directory)
        if dist.get_rank() == 0:
            write_manifest(
                directory, Manifest(position, dist.get_world_size(), dict(settings), stored_files(directory))
            )
    except (OSError, CheckpointException) as failure:
        raise CheckpointError(f"checkpoint {directory} could not be saved: {_cause(failure)}") from failure
    if dist.get_rank() == 0:
        _prune(root, keep)
        logger.info("saved %s", directory)
    dist.barrier()


def find_latest(root: Path) -> Manifest | None:
    """The newest complete checkpoint, the same answer on all ranks. Collective.

    Raises:
        CheckpointError: a manifest is there that this version does not read.
    """
    return _from_rank_0(lambda: latest(root))


def load(
    root: Path,
    manifest: Manifest,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    settings: Mapping[str, str | int | float],
) -> Position:
    """Fills model, optimizer and random state from a complete checkpoint, on any number of ranks. Collective.

    Raises:
        CheckpointError: it is of another training or another model, nothing was changed then; or a file of it
            cannot be read.
    """
    directory = checkpoint_path(root, manifest.position.step)
    _check_settings(directory, manifest.settings, settings)
    state = _state(model, optimizer)
    try:
        _check_tensors(directory, FileSystemReader(directory).read_metadata(), state["model"])
        load_state(state, checkpoint_id=directory)
    except (OSError, CheckpointException) as failure:
        raise CheckpointError(f"checkpoint {directory} could not be loaded: {_cause(failure)}") from failure
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=_OPTIONS
    )
    _set_random_state(state["random"])
    logger.info("loaded %s, saved by %d ranks", directory, manifest.world_size)
    return manifest.position


def full_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Every model and optimizer entry by name, tensors whole and on the CPU; empty but on rank 0. Collective."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, flatten_optimizer_state_dict=True)
    of_model, of_optimizer = get_state_dict(model, optimizer, options=options)
    return {**of_model, **of_optimizer} if dist.get_rank() == 0 else {}


def _from_rank_0(look: Callable[[], T]) -> T:
    """What rank 0 finds, or the error that it met, on all ranks: on a shared disk each might see something else."""
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            found = [look()]
        except (OSError, CheckpointError) as failure:
            found = [failure]
    dist.broadcast_object_list(found)
    if isinstance(found[0], Exception):
        raise found[0]
    answer: T = found[0]
    return answer


def _cause(failure: OSError | CheckpointException) -> str:
    """Of a failure on several ranks the first, without the traces that torch puts into its message."""
    if not isinstance(failure, CheckpointException):
        return str(failure)
    rank, (error, _) = min(failure.failures.items())
    return f"rank {rank}: {error}"


def _make_empty(directory: Path) -> None:
    _clear(directory)
    directory.mkdir(parents=True)


def _state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    of_model, of_optimizer = get_state_dict(model, optimizer, options=_OPTIONS)
    return {"model": of_model, "optimizer": of_optimizer, "random": _random_state()}


def _random_state() -> dict[str, Tensor]:
    """One state for all ranks: training draws nothing per rank, or the layout would change what it draws."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_random_state(states: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


def _check_settings(
    directory: Path, stored: Mapping[str, str | int | float], wanted: Mapping[str, str | int | float]
) -> None:
    for name in sorted({*stored, *wanted}):
        if stored.get(name) != wanted.get(name):
            raise CheckpointError(
                f"checkpoint {directory} is of another training: {name} is {stored.get(name)!r} there "
                f"and {wanted.get(name)!r} here"
            )


def _check_tensors(directory: Path, stored: Metadata, model: Mapping[str, Tensor]) -> None:
    """By name, shape and precision: by itself a load converts precisions and overlooks what it has no use for."""
    prefix = "model."
    there = {
        name.removeprefix(prefix): _describe_stored(entry)
        for name, entry in stored.state_dict_metadata.items()
        if name.startswith(prefix)
    }
    here = {name: _describe(tensor.shape, tensor.dtype) for name, tensor in model.items()}
    for name in sorted({*there, *here}):
        if there.get(name) != here.get(name):
            raise CheckpointError(
                f"checkpoint {directory} is of another model: {name} is {there.get(name, 'absent')} there "
                f"and {here.get(name, 'absent')} here"
            )


def _describe_stored(entry: TensorStorageMetadata | BytesStorageMetadata) -> str:
    return _describe(entry.size, entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else "no tensor"


def _describe(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{'x'.join(str(length) for length in shape)} {str(dtype).removeprefix('torch.')}"


def _prune(root: Path, keep: int) -> None:
    """Keeps the newest complete checkpoints; older ones and unfinished ones before the newest go."""
    kept = [manifest.position.step for _, manifest in zip(range(keep), complete_checkpoints(root), strict=False)]
    for step in checkpoint_steps(root):
        if step not in kept and step < kept[0]:
            try:
                _clear(checkpoint_path(root, step))
            except OSError as failure:
                logger.warning("an old checkpoint stays: %s", failure)


def _clear(directory: Path) -> None:
    if directory.exists():
        # First what makes it count, so that a half-removed checkpoint is never taken for a whole one.
        (directory / MANIFEST_NAME).unlink(missing_ok=True)
        shutil.rmtree(directory)
