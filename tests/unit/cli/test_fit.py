"""`ebbtide fit`: calibration of a GPU profile from measured runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from scheduler.solver.profiles.catalog import load_gpu, parse_gpu

Run = Callable[..., Result]
HEAD = "model,tensor,data,micro_batch,global_batch,recompute,iteration_time_s"
ROWS = (
    "gpt2,1,8,1,64,none,0.40",
    "gpt2,2,4,2,64,none,0.45",
    "gpt2,4,2,8,64,full,0.60",
    "llama-2-7b,8,1,1,16,full,4.0",
    "llama-2-7b,4,2,1,16,none,3.1",
)


@pytest.fixture
def runs(tmp_path: Path) -> str:
    file = tmp_path / "runs.csv"
    file.write_text("\n".join((HEAD, *ROWS)) + "\n")
    return str(file)


def test_fit_returns_constants_and_errors_and_writes_a_profile(run: Run, runs: str, tmp_path: Path) -> None:
    out = tmp_path / "mine.json"
    words = ("fit", runs, "--gpu", "a100-80g", "--rows", "4", "--seed", "3", "--leave-one-out", "--out", str(out))
    document = json.loads(run(*words, "-o", "json").stdout)
    assert document["source"] == "fitted to 4 of 5 runs of runs.csv, seed 3"
    assert (
        len(document["drawn"]),
        document["errors"]["on_others"]["runs"],
        document["errors"]["left_out"]["runs"],
    ) == (4, 1, 4)
    first = document["constants"][0]
    assert (first["name"], first["unit"], first["before"]) == ("efficiency", "ratio", load_gpu("a100-80g").efficiency)
    assert parse_gpu(out.read_text()).efficiency == first["after"]
    profile = json.loads(out.read_text())
    assert profile["efficiency"]["source"] == document["source"]
    assert profile["memory_bytes"]["source"] == "as in the profile a100-80g"


def test_table_shows_constants_and_errors(run: Run, runs: str) -> None:
    result = run("fit", runs, "--gpu", "a100-80g", "--constants", "efficiency,launch_s")
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert any(line.startswith("launch_s s 0.00") for line in lines)
    assert any(line.startswith("sampled runs 5 ") for line in lines)
    assert not any(line.startswith("other runs") for line in lines)
    assert all(len(line) <= 100 for line in result.stdout.splitlines())


def test_fit_starts_from_a_profile_file(run: Run, runs: str, tmp_path: Path) -> None:
    out = tmp_path / "mine.json"
    run("fit", runs, "--gpu", "a100-80g", "--out", str(out))
    document = json.loads(run("fit", runs, "--gpu", str(out), "-o", "json").stdout)
    assert document["constants"][0]["before"] == parse_gpu(out.read_text()).efficiency


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--gpu", "a1000"), "--gpu: 'a1000'"),
        (("--constants", "speed"), "--constants: "),
        (("--rows", "0"), "--rows"),
        (("--rows", "1", "--leave-one-out"), "--leave-one-out: 1 run"),
    ],
)
def test_invalid_option_is_named(run: Run, runs: str, words: tuple[str, ...], message: str) -> None:
    result = run("fit", runs, *(() if "--gpu" in words else ("--gpu", "a100-80g")), *words)
    assert result.exit_code == 2
    assert message in result.stderr


def test_invalid_cell_is_named_with_file_and_row(run: Run, runs: str) -> None:
    Path(runs).write_text(f"{HEAD}\n{ROWS[0]}\n{ROWS[1].replace('0.45', 'slow')}\n")
    result = run("fit", runs, "--gpu", "a100-80g")
    assert result.exit_code == 2
    assert f"{runs}: row 3: iteration_time_s" in result.stderr


def test_missing_output_directory_is_a_failure(run: Run, runs: str, tmp_path: Path) -> None:
    result = run("fit", runs, "--gpu", "a100-80g", "--out", str(tmp_path / "no" / "mine.json"))
    assert result.exit_code == 1
    assert "cannot be written" in result.stderr
