"""`ebbtide submit` with the user's code: command, working directory, setup, virtual environment, environment file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from scheduler.agent.working_directory import WorkingDirectories
from tests.unit.cli.conftest import InProcessService

Ask = Callable[..., Any]
Run = Callable[..., Result]
SUBMIT = ("submit", "--name", "mine", "--min", "1")
TRAIN = ("--", "python", "train.py", "--lr", "0.1", "--name", "x", "--", "-o", "z")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text("print(1)\n")
    return folder


def submit(run: Run, *words: str, **more: str) -> dict[str, Any]:
    result = run("submit", "--name", "mine", "--min", "1", "-o", "json", *words, **more)
    assert result.exit_code == 0, result.output
    spec: dict[str, Any] = json.loads(result.stdout)["spec"]
    return spec


def refused(run: Run, *words: str, code: int = 2) -> str:
    result = run(*words)
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    return result.stderr


@pytest.mark.parametrize("marker", [("--",), ()])
def test_all_words_after_the_options_are_the_command(
    run: Run, service: InProcessService, marker: tuple[str, ...]
) -> None:
    assert submit(run, *marker, *TRAIN[1:])["command"] == list(TRAIN[1:])


def test_a_job_without_a_command_is_refused(run: Run, service: InProcessService, tmp_path: Path) -> None:
    assert "python train.py" in refused(run, *SUBMIT)
    file = tmp_path / "job.yaml"
    file.write_text("{name: a, gpus: {min: 1, max: 1}}")
    assert str(file) in refused(run, "submit", "-f", str(file))
    assert run("submit", "-f", str(file), "--dry-run").exit_code == 0
    assert run("submit", "-f", str(file), "python").exit_code == 0
    assert "--command" in refused(run, *SUBMIT, "--command", "true", "--", "false")


def test_a_working_directory_is_uploaded_once_and_unpacked_equal(
    run: Run, service: InProcessService, project: Path, tmp_path: Path
) -> None:
    options = ("--workdir", "project", "--setup", "make && echo", "--venv", ".venv", "--launch", "node")
    spec = submit(run, *options, *TRAIN)
    assert (spec["setup"], spec["venv"], spec["launch"]) == (["sh", "-c", "make && echo"], ".venv", "node")
    digest = spec["workdir"]["archive"]
    [file] = (tmp_path / "archives").iterdir()
    written = file.stat().st_ino
    assert submit(run, "--workdir", str(project), "--", "true")["workdir"]["archive"] == digest
    assert file.stat().st_ino == written, "the second submission uploads nothing"

    def fetch(target: Path) -> None:
        target.write_bytes(file.read_bytes())

    directory = WorkingDirectories(tmp_path / "machine").prepare(digest, fetch, run_setup=lambda *_: 0)
    assert (directory.path / "train.py").read_text() == "print(1)\n"


def test_a_dry_run_uploads_nothing(run: Run, service: InProcessService, project: Path, tmp_path: Path) -> None:
    assert run(*SUBMIT, "--workdir", "project", "--dry-run").exit_code == 0
    assert not (tmp_path / "archives").exists()


def test_limits_of_the_service_and_of_the_command_are_reported(
    run: Run, project: Path, monkeypatch: pytest.MonkeyPatch, service: InProcessService
) -> None:
    (project / "data.bin").write_bytes(bytes(20_000))
    result = run(*SUBMIT, "--workdir", "project", "true", EBBTIDE_ARCHIVE_BYTES_MAX="4000")
    assert (result.exit_code, "data.bin" in result.stderr, ".ebbtideignore" in result.stderr) == (2, True, True)
    assert "EBBTIDE_ARCHIVE_BYTES_MAX" in run(*SUBMIT, "--workdir", ".", EBBTIDE_ARCHIVE_BYTES_MAX="many").stderr


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (("--setup", "make"), "setup"),
        (("--venv", ".venv"), "venv"),
        (("--workdir", "project", "--venv", ".venv"), "venv"),
        (("--workdir", "nowhere"), "nowhere"),
        (("--launch", "pod"), "pod"),
    ],
)
def test_invalid_options_are_refused_by_name(
    run: Run, service: InProcessService, project: Path, options: tuple[str, ...], field: str
) -> None:
    assert field in refused(run, *SUBMIT, *options, "--", "true")


def test_an_environment_file_is_literal_and_overridden_by_options(
    run: Run, service: InProcessService, project: Path
) -> None:
    Path("env").write_text(
        "# comment\nA=1\nexport B=\"two words\\nand lines\" # why\nC='$HOME ${A}'\nD=${A}\nE=\nF=a=b # c\nA=2\n"
    )
    env = submit(run, "--env-file", "env", "--env", "E=5", "--", "true")["env"]
    assert env == {"A": "2", "B": "two words\nand lines", "C": "$HOME ${A}", "D": "${A}", "E": "5", "F": "a=b"}


@pytest.mark.parametrize(("line", "number"), [("A", 2), ("=3", 2), ('A="open', 2), ("A B=3", 2), ("RANK=1", None)])
def test_invalid_lines_of_an_environment_file_are_refused(
    run: Run, service: InProcessService, project: Path, line: str, number: int | None
) -> None:
    Path("env").write_text(f"OK=1\n{line}\n")
    message = refused(run, *SUBMIT, "--env-file", "env", "--", "true")
    assert f"env: line {number}" in message if number else "RANK" in message
    assert "missing" in refused(run, *SUBMIT, "--env-file", "missing", "--", "true")


def test_options_name_what_an_unmodified_script_saves(run: Run, service: InProcessService, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    document = {"name": "mine", "gpus": {"min": 1, "max": 1}, "command": ["true"], "launch": "node"}
    file.write_text(json.dumps(document | {"checkpoint": {"keep": 5, "path": "old.pt"}}))
    options = ("--checkpoint-path", "ckpt.pt", "--checkpoint-signal", "SIGUSR1")
    result = run("submit", "-f", str(file), *options, "-o", "json")
    assert result.exit_code == 0, result.output
    checkpoint = json.loads(result.stdout)["spec"]["checkpoint"]
    assert (checkpoint["keep"], checkpoint["path"], checkpoint["signal"]) == (5, "ckpt.pt", "SIGUSR1")
    assert "checkpoint" in refused(run, *SUBMIT, "--checkpoint-signal", "SIGNOPE", "--", "true")


def test_a_configuration_file_is_the_jobs_model(run: Run, service: InProcessService, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    sizes = {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 512}
    file.write_text(json.dumps({"model_type": "llama", "vocab_size": 512, **sizes}))
    result = run(*SUBMIT, "--model", str(file), "--global-batch", "8", "-o", "json", "--", "true")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["spec"]["profile"]["hidden_size"] == 128
    file.write_text(json.dumps({"model_type": "llama", **sizes}))
    assert "vocab_size" in refused(run, *SUBMIT, "--model", str(file), "--global-batch", "8", "--", "true")
    assert "gone.json" in refused(run, *SUBMIT, "--model", "gone.json", "--global-batch", "8", "--", "true")
