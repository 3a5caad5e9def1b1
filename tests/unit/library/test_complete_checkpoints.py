"""A checkpoint of a framework counts once its record is complete."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from ebbtide.integrations.complete_checkpoints import (
    BatchRecord,
    CheckpointMismatchError,
    CheckpointRecord,
    check_record,
    choose_global_batch,
    digest_model,
    discard_record,
    list_complete_checkpoints,
    read_record,
    record_checkpoint,
    remove_incomplete_checkpoints,
    remove_old_checkpoints,
)

MODEL = digest_model(nn.Linear(2, 3))
RECORD = CheckpointRecord(4, BatchRecord(16, 8), MODEL, "lightning", "2.6.6", {"epoch": 1})


def _write(root: Path, step: int, *, is_complete: bool = True) -> Path:
    path = root / f"step-{step}"
    (path / "deep").mkdir(parents=True)
    (path / "model").write_bytes(b"model")
    (path / "deep" / "optimizer").write_bytes(b"optimizer")
    if is_complete:
        record_checkpoint(path, replace(RECORD, step=step))
    return path


def test_the_newest_complete_checkpoint_is_found(tmp_path: Path) -> None:
    for step in (9, 10):
        _write(tmp_path, step)
    _write(tmp_path, 11, is_complete=False)
    (path, record), (previous, _) = list_complete_checkpoints(tmp_path, "step-*")
    assert previous == tmp_path / "step-9"
    assert path == tmp_path / "step-10"
    assert record.step == 10
    assert dict(record.files) == {"step-10/deep/optimizer": 9, "step-10/model": 5}
    assert replace(record, files={}) == replace(RECORD, step=10)


@pytest.mark.parametrize("damage", ["shortened", "removed", "unreadable record", "discarded record"])
def test_a_damaged_checkpoint_does_not_count(tmp_path: Path, damage: str) -> None:
    path = _write(tmp_path, 1)
    if damage == "shortened":
        (path / "model").write_bytes(b"mode")
    elif damage == "removed":
        (path / "deep" / "optimizer").unlink()
    elif damage == "unreadable record":
        (path / "ebbtide.json").write_text('{"step": 1')
    else:
        discard_record(path)
    assert read_record(path) is None
    assert list_complete_checkpoints(tmp_path, "step-*") == []


def test_a_checkpoint_may_be_one_file(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        path = tmp_path / f"step-{step}.ckpt"
        path.write_bytes(b"state")
        record_checkpoint(path, replace(RECORD, step=step))
    remove_old_checkpoints(tmp_path, "step-*.ckpt", keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("step-2.ckpt", "step-2.ckpt.ebbtide.json", "step-3.ckpt", "step-3.ckpt.ebbtide.json")
    ]


def test_incomplete_checkpoints_are_removed_where_a_complete_one_exists(tmp_path: Path) -> None:
    incomplete = _write(tmp_path, 2, is_complete=False)
    remove_incomplete_checkpoints(tmp_path, "step-*")
    assert incomplete.exists(), "it may be of a training without Ebbtide"
    complete = _write(tmp_path, 1)
    remove_incomplete_checkpoints(tmp_path, "step-*")
    assert (incomplete.exists(), complete.exists()) == (False, True)


@pytest.mark.parametrize(
    "record",
    [
        replace(RECORD, model=digest_model(nn.Linear(3, 2))),
        replace(RECORD, framework_version="1.9.0"),
        replace(RECORD, framework="accelerate"),
    ],
    ids=["model", "version", "framework"],
)
def test_a_checkpoint_of_another_model_or_version_is_refused(tmp_path: Path, record: CheckpointRecord) -> None:
    check_record(tmp_path, RECORD, model=MODEL, framework="lightning", version="2.7.0")
    with pytest.raises(CheckpointMismatchError):
        check_record(tmp_path, record, model=MODEL, framework="lightning", version="2.6.6")


def test_the_global_batch_is_that_of_the_first_start() -> None:
    first = choose_global_batch(0, None, rank_batch=8, world_size=2)
    assert first == BatchRecord(16, 8)
    assert choose_global_batch(0, first, rank_batch=8, world_size=4) == first
    assert choose_global_batch(32, first, rank_batch=4, world_size=4) == BatchRecord(32, 4)
    with pytest.raises(ValueError, match="`global_batch`"):
        choose_global_batch(0, first, rank_batch=4, world_size=4)
