import json
import os
from pathlib import Path
from typing import Any

import pytest

from scheduler.domain.observation import RankPhase
from scheduler.worker.status import OomKillCounter, StatusFile


def _read(directory: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((directory / "status-3.json").read_text(encoding="utf-8"))
    return document


def test_the_file_holds_the_contract_from_the_first_moment(tmp_path: Path) -> None:
    StatusFile(tmp_path, rank=3)
    kills = OomKillCounter.for_this_process()
    assert _read(tmp_path) == {
        "rank": 3,
        "pid": os.getpid(),
        "phase": "starting",
        "step": 0,
        "checkpoint_step": None,
        "loss": None,
        "samples_per_s": None,
        "reason": "",
        "cause": None,
        "peak_bytes": None,
        "phases_s": {},
        "memory_events": str(kills.path) if kills else "",
        "oom_kills": kills.read() if kills else None,
        "frozen_layers": None,
        "traffic": None,
    }


def test_steps_in_quick_succession_are_not_all_written(tmp_path: Path) -> None:
    file = StatusFile(tmp_path, rank=3)
    file.update(phase=RankPhase.RUNNING, step=1)
    written = [(tmp_path / "status-3.json").stat().st_mtime_ns]
    for step in range(2, 200):
        file.update(step=step)
        written.append((tmp_path / "status-3.json").stat().st_mtime_ns)
    assert file.status.step == 199
    assert len(set(written)) < 100


def test_a_change_of_phase_is_written_at_once_with_the_last_step(tmp_path: Path) -> None:
    file = StatusFile(tmp_path, rank=3)
    file.update(phase=RankPhase.RUNNING, step=1)
    file.update(step=2)
    file.update(phase=RankPhase.LEFT)
    assert (_read(tmp_path)["phase"], _read(tmp_path)["step"]) == ("left", 2)


def test_what_comes_after_the_last_phase_is_written_at_once(tmp_path: Path) -> None:
    file = StatusFile(tmp_path, rank=3)
    file.update(phase=RankPhase.LEFT)
    file.update(phases_s={"teardown": 0.5})
    assert _read(tmp_path)["phases_s"] == {"teardown": 0.5}


def test_a_disk_that_is_full_for_a_while_ends_nothing_and_what_is_new_is_written_afterwards(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = StatusFile(tmp_path, rank=3)
    in_the_way = tmp_path / f".status-3.json.{os.getpid()}.part"
    in_the_way.mkdir()
    for step in (1, 2):
        file.update(phase=RankPhase.RUNNING, checkpoint_step=step)
    assert caplog.text.count("cannot say how far it is") == 1
    with pytest.raises(OSError, match=in_the_way.name):
        file.update(phase=RankPhase.LEFT)
    in_the_way.rmdir()
    file.update()
    assert (_read(tmp_path)["phase"], _read(tmp_path)["checkpoint_step"]) == ("left", 2)


def test_a_run_folder_that_does_not_exist_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        StatusFile(tmp_path / "nowhere", rank=3)


def test_no_part_of_a_file_is_left_beside_it(tmp_path: Path) -> None:
    file = StatusFile(tmp_path, rank=3)
    file.update(phase=RankPhase.RUNNING)
    assert [path.name for path in tmp_path.iterdir()] == ["status-3.json"]


def test_without_a_directory_it_only_remembers() -> None:
    file = StatusFile(None, rank=0)
    file.update(phase=RankPhase.SUCCEEDED, step=5)
    assert file.status.step == 5
