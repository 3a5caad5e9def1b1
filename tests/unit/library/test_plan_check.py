"""A script that trains with other degrees than its plan is stopped before it trains."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ebbtide.environment import RankEnvironment
from ebbtide.plan_check import count_plan_ranks, find_degrees, read_plan_degrees
from ebbtide.session import Session
from scheduler.domain.parallel_plan import LayerStrategy, plan_to_json
from tests.builders_plan_export import build_plan

PLAN = build_plan(2, 2, strategy=LayerStrategy(1, tp=2, dp=2, ring=2, zero=1, shard_group=4))
DIFFERENT = build_plan(4, others=(LayerStrategy(1, offload=True),))


@pytest.fixture
def environment(tmp_path: Path) -> RankEnvironment:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan_to_json(PLAN)), encoding="utf-8")
    return RankEnvironment(
        rank=0, world_size=16, store_host="h", store_port=1, plan_path=path, run_dir=tmp_path, framework="megatron-lm"
    )


def _read_status(environment: RankEnvironment) -> Any:
    assert environment.run_dir is not None
    return json.loads((environment.run_dir / "status-0.json").read_text(encoding="utf-8"))


def test_the_degrees_of_a_plan_document_are_those_of_the_plan() -> None:
    assert read_plan_degrees(plan_to_json(PLAN)) == {"pp": 2, "tp": 2, "dp": 2, "cp": 2, "ep": 1}
    assert count_plan_ranks(plan_to_json(PLAN)) == PLAN.world_size
    interleaved = build_plan(*(1,) * 4, interleave=2)
    assert read_plan_degrees(plan_to_json(interleaved))["pp"] == count_plan_ranks(plan_to_json(interleaved)) == 2
    assert read_plan_degrees(plan_to_json(DIFFERENT)) == {"pp": 1}


def test_another_number_of_ranks_fails_the_rank_and_is_reported(environment: RankEnvironment) -> None:
    with pytest.raises(ValueError, match="`WORLD_SIZE` is 8, but the plan of this generation has 16 ranks"):
        Session(replace(environment, world_size=8))
    assert "`WORLD_SIZE`" in _read_status(environment)["reason"]
    Session(replace(environment, world_size=8, framework=""))


def test_degrees_that_a_script_reports_must_be_the_plans(environment: RankEnvironment) -> None:
    session = Session(environment)
    session.check_degrees(tp=2, pp=2, cp=2)
    with pytest.raises(ValueError, match=r"tp is 1, but the plan has 2.*\{plan\.tp\}"):
        session.check_degrees(tp=1, dp=2)
    with pytest.raises(ValueError, match="`tensor` is no degree"):
        session.check_degrees(tensor=2)


def test_degrees_of_a_loaded_framework_are_checked_before_training(
    environment: RankEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_degrees() == {}
    sizes = {"tensor_model": 4, "pipeline_model": 2, "context": 2, "data": 1}
    calls = {f"get_{name}_parallel_world_size": lambda size=size: size for name, size in sizes.items()}
    state = SimpleNamespace(model_parallel_is_initialized=lambda: True, **calls)
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)
    with pytest.raises(ValueError, match="tp is 4, but the plan has 2, dp is 1"), Session(environment) as session:
        session.mark_resumed(0)
    status = _read_status(environment)
    assert (status["phase"], status["checkpoint_step"]) == ("failed", None)
