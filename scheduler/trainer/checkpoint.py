"""Checkpoints that any number of ranks can load, whichever number saved them.

torch.distributed.checkpoint stores each tensor once, by its name in the plain model, so a layout is nothing but a way
to read it. A checkpoint is a directory `step-NNNNNNNN` under a root; its manifest, written last, makes it count.
All functions need a process group; a lone process has a group of one.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from scheduler.domain.job_records import LoadTraffic
from scheduler.trainer.checkpoint_manifest import (
    MANIFEST_NAME,
    CheckpointError,
    Manifest,
    checkpoint_path,
    find_latest_manifest,
    iterate_complete_checkpoints,
    list_checkpoint_steps,
    list_stored_files,
    read_manifest,
    write_manifest,
)
from scheduler.trainer.checkpoint_storage import PieceReader, PieceWriter
from scheduler.trainer.training_state import (
    TrainablePart,
    collect_checkpoint_share,
    collect_stored_state,
    set_random_state,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")


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


def reject_lost_checkpoint(root: Path, *, step: int) -> None:
    """No complete checkpoint was found: well for a job that has told of none (`step` 0), not for another one.

    Raises:
        CheckpointError: what the job has saved is gone; a new start would overwrite all that is known of it.
    """
    if step:
        state = "holds no complete checkpoint" if root.is_dir() else "does not exist"
        raise CheckpointError(
            f"checkpoint directory {root} {state}, but this job has saved step {step} there; "
            "bring it back, or submit a new job to begin again"
        )


def remove_unfinished(root: Path) -> None:
    """What killed saves have left, so that it does not take the room of the next one: it would stay until a later one
    is complete. One that was finished stays, whatever it has lost since. No save may be under way."""
    if dist.get_rank() == 0:
        for step in list_checkpoint_steps(root):
            directory = checkpoint_path(root, step)
            if not (directory / MANIFEST_NAME).exists():
                _try_remove(directory)


class BackgroundSaveResources:
    """What the saves in the background of one training share, so that each holds it up less: a group that nobody else
    uses, so that a save never comes between two messages of the training, and the host memory that the state is copied
    into, for memory that is new takes twice the time of the copy itself; and the thread that completes them, for to
    remove an old checkpoint takes as long as to copy a new one. Collective."""

    def __init__(self) -> None:
        self.group = dist.new_group(backend="gloo")
        self.executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint completion")
        self.stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
            )
        )


class BackgroundSave:
    """A checkpoint that is being written in the background. On rank 0 it counts, and old ones go, as soon as all files
    are there; `finish` waits for that.

    One that is complete already is left as it is: the same step of the same training holds the same state.
    """

    def __init__(
        self,
        root: Path,
        parts: Sequence[TrainablePart],
        manifest: Manifest,
        *,
        node: str,
        keep: int,
        resources: BackgroundSaveResources,
    ) -> None:
        """Copies the state and goes on. Collective. `node` is the one that this rank is on. What was saved before with
        this `background` must be finished.

        Raises:
            CheckpointError: the directory cannot be made, or no step was made yet.
        """
        self._manifest = manifest
        self._directory = _prepare_directory(root, manifest)
        self._completion: Future[None] | None = None
        if self._directory is not None:
            writer = PieceWriter(self._directory, rank=dist.get_rank(), node=node)
            written = async_save(
                collect_checkpoint_share(parts),
                storage_writer=writer,
                process_group=resources.group,
                async_stager=resources.stager,
            )
            assert isinstance(written, Future), "this is what it returns where the stager copies at once"
            self._completion = resources.executor.submit(
                _finalize, root, self._directory, manifest, keep, write_files=written.result, group=resources.group
            )

    @property
    def step(self) -> int:
        return self._manifest.position.step

    @property
    def is_done(self) -> bool:
        return self._completion is None or self._completion.done()

    def wait(self) -> None:
        """Waits until the checkpoint is complete and all but the newest complete ones are removed.

        Raises:
            CheckpointError: a file could not be written; what was complete before stays so, nothing stays of this one.
        """
        if self._completion is None or self._directory is None:
            return
        with _convert_save_errors(self._directory):
            self._completion.result()


def save(root: Path, parts: Sequence[TrainablePart], manifest: Manifest, *, node: str, keep: int = 2) -> None:
    """As `Saving`, at once: when it returns the checkpoint is complete. Collective.

    Raises:
        CheckpointError: a file cannot be written, what was complete before stays so; or no step was made yet.
    """
    directory = _prepare_directory(root, manifest)
    if directory is None:
        return
    writer = PieceWriter(directory, rank=dist.get_rank(), node=node)
    with _convert_save_errors(directory):
        _finalize(
            root,
            directory,
            manifest,
            keep,
            write_files=lambda: save_state(collect_checkpoint_share(parts), storage_writer=writer),
        )


def find_latest(root: Path) -> Manifest | None:
    """The newest complete checkpoint, the same answer on all ranks. Collective.

    Raises:
        CheckpointError: a manifest is there that this version does not read.
    """
    return _broadcast_from_rank_0(lambda: find_latest_manifest(root))


def load(
    root: Path,
    manifest: Manifest,
    parts: Sequence[TrainablePart],
    *,
    settings: Mapping[str, str | int | float],
    node: str,
) -> LoadTraffic:
    """Fills model, optimizers and random state from a complete checkpoint, on any number of ranks, and says what this
    one read, which is on `node`. Collective.

    Raises:
        CheckpointError: it is of another training or another model, nothing was changed then; or a file of it
            cannot be read.
    """
    directory = checkpoint_path(root, manifest.position.step)
    _check_settings(directory, manifest.settings, settings)
    values, reader = collect_stored_state(parts), PieceReader(directory, node=node)
    try:
        _check_tensors(directory, reader.read_metadata(), values["model"])
        load_state(values, storage_reader=reader)
    except (OSError, CheckpointException) as failure:
        raise CheckpointError(f"checkpoint {directory} could not be loaded: {_describe_failure(failure)}") from failure
    # The tensors are those of the model and its optimizers themselves: they are filled in place.
    set_random_state(values["random"])
    logger.info("loaded %s, saved by %d ranks: %s", directory, manifest.world_size, reader.traffic)
    return reader.traffic


def _prepare_directory(root: Path, manifest: Manifest) -> Path | None:
    """An empty directory for the checkpoint, None where it is complete already. Collective."""
    if manifest.position.step == 0:
        # To have something to store torch would make an empty first step, and Adam counts its steps.
        raise CheckpointError("step 0 is not saved: it holds nothing that a new start does not give")
    directory = checkpoint_path(root, manifest.position.step)
    with _convert_save_errors(directory):
        is_needed = _broadcast_from_rank_0(lambda: _make_empty_unless_complete(directory))
    return directory if is_needed else None


def _finalize(
    root: Path,
    directory: Path,
    manifest: Manifest,
    keep: int,
    *,
    write_files: Callable[[], object],
    group: dist.ProcessGroup | None = None,
) -> None:
    """As soon as all files are there it counts, or fails on all ranks. Collective over the group."""
    is_first = dist.get_rank() == 0
    try:
        write_files()
        _broadcast_from_rank_0(
            lambda: write_manifest(directory, replace(manifest, files=list_stored_files(directory))), group
        )
    except (OSError, CheckpointException):
        if is_first:
            # On a full disk no later save would find room beside what is left of this one.
            _try_remove(directory)
        raise
    if is_first:
        _prune(root, keep)
        logger.info("saved %s", directory)


@contextmanager
def _convert_save_errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, CheckpointException) as failure:
        raise CheckpointError(f"checkpoint {directory} could not be saved: {_describe_failure(failure)}") from failure


def _broadcast_from_rank_0(compute: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """What rank 0 finds, or the error that it met, on all ranks: on a shared disk each might see something else."""
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            found = [compute()]
        except (OSError, CheckpointError) as failure:
            found = [failure]
    dist.broadcast_object_list(found, group=group)
    if isinstance(found[0], Exception):
        raise found[0]
    answer: T = found[0]
    return answer


def _describe_failure(failure: OSError | CheckpointException) -> str:
    """Of a failure on several ranks the first, without the traces that torch puts into its message."""
    if isinstance(failure, CheckpointException):
        rank, (error, _) = min(failure.failures.items())
        return f"rank {rank}: {_describe_error(error)}"
    return _describe_error(failure)


def _describe_error(error: BaseException) -> str:
    """Without the number of a system's error, which only programmers know."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    return f"{error.strerror}: {error.filename}" if error.filename else error.strerror


