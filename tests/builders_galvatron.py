"""Recorded cases of Galvatron, and the instances of its dynamic program for the exact search."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from baselines.galvatron.plan_search import MAX_LABELS, build_identical_layers_problem
from scheduler.solver.instance import Floats, Ints
from scheduler.solver.search.stage_problem import StageProblem
from scheduler.solver.search.stage_search import solve_stage

FOLDERS = sorted(path.parent for path in (Path(__file__).parent / "data" / "galvatron").glob("*/spec.json"))
INFEASIBLE = next(folder for folder in FOLDERS if "12GB" in folder.name)
SOLVED = [folder for folder in FOLDERS if folder != INFEASIBLE]

_ORDER_BIAS_S = 1e-8
"""Transitions below are no cost: Galvatron's way to order equally good strategies (1e-10 to 3e-9)."""


def load_recorded_answer(folder: Path) -> dict[str, Any]:
    """Return Galvatron's own answer."""
    answer: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return answer


@dataclass(frozen=True, slots=True, eq=False)
class StageTable:
    """One instance of Galvatron's dynamic program, as `cost_tables.json` records it, for S strategies.

    time_s [S], memory_mb [S], transition_s [S, S]; `embedding_s` comes on top of the layers' time, `room_mb` is left
    for them. `recorded_s` is the program's own optimum, infinite where nothing fits.
    """

    time_s: Floats
    memory_mb: Ints
    transition_s: Floats
    layers: int
    embedding_s: float
    room_mb: int
    recorded_s: float

    @property
    def charged_s(self) -> Floats:
        """[S, S]: transitions without the bias that orders equally good strategies."""
        return np.where(self.transition_s < _ORDER_BIAS_S, 0.0, self.transition_s)

    def problem(self) -> StageProblem:
        """The problem without the bias. Strategies with equal transitions share a layout."""
        return build_identical_layers_problem(self.time_s, self.memory_mb, self.layers, self.room_mb, self.charged_s)


@dataclass(frozen=True, slots=True)
class StageAnswer:
    """Strategy of each layer (empty: nothing fits), its cost in the table's own terms, and a bound that no choice
    can beat."""

    cost_s: float
    bound_s: float
    choice: tuple[int, ...]


def load_stage_tables(folder: Path) -> list[StageTable]:
    """Return the recorded tables; empty if the case has none."""
    path = folder / "cost_tables.json"
    return [_table(stage) for stage in json.loads(path.read_text())["stages"]] if path.exists() else []


def solve_table(table: StageTable) -> StageAnswer:
    """The best strategies by the exact search, which leaves the bias out, ordered to avoid the bias.

    Layers are identical, so that those of a run of one layout may swap places: strategies that the bias charges most
    for entering come first. The search's optimum bounds the cost with the bias.
    """
    problem = table.problem()
    found = solve_stage(problem, labels_max=MAX_LABELS)
    if not found.choice:
        return StageAnswer(inf, inf, ())
    choice = np.array(found.choice)
    entering_s = (table.transition_s - table.charged_s).sum(axis=0)[choice]
    runs = np.cumsum(np.diff(problem.layouts[choice], prepend=0) != 0)
    choice = choice[np.lexsort((choice, -entering_s, runs))]
    cost_s = table.time_s[choice].sum() + table.transition_s[choice[:-1], choice[1:]].sum() + table.embedding_s
    return StageAnswer(float(cost_s), found.bound_s + table.embedding_s, tuple(choice.tolist()))


def _table(stage: dict[str, Any]) -> StageTable:
    (embedding_s,), (embedding_mb,) = stage["other_time"].values(), stage["other_mem"].values()
    return StageTable(
        time_s=np.array(stage["time_s"]),
        memory_mb=np.array(stage["mem_mb"]).astype(np.int64),
        transition_s=np.array(stage["inter_s"]),
        layers=int(stage["layers"]),
        embedding_s=embedding_s,
        room_mb=stage["max_mem_mb"] - int(embedding_mb),
        recorded_s=stage["dp_cost"][0],
    )
