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
from scheduler.trainer.checkpoint_storage import PieceReader
from scheduler.trainer.model import SIZES, GptSize, build_gpt
from scheduler.trainer.training_state import TrainablePart, compute_global_digest, compute_state_digest
from scheduler.worker.environment import RankEnvironment
from scheduler.worker.session import Session

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
    """One step on random tokens, so that the random state matters."""
    tokens = torch.randint(0, 256, (2, 16))
    torch.autograd.backward(functional.cross_entropy(training.module(tokens).flatten(0, 1), tokens.flatten()))
    for optimizer in training.optimizers:
        optimizer.step()
        optimizer.zero_grad()


def _facts(step: int) -> Manifest:
    return Manifest(TrainingPosition(step, 12 * step), 1, SETTINGS, ())


def _save(root: Path, training: TrainablePart, step: int, *, keep: int = 2) -> None:
    checkpoint.save(root, [training], _facts(step), node="t0", keep=keep)


def _load(root: Path, training: TrainablePart, *, settings: Mapping[str, str | int | float] = SETTINGS) -> Manifest:
    found = find_latest_manifest(root)
    assert found is not None
    checkpoint.load(root, found, [training], settings=settings, node="t0")
    return found


def _digest(training: TrainablePart) -> str:
    return compute_global_digest([training])


def test_model_optimizer_position_and_random_state_come_back_bit_by_bit(tmp_path: Path) -> None:
    training = _training()
    for _ in range(3):
        _step(training)
    _save(tmp_path, training, 3)
    saved = _digest(training)
    _step(training)
    one_later = _digest(training)
    assert one_later != saved

    torch.manual_seed(77)
    fresh = _training(seed=2)
    assert _load(tmp_path, fresh).position == TrainingPosition(step=3, samples=36)
    assert _digest(fresh) == saved
    _step(fresh)
    assert _digest(fresh) == one_later


def test_a_checkpoint_holds_tensors_and_none_of_the_numbers_that_follow_from_settings(tmp_path: Path) -> None:
    training = _training()
    _step(training)
    _save(tmp_path, training, 1)
    stored = PieceReader(checkpoint_path(tmp_path, 1), node="here").read_metadata().state_dict_metadata
    assert {type(entry) for entry in stored.values()} == {TensorStorageMetadata}
    names = {name for name, _ in training.module.named_parameters()}
    moments = {f"optimizer.state.{name}.{kind}" for name in names for kind in ("step", "exp_avg", "exp_avg_sq")}
    assert set(stored) == {f"model.{name}" for name in names} | moments | {"random.cpu"}


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    training = _training()
    for step in (1, 2, 3, 4):
        _save(tmp_path, training, step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]


def test_a_half_written_checkpoint_is_never_loaded_and_goes_with_the_next_save(tmp_path: Path) -> None:
    training = _training()
    _save(tmp_path, training, 1)
    _save(tmp_path, training, 2)
    (checkpoint_path(tmp_path, 2) / MANIFEST_NAME).unlink()
    found = find_latest_manifest(tmp_path)
    assert found is not None
    assert found.position.step == 1
    _save(tmp_path, training, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]


def test_a_step_that_was_half_written_is_written_anew(tmp_path: Path) -> None:
    training = _training()
    half = checkpoint_path(tmp_path, 2)
    half.mkdir()
    (half / "rest_of_a_crash").write_bytes(b"123")
    _save(tmp_path, training, 2)
    found = find_latest_manifest(tmp_path)
    assert found is not None
    assert found.position.step == 2
    assert not (half / "rest_of_a_crash").exists()


def test_a_complete_checkpoint_is_not_written_a_second_time(tmp_path: Path) -> None:
    training = _training()
    _save(tmp_path, training, 2)
    first = (checkpoint_path(tmp_path, 2) / MANIFEST_NAME).stat().st_mtime_ns
    _save(tmp_path, training, 2)
    assert (checkpoint_path(tmp_path, 2) / MANIFEST_NAME).stat().st_mtime_ns == first


def test_a_checkpoint_of_another_training_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    training = _training()
    _save(tmp_path, training, 1)
    other = _training(seed=2)
    before = compute_state_digest(other.module.state_dict())
    with pytest.raises(CheckpointError, match="is of another training: seed is 1 there and 2 here"):
        _load(tmp_path, other, settings={**SETTINGS, "seed": 2})
    assert compute_state_digest(other.module.state_dict()) == before


