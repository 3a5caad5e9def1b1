"""What a local executor keeps on disk."""

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


def a_record(job_id: str = "a", generation: int = 1) -> StartedRecord:
    return StartedRecord(job_id, generation, {"t0": (0, 1)}, 2, snapshot_generation=9, started_at_s=5.0)


def test_a_generation_appears_with_its_record_and_its_plan(tmp_path: Path) -> None:
    root = RunRoot(tmp_path)
    folder = root.begin(a_record(), PLAN)
    assert folder == root.folder("a", 1)
    assert folder.read_started_record() == a_record()
    assert sorted(path.name for path in folder.path.iterdir()) == ["plan.json", "started.json"]
    assert root.checkpoint_dir("a").is_dir()


def test_a_generation_cannot_be_begun_twice(tmp_path: Path) -> None:
    RunRoot(tmp_path).begin(a_record(), PLAN)
    with pytest.raises(OSError, match="not empty"):
        RunRoot(tmp_path).begin(a_record(), PLAN)


def test_a_half_written_generation_was_not_begun(tmp_path: Path) -> None:
    root = RunRoot(tmp_path)
    half = tmp_path / "jobs/a/.gen-1.part"
    half.mkdir(parents=True)
    (half / "plan.json").write_text("{")
    assert list(root.list_unsettled()) == []
    assert root.begin(a_record(), PLAN).read_started_record() == a_record()


def test_settled_generations_are_not_listed(tmp_path: Path) -> None:
    root = RunRoot(tmp_path)
    first, second = (root.begin(a_record(generation=generation), PLAN) for generation in (1, 2))
    first.settle()
    assert list(root.list_unsettled()) == [second]


@pytest.mark.parametrize("job_id", ["a/b", "..", ".", "gpt 2", "gen-1", "ä%2F"])
def test_any_job_id_gets_a_folder_of_its_own_inside_the_run_root(tmp_path: Path, job_id: str) -> None:
    root = RunRoot(tmp_path)
    folder = root.begin(a_record(job_id), PLAN)
    assert folder.path.resolve().parent.parent == (tmp_path / "jobs").resolve()
    assert [found.read_started_record().job_id for found in root.list_unsettled()] == [job_id]


def test_an_end_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    folder = GenerationFolder(tmp_path)
    assert folder.read_end() is None
    end = Run("a", 1, RunPhase.LEFT, steps=7.0, checkpoint_steps=7.0, loss=1.25, reason="told")
    folder.write_ended(end)
    assert folder.read_end() == end


def test_what_the_next_controller_reads_is_on_the_disk_before_it_bears_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(Path(f"/proc/self/fd/{descriptor}").readlink()))
    folder = RunRoot(tmp_path).begin(a_record(), PLAN)
    folder.write_ended(Run("a", 1, RunPhase.LEFT))
    part = tmp_path / "jobs/a/.gen-1.part"
    assert synced == [part / ".plan.json.part", part / ".started.json.part", folder.path / ".ended.json.part"]


def test_a_record_that_is_not_whole_is_named(tmp_path: Path) -> None:
    (tmp_path / "started.json").touch()
    with pytest.raises(ValueError, match=r"started\.json: Expecting value"):
        GenerationFolder(tmp_path).read_started_record()


@pytest.mark.parametrize(("seconds_left", "written"), [(12.5, 12.5), (math.inf, None)])
def test_a_notice_has_the_form_that_workers_read(tmp_path: Path, seconds_left: float, written: float | None) -> None:
    GenerationFolder(tmp_path).write_notice("leave", seconds_left=seconds_left)
    notice = json.loads((tmp_path / "notice.json").read_text())
    assert notice == {"action": "leave", "step": None, "seconds_left": written}


def test_the_tail_of_a_log_is_its_last_lines_in_one(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    assert read_tail(log) == ""
    log.write_bytes(b"\n".join(b"line %d \xff" % at for at in range(2000)) + b"\n\n")
    assert read_tail(log).split(" | ") == [f"line {at} �" for at in range(1995, 2000)]


def test_a_run_root_is_locked_once_and_again_after_it_was_unlocked(tmp_path: Path) -> None:
    root = RunRoot(tmp_path / "new")
    root.lock()
    root.lock()
    assert int((tmp_path / "new/executor.lock").read_text()) > 0
    root.unlock()
    root.unlock()
    root.lock()
    root.unlock()


def test_runs_that_are_not_settled_and_folders_with_checkpoints_stay(tmp_path: Path) -> None:
    root = RunRoot(tmp_path)
    first, second = (root.begin(a_record(generation=generation), PLAN) for generation in (1, 2))
    first.settle()
    assert root.remove_runs("a") == 0
    second.settle()
    assert (root.remove_runs("a"), root.remove_runs("a")) == (1, 0)
    assert list((tmp_path / "jobs").iterdir()) == [], "it held no checkpoint"
