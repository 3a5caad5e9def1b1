"""`ebbtide plan`: plans and scaling curves."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import Result

from cli.planning.plan_tables import format_degrees, format_layer_ranges, format_pipeline
from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan, plan_from_json, plan_to_json
from scheduler.solver.profiles.catalog import load_model
from tests.builders_plan_export import build_plan

Run = Callable[..., Result]
PLAN_FIELDS = {field.name for field in fields(ParallelPlan)} - {"peak_bytes_by_model", "terms", "profile_time_s"}
"""The fields of every plan in plan.json, which has peaks by model for mixed plans only, and no terms and their time."""
GPT2 = ("plan", "--model", "gpt2", "--global-batch", "8")
LLAMA = ("plan", "--model", "llama-2-7b", "--global-batch", "16")


def answer(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_plan_json_has_the_plan_fields_and_search_statistics(run: Run) -> None:
    document = answer(run(*GPT2, "--gpus", "4", "-o", "json"))
    assert set(document) == {
        *PLAN_FIELDS,
        "search_time_s",
        "candidates",
        "step_range_s",
        "inspection",
        "runners_up",
        "remark",
        "whole",
        "simplest",
    }
    plan = plan_from_json({field: document[field] for field in PLAN_FIELDS})
    assert (plan.world_size, plan.global_batch) == (4, 8)
    assert plan.stages[0].gpu == "a100-80g"
    assert plan.stages[-1].last_layer == load_model("gpt2").layer_count - 1
    assert document["search_time_s"] > 0
    assert document["candidates"] > 0


def test_plan_table_shows_throughput_memory_and_stages(run: Run) -> None:
    result = run(*LLAMA, "--gpus", "8")
    document = answer(run(*LLAMA, "--gpus", "8", "-o", "json"))
    assert result.exit_code == 0
    assert f"{document['samples_per_s']:.2f}".rstrip("0") in result.stdout
    assert "of 80.0 GB per GPU" in result.stdout
    assert "8 x a100-80g" in result.stdout
    assert "fsdp over 8" in result.stdout
    assert all(len(line) <= 100 for line in result.stdout.splitlines())


def test_plan_table_shows_bottlenecks_and_runners_up(run: Run) -> None:
    table = run(*LLAMA, "--gpus", "8", "--alternatives", "2").stdout
    assert re.search(r"0 +█+▓*▒* +100\.0% +█+░* +[\d.]+ GB +compute \d+%", table)
    assert "██ compute" in table
    assert len(re.findall(r"\+[\d.]+% +[\d.]+ GB", table)) == 2
    assert "optimal: by the cost model" in table
    assert "runner-up" not in run(*LLAMA, "--gpus", "8", "--alternatives", "0").stdout


def test_tolerance_bounds_the_optimality_gap(run: Run) -> None:
    exact, rough = (answer(run(*LLAMA, "--gpus", "8", "--tolerance", ratio, "-o", "json")) for ratio in ("0", "0.2"))
    assert exact["optimality_gap"] == 0
    assert rough["optimality_gap"] <= 0.2
    assert rough["iteration_time_s"] * (1 - rough["optimality_gap"]) <= exact["iteration_time_s"] * (1 + 1e-9)


def test_limits_restrict_the_plan(run: Run) -> None:
    words = (*LLAMA, "--gpus", "8", "--alternatives", "0", "-o", "json")
    free, limited = answer(run(*words)), answer(run(*words, "--without", "fsdp,zero", "--without", "hybrid-shard"))
    assert {run["zero"] for stage in free["stages"] for run in stage["strategies"]} == {3}
    assert {run["zero"] for stage in limited["stages"] for run in stage["strategies"]} == {0}
    assert limited["iteration_time_s"] > free["iteration_time_s"]
    only = answer(run(*words, "--only", "tensor"))
    assert [(stage["gpus"], run["tp"]) for stage in only["stages"] for run in stage["strategies"]] == [(8, 8)]


def test_limits_that_leave_no_plan_name_a_change(run: Run) -> None:
    result = run(*LLAMA, "--gpus", "8", "--only", "data")
    assert result.exit_code == 1
    assert "\n  binding: limits\n  change: allow " in result.stderr


def test_an_unknown_dimension_is_rejected(run: Run) -> None:
    for option in ("--only", "--without"):
        result = run(*GPT2, "--gpus", "2", option, "data,tensr")
        assert result.exit_code == 2
        assert f"{option}: 'tensr'" in result.stderr
        assert "did you mean 'tensor'" in result.stderr


def test_simplest_plan_is_within_the_ratio(run: Run) -> None:
    words = ("plan", "--model", "llama-2-13b", "--global-batch", "32", "--gpus", "8", "--memory", "60GB")
    document = answer(run(*words, "--alternatives", "0", "--tolerance", "0.001", "-o", "json"))
    simplest = document["simplest"]
    assert (simplest["strategies"], simplest["strategies_min"]) == (1, 1)
    assert 0 <= simplest["slower_ratio"] <= 0.02


def test_yaml_equals_json(run: Run) -> None:
    document = yaml.safe_load(run(*GPT2, "--gpus", "2", "-o", "yaml").stdout)
    same = answer(run(*GPT2, "--gpus", "2", "-o", "json"))
    assert {**document, "search_time_s": 0} == {**same, "search_time_s": 0}


def test_memory_limit_constrains_the_plan(run: Run) -> None:
    roomy = answer(run(*LLAMA, "--gpus", "8", "-o", "json"))
    limit = roomy["peak_bytes_per_gpu"] - 1
    tight = answer(run(*LLAMA, "--gpus", "8", "--memory", str(limit) + "B", "-o", "json"))
    assert tight["peak_bytes_per_gpu"] <= limit
    assert tight["iteration_time_s"] >= roomy["iteration_time_s"]


def test_more_nodes_make_the_plan_slower(run: Run) -> None:
    inside = answer(run(*LLAMA, "--gpus", "8", "-o", "json"))
    across = answer(run(*LLAMA, "--gpus", "8", "--nodes", "8", "-o", "json"))
    assert across["iteration_time_s"] > inside["iteration_time_s"]


def test_frozen_layers_reduce_time_and_memory(run: Run) -> None:
    whole, frozen = (answer(run(*GPT2, "--gpus", "1", *more, "-o", "json")) for more in ((), ("--frozen-layers", "9")))
    assert frozen["iteration_time_s"] < 0.8 * whole["iteration_time_s"]
    assert frozen["peak_bytes_per_gpu"] < whole["peak_bytes_per_gpu"]


def test_sequence_length_and_gpu_change_the_plan(run: Run) -> None:
    short, long = (answer(run(*GPT2, "--gpus", "1", "--seq", seq, "-o", "json")) for seq in ("128", "1024"))
    assert short["iteration_time_s"] < long["iteration_time_s"]
    on_cpu = answer(run(*GPT2, "--gpus", "4", "--gpu", "cpu", "--seq", "128", "-o", "json"))
    assert on_cpu["iteration_time_s"] > short["iteration_time_s"]


@pytest.mark.parametrize(("form", "printed"), [("table", False), ("json", True), ("yaml", True)])
def test_infeasible_plan_fails_with_the_binding_constraint(run: Run, form: str, printed: bool) -> None:
    result = run(*LLAMA, "--gpus", "1", "--memory", "24GB", "-o", form)
    assert result.exit_code == 1
    message = json.loads(result.stderr)["error"]["message"] if form == "json" else result.stderr
    assert "no plan on 1x1 a100-80g: needs " in message
    assert "of 24.0 GB per GPU" in message
    assert re.search(r"\n  binding: memory\n  change: .*[\d.]+ GB", message)
    assert ("infeasible" in result.stdout) is printed
    if form == "json":
        assert json.loads(result.stdout)["constraint"] == "memory"


def test_a_batch_that_all_gpus_cannot_share_is_planned_on_fewer(run: Run) -> None:
    words = ("plan", "--model", "tiny-gpt", "--gpu", "cpu", "--gpus", "7", "--global-batch", "8")
    document = answer(run(*words, "-o", "json"))
    assert sum(stage["gpus"] for stage in document["stages"]) < 7
    assert "global batch of 8" in document["remark"]
    assert "out of 1x7 cpu" in run(*words).stdout


def test_range_returns_the_curve_with_infeasible_points(run: Run) -> None:
    words = (*LLAMA, "--gpus", "1:16", "--memory", "40GB")
    points = answer(run(*words, "-o", "json"))["points"]
    assert [point["gpus"] for point in points] == [1, 2, 3, 4, 5, 6, 7, 8, 16]
    assert "infeasible" in points[0]
    assert points[-1]["shape"] == "2x8 a100-80g"
    assert all(point["better_gpus"] is None or point["better_gpus"] < point["gpus"] for point in points[1:])
    table = run(*words).stdout
    assert "1.00x" in table
    assert "1x1 a100-80g: needs " in table


def test_curve_marks_wasted_gpus(run: Run) -> None:
    words = (*GPT2, "--gpus", "4:5", "--gpu", "l40s")
    points = {point["gpus"]: point for point in answer(run(*words, "-o", "json"))["points"]}
    assert points[5]["iteration_time_s"] > points[4]["iteration_time_s"]
    assert (points[4]["better_gpus"], points[5]["better_gpus"]) == (None, 4)
    table = run(*words).stdout
    assert re.search(r"^ +5 +! ", table, re.MULTILINE)
    assert "! fewer GPUs are at least as fast: 4 instead of 5" in table


def test_curve_without_a_feasible_plan_fails(run: Run) -> None:
    result = run(*LLAMA, "--gpus", "1:2", "--memory", "24GB", "-o", "json")
    assert result.exit_code == 1
    assert len(json.loads(result.stdout)["points"]) == 2
    assert "2 shapes" in result.stderr


def strategy(**degrees: Any) -> Mapping[str, Any]:
    return {"tp": 1, "dp": 1, "ulysses": 1, "ring": 1, "ep": 1, "sequence_sharding": False, **degrees}


def test_degrees_layers_and_pipelines_are_formatted() -> None:
    assert format_degrees(strategy()) == "1 GPU"
    assert format_degrees(strategy(tp=2, dp=4, sequence_sharding=True)) == "tensor 2 x data 4 x sequence-sharded"
    assert format_layer_ranges([0, 1, 2, 8]) == "0-2, 8"
    assert format_layer_ranges([0, 4, 8, 12, 16]) == "0, 4, ..., 16"
    plan = {"stages": [1, 2], "schedule": {"name": "1f1b"}, "micro_batches": 4, "micro_batch_size": 2}
    assert format_pipeline(plan) == "2 stages, 1f1b, 4 micro-batches of 2 samples"


def test_a_plan_for_a_framework_is_printed_in_its_words(run: Run) -> None:
    document = answer(run(*GPT2, "--gpus", "4", "--for", "deepspeed", "-o", "json"))
    exported = document["export"]
    assert exported["framework"] == "deepspeed"
    assert json.loads(exported["file"]["text"])["train_batch_size"] == 8
    assert len({str({**each, "layers": 0}) for stage in document["stages"] for each in stage["strategies"]}) == 1
    table = run(*GPT2, "--gpus", "4", "--for", "megatron-lm")
    assert table.exit_code == 0, table.output
    assert "--tensor-model-parallel-size" in table.stdout


def test_an_unknown_framework_is_refused(run: Run) -> None:
    result = run(*GPT2, "--gpus", "4", "--for", "deepspeeed")
    assert result.exit_code == 2
    assert "--for: 'deepspeeed'" in result.stderr
    assert "did you mean 'deepspeed'?" in result.stderr


def test_a_framework_has_no_plans_on_several_gpu_models(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "shape.yaml"
    path.write_text("- {gpu: a100-80g, nodes: 1, gpus_per_node: 1}\n- {gpu: t4, nodes: 1, gpus_per_node: 1}\n")
    result = run(*GPT2, "--shape", str(path), "--for", "megatron-lm")
    assert result.exit_code == 2
    assert "--for: Megatron-LM" in result.stderr


def test_a_plan_that_a_framework_cannot_express_is_refused_with_the_plan_to_use_instead(
    run: Run, tmp_path: Path
) -> None:
    plan = build_plan(6, 6, strategy=LayerStrategy(1, dp=2), micro_batches=2)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan_to_json(plan)), encoding="utf-8")
    result = run(*GPT2, "--price", str(path), "--for", "deepspeed")
    assert result.exit_code == 1
    assert "pipeline" in result.stderr
    assert "The nearest plan for deepspeed: dp4" in result.stderr
    assert "The fastest plan for deepspeed" in result.stderr
