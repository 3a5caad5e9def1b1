"""Checksums beside checkpoints whose completeness a framework defines."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from ebbtide.checkpoints.errors import DamagedCheckpointError
from ebbtide.integrations.checksum_records import find_damage, find_undamaged, record_checksums


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for step in (3, 5):
        write(tmp_path, step)
    return tmp_path


def write(folder: Path, step: int) -> Path:
    path = folder / f"step-{step}"
    (path / "shards").mkdir(parents=True)
    (path / ".metadata").write_bytes(bytes([step]) * 50)
    (path / "shards" / "0.distcp").write_bytes(bytes([step]) * 500)
    record_checksums(path)
    return path


def newest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*"), reverse=True)


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def test_one_flipped_bit_anywhere_leads_to_the_previous_checkpoint(folder: Path) -> None:
    rng = random.Random(7)
    for _ in range(40):
        files = [path for path in sorted((folder / "step-5").rglob("*")) if path.is_file()]
        file = rng.choice(files)
        flip(file, rng.randrange(8 * file.stat().st_size))
        found = find_undamaged(newest_first(folder))
        assert found is not None
        if found.name == "step-5":
            # The bit was in the record's white space or made another spelling of the same record.
            assert find_damage(found) == []
            assert file.name == "ebbtide.json"
            continue
        assert found.name == "step-3"
        assert (folder / "damaged-5").is_dir()
        write(folder, 5)


def test_a_missing_and_a_shortened_file_are_damage(folder: Path) -> None:
    shard = folder / "step-5" / "shards" / "0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert find_damage(folder / "step-5") == ["step-5/shards/0.distcp"]
    shard.unlink()
    assert find_damage(folder / "step-5") == ["step-5/shards/0.distcp"]


def test_a_checkpoint_without_a_record_counts(folder: Path) -> None:
    (folder / "step-5" / "ebbtide.json").unlink()
    assert find_undamaged(newest_first(folder)) == folder / "step-5"
    assert find_undamaged([]) is None


def test_nothing_changes_if_all_are_damaged(folder: Path) -> None:
    for path in newest_first(folder):
        flip(path / ".metadata", 0)
    before = sorted(folder.rglob("*"))
    with pytest.raises(DamagedCheckpointError):
        find_undamaged(newest_first(folder))
    assert sorted(folder.rglob("*")) == before
