"""Save and load checkpoints that any number of ranks can load, regardless of how many ranks saved them.

torch.distributed.checkpoint stores each tensor once, under its name in the unsharded model, so a layout only decides
how it is read. A checkpoint is a directory `step-NNNNNNNN` under a root directory: the files of torch, the checksums of
`ebbtide.checkpoints` and a manifest. It is complete once its manifest is written, after all other files. All functions
need a process group; a lone process has a group of one.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from ebbtide.checkpoints import nonfinite_losses
from ebbtide.checkpoints.checkpoint_folders import remove_rejected, set_aside, try_set_aside
from ebbtide.checkpoints.coordination import compute_on_all_ranks, compute_on_rank_0
from ebbtide.checkpoints.errors import DamagedCheckpointError
from ebbtide.checkpoints.loading import convert_load_error
from ebbtide.checkpoints.piece_writer import PieceWriter
from ebbtide.checkpoints.saving import describe_failure
from scheduler.domain.job_records import LoadTraffic
from scheduler.trainer.checkpoint_manifest import (
    MANIFEST_NAME,
    CheckpointError,
    Manifest,
    checkpoint_path,
    iterate_complete_checkpoints,
    list_checkpoint_steps,
    list_stored_files,
    read_manifest,
    write_manifest,
)
from scheduler.trainer.checkpoint_storage import CheckpointReader
from scheduler.trainer.training_state import (
    TrainablePart,
    collect_checkpoint_share,
    collect_stored_state,
    set_random_state,
)

logger = logging.getLogger(__name__)


def require_writable(root: Path) -> None:
    """Create the root directory if it is missing, so that a problem shows before the first step, not at the first save.

    Raises:
        CheckpointError: it cannot be created, or no file can be written there.
    """
    probe = root / f".writable-{dist.get_rank()}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise CheckpointError(f"Cannot write to the checkpoint directory {root}: {error.strerror}.") from None


def reject_lost_checkpoint(root: Path, *, step: int) -> None:
    """Raise an error if the job has saved a checkpoint (`step` above 0). Call it when no complete checkpoint was found.

    Raises:
        CheckpointError: the job's checkpoints are gone. A new start would overwrite the remaining files.
    """
    if step:
        problem = "contains no complete checkpoint" if root.is_dir() else "does not exist"
        raise CheckpointError(
            f"The checkpoint directory {root} {problem}, but the job has saved step {step} there. "
            "Restore it, or submit a new job to start from step 0."
        )


def remove_unfinished(root: Path) -> None:
    """Delete the remains of interrupted saves, to free their space for the next save.

    A checkpoint with a manifest is kept even if files are missing. No save may be running.
    """
    if dist.get_rank() == 0:
        for step in list_checkpoint_steps(root):
            directory = checkpoint_path(root, step)
            if not (directory / MANIFEST_NAME).exists():
                _try_remove(directory)


class BackgroundSaveResources:
    """Resources shared by the background saves of one training. Creating them is collective.

    Attributes:
        group: a process group of its own, so that messages of a save never interleave with those of the training.
        executor: the thread that completes saves; deleting an old checkpoint takes as long as copying a new one.
        stager: holds the host memory for copies of the state. Allocating it again takes twice as long as the copy.
    """

    def __init__(self, *, copies_asynchronously: bool = False) -> None:
        """Create the resources.

        Args:
            copies_asynchronously: copy the state in the background. If it is on a GPU, the host memory is pinned.
        """
        self.group = dist.new_group(backend="gloo")
        self.executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint completion")
        is_pinned = copies_asynchronously and torch.cuda.is_available()
        self.stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=is_pinned,
                use_shared_memory=False,
                use_async_staging=copies_asynchronously,
                use_non_blocking_copy=is_pinned,
            )
        )


class BackgroundSave:
    """A checkpoint that is being written in the background.

    Once all files are written, rank 0 completes it and deletes old checkpoints. A checkpoint that is already
    complete is not written again, because the same step of the same training has the same state.
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
        """Copy the state and return. Collective. The previous save with these `resources` must have finished.

        If the resources copy asynchronously, the state must not change before `wait_for_copy` returns.

        Raises:
            CheckpointError: the directory cannot be created, or the step is 0.
        """
        self._manifest = manifest
        self._directory = _prepare_directory(root, manifest)
        self._completion: Future[None] | None = None
        self._copy: Future[None] | None = None
        if self._directory is not None:
            writer = PieceWriter(self._directory, node=node)
            written = async_save(
                collect_checkpoint_share(parts),
                storage_writer=writer,
                process_group=resources.group,
                async_stager=resources.stager,
            )
            if isinstance(written, AsyncSaveResponse):
                self._copy, written = written.staging_completion, written.upload_completion
            self._completion = resources.executor.submit(
                _finalize, root, self._directory, manifest, keep, write_files=written.result, group=resources.group
            )

    @property
    def step(self) -> int:
        return self._manifest.position.step

    @property
    def is_done(self) -> bool:
        return self._completion is None or self._completion.done()

    def wait_for_copy(self) -> None:
        """Wait until the state is copied. A failure shows in `wait`."""
        if self._copy is not None:
            wait_for_futures([self._copy])
            self._copy = None

    def wait(self) -> None:
        """Wait until the checkpoint is complete and old checkpoints are deleted.

        Raises:
            CheckpointError: a file could not be written. Nothing of this checkpoint is left; earlier ones remain.
        """
        if self._completion is None or self._directory is None:
            return
        with _convert_save_errors(self._directory):
            self._completion.result()


