"""Which folders of ended runs stay on a machine. Runs are folders without processes, except where a lock is held."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scheduler.agent.agent_state import AgentIdentity
from scheduler.agent.folder_removal import delete_folder
from scheduler.agent.log_shipper import LogShipper
from scheduler.agent.run_folder import AgentFolders, RunFolder
from scheduler.agent.run_retention import RetentionLimits, RunRetention
from tests.agent.runs import python_job
from tests.small_disk import fill_disk, small_disk

NOW_S = 2_000_000_000.0
DAY_S = 86_400.0
DEEP_TREE = "import os\nfor _ in range(3000):\n    os.mkdir('d')\n    os.chdir('d')\n"


class Site:
    """A state folder with runs of the job `job`."""

    def __init__(self, state: Path) -> None:
        self.folders = AgentFolders(state)
        self.job = self.folders.job_folder("job")
        self.unsent = set[RunFolder]()

    def add(self, generation: int, *, age_s: float | None = 0.0, has_begun: bool = True) -> RunFolder:
        """Create the folder of a run that was settled `age_s` ago, or is not settled."""
        folder = self.folders.folder("job", generation, "n1")
        folder.create(replace(python_job("pass"), job_id="job", generation=generation, node="n1"))
        folder.working_path.mkdir()
        (folder.working_path / "output").write_text("weights")
        if has_begun:
            folder.write_record("start.json", {})
        if age_s is not None:
            folder.settle()
            os.utime(folder.path / "settled", (NOW_S - age_s, NOW_S - age_s))
        return folder

    def sweep(self, *, now_s: float = NOW_S, **limits: Any) -> None:
        retention = RunRetention(self.folders, RetentionLimits(**limits), delete_unused_directories=lambda: None)
        retention.sweep(lambda run: run not in self.unsent, now_s)

    def list_names(self) -> list[str]:
        return sorted(path.name for path in self.job.iterdir()) if self.job.exists() else []


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path / "state")


@contextmanager
def locked(run: RunFolder) -> Iterator[None]:
    with run.lock_path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def test_newest_ended_runs_stay_and_only_the_last_working_directory(site: Site) -> None:
    for generation in (1, 2, 9, 10):
        site.add(generation)
    site.sweep()
    assert site.list_names() == ["gen-10@n1", "gen-9@n1", "work-gen-10@n1"]


def test_live_run_stays_whatever_the_limits_are(site: Site) -> None:
    site.add(1, age_s=None)
    site.add(2)
    site.add(3, age_s=None)
    site.sweep(runs=0, period_s=0.0)
    assert site.list_names() == ["gen-1@n1", "gen-3@n1", "work-gen-1@n1", "work-gen-3@n1"]


def test_run_with_a_process_stays_although_it_is_settled(site: Site) -> None:
    first, _ = site.add(1), site.add(2)
    with locked(first):
        site.sweep(runs=0)
        assert site.list_names() == ["gen-1@n1", "work-gen-1@n1"]
    site.sweep(runs=0)
    assert site.list_names() == []


def test_run_stays_until_its_logs_were_sent(site: Site) -> None:
    site.unsent = {site.add(1, age_s=30 * DAY_S)}
    site.sweep()
    assert "gen-1@n1" in site.list_names()
    site.unsent.clear()
    site.sweep()
    assert site.list_names() == []


def test_run_that_never_began_needs_no_logs(site: Site) -> None:
    site.unsent = {site.add(1, age_s=30 * DAY_S, has_begun=False)}
    site.sweep()
    assert site.list_names() == []


def test_ended_runs_are_deleted_after_the_period(site: Site) -> None:
    site.add(1, age_s=8 * DAY_S)
    site.add(2, age_s=6 * DAY_S)
    site.sweep()
    assert site.list_names() == ["gen-2@n1", "work-gen-2@n1"]


def test_checkpoints_stay_unless_a_period_is_set(site: Site) -> None:
    site.add(1, age_s=30 * DAY_S)
    checkpoints = site.folders.checkpoint_dir("job")
    checkpoints.mkdir()
    (checkpoints / "step-1").write_text("weights")
    site.sweep()
    site.sweep(now_s=NOW_S + 10_000 * DAY_S)
    assert site.list_names() == ["checkpoints"]
    changed_s = max(site.job.stat().st_mtime, checkpoints.stat().st_mtime)
    site.sweep(now_s=changed_s + 0.9 * DAY_S, checkpoints_s=DAY_S)
    assert site.list_names() == ["checkpoints"]
    site.sweep(now_s=changed_s + 1.1 * DAY_S, checkpoints_s=DAY_S)
    assert not site.job.exists()


def test_checkpoints_of_a_job_with_runs_stay(site: Site) -> None:
    site.add(1, age_s=None)
    site.folders.checkpoint_dir("job").mkdir()
    (site.folders.checkpoint_dir("job") / "step-1").write_text("weights")
    site.sweep(now_s=NOW_S + 10_000 * DAY_S, checkpoints_s=0.0)
    assert "checkpoints" in site.list_names()


def test_interrupted_deletion_and_preparation_leave_nothing(site: Site) -> None:
    deleted = site.add(1)
    (deleted.path / "run.json").unlink()
    (site.job / "work-gen-5@n1").mkdir()
    (site.job / ".gen-6@n1.part").mkdir()
    assert list(site.folders.list_unsettled()) == []
    site.sweep()
    assert site.list_names() == []


def test_settled_file_of_a_rank_does_not_count(site: Site) -> None:
    run = site.add(1, age_s=None)
    (run.path / "settled").touch()
    os.chown(run.path / "settled", 65534, -1)
    site.sweep(runs=0)
    assert list(site.folders.list_unsettled()) == [run]
    run.settle()
    assert run.is_settled


def test_job_is_left_alone_while_a_run_of_it_is_prepared(site: Site) -> None:
    site.add(1)
    retention = RunRetention(site.folders, RetentionLimits(runs=0), delete_unused_directories=lambda: None)
    with retention.hold("job"), retention.hold("job"):
        retention.sweep(lambda _: True, NOW_S)
        assert "gen-1@n1" in site.list_names()
    retention.sweep(lambda _: True, NOW_S)
    assert site.list_names() == []


def test_preparation_waits_for_a_deletion(site: Site) -> None:
    site.add(1)
    deleting, go_on, prepared = threading.Event(), threading.Event(), threading.Event()
    retention = RunRetention(site.folders, RetentionLimits(runs=0), delete_unused_directories=lambda: None)

    def has_sent(_run: RunFolder) -> bool:
        deleting.set()
        return go_on.wait(10.0)

    def prepare() -> None:
        with retention.hold("job"):
            prepared.set()

    sweeper = threading.Thread(target=retention.sweep, args=(has_sent, NOW_S))
    sweeper.start()
    assert deleting.wait(10.0)
    preparation = threading.Thread(target=prepare)
    preparation.start()
    assert not prepared.wait(0.05)
    go_on.set()
    assert prepared.wait(10.0)
    for thread in (sweeper, preparation):
        thread.join(10.0)
    assert site.list_names() == []


def test_what_cannot_be_deleted_does_not_stop_the_others(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.add(1)
    other = site.folders.folder("another", 1, "n1")
    other.create(python_job("pass"))
    other.settle()
    remove = RunFolder.delete

    def fail_once(folder: RunFolder) -> None:
        if folder == other:
            raise OSError("busy")
        remove(folder)

    monkeypatch.setattr(RunFolder, "delete", fail_once)
    site.sweep(runs=0)
    assert other.path.exists()
    assert site.list_names() == []


def test_links_are_not_followed(site: Site, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("kept")
    run = site.add(1)
    (run.working_path / "link").symlink_to(outside)
    (run.path / "link").symlink_to(outside)
    site.sweep(runs=0)
    assert site.list_names() == []
    assert (outside / "file").read_text() == "kept"


def test_tree_that_is_deeper_than_the_stack_is_deleted(site: Site) -> None:
    run = site.add(1, age_s=None)
    for folder in (run.temporary_path, run.working_path):
        subprocess.run(["python3", "-c", DEEP_TREE], cwd=folder, check=True)
    run.settle()
    assert not run.temporary_path.exists()
    site.sweep(runs=0)
    assert site.list_names() == []


def test_full_disk_does_not_stop_deletion(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size_kb=256) as disk:
        site = Site(disk / "state")
        site.add(1)
        run = site.add(2, age_s=None)
        fill_disk(run.temporary_path / "data")
        run.settle()
        fill_disk(run.working_path / "data")
        site.sweep(runs=0)
        assert site.list_names() == []


@pytest.mark.skipif(os.geteuid() != 0, reason="changes the user of a process")
def test_owner_without_privileges_deletes_folders_that_are_closed(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "closed" / "deeper").mkdir(parents=True)
    (folder / "link").symlink_to(tmp_path)
    (folder / "closed" / "deeper").chmod(0)
    (folder / "closed").chmod(0)
    for path in (tmp_path, folder, folder / "closed", folder / "closed" / "deeper"):
        os.chown(path, 65534, 65534)
    for path in tmp_path.parents:
        path.chmod(stat.S_IMODE(path.stat().st_mode) | 0o011)
    child = os.fork()
    if child == 0:
        try:
            os.setresuid(65534, 65534, 65534)
            delete_folder(folder)
        finally:
            os._exit(0 if not folder.exists() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert tmp_path.exists()


def test_shipper_knows_which_logs_were_sent(site: Site) -> None:
    run = site.add(1)
    shipper = LogShipper(AgentIdentity("m1", ("n1",), "http://127.0.0.1:9", "credential"))
    assert not shipper.has_sent(run)
    run.write_record("shipping.json", {"0": [5, 5, True]})
    assert shipper.has_sent(run)
    shipper.close(within_s=5.0)
