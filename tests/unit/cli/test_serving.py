"""`ebbtide serving`: sizes of pools, and length classes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

Run = Callable[..., Result]

DOCUMENT = """\
model: llama-3-8b
gpu: rtx-4090
objective: {ttft: 1s, tpot: 50ms}
measurements:
  - {rate: 1, prompt: 206, output: 202, ttft: 49.2ms, tpot: 19.51ms}
  - {rate: 4, prompt: 206, output: 202, ttft: 56.9ms, tpot: 22.6ms}
"""
LENGTHS = "prompt,output,requests\n100,80,3\n400,300,1\n900,40,1\n"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    file = tmp_path / "chat.yaml"
    file.write_text(DOCUMENT)
    return file


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    file = tmp_path / "lengths.csv"
    file.write_text(LENGTHS)
    return file


def test_size_prints_replicas_and_the_binding_limit(run: Run, model: Path, lengths: Path) -> None:
    result = run("serving", "size", str(model), "--rate", "60", "--lengths", str(lengths), "-o", "json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["gpus"] == document["replicas"] > 1
    assert document["ttft_s"] <= 1
    assert document["tpot_s"] <= 0.05
    assert document["binding"] in ("tpot", "kv_cache", "throughput", "ttft")
    assert document["calibration_error"] < 0.05
    assert document["costs"]["base_s"] == pytest.approx(0.0187, rel=0.05)
    table = run("serving", "size", str(model), "--rate", "60", "--lengths", str(lengths))
    assert f"replicas     {document['replicas']}" in table.stdout


def test_bursts_and_tensor_parallelism_change_the_size(run: Run, model: Path, lengths: Path) -> None:
    def count(*words: str) -> int:
        result = run("serving", "size", str(model), "--rate", "60", "--lengths", str(lengths), "-o", "json", *words)
        assert result.exit_code == 0, result.output
        return int(json.loads(result.stdout)["gpus"])

    calm = count()
    assert count("--burstiness", "6") >= calm
    model.write_text(DOCUMENT.split("measurements")[0] + "tensorDegree: 2\n")
    assert count() % 2 == 0


@pytest.mark.parametrize(
    ("text", "field"),
    [
        (DOCUMENT.replace("llama-3-8b", "llama-3-9b"), "model"),
        (DOCUMENT.replace("rtx-4090", "rtx-4091"), "gpu"),
        (DOCUMENT.replace("llama-3-8b", "llama-3.1-70b"), "tensorDegree"),
        (DOCUMENT.replace("50ms", "5ms"), "objective.tpot"),
        (DOCUMENT.replace("tpot: 50ms", "tpot: fast"), "objective.tpot"),
        (DOCUMENT.replace("rate: 4", "rate: 4, concurrency: 2"), "measurements.1.rate"),
        (DOCUMENT + "limits: {sequences: 4096}\n", "limits.sequences"),
        ("- 1\n", "object"),
    ],
)
def test_invalid_documents_name_the_field(run: Run, model: Path, lengths: Path, text: str, field: str) -> None:
    model.write_text(text)
    result = run("serving", "size", str(model), "--rate", "60", "--lengths", str(lengths))
    assert result.exit_code == 2
    assert field in result.stderr


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("prompt\n1\n", "output"),
        ("prompt,output\n", "no requests"),
        ("prompt,output\n0,4\n", "prompt"),
        ("prompt,output\n4,99999999\n", "output"),
        ("prompt,output,requests\n4,4,0\n", "requests"),
    ],
)
def test_invalid_lengths_name_the_column(run: Run, model: Path, lengths: Path, text: str, part: str) -> None:
    lengths.write_text(text)
    result = run("serving", "size", str(model), "--rate", "60", "--lengths", str(lengths))
    assert result.exit_code == 2
    assert part in result.stderr


def test_classes_lists_limits_and_splits_replicas(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("10\n10\n20\n100\n")
    words = ("serving", "classes", "--lengths", str(file), "--classes", "2", "--replicas", "3")
    document = json.loads(run(*words, "-o", "json").stdout)
    assert [each["limit"] for each in document["classes"]] == [20, 100]
    assert [each["replicas"] for each in document["classes"]] == [1, 2]
    assert document["padding_ratio"] == pytest.approx(160 / 140)
    assert "1.143" in run(*words).stdout
    fixed = json.loads(run(*words, "--overhead", "60", "--longest", "200", "-o", "json").stdout)
    assert fixed["classes"][-1]["limit"] == 200
    assert fixed["padding_ratio"] == pytest.approx((3 * 80 + 260) / (4 * 60 + 140))


def test_classes_rejects_too_few_replicas(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("10\n20\n100\n")
    result = run("serving", "classes", "--lengths", str(file), "--classes", "3", "--replicas", "2")
    assert result.exit_code == 2
    assert "replicas" in result.stderr


POOL_DOCUMENT = DOCUMENT + "lengths:\n  - {prompt: 180, output: 150}\nsizing: {mode: advise}\n"


def test_models_of_a_pool_are_set_and_advised(ask: Callable[..., Any], run: Run, fleet: Any, model: Path) -> None:
    model.write_text(POOL_DOCUMENT)
    assert "serves no models" in run("serving", "advise", "serving").stdout
    [view] = ask("serving", "set", "serving", str(model))["serving"]
    assert (view["model"], view["sizing"]) == ("llama-3-8b", "advise")
    assert "off" not in run("serving", "advise", "serving").stdout
    assert ask("serving", "report", "serving", "--rate", "llama-3-8b=8")["asked_gpus"] > 0
    assert run("serving", "report", "serving", "--rate", "llama-3-8b:8").exit_code == 2
    assert run("serving", "report", "serving", "--rate", "llama-3-8b=nan").exit_code == 2
    fleet.tick()
    [advised] = ask("serving", "advise", "serving")["models"]
    assert advised["advice"]["replicas"] == advised["load"]["replicas"] > 0
    table = run("serving", "advise", "serving").stdout
    assert "llama-3-8b" in table
    assert advised["load"]["binding"] in table
    assert ask("serving", "set", "serving")["serving"] == []


def test_lengths_of_the_document_are_used_without_a_file(run: Run, model: Path) -> None:
    assert run("serving", "size", str(model), "--rate", "8").exit_code == 2
    model.write_text(POOL_DOCUMENT)
    result = run("serving", "size", str(model), "--rate", "8", "-o", "json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["replicas"] > 0