@pytest.mark.parametrize(
    ("size", "dtype", "message"),
    [
        (SIZES["tiny-gpt"], torch.float64, "is 96 float64 there and 384 float64 here"),
        (GptSize(2, 64, 2, 256, 64), torch.float64, "is 96 float64 there and 192 float64 here"),
        (SIZES["nano-gpt"], torch.float32, "is 96 float64 there and 96 float32 here"),
        (GptSize(1, 32, 2, 256, 64), torch.float64, "there and absent here"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_by_its_first_odd_tensor(
    tmp_path: Path, size: GptSize, dtype: torch.dtype, message: str
) -> None:
    _save(tmp_path, _training(), 1)
    other = _training(size, dtype=dtype)
    before = compute_state_digest(other.module.state_dict())
    with pytest.raises(CheckpointError, match="is of another model: blocks.*" + message):
        _load(tmp_path, other)
    assert compute_state_digest(other.module.state_dict()) == before


def test_a_directory_that_cannot_be_written_is_told_before_the_training(tmp_path: Path) -> None:
    checkpoint.require_writable(tmp_path / "new" / "root")
    assert (tmp_path / "new" / "root").is_dir()
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    with pytest.raises(CheckpointError, match=r"checkpoint directory .*file/below cannot be written: Not a directory"):
        checkpoint.require_writable(in_the_way / "below")


def test_a_failed_save_names_its_checkpoint_and_leaves_the_former_one(tmp_path: Path) -> None:
    training = _training()
    _save(tmp_path, training, 1)
    checkpoint_path(tmp_path, 2).write_text("a file in the way")
    with pytest.raises(CheckpointError, match="step-00000002 could not be saved"):
        _save(tmp_path, training, 2)
    found = find_latest_manifest(tmp_path)
    assert found is not None
    assert found.position.step == 1


def test_a_disk_that_fills_up_during_a_save_is_named_by_rank_and_the_former_checkpoint_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = _training()
    _save(tmp_path, training, 1)

    def full_disk(*_: object, **__: object) -> None:
        error = OSError(errno.ENOSPC, "No space left on device")
        raise CheckpointException("write", {1: (error, StackSummary())})

    monkeypatch.setattr(checkpoint, "save_state", full_disk)
    with pytest.raises(CheckpointError, match=r"step-00000002 could not be saved: rank 1: .*No space left on device$"):
        _save(tmp_path, training, 2)
    assert list_checkpoint_steps(tmp_path) == [1], "no half of one takes the room that the next save needs"
    found = find_latest_manifest(tmp_path)
    assert found is not None
    assert found.position.step == 1


def test_an_old_checkpoint_that_cannot_be_read_fails_no_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    training = _training()
    _save(tmp_path, training, 1)
    (checkpoint_path(tmp_path, 1) / MANIFEST_NAME).write_text("{")
    _save(tmp_path, training, 2)
    found = find_latest_manifest(tmp_path)
    assert found is not None
    assert found.position.step == 2
    assert "old checkpoints stay: " in caplog.text


def test_the_start_of_a_training_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="step 0 is not saved"):
        _save(tmp_path, _training(), 0)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    _save(tmp_path, _training(), 1)
    tensors = checkpoint_path(tmp_path, 1) / "__0_0.distcp"
    tensors.write_bytes(b"\0" * tensors.stat().st_size)
    with pytest.raises(CheckpointError, match="step-00000001 could not be loaded: rank 0: "):
        _load(tmp_path, _training())


def test_the_manifest_says_what_is_stored(tmp_path: Path) -> None:
    _save(tmp_path, _training(), 7)
    document = json.loads((checkpoint_path(tmp_path, 7) / MANIFEST_NAME).read_text())
    assert document["format"] == 3
    assert document["position"] == {"step": 7, "samples": 84, "frozen": 0}
    assert (document["world_size"], document["settings"]) == (1, SETTINGS)
    assert {file["name"] for file in document["files"]} == {".metadata", "__0_0.distcp"}


def test_a_save_in_the_background_holds_the_state_of_its_step_though_the_training_went_on(tmp_path: Path) -> None:
    training = _training()
    _step(training)
    saved = _digest(training)
    saving = checkpoint.BackgroundSave(
        tmp_path, [training], _facts(1), node="t0", keep=2, resources=checkpoint.BackgroundSaveResources()
    )
    _step(training)
    saving.wait()
    assert saving.is_done
    fresh = _training(seed=2)
    assert _load(tmp_path, fresh).position.step == 1
    assert _digest(fresh) == saved


def test_the_next_save_in_the_background_takes_over_the_memory_and_not_the_state_of_the_former(tmp_path: Path) -> None:
    training, background = _training(), checkpoint.BackgroundSaveResources()
    saved = []
    for step in (1, 2):
        _step(training)
        saved.append(_digest(training))
        saving = checkpoint.BackgroundSave(tmp_path, [training], _facts(step), node="t0", keep=2, resources=background)
        _step(training)
        saving.wait()
    for step, digest in zip((1, 2), saved, strict=True):
        manifest, fresh = read_manifest(checkpoint_path(tmp_path, step)), _training(seed=2)
        assert manifest is not None
        checkpoint.load(tmp_path, manifest, [fresh], settings=SETTINGS, node="t0")
        assert _digest(fresh) == digest


def test_a_background_save_that_fails_is_told_when_it_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*_: object, **__: object) -> Future[None]:
        failed: Future[None] = Future()
        failed.set_exception(OSError(errno.ENOSPC, "No space left on device"))
        return failed

    monkeypatch.setattr(checkpoint, "async_save", full_disk)
    saving = checkpoint.BackgroundSave(
        tmp_path, [_training()], _facts(2), node="t0", keep=2, resources=checkpoint.BackgroundSaveResources()
    )
    with pytest.raises(CheckpointError, match=r"step-00000002 could not be saved: .*No space left on device$"):
        saving.wait()
    assert list_checkpoint_steps(tmp_path) == []
