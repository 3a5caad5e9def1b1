"""Saving and loading checkpoints in a group of one rank."""

import errno
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from traceback import StackSummary

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.nn import functional
from torch.optim import AdamW

from ebbtide.checkpoints.errors import DamagedCheckpointError
from ebbtide.environment import RankEnvironment
from ebbtide.session import Session
from scheduler.trainer import checkpoint
from scheduler.trainer.checkpoint_manifest import (
    MANIFEST_NAME,
    CheckpointError,
    Manifest,
    TrainingPosition,
    checkpoint_path,
    find_latest_manifest,
    list_checkpoint_steps,
    read_manifest,
)
from scheduler.trainer.checkpoint_storage import CheckpointReader
from scheduler.trainer.model import SIZES, GptSize, build_gpt
from scheduler.trainer.training_state import TrainablePart, compute_global_digest, compute_state_digest

SETTINGS: dict[str, str | int | float] = {"model": "nano-gpt", "seed": 1}


@pytest.fixture(scope="module", autouse=True)
def group_of_one() -> Iterator[None]:
    with Session(RankEnvironment()) as session:
        session.init_process_group()
        yield
        session.succeed()


def _training(size: GptSize = SIZES["nano-gpt"], *, seed: int = 1, dtype: torch.dtype = torch.float64) -> TrainablePart:
    model = build_gpt(size, seed=seed, dtype=dtype)
    return TrainablePart(model, [AdamW(model.parameters(), lr=1e-2)])


def _step(training: TrainablePart) -> None:
    """Train one step on random tokens, so that the random state matters."""
    tokens = torch.randint(0, 256, (2, 16))
    torch.autograd.backward(functional.cross_entropy(training.module(tokens).flatten(0, 1), tokens.flatten()))
    for optimizer in training.optimizers:
        optimizer.step()
        optimizer.zero_grad()


def _manifest(step: int) -> Manifest:
    return Manifest(TrainingPosition(step, 12 * step), 1, SETTINGS, ())


def _save(root: Path, training: TrainablePart, step: int, *, keep: int = 2) -> None:
    checkpoint.save(root, [training], _manifest(step), node="t0", keep=keep)


def _load(root: Path, training: TrainablePart, *, settings: Mapping[str, str | int | float] = SETTINGS) -> Manifest:
    manifest = find_latest_manifest(root)
    assert manifest is not None
    checkpoint.load(root, manifest, [training], settings=settings, node="t0")
    return manifest


def _latest_step(root: Path) -> int:
    manifest = find_latest_manifest(root)
    assert manifest is not None
    return manifest.position.step


def _digest(training: TrainablePart) -> str:
    return compute_global_digest([training])


def test_model_optimizer_position_and_random_state_are_restored_bitwise(tmp_path: Path) -> None:
    training = _training()
    for _ in range(3):
        _step(training)
    _save(tmp_path, training, 3)
    saved = _digest(training)
    _step(training)
    after_another_step = _digest(training)
    assert after_another_step != saved

    torch.manual_seed(77)
    fresh = _training(seed=2)
    assert _load(tmp_path, fresh).position == TrainingPosition(step=3, samples=36)
    assert _digest(fresh) == saved
    _step(fresh)
    assert _digest(fresh) == after_another_step


def test_checkpoint_holds_tensors_only(tmp_path: Path) -> None:
    training = _training()
    _step(training)
    _save(tmp_path, training, 1)
    stored = CheckpointReader(checkpoint_path(tmp_path, 1), node="here").read_metadata().state_dict_metadata
    assert {type(entry) for entry in stored.values()} == {TensorStorageMetadata}
    names = {name for name, _ in training.module.named_parameters()}
    moments = {f"optimizer.state.{name}.{kind}" for name in names for kind in ("step", "exp_avg", "exp_avg_sq")}
    assert set(stored) == {f"model.{name}" for name in names} | moments | {"random.cpu"}


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    training = _training()
    for step in (1, 2, 3, 4):
        _save(tmp_path, training, step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]


