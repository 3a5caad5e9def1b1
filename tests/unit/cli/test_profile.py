"""`ebbtide profile` on the CPU: two real ranks measure sizes that take no time."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from scheduler.profiling import device_use
from scheduler.profiling.device_use import DeviceUse
from scheduler.solver.profiles.catalog import parse_gpu

Run = Callable[..., Result]
OPTIONS = ("--device", "cpu", "--scale", "tiny", "--rounds", "1", "--allow-busy", "-o", "json")


@pytest.mark.full
def test_profile_of_two_ranks_is_written_validated_and_not_measured_again(run: Run, tmp_path: Path) -> None:
    out, table, plot, galvatron = (tmp_path / name for name in ("mine.json", "steps.csv", "steps.png", "galvatron"))
    files = ("--out", str(out), "--table", str(table), "--plot", str(plot), "--galvatron", str(galvatron))
    words = ("profile", *files, *OPTIONS, "--ranks", "2", "--validate", "--plans", "3")
    result = run(*words)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert (document["skipped"], document["failed"]) == (0, [])
    hardware = parse_gpu(out.read_text())
    assert {table.ranks for table in hardware.collectives} == {2}
    written = json.loads(out.read_text())
    assert "2 ranks" in written["efficiency"]["source"]
    assert "not measured" in written["inter_bandwidth_bytes_per_s"]["source"]
    steps = document["validation"]["steps"]
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert len(steps) == len(rows) == document["validation"]["time"]["runs"] == 3
    assert all(step["measured_s"] > 0 and step["measured_bytes"] > 0 for step in steps)
    assert plot.stat().st_size > 10_000
    assert (galvatron / "spec.json").exists()
    log = out.with_suffix(".jsonl").read_text()
    assert run(*words).exit_code == 0
    assert out.with_suffix(".jsonl").read_text() == log


def test_a_file_that_holds_no_measurements_is_refused(run: Run, tmp_path: Path) -> None:
    log = tmp_path / "mine.jsonl"
    log.write_text('{"task": 3}\n')
    result = run("profile", "--out", str(tmp_path / "mine.json"), *OPTIONS)
    assert result.exit_code == 2
    assert "mine.jsonl" in result.stderr


def test_a_busy_device_is_refused(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_use, "read_device_use", lambda kind, ranks: [DeviceUse("GPU 0", (1,), 0.9)])
    result = run("profile", "--out", str(tmp_path / "mine.json"), "--device", "cuda")
    assert result.exit_code == 3
    assert "GPU 0" in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--device", "tpu"), "--device: 'tpu'"),
        (("--scale", "huge"), "--scale: 'huge'"),
        (("--table", "steps.csv"), "--validate"),
        (("--validate", "--plot", "steps.txt"), "--plot"),
        (("--ranks", "0"), "--ranks"),
    ],
)
def test_invalid_option_is_named(run: Run, tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    result = run("profile", "--out", str(tmp_path / "mine.json"), *words)
    assert result.exit_code == 2
    assert message in result.stderr
