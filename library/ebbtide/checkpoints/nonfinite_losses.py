"""A record of non-finite losses beside the checkpoints, so that a training does not return to the same one forever.

The file lists the newest checkpoint and the generation of the job whenever the loss was non-finite and has not
recovered since.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from ebbtide.checkpoints import checkpoint_folders
from ebbtide.status_file import write_json_atomically

logger = logging.getLogger(__name__)

RECORD_NAME = "nonfinite-losses.json"
_TOLERATED = 1  # the second time is not a transient error of the hardware


class NonfiniteLossRecord:
    """The record of one generation. A failure to write it is logged, because it must not end a training."""

    def __init__(self, folder: Path, *, generation: int) -> None:
        self._folder = folder
        self._generation = generation

    def record(self, step: int) -> None:
        """Record a non-finite loss while `step` is the newest checkpoint."""
        try:
            record_nonfinite_loss(self._folder, step=step, generation=self._generation)
        except OSError as error:
            logger.warning("Cannot record a non-finite loss in %s: %s", self._folder, error)

    def withdraw(self) -> None:
        """Delete the record, because the loss is finite again."""
        try:
            withdraw_nonfinite_loss(self._folder, generation=self._generation)
        except OSError as error:
            logger.warning("Cannot delete the record of a non-finite loss in %s: %s", self._folder, error)


def record_nonfinite_loss(folder: Path, *, step: int, generation: int) -> None:
    """Record that the loss of this generation became non-finite while `step` was the newest checkpoint."""
    _write(folder, [*_read(folder), (step, generation)])


def withdraw_nonfinite_loss(folder: Path, *, generation: int) -> None:
    """Delete the records of this generation, because its loss is finite again."""
    _write(folder, [record for record in _read(folder) if record[1] != generation])


def is_rejected(folder: Path, step: int) -> bool:
    """Return whether the loss became non-finite in two generations while `step` was the newest checkpoint."""
    return sum(recorded == step for recorded, _ in _read(folder)) > _TOLERATED


def forget_step(folder: Path, step: int) -> None:
    """Delete the records of a step, because its checkpoint is gone."""
    _write(folder, [record for record in _read(folder) if record[0] != step])


def reject_checkpoint(folder: Path) -> None:
    """Set the newest checkpoint aside if it is rejected and there is an earlier one."""
    steps = checkpoint_folders.list_steps(folder)
    if not steps or not is_rejected(folder, steps[0]):
        return
    path = checkpoint_folders.checkpoint_path(folder, steps[0])
    if len(steps) == 1:
        logger.error("The loss became non-finite twice right after %s, and there is no earlier checkpoint.", path)
        return
    logger.error("The loss became non-finite twice right after %s. Falling back to the previous checkpoint.", path)
    checkpoint_folders.set_aside(path, "nonfinite")
    forget_step(folder, steps[0])


def _read(folder: Path) -> list[tuple[int, int]]:
    try:
        document = json.loads((folder / RECORD_NAME).read_text(encoding="utf-8"))
        return [(int(step), int(generation)) for step, generation in document["after"]]
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError) as error:
        logger.warning("%s is malformed and ignored: %s", folder / RECORD_NAME, error)
        return []


def _write(folder: Path, records: list[tuple[int, int]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_json_atomically(folder / RECORD_NAME, {"after": sorted(set(records))}, durable=True)
