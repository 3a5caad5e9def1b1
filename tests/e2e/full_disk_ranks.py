"""A rank of a group whose disk is full when rank 0 writes the manifest of a checkpoint.

`main(FOLDER, RANK, RANKS)` saves in the foreground and in the background, and writes the error of each save to
`FOLDER/found-RANK.json`.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.optim import AdamW

from scheduler.trainer import checkpoint
from scheduler.trainer.checkpoint_manifest import CheckpointError, Manifest, TrainingPosition
from scheduler.trainer.model import SIZES, build_gpt
from scheduler.trainer.training_state import TrainablePart

ROOT = "checkpoints"


def error_of(save: Callable[[], None]) -> str:
    try:
        save()
    except CheckpointError as error:
        return str(error)
    return ""


def full_disk(directory: Path, manifest: Manifest) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def main(folder: Path, rank: int, ranks: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    model = build_gpt(SIZES["nano-gpt"], seed=1, dtype=torch.float32)
    root, parts = folder / ROOT, [TrainablePart(model, [AdamW(model.parameters())])]
    resources = checkpoint.BackgroundSaveResources()

    def save(step: int) -> None:
        checkpoint.save(root, parts, Manifest(TrainingPosition(step, step), ranks, {}, ()), node="t0")

    def save_in_background(step: int) -> None:
        manifest = Manifest(TrainingPosition(step, step), ranks, {}, ())
        checkpoint.BackgroundSave(root, parts, manifest, node="t0", keep=2, resources=resources).wait()

    errors = [error_of(lambda: save(1))]
    with patch.object(checkpoint, "write_manifest", full_disk):
        errors += [error_of(lambda: save(2)), error_of(lambda: save_in_background(3))]
    errors += [error_of(lambda: save_in_background(4))]
    (folder / f"found-{rank}.json").write_text(json.dumps(errors))
    # No rank leaves while another still waits for its messages.
    dist.barrier()
