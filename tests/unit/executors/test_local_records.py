"""Files of the local executor."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from scheduler.domain.observation import Run, RunPhase
from scheduler.domain.scaling_curve import build_data_parallel_plan
from scheduler.executors.local_records import GenerationFolder, RunRoot, StartedRecord
from scheduler.executors.log_files import read_tail

PLAN = build_data_parallel_plan("cpu", 2)


def build_record(job_id: str = "a", generation: int = 1) -> StartedRecord:
    return StartedRecord(job_id, generation, {"t0": (0, 1)}, 2, snapshot_generation=9, started_at_s=5.0)


def test_begun_generation_has_record_and_plan(tmp_path: Path) -> None:
    root = RunRoot(tmp_path)
    folder = root.begin(build_record(), PLAN)
    assert folder == root.folder("a", 1)
    assert folder.read_started_record() == build_record()
    assert sorted(path.name for path in folder.path.iterdir()) == ["plan.json", "started.json"]
    assert root.checkpoint_dir("a").is_dir()


def test_generation_cannot_begin_twice(tmp_path: Path) -> None:
    RunRoot(tmp_path).begin(build_record(), PLAN)
    with pytest.raises(OSError, match="not empty"):
        RunRoot(tmp_path).begin(build_record(), PLAN)


def test_incomplete_generation_has_not_begun(tmp_path: Path) -> None:
    root = RunRoot(tmp_path)
    half = tmp_path / "jobs/a/.gen-1.part"
    half.mkdir(parents=True)
    (half / "plan.json").write_text("{")
    assert list(root.list_unsettled()) == []
    assert root.begin(build_record(), PLAN).read_started_record() == build_record()


def test_settled_generations_are_not_listed(tmp_path: Path) -> None:
    root = RunRoot(tmp_path)
    first, second = (root.begin(build_record(generation=generation), PLAN) for generation in (1, 2))
    first.settle()
    assert list(root.list_unsettled()) == [second]


@pytest.mark.parametrize("job_id", ["a/b", "..", ".", "gpt 2", "gen-1", "ä%2F"])
def test_any_job_id_gets_its_own_folder_in_the_run_root(tmp_path: Path, job_id: str) -> None:
    root = RunRoot(tmp_path)
    folder = root.begin(build_record(job_id), PLAN)
    assert folder.path.resolve().parent.parent == (tmp_path / "jobs").resolve()
    assert [found.read_started_record().job_id for found in root.list_unsettled()] == [job_id]


def test_end_round_trips(tmp_path: Path) -> None:
    folder = GenerationFolder(tmp_path)
    assert folder.read_end() is None
    end = Run("a", 1, RunPhase.LEFT, steps=7.0, checkpoint_steps=7.0, loss=1.25, reason="told")
    folder.write_ended(end)
    assert folder.read_end() == end


def test_records_are_flushed_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(Path(f"/proc/self/fd/{descriptor}").readlink()))
    folder = RunRoot(tmp_path).begin(build_record(), PLAN)
    folder.write_ended(Run("a", 1, RunPhase.LEFT))
    part = tmp_path / "jobs/a/.gen-1.part"
    assert synced == [part / ".plan.json.part", part / ".started.json.part", folder.path / ".ended.json.part"]


def test_corrupt_record_is_named_in_the_error(tmp_path: Path) -> None:
    (tmp_path / "started.json").touch()
    with pytest.raises(ValueError, match=r"started\.json: Expecting value"):
        GenerationFolder(tmp_path).read_started_record()


@pytest.mark.parametrize(("seconds_left", "written"), [(12.5, 12.5), (math.inf, None)])
def test_notice_format(tmp_path: Path, seconds_left: float, written: float | None) -> None:
    GenerationFolder(tmp_path).write_notice("leave", seconds_left=seconds_left)
    notice = json.loads((tmp_path / "notice.json").read_text())
    assert notice == {"action": "leave", "step": None, "seconds_left": written}


def test_read_tail(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    assert read_tail(log) == ""
    log.write_bytes(b"\n".join(b"line %d \xff" % at for at in range(2000)) + b"\n\n")
    assert read_tail(log).split(" | ") == [f"line {at} �" for at in range(1995, 2000)]


def test_run_root_lock_is_exclusive(tmp_path: Path) -> None:
    root = RunRoot(tmp_path / "new")
    root.lock()
    root.lock()
    assert int((tmp_path / "new/executor.lock").read_text()) > 0
    root.unlock()
    root.unlock()
    root.lock()
    root.unlock()


def test_unsettled_runs_and_checkpoints_are_kept(tmp_path: Path) -> None:
    root = RunRoot(tmp_path)
    first, second = (root.begin(build_record(generation=generation), PLAN) for generation in (1, 2))
    first.settle()
    assert root.remove_runs("a") == 0
    second.settle()
    assert (root.remove_runs("a"), root.remove_runs("a")) == (1, 0)
    assert list((tmp_path / "jobs").iterdir()) == [], "the folder had no checkpoint"