def test_unfinished_checkpoint_is_not_loaded_and_is_deleted_by_the_next_save(tmp_path: Path) -> None:
    training = _training()
    _save(tmp_path, training, 1)
    _save(tmp_path, training, 2)
    (checkpoint_path(tmp_path, 2) / MANIFEST_NAME).unlink()
    assert _latest_step(tmp_path) == 1
    _save(tmp_path, training, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]


def test_unfinished_step_is_saved_again(tmp_path: Path) -> None:
    training = _training()
    unfinished = checkpoint_path(tmp_path, 2)
    unfinished.mkdir()
    (unfinished / "leftover").write_bytes(b"123")
    _save(tmp_path, training, 2)
    assert _latest_step(tmp_path) == 2
    assert not (unfinished / "leftover").exists()


def test_complete_checkpoint_is_not_written_again(tmp_path: Path) -> None:
    training = _training()
    _save(tmp_path, training, 2)
    first = (checkpoint_path(tmp_path, 2) / MANIFEST_NAME).stat().st_mtime_ns
    _save(tmp_path, training, 2)
    assert (checkpoint_path(tmp_path, 2) / MANIFEST_NAME).stat().st_mtime_ns == first


def test_checkpoint_of_another_training_is_rejected_and_changes_nothing(tmp_path: Path) -> None:
    training = _training()
    _save(tmp_path, training, 1)
    other = _training(seed=2)
    before = compute_state_digest(other.module.state_dict())
    with pytest.raises(CheckpointError, match=r"`seed` is 1.* 2"):
        _load(tmp_path, other, settings={**SETTINGS, "seed": 2})
    assert compute_state_digest(other.module.state_dict()) == before


@pytest.mark.parametrize(
    ("size", "dtype", "stored", "expected"),
    [
        (SIZES["tiny-gpt"], torch.float64, "96 float64", "384 float64"),
        (GptSize(2, 64, 2, 256, 64), torch.float64, "96 float64", "192 float64"),
        (SIZES["nano-gpt"], torch.float32, "96 float64", "96 float32"),
        (GptSize(1, 32, 2, 256, 64), torch.float64, "96 float64", "absent"),
    ],
)
def test_checkpoint_of_another_model_is_rejected_with_the_first_different_tensor(
    tmp_path: Path, size: GptSize, dtype: torch.dtype, stored: str, expected: str
) -> None:
    _save(tmp_path, _training(), 1)
    other = _training(size, dtype=dtype)
    before = compute_state_digest(other.module.state_dict())
    with pytest.raises(CheckpointError, match=f"blocks.* {stored}.* {expected}"):
        _load(tmp_path, other)
    assert compute_state_digest(other.module.state_dict()) == before


def test_unwritable_directory_is_an_error_before_training(tmp_path: Path) -> None:
    checkpoint.require_writable(tmp_path / "new" / "root")
    assert (tmp_path / "new" / "root").is_dir()
    obstacle = tmp_path / "file"
    obstacle.write_text("")
    with pytest.raises(CheckpointError, match="file/below: Not a directory"):
        checkpoint.require_writable(obstacle / "below")


def test_failed_save_names_its_checkpoint_and_keeps_the_previous_one(tmp_path: Path) -> None:
    training = _training()
    _save(tmp_path, training, 1)
    checkpoint_path(tmp_path, 2).write_text("a file in the way")
    with pytest.raises(CheckpointError, match=r"Cannot save .*step-00000002"):
        _save(tmp_path, training, 2)
    assert _latest_step(tmp_path) == 1


def test_full_disk_names_the_rank_and_keeps_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = _training()
    _save(tmp_path, training, 1)

    def full_disk(*_: object, **__: object) -> None:
        error = OSError(errno.ENOSPC, "No space left on device")
        raise CheckpointException("write", {1: (error, StackSummary())})

    monkeypatch.setattr(checkpoint, "save_state", full_disk)
    with pytest.raises(CheckpointError, match=r"step-00000002: rank 1: .*No space left on device\.$"):
        _save(tmp_path, training, 2)
    assert list_checkpoint_steps(tmp_path) == [1], "the unfinished checkpoint is deleted, to free its space"
    assert _latest_step(tmp_path) == 1