def _make_empty_unless_complete(directory: Path) -> bool:
    """Whether it was not complete and is empty now."""
    if read_manifest(directory) is not None:
        return False
    _remove(directory)
    directory.mkdir(parents=True)
    return True


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
        name.removeprefix(prefix): _describe_stored_tensor(entry)
        for name, entry in stored.state_dict_metadata.items()
        if name.startswith(prefix)
    }
    held: list[dict[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(held, {name: _describe_tensor(tensor.shape, tensor.dtype) for name, tensor in model.items()})
    here = {name: form for rank in held for name, form in rank.items()}
    for name in sorted({*there, *here}):
        if there.get(name) != here.get(name):
            raise CheckpointError(
                f"checkpoint {directory} is of another model: {name} is {there.get(name, 'absent')} there "
                f"and {here.get(name, 'absent')} here"
            )


def _describe_stored_tensor(entry: TensorStorageMetadata | BytesStorageMetadata) -> str:
    return (
        _describe_tensor(entry.size, entry.properties.dtype)
        if isinstance(entry, TensorStorageMetadata)
        else "no tensor"
    )


def _describe_tensor(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{'x'.join(str(length) for length in shape)} {str(dtype).removeprefix('torch.')}"


def _prune(root: Path, keep: int) -> None:
    """Keeps the newest complete checkpoints; older ones and unfinished ones before the newest go. That one of them
    cannot be read or removed is no failure of the save that just succeeded."""
    try:
        kept = [
            manifest.position.step for _, manifest in zip(range(keep), iterate_complete_checkpoints(root), strict=False)
        ]
        gone = [step for step in list_checkpoint_steps(root) if step not in kept and step < kept[0]]
    except (OSError, CheckpointError) as failure:
        logger.warning("old checkpoints stay: %s", failure)
        return
    for step in gone:
        _try_remove(checkpoint_path(root, step))


def _try_remove(directory: Path) -> None:
    try:
        _remove(directory)
    except OSError as failure:
        logger.warning("a checkpoint that is not needed stays: %s", failure)


def _remove(directory: Path) -> None:
    if directory.exists():
        # First what makes it count, so that a half-removed checkpoint is never taken for a whole one.
        (directory / MANIFEST_NAME).unlink(missing_ok=True)
        shutil.rmtree(directory)
