"""Checkpoints of earlier versions of the trainer can be loaded."""

from __future__ import annotations

import pickle
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.optim import AdamW

from ebbtide.environment import RankEnvironment
from ebbtide.session import Session
from scheduler.trainer import checkpoint
from scheduler.trainer.checkpoint_manifest import TrainingPosition, checkpoint_path
from scheduler.trainer.checkpoint_storage import StoredPiece
from scheduler.trainer.model import GptSize, build_gpt
from scheduler.trainer.training_state import TrainablePart, compute_global_digest

RECORDED = Path(__file__).parents[2] / "data" / "checkpoints" / "format-3"
RECORDED_DIGEST = "21757b6fe4666920a0ca831b8fcb5ff0736acaa76cda925207313e00df4a1ffa"


@pytest.fixture(scope="module", autouse=True)
def group_of_one() -> Iterator[None]:
    with Session(RankEnvironment()) as session:
        session.init_process_group()
        yield
        session.succeed()


def _load(root: Path) -> str:
    model = build_gpt(GptSize(1, 16, 2, 64, 16), seed=2, dtype=torch.float32)
    parts = [TrainablePart(model, [AdamW(model.parameters(), lr=1e-2)])]
    manifest = checkpoint.find_latest(root)
    assert manifest is not None
    assert manifest.position == TrainingPosition(step=3, samples=36)
    checkpoint.load(root, manifest, parts, settings={"model": "recorded", "seed": 1}, node="t0")
    return compute_global_digest(parts)


def test_checkpoint_of_format_3_is_loaded() -> None:
    assert _load(RECORDED) == RECORDED_DIGEST


def test_checkpoint_saved_before_the_module_moved_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "root"
    shutil.copytree(RECORDED, root)
    path = checkpoint_path(root, 3) / ".metadata"
    metadata, size = pickle.loads(path.read_bytes()), path.stat().st_size
    former = ModuleType("scheduler.worker.pieces")
    with monkeypatch.context() as patch:
        patch.setattr(former, "StoredPiece", StoredPiece, raising=False)
        patch.setitem(sys.modules, former.__name__, former)
        patch.setattr(StoredPiece, "__module__", former.__name__)
        path.write_bytes(pickle.dumps(metadata))
    assert b"scheduler.worker.pieces" in path.read_bytes()
    manifest = path.with_name("manifest.json")
    manifest.write_text(manifest.read_text().replace(str(size), str(path.stat().st_size)))
    assert _load(root) == RECORDED_DIGEST
