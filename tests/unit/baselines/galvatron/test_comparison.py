"""The comparison with Galvatron that the command line shows, and the plans given to it."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from baselines.galvatron.comparison import compare_with_galvatron, parse_plan
from baselines.galvatron.cost_model import evaluate_plan
from baselines.galvatron.profile_reader import read_case
from baselines.galvatron.profiles import JsonField
from baselines.galvatron.strategy_space import MemoryLimitReading
from scheduler.domain.parallel_plan import LayerStrategy, Recompute, plan_from_json
from scheduler.solver.profiles.profile_document import ProfileError
from tests.builders_galvatron import INFEASIBLE, SOLVED, load_recorded_answer

FOLDER = next(folder for folder in SOLVED if "8gpu_24GB" in folder.name)
CAP_MB = 19_661


@pytest.fixture(scope="module")
def answer() -> dict[str, Any]:
    return compare_with_galvatron(FOLDER, MemoryLimitReading.KEPT_BACK, FOLDER / "result.json")


def test_both_plans_are_evaluated_alike(answer: dict[str, Any]) -> None:
    ours, given = answer["ours"], answer["given"]
    assert answer["memory_mb_max"] == CAP_MB
    assert given["iteration_time_s"] == pytest.approx(load_recorded_answer(FOLDER)["iter_time_s"], rel=1e-4)
    assert given["speed_up"] == given["iteration_time_s"] / ours["iteration_time_s"] > 1.01
    assert ours["fits"]
    assert given["fits"]
    assert (ours["optimality_gap"], given["optimality_gap"]) == (0.0, None)


def test_result_is_plain_json_with_plans_in_the_shared_form(answer: dict[str, Any]) -> None:
    again = json.loads(json.dumps(answer))
    plan = plan_from_json(again["ours"])
    assert plan.world_size == answer["gpus"]
    assert plan.global_batch == 64
    assert sum(run.layers for stage in plan.stages for run in stage.strategies) == 32


@pytest.mark.parametrize("part", ["ours", "given"])
def test_own_plan_is_evaluated_the_same_when_given_back(answer: dict[str, Any], part: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(answer[part]))
    case = read_case(FOLDER)
    judged = evaluate_plan(parse_plan(JsonField.from_file(path), case, CAP_MB), case)
    assert judged.judged_s == answer[part]["iteration_time_s"]
    assert judged.memory_mb == answer[part]["evaluation"]["memory_mb"]


def test_missing_embedding_strategy_defaults_to_the_best_that_fits(answer: dict[str, Any]) -> None:
    bare = {key: value for key, value in answer["ours"].items() if key != "embedding"}
    case = read_case(FOLDER)
    judged = evaluate_plan(parse_plan(JsonField("plan", bare), case, CAP_MB), case)
    assert judged.judged_s == pytest.approx(answer["ours"]["iteration_time_s"])


def test_uneven_plan_is_judged_by_its_slowest_stage() -> None:
    stages = [stage([{**RUN, "layers": layers}]) for layers in (30, 2)]
    case = read_case(FOLDER)
    judged = evaluate_plan(parse_plan(JsonField("plan", {**PLAN, "stages": stages}), case, CAP_MB), case)
    assert judged.judged_s == judged.bottleneck_s
    assert judged.bottleneck_s >= 8 * max(judged.stages_s)


def test_infeasible_case_reports_the_memory_needed() -> None:
    answer = compare_with_galvatron(INFEASIBLE, MemoryLimitReading.NOMINAL)
    assert re.findall(r"\d+", answer["infeasible"]) == ["15972", "12288"]
    assert "ours" not in answer


RUN = asdict(LayerStrategy(layers=16, dp=4, zero=3, shard_group=4, recompute=Recompute.FULL))


def stage(strategies: list[dict[str, Any]]) -> dict[str, Any]:
    return {"first_layer": 0, "last_layer": 0, "gpu": "any", "gpus": 4, "strategies": strategies}


PLAN: dict[str, Any] = {
    "schedule": {"name": "1f1b", "interleave": 1},
    "micro_batches": 8,
    "micro_batch_size": 8,
    "iteration_time_s": 1.0,
    "samples_per_s": 64.0,
    "peak_bytes_per_gpu": 1,
    "optimality_gap": 0.0,
    "stages": [stage([RUN]), stage([RUN])],
}
BEST = load_recorded_answer(FOLDER)["best"]


@pytest.mark.parametrize(
    ("document", "complaint"),
    [
        ([], "plan is []; it must be a JSON object"),
        (load_recorded_answer(INFEASIBLE), "plan.best is None; it must be a JSON object"),
        ({**BEST, "pp": 3}, "must be of the form 3-tp[*]-dp[f][-c][-sp]"),
        ({**BEST, "chunks": 7}, "micro-batches is 7; it must divide the global batch of 64"),
        ({**BEST, "layer_runs": [["1-1-8", 31]]}, "layers by stage is [31]; it must be one or more each, 32 in all"),
        ({**BEST, "layer_runs": [["1-1-8", 10**9]]}, "must be a whole number from 1 to 32"),
        ({**BEST, "layer_runs": [["1-1-8"]]}, "must be a label and a number of layers"),
        ({**BEST, "layer_runs": [["1-1-4", 32]]}, "strategy is 1-1-4; it must spread 8 samples over 8 GPUs"),
        ({**BEST, "layer_runs": [["1-8*-1", 32]]}, "buffer degree is 2; it must divide the GPUs of a stage and be at"),
        ({**BEST, "global_buffer_tp": 5}, "must be a plan whose buffer degree (5)"),
        ({**BEST, "tp_sp_mode": "both"}, "tp_sp_mode is 'both'; it must be 'tp_only' or 'sp_only' or 'tp_with_sp'"),
        ({**BEST, "embedding": "1-1-8-c"}, "embedding is 1-1-8-c; it must be without recompute"),
        ({**PLAN, "micro_batches": 4}, "micro_batch_size is 8; it must be 64 / 4"),
        ({**PLAN, "micro_batches": "8"}, "micro_batches is '8'; it must be a whole number"),
        ({**PLAN, "stages": [stage([{**RUN, "zero": 1}])]}, "zero one of (0, 2, 3)"),
        ({**PLAN, "stages": [stage([{**RUN, "recompute": "selective"}])]}, "Galvatron's model supports"),
        ({**PLAN, "stages": [stage([{**RUN, "offload": True}])]}, "Galvatron's model supports"),
        ({**PLAN, "stages": [stage([{**RUN, "layers": 0}])]}, "layers is 0; it must be a whole number from 1"),
        ({**PLAN, "stages": [stage([])]}, "layers by stage is [0]"),
        ({**PLAN, "schedule": {"name": "gpipe", "interleave": 1}}, "Galvatron's model supports 1F1B"),
        ({**PLAN, "stages": 3}, "plan: "),
        ({"pp": 1}, "plan: field 'stages' is missing"),
    ],
)
def test_unsupported_plan_is_rejected_by_field(document: object, complaint: str) -> None:
    case = read_case(FOLDER)
    with pytest.raises(ProfileError) as refused:
        evaluate_plan(parse_plan(JsonField("plan", document), case, CAP_MB), case)
    assert complaint in str(refused.value)