def save(root: Path, parts: Sequence[TrainablePart], manifest: Manifest, *, node: str, keep: int = 2) -> None:
    """Save a checkpoint and return when it is complete. Collective.

    Raises:
        CheckpointError: a file cannot be written (earlier checkpoints remain), or the step is 0.
    """
    directory = _prepare_directory(root, manifest)
    if directory is None:
        return
    writer = PieceWriter(directory, node=node)
    with _convert_save_errors(directory):
        _finalize(
            root,
            directory,
            manifest,
            keep,
            write_files=lambda: save_state(collect_checkpoint_share(parts), storage_writer=writer),
        )


def find_latest(root: Path) -> Manifest | None:
    """Return the manifest of the newest usable checkpoint, the same on all ranks. Collective.

    A checkpoint right after which the loss became non-finite twice is set aside, if there is an earlier one.

    Raises:
        CheckpointError: a manifest has a format that this version does not read, or all checkpoints are damaged.
    """
    return compute_on_rank_0(lambda: _find_usable(root))


def fall_back(root: Path, damaged: Manifest, error: DamagedCheckpointError) -> Manifest:
    """Set a damaged checkpoint aside and return the manifest of the previous one. Collective.

    Raises:
        DamagedCheckpointError: there is no other complete checkpoint. The damaged one stays as it is.
    """
    step = damaged.position.step
    manifest = compute_on_rank_0(lambda: _find_usable(root, before=step))
    if manifest is None:
        raise error
    logger.error("%s Falling back to the previous checkpoint.", error)
    compute_on_rank_0(lambda: try_set_aside(checkpoint_path(root, step), "damaged"))
    return manifest


def load(
    root: Path,
    manifest: Manifest,
    parts: Sequence[TrainablePart],
    *,
    settings: Mapping[str, str | int | float],
    node: str,
) -> LoadTraffic:
    """Fill model, optimizers and random state from a complete checkpoint, on any number of ranks. Collective.

    Returns:
        What this rank, which runs on `node`, has read.

    Raises:
        DamagedCheckpointError: a file is missing or damaged. The state may be overwritten in part.
        CheckpointError: the checkpoint is of another training or model (nothing was changed), or a file is unreadable.
    """
    directory = checkpoint_path(root, manifest.position.step)
    _check_settings(directory, manifest.settings, settings)
    values, reader = collect_stored_state(parts), CheckpointReader(directory, node=node)
    try:
        metadata = compute_on_all_ranks(reader.read_metadata)
        _check_tensors(directory, metadata, values["model"])
        # Ranks without a GPU save no random state of one, so a rank with a GPU keeps its own.
        values["random"] = {
            name: state for name, state in values["random"].items() if f"random.{name}" in metadata.state_dict_metadata
        }
        load_state(values, storage_reader=reader)
    except (OSError, CheckpointException) as error:
        raise convert_load_error(directory, error) from error
    # Tensors of model and optimizers were filled in place; only the random state has to be set.
    set_random_state(values["random"])
    logger.info("Loaded %s, saved by %d ranks: %s", directory, manifest.world_size, reader.traffic)
    return reader.traffic


def _find_usable(root: Path, *, before: int | None = None) -> Manifest | None:
    manifests = (each for each in iterate_complete_checkpoints(root) if before is None or each.position.step < before)
    newest, previous = next(manifests, None), next(manifests, None)
    if newest is None:
        if before is None and any((path / MANIFEST_NAME).exists() for path in _list_directories(root)):
            raise CheckpointError(
                f"All checkpoints in {root} are damaged. Restore one, or delete them to start from step 0."
            )
        return None
    step = newest.position.step
    if not nonfinite_losses.is_rejected(root, step):
        return newest
    directory = checkpoint_path(root, step)
    if previous is None:
        logger.error("The loss became non-finite twice right after %s, and there is no earlier checkpoint.", directory)
        return newest
    logger.error("The loss became non-finite twice right after %s. Falling back to the previous checkpoint.", directory)
    set_aside(directory, "nonfinite")
    nonfinite_losses.forget_step(root, step)
    return previous


