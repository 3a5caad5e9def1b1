"""Placeholders of the plan in commands."""

from __future__ import annotations

import re

import pytest

from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan, Recompute
from scheduler.plan_export.framework import Framework, list_plan_values
from scheduler.plan_export.frameworks import FRAMEWORKS
from scheduler.plan_export.placeholders import fill_placeholders, find_command_problem
from tests.builders_plan_export import build_plan

STRATEGY = LayerStrategy(1, tp=2, dp=4, zero=3, shard_group=4, recompute=Recompute.FULL)
PLAN = build_plan(4, strategy=STRATEGY)
BY_LAYER = build_plan(4, strategy=LayerStrategy(1, dp=2, zero=2, shard_group=2), others=(LayerStrategy(1, tp=2),))


def _fill(*command: str, name: str = "torchtitan", plan: ParallelPlan = PLAN, file: str = "") -> tuple[str, ...]:
    return fill_placeholders(command, plan, FRAMEWORKS[name].export(plan), file)


def test_degrees_are_filled_in_anywhere_in_a_word() -> None:
    assert _fill("train", "--tp={plan.tp}", "{plan.dp}x{plan.pp}", "{node_rank}") == (
        "train",
        "--tp=2",
        "4x1",
        "{node_rank}",
    )
    assert _fill("{plan.micro_batch_size}", "{plan.micro_batches}", "{plan.world_size}") == ("2", "8", "8")
    assert _fill("{plan.recompute}", "{plan.gradient_checkpointing}", "{plan.zero}") == ("full", "true", "3")


def test_arguments_are_words_of_their_own_or_quoted_inside_one() -> None:
    plan = build_plan(2, 3)
    words = _fill("python", "{plan.args}", name="megatron-lm", plan=plan)
    assert words[1:3] == ("--tensor-model-parallel-size", "1")
    assert words[-1] == "Et*2|t*3L"
    shell = _fill("sh", "-c", "python pretrain.py {plan.args}", name="megatron-lm", plan=plan)
    assert shell[2].endswith("--pipeline-model-parallel-layout 'Et*2|t*3L'")


def test_the_path_of_the_file_is_filled_in_also_within_arguments() -> None:
    plan = build_plan(4, strategy=LayerStrategy(1, dp=4, zero=3, shard_group=4))
    assert _fill("{plan.file}", name="deepspeed", plan=plan, file="/run/a") == ("/run/a",)
    assert _fill("{plan.args}", name="accelerate", plan=plan, file="/run/a") == ("--config_file", "/run/a")


def test_a_plan_with_different_layers_has_no_single_degrees() -> None:
    assert "tp" not in list_plan_values(BY_LAYER)
    with pytest.raises(ValueError, match=r"\{plan\.tp\}"):
        fill_placeholders(["{plan.tp}"], BY_LAYER, FRAMEWORKS["galvatron"].write(BY_LAYER), "")


@pytest.mark.parametrize("framework", FRAMEWORKS.values(), ids=list(FRAMEWORKS))
def test_every_placeholder_of_a_framework_has_a_value(framework: Framework) -> None:
    plan = build_plan(4, strategy=LayerStrategy(1, dp=4, zero=2, shard_group=4))
    plan = plan if not framework.find_problem(plan) else build_plan(4)
    command = [f"{{plan.{name}}}" for name in framework.list_placeholders()]
    assert find_command_problem(command, framework) == ""
    assert not any("{" in word for word in fill_placeholders(command, plan, framework.export(plan), "/run/plan"))


@pytest.mark.parametrize(
    ("name", "command", "problem"),
    [
        ("", ["train", "{plan.tp}"], r"\{plan\.tp\}.*framework"),
        ("deepspeed", ["python", "train.py"], r"\{plan\.file\}"),
        ("torchtitan", ["python", "train.py"], r"\{plan\.args\}"),
        ("deepspeed", ["{plan.args}"], r"not \{plan\.args\}: \{plan\.file\}"),
        ("torchtitan", ["{plan.ppp}"], r"not \{plan\.ppp\}.*did you mean 'pp'"),
        ("galvatron", ["{plan.tp}"], r"not \{plan\.tp\}"),
        ("", ["train", "{nnodes}"], ""),
        ("deepspeed", ["--config={plan.file}"], ""),
    ],
)
def test_a_command_that_cannot_get_the_plan_is_refused(name: str, command: list[str], problem: str) -> None:
    found = find_command_problem(command, FRAMEWORKS.get(name))
    assert bool(found) == bool(problem)
    if problem:
        assert re.search(problem, found), found