def test_unreadable_old_checkpoint_does_not_fail_a_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    training = _training()
    _save(tmp_path, training, 1)
    (checkpoint_path(tmp_path, 1) / MANIFEST_NAME).write_text("{")
    _save(tmp_path, training, 2)
    assert _latest_step(tmp_path) == 2
    assert "is damaged" in caplog.text


def test_step_0_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="Step 0"):
        _save(tmp_path, _training(), 0)
    assert list(tmp_path.iterdir()) == []


def test_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    _save(tmp_path, _training(), 1)
    tensors = checkpoint_path(tmp_path, 1) / "__0_0.distcp"
    tensors.write_bytes(b"\0" * tensors.stat().st_size)
    with pytest.raises(DamagedCheckpointError, match=r"step-00000001/__0_0\.distcp is damaged"):
        _load(tmp_path, _training())


def test_manifest_describes_the_checkpoint(tmp_path: Path) -> None:
    _save(tmp_path, _training(), 7)
    document = json.loads((checkpoint_path(tmp_path, 7) / MANIFEST_NAME).read_text())
    assert document["format"] == 4
    assert document["position"] == {"step": 7, "samples": 84, "frozen": 0}
    assert (document["world_size"], document["settings"]) == (1, SETTINGS)
    assert {file["name"] for file in document["files"]} == {".metadata", "__0_0.distcp", "checksums.jsonl"}


@pytest.mark.parametrize("copies_asynchronously", [False, True], ids=["copied at once", "copied in the background"])
def test_background_save_holds_the_state_of_its_step_while_training_continues(
    tmp_path: Path, copies_asynchronously: bool
) -> None:
    training = _training()
    resources = checkpoint.BackgroundSaveResources(copies_asynchronously=copies_asynchronously)
    _step(training)
    saved = _digest(training)
    background_save = checkpoint.BackgroundSave(
        tmp_path, [training], _manifest(1), node="t0", keep=2, resources=resources
    )
    background_save.wait_for_copy()
    _step(training)
    background_save.wait()
    assert background_save.is_done
    fresh = _training(seed=2)
    assert _load(tmp_path, fresh).position.step == 1
    assert _digest(fresh) == saved


@pytest.mark.parametrize("copies_asynchronously", [False, True], ids=["copied at once", "copied in the background"])
def test_second_background_save_reuses_memory_but_not_state(tmp_path: Path, copies_asynchronously: bool) -> None:
    training = _training()
    resources = checkpoint.BackgroundSaveResources(copies_asynchronously=copies_asynchronously)
    saved = []
    for step in (1, 2):
        _step(training)
        saved.append(_digest(training))
        background_save = checkpoint.BackgroundSave(
            tmp_path, [training], _manifest(step), node="t0", keep=2, resources=resources
        )
        background_save.wait_for_copy()
        _step(training)
        background_save.wait()
    for step, digest in zip((1, 2), saved, strict=True):
        manifest, fresh = read_manifest(checkpoint_path(tmp_path, step)), _training(seed=2)
        assert manifest is not None
        checkpoint.load(tmp_path, manifest, [fresh], settings=SETTINGS, node="t0")
        assert _digest(fresh) == digest


def test_failed_background_save_raises_when_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: object, **__: object) -> Future[None]:
        future: Future[None] = Future()
        future.set_exception(OSError(errno.ENOSPC, "No space left on device"))
        return future

    monkeypatch.setattr(checkpoint, "async_save", full_disk)
    background_save = checkpoint.BackgroundSave(
        tmp_path, [_training()], _manifest(2), node="t0", keep=2, resources=checkpoint.BackgroundSaveResources()
    )
    with pytest.raises(CheckpointError, match=r"step-00000002: .*No space left on device\.$"):
        background_save.wait()
    assert list_checkpoint_steps(tmp_path) == []
