"""Which interpreter runs the supervisors of the reference trainer, where the agent's own has no trainer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from scheduler.agent import supervisor_command
from scheduler.agent.supervisor_command import find_trainer_interpreter


@pytest.fixture
def injected(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter that lacks the trainer, as in the bundle of pods."""
    monkeypatch.setattr(supervisor_command, "_TRAINER", "scheduler.no_such_trainer")


def write_python(folder: Path, script: str) -> dict[str, str]:
    """Write a program named python, and return the variables of an image that has it."""
    program = folder / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


def test_agent_with_the_trainer_forks_ranks_itself() -> None:
    assert find_trainer_interpreter({"PATH": "/nowhere"}) == sys.executable


@pytest.mark.usefixtures("injected")
def test_python_of_the_image_with_the_same_supervisor_is_taken(tmp_path: Path) -> None:
    variables = write_python(tmp_path, f'exec {sys.executable} "$@"')
    assert find_trainer_interpreter(variables) == str(tmp_path / "python")


@pytest.mark.usefixtures("injected")
@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("echo 00", "has the supervisor of another version of Ebbtide"),
        ("echo \"No module named 'scheduler'\" >&2; exit 1", "has no supervisor of Ebbtide (No module named 'sch"),
        ("exit 1", "has no supervisor of Ebbtide (no output)"),
    ],
)
def test_other_python_of_the_image_is_named_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, script: str, problem: str
) -> None:
    assert find_trainer_interpreter(write_python(tmp_path, script)) == ""
    assert f"{tmp_path}/python {problem}" in caplog.text


@pytest.mark.usefixtures("injected")
def test_image_without_python_starts_ranks_as_programs(caplog: pytest.LogCaptureFixture) -> None:
    assert find_trainer_interpreter({"PATH": "/nowhere"}) == ""
    assert "its PATH has no python" in caplog.text
