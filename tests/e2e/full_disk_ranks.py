"""One of several gloo ranks whose disk is full when rank 0 comes to write the manifest.

`main(FOLDER, RANK, RANKS)` saves at once and in the background, and writes what each
of them raised to `FOLDER/found-RANK.json`.
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


def told(save: Callable[[], None]) -> str:
    try:
        save()
    except CheckpointError as failure:
        return str(failure)
    return "it went well"


def full_disk(directory: Path, manifest: Manifest) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def main(folder: Path, rank: int, ranks: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    model = build_gpt(SIZES["nano-gpt"], seed=1, dtype=torch.float32)
    root, parts, background = (
        folder / ROOT,
        [TrainablePart(model, [AdamW(model.parameters())])],
        checkpoint.BackgroundSaveResources(),
    )

    def at_once(step: int) -> None:
        checkpoint.save(root, parts, Manifest(TrainingPosition(step, step), ranks, {}, ()), node="t0")

    def behind(step: int) -> None:
        facts = Manifest(TrainingPosition(step, step), ranks, {}, ())
        checkpoint.BackgroundSave(root, parts, facts, node="t0", keep=2, resources=background).wait()

    found = [told(lambda: at_once(1))]
    with patch.object(checkpoint, "write_manifest", full_disk):
        found += [told(lambda: at_once(2)), told(lambda: behind(3))]
    found += [told(lambda: behind(4))]
    (folder / f"found-{rank}.json").write_text(json.dumps(found))
    # No rank leaves while another still talks to it.
    dist.barrier()