def _list_directories(root: Path) -> list[Path]:
    return [checkpoint_path(root, step) for step in list_checkpoint_steps(root)]


def _prepare_directory(root: Path, manifest: Manifest) -> Path | None:
    """Return an empty directory for the checkpoint, or None if the checkpoint is already complete. Collective."""
    if manifest.position.step == 0:
        # torch would make an empty step to have an optimizer state to store, and Adam counts its steps.
        raise CheckpointError("Step 0 cannot be saved: it equals a new start.")
    directory = checkpoint_path(root, manifest.position.step)
    with _convert_save_errors(directory):
        is_needed = compute_on_rank_0(lambda: _make_empty_unless_complete(directory))
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
    """Complete the checkpoint once all files are written, or fail on all ranks. Collective over the group."""
    is_rank_0 = dist.get_rank() == 0
    try:
        write_files()
        compute_on_rank_0(
            lambda: write_manifest(directory, replace(manifest, files=list_stored_files(directory))), group
        )
    except (OSError, CheckpointException):
        if is_rank_0:
            # On a full disk the next save needs the space of this one.
            _try_remove(directory)
        raise
    if is_rank_0:
        _prune(root, keep)
        logger.info("Saved %s", directory)


@contextmanager
def _convert_save_errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, CheckpointException) as error:
        raise CheckpointError(f"Cannot save the checkpoint {directory}: {describe_failure(error)}.") from error


def _make_empty_unless_complete(directory: Path) -> bool:
    """Return False if the checkpoint is complete. Otherwise create an empty directory for it."""
    try:
        if read_manifest(directory) is not None:
            return False
        _remove(directory)
    except DamagedCheckpointError:
        set_aside(directory, "damaged")
    directory.mkdir(parents=True)
    return True


def _check_settings(
    directory: Path, stored: Mapping[str, str | int | float], expected: Mapping[str, str | int | float]
) -> None:
    for name in sorted({*stored, *expected}):
        if stored.get(name) != expected.get(name):
            raise CheckpointError(
                f"The checkpoint {directory} is of another training: its `{name}` is {stored.get(name)!r}, "
                f"but this training has {expected.get(name)!r}."
            )


def _check_tensors(directory: Path, stored: Metadata, model: Mapping[str, Tensor]) -> None:
    """Require that names, shapes and dtypes match.

    A load silently converts dtypes, and ignores tensors that it does not need.
    """
    prefix = "model."
    stored_tensors = {
        name.removeprefix(prefix): _describe_stored_tensor(entry)
        for name, entry in stored.state_dict_metadata.items()
        if name.startswith(prefix)
    }
    by_rank: list[dict[str, str]] = [{}] * dist.get_world_size()
    own = {name: _describe_tensor(tensor.shape, tensor.dtype) for name, tensor in model.items()}
    dist.all_gather_object(by_rank, own)
    model_tensors = {name: tensor for tensors in by_rank for name, tensor in tensors.items()}
    for name in sorted({*stored_tensors, *model_tensors}):
        if stored_tensors.get(name) != model_tensors.get(name):
            raise CheckpointError(
                f"The checkpoint {directory} is of another model: its {name} is {stored_tensors.get(name, 'absent')}, "
                f"but this model's is {model_tensors.get(name, 'absent')}."
            )


def _describe_stored_tensor(entry: TensorStorageMetadata | BytesStorageMetadata) -> str:
    if isinstance(entry, TensorStorageMetadata):
        return _describe_tensor(entry.size, entry.properties.dtype)
    return "no tensor"


def _describe_tensor(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{'x'.join(str(length) for length in shape)} {str(dtype).removeprefix('torch.')}"


def _prune(root: Path, keep: int) -> None:
    """Delete all but the newest `keep` complete checkpoints, and unfinished ones older than the newest.

    A failure to read or delete one of them is not a failure of the save that just succeeded.
    """
    try:
        kept = [manifest.position.step for manifest in islice(iterate_complete_checkpoints(root), keep)]
        obsolete = [step for step in list_checkpoint_steps(root) if step not in kept and step < kept[0]]
    except (OSError, CheckpointError) as error:
        logger.warning("Cannot delete old checkpoints: %s", error)
        return
    for step in obsolete:
        _try_remove(checkpoint_path(root, step))
    remove_rejected(root, before=kept[-1])


def _try_remove(directory: Path) -> None:
    try:
        _remove(directory)
    except OSError as error:
        logger.warning("Cannot delete an obsolete checkpoint: %s", error)


def _remove(directory: Path) -> None:
    if directory.exists():
        # The manifest goes first, so that a partly deleted checkpoint never counts as complete.
        (directory / MANIFEST_NAME).unlink(missing_ok=True)
        shutil.rmtree(directory)
