"""Checkpoints of frameworks: damage and non-finite losses lead to an earlier one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ebbtide.checkpoints.errors import DamagedCheckpointError
from ebbtide.checkpoints.nonfinite_losses import is_rejected, record_nonfinite_loss
from ebbtide.integrations import file_checksums
from ebbtide.integrations.complete_checkpoints import BatchRecord, CheckpointRecord
from ebbtide.integrations.file_checksums import compute_checksums, find_damaged_files
from ebbtide.integrations.framework_checkpoints import FrameworkCheckpoints

RECORD = CheckpointRecord(4, BatchRecord(16, 8), "digest", "accelerate", "1.0.0")


@pytest.fixture
def folder(tmp_path: Path) -> FrameworkCheckpoints:
    return _open(tmp_path)


def _open(root: Path) -> FrameworkCheckpoints:
    return FrameworkCheckpoints(root / "out", "step-*", nonfinite_folder=root)


def _write(folder: FrameworkCheckpoints, step: int, *, suffix: str = "") -> Path:
    path = folder.folder / f"step-{step}{suffix}"
    file = path if suffix else path / "model"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"weights of %d" % step)
    folder.complete(path, replace(RECORD, step=step))
    return path


def _flip_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[3] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("suffix", ["", ".ckpt"])
def test_one_flipped_bit_leads_to_the_previous_checkpoint(folder: FrameworkCheckpoints, suffix: str) -> None:
    _write(folder, 4, suffix=suffix)
    damaged = _write(folder, 8, suffix=suffix)
    _flip_bit(damaged if suffix else damaged / "model")
    found = folder.find_usable()
    assert found is not None
    assert found[1].step == 4
    assert damaged.exists(), "other ranks may still read it"
    folder.clean_up()
    assert not damaged.exists()
    assert damaged.with_name(f"damaged-{damaged.name}").exists()
    _write(folder, 8, suffix=suffix)
    assert folder.find_usable() is not None


def test_a_training_does_not_start_anew_if_all_its_checkpoints_are_damaged(folder: FrameworkCheckpoints) -> None:
    path = _write(folder, 4)
    _flip_bit(path / "model")
    with pytest.raises(DamagedCheckpointError, match=str(folder.folder)):
        folder.find_usable()
    assert path.exists()


@pytest.mark.parametrize(("generations", "step"), [((), 8), ((1,), 8), ((1, 2), 4)])
def test_a_loss_that_was_nonfinite_twice_leads_to_the_previous_checkpoint(
    folder: FrameworkCheckpoints, generations: tuple[int, ...], step: int
) -> None:
    root = folder.folder.parent
    for each in (4, 8):
        _write(folder, each)
    for generation in generations:
        record_nonfinite_loss(root, step=8, generation=generation)
    found = folder.find_usable()
    assert found is not None
    assert found[1].step == step
    folder.clean_up()
    assert not is_rejected(root, 8)
    assert (folder.folder / "nonfinite-step-8").exists() == (step == 4)


def test_the_only_checkpoint_is_used_although_the_loss_was_nonfinite(folder: FrameworkCheckpoints) -> None:
    _write(folder, 8)
    for generation in (1, 2):
        record_nonfinite_loss(folder.folder.parent, step=8, generation=generation)
    assert folder.find_usable() is not None


def test_checksums_cover_every_block_of_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(file_checksums, "_BLOCK_BYTES", 4)
    (tmp_path / "a").write_bytes(b"0123456789")
    (tmp_path / "empty").touch()
    checksums = compute_checksums(tmp_path, {"a": 10, "empty": 0})
    assert [len(blocks) for blocks in checksums.values()] == [3, 0]
    assert find_damaged_files(tmp_path, checksums) == []
    (tmp_path / "a").write_bytes(b"012345678x")
    assert find_damaged_files(tmp_path, checksums) == ["a"]
    (tmp_path / "a").unlink()
    assert find_damaged_files(tmp_path, checksums) == ["a"]
