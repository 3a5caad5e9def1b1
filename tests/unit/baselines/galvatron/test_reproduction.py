"""Galvatron's recorded figures, recomputed from its profiles."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baselines.galvatron.comparison import parse_plan
from baselines.galvatron.cost_model import (
    compute_embedding_mb,
    compute_embedding_time,
    compute_layer_mb,
    compute_layer_time,
    compute_transition_s,
    evaluate_plan,
)
from baselines.galvatron.profile_reader import read_case
from baselines.galvatron.profiles import JsonField
from baselines.galvatron.strategy_space import (
    MemoryLimitReading,
    PipelineSetting,
    Strategy,
    compute_memory_limit_mb,
    enumerate_strategy_sets,
)
from tests.builders_galvatron import SOLVED, load_recorded_answer

SEARCH_CHARGES = 100
"""Galvatron's dynamic program prices transitions this many times too high."""


@pytest.mark.parametrize("folder", SOLVED, ids=lambda folder: folder.name)
def test_galvatron_plan_matches_its_recorded_time_and_memory(folder: Path) -> None:
    case, answer = read_case(folder), load_recorded_answer(folder)
    cap = compute_memory_limit_mb(case.memory_gb, MemoryLimitReading.KEPT_BACK)
    judged = evaluate_plan(parse_plan(JsonField.from_file(folder / "result.json"), case, cap), case)
    assert judged.iteration_s == pytest.approx(answer["iter_time_s"], rel=1e-4)
    assert judged.iteration_s == judged.judged_s <= judged.bottleneck_s
    # Its figures include the memory that it reserves.
    kept_back = compute_memory_limit_mb(case.memory_gb, MemoryLimitReading.NOMINAL) - cap
    assert [used + kept_back for used in judged.memory_mb] == [int(mb) for mb in answer["best"]["memory_used_mb"]]


@pytest.mark.parametrize("folder", SOLVED, ids=lambda folder: folder.name)
def test_every_cost_table_is_reproduced(folder: Path) -> None:
    case, tables = read_case(folder), json.loads((folder / "cost_tables.json").read_text())
    setting = PipelineSetting(case, tables["pp"], tables["chunks"])
    strategies = strategies_of(setting, tables)
    buffer_degree = None if tables["tp_sp_mode"] == "sp_only" else tables["global_buffer_tp"]
    for number, stage in enumerate(tables["stages"]):
        embedding, position = _embedding(tables["embed"][number // tables["pp"]]), number % tables["pp"]
        assert [compute_layer_time(strategy, setting).synced_s for strategy in strategies] == pytest.approx(
            stage["time_s"], rel=1e-8
        )
        assert [compute_layer_mb(strategy, setting, position) for strategy in strategies] == stage["mem_mb"]
        assert [compute_embedding_time(embedding, setting, position).synced_s] == pytest.approx(
            [*stage["other_time"].values()]
        )
        assert [compute_embedding_mb(embedding, setting, position, buffer_degree)] == [*stage["other_mem"].values()]
        assert compute_memory_limit_mb(case.memory_gb, MemoryLimitReading.KEPT_BACK) == stage["max_mem_mb"]
        priced = [[compute_transition_s(strategy, other, setting) for other in strategies] for strategy in strategies]
        np.testing.assert_allclose(SEARCH_CHARGES * np.array(priced), stage["inter_s"], rtol=1e-9, atol=4e-9)


def strategies_of(setting: PipelineSetting, tables: dict[str, Any]) -> list[Strategy]:
    """Return the strategies that the tables name, in their order."""
    by_label = {
        strategy.label(setting.stages): strategy
        for _, found in enumerate_strategy_sets(setting, restricted=True)
        for strategy in found
    }
    return [by_label[label] for label in tables["strategies"]]


def _embedding(text: str) -> Strategy:
    found = dict(re.findall(r"(\w+)=([\w.]+)", text))
    zero = {"DPType.DDP": 0, "DPType.ZERO2": 2, "DPType.ZERO3": 3}[found["dp_type"]]
    return Strategy(int(found["tp_size"]), int(found["sp_size"]), int(found["dp_size"]), zero)
