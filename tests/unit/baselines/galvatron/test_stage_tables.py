"""The exact search on instances of Galvatron's own dynamic program."""

from __future__ import annotations

from math import inf
from pathlib import Path

import numpy as np
import pytest

from tests.builders_galvatron import SOLVED, StageTable, load_stage_tables, solve_table


def exact_dp_s(table: StageTable) -> float:
    """Return the least time by dynamic programming over layers, split and whole MB, without the bias that orders
    equals."""
    kinds, kind = np.unique(table.charged_s, axis=0, return_inverse=True)
    members = [np.flatnonzero(kind.reshape(-1) == one) for one in range(len(kinds))]
    between = [[table.charged_s[former[0], latter[0]] for latter in members] for former in members]
    least = np.zeros((len(members), table.room_mb + 1))  # By the kind of the previous layer and the MB in use.
    for layer in range(table.layers):
        reach = np.full((len(members), table.room_mb + 1), inf)
        for latter, own in enumerate(members):
            origins = [least[former] + (between[former][latter] if layer else 0.0) for former in range(len(members))]
            before = np.minimum.reduce(origins)
            for strategy in own:
                size = int(table.memory_mb[strategy])
                placed = before[: max(0, table.room_mb + 1 - size)] + table.time_s[strategy]
                reach[latter, size:] = np.minimum(reach[latter, size:], placed)
        least = reach
    return float(least[:, -1].min()) + table.embedding_s


@pytest.mark.parametrize("folder", SOLVED, ids=lambda folder: folder.name)
def test_stage_tables_are_solved_exactly_and_no_worse_than_by_galvatron(folder: Path) -> None:
    tables = load_stage_tables(folder)
    assert tables
    for table in tables:
        answer = solve_table(table)
        if table.recorded_s == inf:
            assert answer.choice == ()
            continue
        assert answer.cost_s <= table.recorded_s * (1 + 1e-12)
        assert answer.bound_s >= answer.cost_s * (1 - 2e-12)
        assert table.memory_mb[list(answer.choice)].sum() <= table.room_mb


def test_search_matches_dynamic_programming_over_whole_megabytes() -> None:
    for table in (table for folder in SOLVED for table in load_stage_tables(folder)):
        assert solve_table(table).cost_s == pytest.approx(exact_dp_s(table), rel=1e-11)
