"""Folders of stored logs."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler.executors.log_files import LogLimits, read_tail
from scheduler.executors.stored_logs import LogRoot


def store(root: LogRoot, job_id: str, generation: int) -> Path:
    folder = root.folder(job_id, generation)
    folder.path.mkdir(parents=True)
    folder.log_path(0).write_text("output\n")
    return folder.path


@pytest.mark.parametrize("job_id", ["a/b", "..", ".", "gpt 2", "gen-1", "ä%2F"])
def test_any_job_id_gets_its_own_folder(tmp_path: Path, job_id: str) -> None:
    root = LogRoot(tmp_path)
    assert store(root, job_id, 1).resolve().parent.parent == (tmp_path / "jobs").resolve()
    assert list(root.list_jobs()) == [job_id]


def test_only_the_newest_generations_keep_output(tmp_path: Path) -> None:
    root = LogRoot(tmp_path, limits=LogLimits(generations=2))
    paths = [store(root, "a", generation) for generation in (1, 2, 10)]
    root.delete_old_logs("a")
    assert [(path / "rank-0.log").exists() for path in paths] == [False, True, True]
    assert root.list_generations("a") == [1, 2, 10]


def test_deletion_leaves_other_files_of_the_job(tmp_path: Path) -> None:
    root = LogRoot(tmp_path)
    job = store(root, "a", 1).parent
    (job / "checkpoints").mkdir()
    assert (root.delete_job("a"), root.delete_job("a")) == (1, 0)
    assert [path.name for path in job.iterdir()] == ["checkpoints"]
    store(root, "b", 1)
    root.delete_job("b")
    assert not (tmp_path / "jobs" / "b").exists()


def test_read_tail(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    assert read_tail(log) == ""
    log.write_bytes(b"\n".join(b"line %d \xff" % at for at in range(2000)) + b"\n\n")
    assert read_tail(log).split(" | ") == [f"line {at} �" for at in range(1995, 2000)]
