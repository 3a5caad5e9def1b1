"""A state folder on a disk that is full or read-only, and with what earlier agents have left."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler.agent.agent_state import AgentIdentity, AgentState
from scheduler.agent.containment import Containment, ContainmentPolicy
from scheduler.agent.run_folder import AgentFolders
from scheduler.agent.run_launcher import RunLauncher
from scheduler.agent.supervised_run import SupervisedRun
from scheduler.domain.machine import MachineInventory
from tests.agent.runs import python_job

DISK_BYTES = 262_144


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk of its own."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(path)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("a file system cannot be mounted here")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill(disk: Path) -> Path:
    """Fill the disk and return the file that does it."""
    ballast = disk / "ballast"
    with pytest.raises(OSError, match="No space left"):
        ballast.write_bytes(bytes(2 * DISK_BYTES))
    return ballast


def open_launcher(state: AgentState) -> RunLauncher:
    containment = Containment.detect(ContainmentPolicy(), hidden=[state.root])
    return RunLauncher(state, AgentIdentity("m1", ("m1",), "", ""), containment, MachineInventory(), preload=())


@pytest.mark.parametrize("generation", [1, 2])
def test_run_on_a_full_disk_fails_with_the_reason(disk: Path, generation: int) -> None:
    """With a later generation, the folder of the job exists already."""
    state = AgentState(disk / "state")
    launcher = open_launcher(state)
    if generation > 1:
        AgentFolders(state.root).checkpoint_dir("job-1").mkdir(parents=True, mode=0o700)
    ballast = fill(disk)
    run = launcher.prepare(python_job("", generation=generation), threading.Event())
    assert run.poll().has_ended
    assert os.strerror(errno.ENOSPC) in run.poll().failure
    run.settle()
    ballast.unlink()
    again = launcher.prepare(python_job("", generation=generation + 1), threading.Event())
    assert not again.poll().failure
    again.kill()


def test_run_on_a_read_only_disk_fails_with_the_reason(disk: Path, tmp_path: Path) -> None:
    state = AgentState(tmp_path / "state")
    launcher, jobs = open_launcher(state), state.root / "jobs"
    jobs.mkdir()
    subprocess.run(["mount", "--bind", str(disk), str(jobs)], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(jobs)], check=True)
        run = launcher.prepare(python_job(""), threading.Event())
        assert run.poll().has_ended
        assert os.strerror(errno.EROFS) in run.poll().failure
        run.settle()
    finally:
        subprocess.run(["umount", "--lazy", str(jobs)], check=True)


def test_full_disk_does_not_end_the_lease_of_ranks(disk: Path) -> None:
    state = AgentState(disk / "state")
    state.extend_lease(1000.0)
    fill(disk)
    assert state.accept_epoch(7)
    assert not state.accept_epoch(6)
    state.extend_lease(1100.0)
    assert float(state.lease_path.read_text(encoding="ascii")) == 1100.0


def test_run_of_another_user_does_not_stop_the_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that ran as root before leaves folders that another user cannot read."""
    state = AgentState(tmp_path / "state")
    AgentFolders(state.root).folder("job-1", 1, "node-1").create(python_job(""))
    monkeypatch.setattr(SupervisedRun, "recover", _refuse)
    assert open_launcher(state).recover_runs() == []


def _refuse(_folder: object) -> SupervisedRun:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
