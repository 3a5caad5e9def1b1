"""The manifest of a checkpoint, and which checkpoints are complete."""

import json
from pathlib import Path

import pytest

from ebbtide.checkpoints.errors import DamagedCheckpointError
from scheduler.trainer.checkpoint_manifest import (
    MANIFEST_NAME,
    CheckpointError,
    Manifest,
    TrainingPosition,
    checkpoint_path,
    find_latest_manifest,
    list_checkpoint_steps,
    list_stored_files,
    read_manifest,
    write_manifest,
)


def _checkpoint(root: Path, step: int) -> Path:
    """Write a complete checkpoint with one small file."""
    directory = checkpoint_path(root, step)
    directory.mkdir(parents=True)
    (directory / "tensors").write_bytes(b"12345678")
    write_manifest(directory, Manifest(TrainingPosition(step, 12 * step), 2, {"seed": 1}, list_stored_files(directory)))
    return directory


def test_manifest_is_read_as_written(tmp_path: Path) -> None:
    directory = _checkpoint(tmp_path, 5)
    manifest = read_manifest(directory)
    assert manifest == Manifest(TrainingPosition(5, 60), 2, {"seed": 1}, list_stored_files(directory))


def test_latest_checkpoint_is_the_complete_one_with_the_highest_step(tmp_path: Path) -> None:
    for step in (5, 20, 100):
        _checkpoint(tmp_path, step)
    (checkpoint_path(tmp_path, 100) / MANIFEST_NAME).unlink()
    (tmp_path / "notes").mkdir()
    (tmp_path / "step-00000999").write_text("a file, not a checkpoint")
    assert list_checkpoint_steps(tmp_path) == [100, 20, 5]
    manifest = find_latest_manifest(tmp_path)
    assert manifest is not None
    assert manifest.position.step == 20


def test_missing_or_empty_directory_has_no_checkpoint(tmp_path: Path) -> None:
    assert find_latest_manifest(tmp_path) is None
    assert find_latest_manifest(tmp_path / "missing") is None


@pytest.mark.parametrize("damage", ["missing", "short"])
def test_checkpoint_with_a_missing_or_truncated_file_is_incomplete(tmp_path: Path, damage: str) -> None:
    tensors = _checkpoint(tmp_path, 5) / "tensors"
    if damage == "missing":
        tensors.unlink()
    else:
        tensors.write_bytes(b"1234")
    assert find_latest_manifest(tmp_path) is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "manifest.json"),
        (json.dumps({"format": 4}), "no checksum"),
        (json.dumps({"format": 3}), "position"),
        (json.dumps({"format": 3, "position": {"step": 1, "color": 2}}), "color"),
    ],
)
def test_malformed_manifest_is_damage_and_the_previous_checkpoint_is_the_latest(
    tmp_path: Path, text: str, problem: str
) -> None:
    _checkpoint(tmp_path, 4)
    directory = _checkpoint(tmp_path, 5)
    (directory / MANIFEST_NAME).write_text(text)
    with pytest.raises(DamagedCheckpointError, match=problem):
        read_manifest(directory)
    manifest = find_latest_manifest(tmp_path)
    assert manifest is not None
    assert manifest.position.step == 4


def test_manifest_of_a_newer_version_is_an_error(tmp_path: Path) -> None:
    (_checkpoint(tmp_path, 5) / MANIFEST_NAME).write_text(json.dumps({"format": 9}))
    with pytest.raises(CheckpointError, match="`format` is 9"):
        find_latest_manifest(tmp_path)


def test_every_flipped_bit_of_a_manifest_is_noticed(tmp_path: Path) -> None:
    path = _checkpoint(tmp_path, 5) / MANIFEST_NAME
    content = path.read_bytes()
    for bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(DamagedCheckpointError):
            read_manifest(path.parent)
