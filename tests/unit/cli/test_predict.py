"""`ebbtide predict`: predicted time and memory beside measured ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from scheduler.solver.calibration.constant_fit import compute_memory_errors, compute_time_errors
from scheduler.solver.calibration.measured_runs import parse_measured_runs
from scheduler.solver.profiles.catalog import load_gpu

Run = Callable[..., Result]
HEAD = "name,model,tensor,data,micro_batch,global_batch,recompute,iteration_time_s,peak_bytes"
GOOD = ("a,gpt2,1,8,1,64,none,0.40,", "b,gpt2,2,4,2,64,none,0.45,6e9", "c,llama-2-7b,8,1,1,16,full,4.0,30e9")
TOO_LARGE = "d,llama-2-7b,1,8,4,64,none,3.0,"
UNKNOWN_MODEL, UNEVEN = "e,gpt9,1,8,1,64,none,1.0,", "f,gpt2,1,8,3,64,none,1.0,"


@pytest.fixture
def runs(tmp_path: Path) -> str:
    file = tmp_path / "runs.csv"
    file.write_text("\n".join((HEAD, UNKNOWN_MODEL, *GOOD, UNEVEN, TOO_LARGE)) + "\n")
    return str(file)


def test_each_row_has_a_prediction_or_a_reason(run: Run, runs: str) -> None:
    result = run("predict", runs, "--gpu", "a100-80g", "-o", "json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert [each["row"] for each in document["runs"]] == [3, 4, 5, 7]
    reasons = {each["row"]: each["reason"] for each in document["unusable"]}
    assert set(reasons) == {2, 6}
    assert "gpt9" in reasons[2]
    assert "24" in reasons[6]
    assert [each["fits"] for each in document["runs"]] == [True, True, True, False]
    assert (document["summary"]["fit"], document["summary"]["of"]) == (3, 4)


def test_errors_are_those_of_fit(run: Run, runs: str) -> None:
    document = json.loads(run("predict", runs, "--gpu", "a100-80g", "-o", "json").stdout)
    hardware = load_gpu("a100-80g")
    measured = parse_measured_runs("\n".join((HEAD, *GOOD, TOO_LARGE)), hardware)
    times = compute_time_errors(measured, hardware)
    assert [each["time_error"] for each in document["runs"]] == pytest.approx(times.tolist())
    memory = [each["memory_error"] for each in document["runs"] if each["memory_error"] is not None]
    assert memory == pytest.approx(compute_memory_errors(measured, hardware).tolist())
    assert document["summary"]["time"]["worst"] == pytest.approx(max(map(abs, times)))
    assert document["summary"]["memory"]["runs"] == 2


def test_table_names_rows_without_a_prediction(run: Run, runs: str) -> None:
    result = run("predict", runs, "--gpu", "a100-80g")
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert any(line.startswith("2 ") and "gpt9" in line for line in lines)
    assert any("3 of 4 runs" in line for line in lines)


def test_a_missing_column_is_an_input_error(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "runs.csv"
    file.write_text("model,micro_batch\ngpt2,1\n")
    result = run("predict", str(file), "--gpu", "a100-80g")
    assert result.exit_code == 2
    assert "global_batch" in result.stderr


def _write_scaled_runs(file: Path) -> None:
    """Write runs of one model that take 1.5 times as long as predicted."""
    plans = [(1, 8, 1), (2, 4, 1), (4, 2, 1), (2, 8, 1), (1, 4, 2), (2, 2, 2), (1, 8, 2), (2, 4, 2), (1, 4, 4)]
    rows = [f"r,gpt2,{tensor},{data},{micro},64,none,1.0," for tensor, data, micro in plans]
    hardware = load_gpu("a100-80g")
    predicted_s = 1 + compute_time_errors(parse_measured_runs("\n".join((HEAD, *rows)), hardware), hardware)
    times = (f"none,{1.5 * seconds}," for seconds in predicted_s.tolist())
    file.write_text("\n".join([HEAD, *(row.replace("none,1.0,", time) for row, time in zip(rows, times, strict=True))]))


def test_learning_from_some_runs_corrects_the_others(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "runs.csv"
    _write_scaled_runs(file)
    document = json.loads(run("predict", str(file), "--gpu", "a100-80g", "--learn", "4", "-o", "json").stdout)
    assert [each["is_drawn"] for each in document["runs"]].count(True) == 4
    summary = document["summary"]
    assert summary["time_not_drawn"]["mean"] == pytest.approx(1 / 3)
    assert summary["time_learned"]["runs"] == 5
    assert summary["time_learned"]["worst"] < 0.1
    for each in document["runs"]:
        if not each["is_drawn"]:
            low_s, high_s = each["learned_interval_s"]
            assert low_s < each["learned_s"] < high_s
    table = run("predict", str(file), "--gpu", "a100-80g", "--learn", "4")
    assert "80% interval" in " ".join(table.stdout.split())


def test_learning_leaves_at_least_one_run_out(run: Run, runs: str) -> None:
    result = run("predict", runs, "--gpu", "a100-80g", "--learn", "4")
    assert result.exit_code == 2
    assert "--learn is 4" in result.stderr
