"""Exported plans are read by the frameworks' own parsers, in an environment of their own (`make frameworks`)."""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path

import pytest

from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.plan_export.framework import get_uniform_strategy, list_plan_values
from scheduler.plan_export.frameworks import FRAMEWORKS
from tests.builders_plan_export import draw_plan

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-frameworks" / "bin" / "python"
SCRIPT = Path(__file__).with_name("framework_parsers.py")
PLANS = 20

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-frameworks: run `make frameworks`"),
]


@pytest.mark.parametrize("name", ["accelerate", "deepspeed", "megatron-lm", "torchtitan"])
def test_the_frameworks_own_parser_finds_the_degrees_of_the_plan(name: str, tmp_path: Path) -> None:
    rng = random.Random(f"parsers/{name}")
    plans = [draw_plan(rng, FRAMEWORKS[name]) for _ in range(PLANS)]
    output = tmp_path / "found.json"
    subprocess.run(
        [PYTHON, SCRIPT, output],
        input=json.dumps([_build_case(name, plan) for plan in plans]),
        text=True,
        check=True,
        capture_output=True,
        env={**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""},
    )
    for plan, found in zip(plans, json.loads(output.read_text(encoding="utf-8")), strict=True):
        expected = _list_expected(plan)
        assert found == {field: expected[field] for field in found}, plan


def _build_case(name: str, plan: ParallelPlan) -> dict[str, object]:
    exported = FRAMEWORKS[name].export(plan)
    file = None if exported.file is None else exported.file.text
    return {
        "framework": name,
        "args": list(exported.args),
        "file": file,
        "world_size": plan.world_size,
        "layers": plan.layers,
    }


def _list_expected(plan: ParallelPlan) -> dict[str, object]:
    strategy = get_uniform_strategy(plan)
    numbers = {name: int(value) for name, value in list_plan_values(plan).items() if value.isdigit()}
    stage = max(strategy.zero, 1) if strategy.offload else strategy.zero
    return {
        **numbers,
        "zero": stage,
        "total": plan.world_size,
        "recompute": strategy.recompute.value,
        "offload": strategy.offload,
        "offload_parameters": strategy.offload_parameters,
    }
