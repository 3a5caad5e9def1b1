"""Setup commands in real containers: their limits, and their end."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from scheduler.agent.setup_command import run_setup_command
from scheduler.agent.working_directory import WorkingDirectoryError
from tests.agent.requirements import needs_root
from tests.agent.runs import LIMITS, TestMachine, find_processes, python_job, wait_for_file

pytestmark = needs_root


def run_setup(machine: TestMachine, script: str, cancelled: threading.Event) -> int:
    directory = machine.working_dir("shared") / "workdir"
    directory.mkdir(exist_ok=True)
    document = python_job("pass")
    user = machine.containment.policy.find_user(document.owner_id, document.owner)
    assert user is not None
    os.chown(directory, user.uid, user.gid)
    log = directory.with_name("setup.log")
    return run_setup_command(
        ("sh", "-c", script),
        document,
        machine.containment,
        user,
        gpus=(),
        directory=directory,
        log=log,
        cancelled=cancelled,
    )


def read_log(machine: TestMachine) -> str:
    return (machine.working_dir("shared") / "setup.log").read_text()


def wait_until_gone(mark: str) -> None:
    deadline_s = time.monotonic() + 5
    while find_processes(mark) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert find_processes(mark) == []


def test_setup_starts_in_its_directory_and_prints_nothing_of_its_container(machine: TestMachine) -> None:
    assert run_setup(machine, "pwd; exit 3", threading.Event()) == 3
    assert read_log(machine) == f"{machine.working_dir('shared') / 'workdir'}\n"


def test_setup_has_the_limits_of_its_job(machine: TestMachine) -> None:
    assert run_setup(machine, "python3 -c 'bytearray(1 << 30)'", threading.Event()) == 128 + signal.SIGKILL
    assert LIMITS.processes is not None
    fork = "for i in $(seq 100); do sleep 60 & done; echo $i"
    assert run_setup(machine, fork, threading.Event()) != 0
    assert "100" not in read_log(machine)


def test_cancelled_setup_leaves_no_process(machine: TestMachine) -> None:
    cancelled, failures = threading.Event(), list[Exception]()

    def run() -> None:
        try:
            run_setup(machine, "setsid env -i sleep 4323.5 & touch begun; sleep 4323.5", cancelled)
        except WorkingDirectoryError as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    wait_for_file(machine.working_dir("shared") / "workdir" / "begun")
    cancelled.set()
    thread.join(10)
    assert (len(failures), find_processes("4323.5")) == (1, [])


def test_setup_ends_at_its_deadline(machine: TestMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.agent.setup_command.SETUP_TIMEOUT_S", 0.2)
    with pytest.raises(WorkingDirectoryError):
        run_setup(machine, "sleep 4324.5", threading.Event())
    assert find_processes("4324.5") == []


def test_setup_ends_with_its_agent(machine: TestMachine) -> None:
    begun: Path = machine.working_dir("shared") / "workdir" / "begun"
    agent = os.fork()
    if agent == 0:
        try:
            run_setup(machine, "setsid env -i sleep 4325.5 & touch begun; sleep 4325.5", threading.Event())
        finally:
            os._exit(0)
    wait_for_file(begun)
    os.kill(agent, signal.SIGKILL)
    os.waitpid(agent, 0)
    wait_until_gone("4325.5")
    assert run_setup(machine, "exit 0", threading.Event()) == 0
