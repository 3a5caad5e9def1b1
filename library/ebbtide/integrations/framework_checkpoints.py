"""The checkpoints of a framework's training: completion, search for a usable one, and removal."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

from ebbtide.checkpoints import nonfinite_losses
from ebbtide.checkpoints.coordination import compute_on_rank_0
from ebbtide.checkpoints.errors import DamagedCheckpointError
from ebbtide.integrations.complete_checkpoints import (
    CheckpointRecord,
    list_complete_checkpoints,
    measure_files,
    record_checkpoint,
    remove_incomplete_checkpoints,
    remove_old_checkpoints,
    rename_checkpoint,
)
from ebbtide.integrations.file_checksums import compute_checksums, find_damaged_files
from ebbtide.integrations.framework_session import wait_for_all_ranks

logger = logging.getLogger(__name__)

_KEEP_MIN = 2


class FrameworkCheckpoints:
    """The checkpoints in one folder.

    Args:
        pattern: matches the names of checkpoints in `folder`.
        nonfinite_folder: folder in which the session records losses that are not finite; None if it records none.
    """

    def __init__(self, folder: Path, pattern: str, *, nonfinite_folder: Path | None) -> None:
        self.folder = folder
        self._pattern = pattern
        self._nonfinite_folder = nonfinite_folder
        self._unusable: list[tuple[Path, CheckpointRecord, str]] = []

    def find_usable(self) -> tuple[Path, CheckpointRecord] | None:
        """Return the newest usable checkpoint, None without one. Collective, if there is a process group.

        A checkpoint is usable if its files have their checksums, and if the loss did not become non-finite twice right
        after it.

        Raises:
            DamagedCheckpointError: there are checkpoints, but all of them are damaged.
            OSError: a file cannot be read.
        """
        complete = compute_on_rank_0(partial(list_complete_checkpoints, self.folder, self._pattern))
        for path, record in complete:
            is_rejected = compute_on_rank_0(partial(self._is_rejected, record.step))
            if is_rejected and path is complete[-1][0]:
                logger.error("The loss became non-finite twice right after %s, and there is no earlier one.", path)
            elif is_rejected:
                logger.error("The loss became non-finite twice right after %s. Falling back to an earlier one.", path)
                self._unusable.append((path, record, "nonfinite"))
                continue
            damaged = find_damaged_files(path.parent, record.checksums)
            if not damaged:
                return path, record
            logger.error("The checkpoint %s is damaged: %s differ from their checksums.", path, ", ".join(damaged))
            self._unusable.append((path, record, "damaged"))
        if self._unusable:
            raise DamagedCheckpointError(
                f"All checkpoints in {self.folder} are damaged; see the log. Restore their files, or use another "
                "output directory to start anew."
            )
        return None

    def clean_up(self) -> None:
        """Rename unusable checkpoints and remove incomplete ones. Call it on rank 0, when all ranks have found theirs.

        A damaged checkpoint gets the prefix `damaged-`, one with a non-finite loss `nonfinite-`.
        """
        for path, record, reason in self._unusable:
            rename_checkpoint(path, path.with_name(f"{reason}-{path.name}"))
            if reason == "nonfinite" and self._nonfinite_folder is not None:
                nonfinite_losses.forget_step(self._nonfinite_folder, record.step)
        self._unusable = []
        remove_incomplete_checkpoints(self.folder, self._pattern)

    def complete(self, path: Path, record: CheckpointRecord) -> None:
        """Mark a checkpoint as complete, once every rank has written. Collective, if there is a process group.

        Raises:
            OSError: a file cannot be read, or the record cannot be written.
        """
        wait_for_all_ranks()
        sizes = compute_on_rank_0(partial(measure_files, path))
        checksums = compute_checksums(path.parent, sizes)
        compute_on_rank_0(partial(record_checkpoint, path, replace(record, checksums=checksums)))

    def remove_old(self, keep: int) -> None:
        """Remove the oldest complete checkpoints, so that `keep` remain, at least 2. Call it on rank 0."""
        remove_old_checkpoints(self.folder, self._pattern, keep=max(keep, _KEEP_MIN))

    def _is_rejected(self, step: int) -> bool:
        folder = self._nonfinite_folder
        return folder is not None and nonfinite_losses.is_rejected(folder, step)
