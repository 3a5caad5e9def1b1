"""Scripts that know nothing of Ebbtide save on a signal or at intervals: real runs, led by the agent's active run."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scheduler.agent import script_checkpoints
from scheduler.agent.job_runs import ActiveRun
from scheduler.domain.run_document import LaunchMode, RunDocument
from tests.agent.requirements import needs_bubblewrap
from tests.agent.runs import TIMEOUT_S, TestMachine, create_machine, python_job

pytestmark = needs_bubblewrap

ON_SIGNAL = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(os.environ["EBBTIDE_CHECKPOINT_DIR"])
def save(number, frame):
    (folder / "part").write_text("x" * 1000)
    (folder / "part").rename(folder / "ckpt-7.pt")
    {end}
signal.signal(signal.{signal}, save)
(folder / "ready").touch()
while True:
    time.sleep(0.02)
"""
AT_INTERVALS = """
import os, pathlib, time
folder = pathlib.Path(os.environ["EBBTIDE_CHECKPOINT_DIR"])
(folder / "ready").touch()
for number in range(10**6):
    time.sleep(0.6)
    (folder / f"ckpt-{number}").mkdir()
    (folder / f"ckpt-{number}" / "model.pt").write_text("x" * number)
    while number == 1:
        time.sleep(1)
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestMachine]:
    monkeypatch.setattr(script_checkpoints, "SETTLE_S", 0.2)
    monkeypatch.setattr(script_checkpoints, "_LOOK_PERIOD_S", 0.02)
    yield from create_machine(tmp_path)


def _begin(machine: TestMachine, script: str, *, pattern: str = "ckpt-*", signal: str = "", **fields: Any) -> ActiveRun:
    document = python_job(script, checkpoint_path=pattern, checkpoint_signal=signal, **fields)
    active = ActiveRun(machine.begin(document))
    ready = machine.folders.checkpoint_dir(document.job_id) / "ready"
    _update_until(active, lambda _: ready.exists())
    return active


def _update_until(active: ActiveRun, reached: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    deadline_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline_s:
        active.update()
        report = active.report()
        if reached(report):
            return report
        time.sleep(0.01)
    raise AssertionError(active.report())


def _leave(active: ActiveRun, seconds_left: float | None) -> dict[str, Any]:
    active.apply_order({"action": "replan", "seconds_left": seconds_left, "step": None, "request": ""}, "")
    return _update_until(active, lambda _: active.has_ended)


@pytest.mark.parametrize(
    ("signal", "end", "code"),
    [
        ("SIGTERM", "sys.exit(0)", 0),
        ("SIGTERM", "sys.exit(143)", 143),
        ("SIGUSR1", "pass", -15),
    ],
)
def test_signal_is_sent_and_the_file_is_waited_for(machine: TestMachine, signal: str, end: str, code: int) -> None:
    active = _begin(machine, ON_SIGNAL.format(signal=signal, end=end), signal=signal)
    report = _leave(active, None)
    assert (report["saved"], report["terminated"], report["killed"]) == (True, True, "")
    assert report["ranks"][0]["exit_code"] == code
    assert report["checkpoint_age_s"] < TIMEOUT_S


def test_script_that_saves_at_intervals_ends_after_its_next_checkpoint(machine: TestMachine) -> None:
    active = _begin(machine, AT_INTERVALS)
    first = _update_until(active, lambda report: report["checkpoint_age_s"] is not None)
    assert not first["saved"]
    report = _leave(active, None)
    assert (report["saved"], report["terminated"], report["ranks"][0]["exit_code"]) == (True, True, -15)
    assert len(list(machine.folders.checkpoint_dir(active.run.document.job_id).glob("ckpt-*"))) == 2


def test_script_that_handles_no_signal_and_saves_nothing_is_killed_with_the_reason(machine: TestMachine) -> None:
    script = ON_SIGNAL.partition("def save")[0] + '(folder / "ready").touch()\ntime.sleep(99)\n'
    active = _begin(machine, script, signal="SIGUSR1")
    report = _leave(active, 0.5)
    assert not report["saved"]
    assert "checkpoint.signal (SIGUSR1)" in report["killed"]


@pytest.mark.parametrize("end", ["sys.exit(1)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_file_of_a_rank_that_crashed_while_saving_is_no_checkpoint(machine: TestMachine, end: str) -> None:
    active = _begin(machine, ON_SIGNAL.format(signal="SIGTERM", end=end), signal="SIGTERM")
    assert not _leave(active, None)["saved"]


def test_files_of_earlier_runs_and_others_are_no_checkpoints(machine: TestMachine) -> None:
    write = "import os, pathlib; pathlib.Path(os.environ['EBBTIDE_CHECKPOINT_DIR'], 'ckpt-old').touch()"
    machine.finish(python_job(write))
    script = ON_SIGNAL.format(signal="SIGTERM", end="sys.exit(0)").replace("ckpt-7.pt", "other.pt")
    report = _leave(_begin(machine, script, signal="SIGTERM", generation=2), None)
    assert (report["saved"], report["checkpoint_age_s"]) == (False, None)


def test_the_last_file_of_a_checkpoint_completes_it(machine: TestMachine) -> None:
    """The Trainer of Hugging Face writes its weights, pauses longer than files settle, and ends with its state."""
    save = (
        'target = folder / "checkpoint-7"; target.mkdir(); (target / "model").touch(); time.sleep(0.5); '
        '(target / "trainer_state.json").touch()'
    )
    script = ON_SIGNAL.format(signal="SIGTERM", end=save)
    active = _begin(machine, script, signal="SIGTERM", pattern="checkpoint-*/trainer_state.json")
    report = _leave(active, None)
    state = machine.folders.checkpoint_dir(active.run.document.job_id) / "checkpoint-7" / "trainer_state.json"
    assert (report["saved"], state.exists()) == (True, True)


@pytest.mark.parametrize("name", ["torchrun", "accelerate", "deepspeed"])
def test_launcher_gets_no_signal_itself(machine: TestMachine, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher would end its ranks at once. Here it is a process of that name that handles SIGTERM."""
    monkeypatch.setattr(script_checkpoints, "SETTLE_S", TIMEOUT_S)  # the launcher ends before it is ended
    launcher = machine.working_dir("job-1") / name
    script = ON_SIGNAL.format(signal="SIGTERM", end="sys.exit(0)")
    (machine.working_dir("job-1") / "rank.py").write_text(script)
    launcher.write_text(
        "import signal, subprocess, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(77))\n"
        "sys.exit(subprocess.Popen([sys.executable, 'rank.py'], start_new_session=True).wait())\n"
    )
    document = replace(
        python_job("", checkpoint_path="ckpt-*", checkpoint_signal="SIGTERM"),
        command=("python", name),
        launch=LaunchMode.NODE,
    )
    active = ActiveRun(machine.begin(document))
    _update_until(active, lambda _: (machine.folders.checkpoint_dir("job-1") / "ready").exists())
    report = _leave(active, None)
    assert (report["saved"], report["ranks"][0]["exit_code"]) == (True, 0)


def test_command_finds_the_directory_of_checkpoints(machine: TestMachine) -> None:
    document: RunDocument = replace(
        python_job(""), command=("python", "-c", "import sys; print('folder', sys.argv[1])", "{checkpoint_dir}/a")
    )
    run, _ = machine.finish(document)
    folder = machine.folders.checkpoint_dir(document.job_id)
    assert run.folder.read_log_tail(0) == f"folder {folder}/a"


def test_file_system_that_does_not_answer_does_not_stop_the_agent(
    machine: TestMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    active, answers = _begin(machine, AT_INTERVALS), threading.Event()
    walk = script_checkpoints._walk

    def wait(folder: Path, parts: list[str]) -> Iterator[os.stat_result]:
        answers.wait()
        return walk(folder, parts)

    monkeypatch.setattr(script_checkpoints, "_SCAN_TIMEOUT_S", 0.2)
    monkeypatch.setattr(script_checkpoints, "_walk", wait)
    began_s, until_s = time.monotonic(), time.monotonic() + 0.5
    report = _update_until(active, lambda _: time.monotonic() >= until_s)
    assert time.monotonic() < began_s + 2.0
    assert report["checkpoint_age_s"] is None
    answers.set()
    assert _leave(active, None)["saved"]
