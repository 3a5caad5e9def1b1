"""Galvatron's cost model: time of its stage tables, and our plan against Galvatron's at equal memory."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from time import perf_counter

from baselines.galvatron.plan_search import search_plan
from baselines.galvatron.profile_reader import read_case
from baselines.galvatron.strategy_space import MemoryLimitReading, compute_memory_limit_mb
from tests.builders_galvatron import FOLDERS, StageTable, load_recorded_answer, load_stage_tables, solve_table

REPETITIONS = 3


def rows() -> list[tuple[str, str, str]]:
    """Return the stage tables first, then for each case both iteration times and both search times."""
    return [_tables(), *((f"galvatron: {folder.name}", "at most as slow", _case(folder)) for folder in FOLDERS)]


def _tables() -> tuple[str, str, str]:
    tables = [
        table for folder in FOLDERS if (folder / "cost_tables.json").exists() for table in load_stage_tables(folder)
    ]
    taken_s = [_median_s(table) for table in tables]
    found = f"median {median(taken_s) * 1e3:.1f} ms, worst {max(taken_s) * 1e3:.1f} ms over {len(tables)} tables"
    return "galvatron: stage tables, exact", "20 ms each", found


def _median_s(table: StageTable) -> float:
    taken_s = []
    for _ in range(REPETITIONS):
        begin_s = perf_counter()
        solve_table(table)
        taken_s.append(perf_counter() - begin_s)
    return median(taken_s)


def _case(folder: Path) -> str:
    case, own = read_case(folder), load_recorded_answer(folder)
    begin_s = perf_counter()
    found = search_plan(case, compute_memory_limit_mb(case.memory_gb, MemoryLimitReading.KEPT_BACK))
    taken = f"in {perf_counter() - begin_s:.2f} s (its own took {own['search_s']:.0f} s)"
    if found.evaluation is None:
        return f"infeasible, as it says, {taken}"
    ours_s, its_s = found.evaluation.judged_s, own["iter_time_s"]
    return f"{ours_s:.4f} s, its plan {its_s:.4f} s ({ours_s / its_s - 1:+.2%}), {taken}"
