"""`ebbtide plan` with files: shapes, GPU profiles, dumped requests, charts, Galvatron profiles."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from scheduler.domain.parallel_plan import plan_from_json
from tests.builders_galvatron import INFEASIBLE, SOLVED
from tests.unit.cli.conftest import needs_charts

Run = Callable[..., Result]
GPT2 = ("plan", "--model", "gpt2", "--global-batch", "4")
MIXED = """
- {gpu: h100-80g, nodes: 1, gpus_per_node: 2}
- {gpu: l40s, nodes: 1, gpus_per_node: 1}
"""


def answer(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def write_gpu_profile(folder: Path, **changes: Any) -> str:
    """Write a custom GPU profile based on the shipped L40S and return its file."""
    shipped = files("scheduler.solver.profiles").joinpath("data", "gpus", "l40s.json").read_text()
    file = folder / "mine.json"
    file.write_text(json.dumps({**json.loads(shipped), "gpu": "mine", **changes}))
    return str(file)


def test_shape_file_describes_heterogeneous_nodes(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "shape.yaml"
    file.write_text(MIXED)
    words = ("plan", "--model", "gpt2", "--global-batch", "2", "--shape", str(file))
    document = answer(run(*words, "-o", "json"))
    assert document["remark"].startswith("1x2 h100-80g alone")
    table = run(*words).stdout
    assert "1x2 h100-80g + 1x1 l40s" in table
    assert "1x2 h100-80g alone" in table
    assert "(all GPUs)" in table


OWN_PLAN = """
micro_batches: 4
micro_batch_size: 8
stages:
- strategies: [{layers: 6, tp: 2}]
- strategies: [{layers: 6, tp: 2}]
"""


def _price(run: Run, tmp_path: Path, text: str, *options: str) -> tuple[Result, Any]:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    result = run("plan", "--model", "gpt2", "--price", str(file), *options, "-o", "json")
    return result, json.loads(result.stdout) if result.stdout else None


def test_price_predicts_a_plan_and_compares_it_with_the_fastest(run: Run, tmp_path: Path) -> None:
    result, document = _price(run, tmp_path, OWN_PLAN)
    assert result.exit_code == 0
    assert (document["runnable"], document["fits"], document["violation"]) == (True, True, "")
    assert [device["gpus"] for device in document["inspection"]["devices"]] == [2, 2]
    assert document["optimum"]["iteration_time_s"] < document["iteration_time_s"]
    ratio = document["iteration_time_s"] / document["optimum"]["iteration_time_s"] - 1
    assert document["slower_ratio"] == pytest.approx(ratio)
    table = run("plan", "--model", "gpt2", "--price", str(tmp_path / "mine.yaml")).stdout
    assert "part of the step" in table


def test_price_of_the_fastest_plan_is_its_own(run: Run, tmp_path: Path) -> None:
    best = run(*GPT2, "--gpus", "2", "--alternatives", "0", "-o", "json").stdout
    result, document = _price(run, tmp_path, best)
    assert result.exit_code == 0
    assert document["iteration_time_s"] == json.loads(best)["iteration_time_s"]
    assert document["slower_ratio"] == 0


def test_price_of_a_plan_outside_the_limits_says_how_much_faster_it_is(run: Run, tmp_path: Path) -> None:
    best = run(*GPT2, "--gpus", "4", "--alternatives", "0", "-o", "json").stdout
    _, document = _price(run, tmp_path, best, "--only", "pipeline")
    assert document["slower_ratio"] < -0.01
    table = run("plan", "--model", "gpt2", "--price", str(tmp_path / "mine.yaml"), "--only", "pipeline").stdout
    assert f"{-100 * document['slower_ratio']:.1f}%" in table
    assert "slower by" not in table


@pytest.mark.parametrize(
    ("text", "options", "rule"),
    [
        (OWN_PLAN, ("--without", "pipeline"), "pipeline"),
        (OWN_PLAN, ("--memory", "3GB"), "GB per GPU"),
        (OWN_PLAN.replace("tp: 2", "tp: 5"), (), "tp is 5"),
        (OWN_PLAN, ("--global-batch", "64"), "global batch"),
        (OWN_PLAN, ("--gpus", "8"), "8"),
        (OWN_PLAN.replace("layers: 6", "layers: 5"), (), "12"),
    ],
)
def test_price_names_the_rule_that_a_plan_breaks(
    run: Run, tmp_path: Path, text: str, options: tuple[str, ...], rule: str
) -> None:
    result, document = _price(run, tmp_path, text, *options)
    assert result.exit_code == 1
    assert document["runnable"] is False
    assert rule in document["violation"]


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("[]", "document"),
        ("micro_batches: 4", "micro_batch_size"),
        (OWN_PLAN.replace("micro_batches: 4", "micro_batches: 0"), "micro_batches"),
        (OWN_PLAN.replace("tp: 2", "pt: 2"), "stages.0.strategies.0.pt"),
        (OWN_PLAN.replace("}]", "}, {layers: 1, tp: 4}]"), "stages.0.gpus"),
    ],
)
def test_an_invalid_plan_file_is_rejected_by_field(run: Run, tmp_path: Path, text: str, field: str) -> None:
    result, _ = _price(run, tmp_path, text)
    assert result.exit_code == 2
    assert field in result.stderr


def _write_shape(tmp_path: Path, *gpus: str) -> str:
    file = tmp_path / "shape.json"
    file.write_text(json.dumps([{"gpu": gpu, "nodes": 1, "gpus_per_node": 1} for gpu in gpus]))
    return str(file)


def test_a_shape_may_have_three_gpu_models(run: Run, tmp_path: Path) -> None:
    shape = _write_shape(tmp_path, "h100-80g", "a100-80g", "v100-32g")
    plan = answer(run("plan", "--model", "gpt2", "--global-batch", "48", "--shape", shape, "-o", "json"))
    assert {stage["gpu"] for stage in plan["stages"]} <= {"h100-80g", "a100-80g", "v100-32g"}
    assert plan["optimality_gap"] == 0


def test_shape_with_five_gpu_models_is_infeasible(run: Run, tmp_path: Path) -> None:
    shape = _write_shape(tmp_path, "h100-80g", "l40s", "a100-80g", "v100-32g", "t4")
    for solver in ("exact", "milp"):
        result = run(*GPT2, "--shape", shape, "--solver", solver)
        assert result.exit_code == 1
        assert "\n  binding: shape" in result.stderr


def test_custom_gpu_profile_replaces_a_name(run: Run, tmp_path: Path) -> None:
    mine = write_gpu_profile(tmp_path)
    document = answer(run(*GPT2, "--gpu", mine, "--gpus", "2", "-o", "json"))
    shipped = answer(run(*GPT2, "--gpu", "l40s", "--gpus", "2", "-o", "json"))
    assert document["stages"][0]["gpu"] == "mine"
    assert document["iteration_time_s"] == shipped["iteration_time_s"]
    shape = tmp_path / "shape.yaml"
    shape.write_text(f"- {{gpu: {mine}, nodes: 2, gpus_per_node: 1}}\n")
    assert answer(run(*GPT2, "--shape", str(shape), "-o", "json"))["stages"][0]["gpu"] == "mine"


def test_invalid_gpu_profile_is_rejected_by_field(run: Run, tmp_path: Path) -> None:
    result = run(*GPT2, "--gpu", write_gpu_profile(tmp_path, intra_bandwidth_bytes_per_s=0), "--gpus", "2")
    assert result.exit_code == 2
    assert "intra_bandwidth_bytes_per_s" in result.stderr


@pytest.fixture
def dumped(run: Run, tmp_path: Path) -> tuple[str, Any]:
    """The file of a dumped request, and the plan of the request."""
    file = str(tmp_path / "dump.json")
    result = run(*GPT2, "--gpus", "2", "--dump", file, "-o", "json")
    assert f"instances written to {file}" in result.stderr
    return file, answer(result)


@pytest.mark.parametrize("solver", ["exact", "milp"])
def test_dumped_request_is_solved_by_both_solvers(run: Run, dumped: tuple[str, Any], solver: str) -> None:
    file, plan = dumped
    document = answer(run("plan", "--load", file, "--solver", solver, "--time-limit", "60", "-o", "json"))
    overhead_s = plan["iteration_time_s"] - document["objective_s"]
    assert 0 <= overhead_s < 0.01
    assert document["bound_s"] == pytest.approx(document["objective_s"])
    assert (document["solver"], document["proven"]) == (solver, True)
    assert document["borders"] == [0, 12]
    assert len(document["choice"]) == 12
    table = run("plan", "--load", file, "--solver", solver).stdout
    assert "objective" in table
    assert "proven bound" in table


def test_milp_finds_the_same_plan_as_the_search(run: Run) -> None:
    exact, milp = (answer(run(*GPT2, "--gpus", "2", "--solver", name, "-o", "json")) for name in ("exact", "milp"))
    assert milp["iteration_time_s"] == pytest.approx(exact["iteration_time_s"], rel=1e-6)
    assert milp["optimality_gap"] <= 1e-6
    assert (milp["solver"], milp["status"]) == ("milp", "optimal")
    assert milp["inspection"]["devices"]


def test_both_solvers_report_infeasible_memory(run: Run, tmp_path: Path) -> None:
    file = str(tmp_path / "dump.json")
    words = ("plan", "--model", "gpt2", "--global-batch", "2", "--gpus", "1", "--memory", "2GB")
    for solver in ("exact", "milp"):
        result = run(*words, "--solver", solver, "--dump", file)
        assert result.exit_code == 1
        assert "of 2.0 GB per GPU" in result.stderr
        result = run("plan", "--load", file, "--solver", solver)
        assert result.exit_code == 1
        assert "binding: memory" in result.stderr


def test_missing_highspy_names_the_extra_to_install(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "highspy", None)
    result = run(*GPT2, "--gpus", "2", "--solver", "milp")
    assert result.exit_code == 1
    assert "pip install 'ebbtide-server[milp]'" in result.stderr


@pytest.mark.parametrize(
    ("form", "begins"), [("png", b"\x89PNG"), ("svg", b"<?xml"), pytest.param("html", b"<!doctype", marks=needs_charts)]
)
def test_curve_chart_is_saved(run: Run, tmp_path: Path, form: str, begins: bytes) -> None:
    file = tmp_path / f"curve.{form}"
    result = run(*GPT2, "--gpus", "4:6", "--gpu", "l40s", "--plot", str(file))
    assert result.exit_code == 0, result.output
    assert str(file) in result.stderr
    assert file.read_bytes().startswith(begins)


def test_chart_is_reproducible(run: Run, tmp_path: Path) -> None:
    pictures = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for picture in pictures:
        assert run(*GPT2, "--gpus", "1:2", "--plot", str(picture)).exit_code == 0
    assert pictures[0].read_bytes() == pictures[1].read_bytes()


def test_missing_matplotlib_names_the_extra_to_install(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli.planning.curve_chart.find_spec", lambda _: None)
    result = run(*GPT2, "--gpus", "1:2", "--plot", "curve.png")
    assert result.exit_code == 1
    assert "pip install 'ebbtide-server[plot]'" in result.stderr
    assert result.stdout == ""


@pytest.fixture(params=["kept-back", "nominal"])
def judged(request: pytest.FixtureRequest, run: Run) -> tuple[str, Any, str]:
    """Galvatron's plan and ours under one reading of its memory limit: the reading, the JSON and the table."""
    folder = next(folder for folder in SOLVED if "8gpu_24GB" in folder.name)
    plan_file, reading = str(folder / "result.json"), str(request.param)
    words = ("plan", "--galvatron", str(folder), "--galvatron-plan", plan_file, "--memory-reading", reading)
    return reading, answer(run(*words, "-o", "json")), run(*words).stdout


def test_galvatron_plan_and_ours_use_one_cost_model(judged: tuple[str, Any, str]) -> None:
    reading, document, table = judged
    assert plan_from_json(document).world_size == document["galvatron"]["gpus"] == 8
    assert document["galvatron"]["memory_mb_max"] == {"kept-back": 19_661, "nominal": 24_576}[reading]
    assert document["given"]["speed_up"] >= 1
    assert document["search_time_s"] > 0
    assert document["candidates"] > 0
    assert f"{100 * (document['given']['speed_up'] - 1):.2f}% faster than the given plan" in table
    assert ("reserves" in table) is (reading == "kept-back")


def test_infeasible_galvatron_profile_fails_with_the_binding_constraint(run: Run) -> None:
    result = run("plan", "--galvatron", str(INFEASIBLE), "-o", "json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["constraint"] == "memory"
