"""Label setting and its bounds against enumeration of a stage's strategies."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest

from scheduler.domain.parallel_plan import LayerStrategy
from scheduler.solver.costs.cost_tables import CostTables
from scheduler.solver.search.stage_bounds import stage_lower_bounds
from scheduler.solver.search.stage_search import StageProblem, one_switch, solve_stage

STRATEGIES = 5
LAYERS = 5


def _problem(seed: int) -> StageProblem:
    """Random tables in which more time buys less memory, with buffers and changes of layout that matter."""
    generator = np.random.default_rng(seed)
    kinds = int(generator.integers(1, LAYERS + 1))
    time_s = np.sort(generator.uniform(1, 3, (kinds, STRATEGIES)), axis=1)
    memory = np.sort(generator.integers(10, 1000, (kinds, STRATEGIES)), axis=1)[:, ::-1]
    tables = CostTables(
        strategies=tuple(LayerStrategy(layers=1, tp=number + 1) for number in range(STRATEGIES)),
        types=np.sort(generator.integers(0, kinds, LAYERS)),
        layouts=generator.integers(0, 2, STRATEGIES),
        time_s=time_s,
        state_bytes=memory,
        kept_bytes=generator.integers(0, 200, (kinds, STRATEGIES)),
        working_bytes=generator.choice([0, 100, 700], STRATEGIES),
        reshard_s=np.broadcast_to(generator.uniform(0, 0.4) * (1 - np.eye(2)), (kinds, 2, 2)),
        border_s=generator.uniform(0, 0.3, (kinds, STRATEGIES)),
        hand_over_s=np.zeros((0, LAYERS + 1)),
    )
    return StageProblem(
        tables=tables,
        types=tables.types,
        in_flight=int(generator.integers(1, 4)),
        capacity_bytes=int(generator.integers(1000, 4500)),
        entry=bool(generator.integers(2)),
        exit=bool(generator.integers(2)),
    )


def _cost(problem: StageProblem, choice: tuple[int, ...]) -> float:
    """Time of one choice, infinite where it does not fit; written from the definition."""
    tables, rows = problem.tables, list(zip(problem.types.tolist(), choice, strict=True))
    memory = sum(int(tables.state_bytes[u, s] + problem.in_flight * tables.kept_bytes[u, s]) for u, s in rows)
    if memory + max(int(tables.working_bytes[s]) for s in choice) > problem.capacity_bytes:
        return np.inf
    time_s = sum(float(tables.time_s[u, s]) for u, s in rows)
    time_s += sum(float(tables.reshard_s[u, tables.layouts[s], tables.layouts[r]]) for (u, s), (_, r) in pairwise(rows))
    time_s += float(tables.border_s[rows[0]]) * problem.entry + float(tables.border_s[rows[-1]]) * problem.exit
    return time_s


def _enumerated(problem: StageProblem) -> float:
    return min(_cost(problem, choice) for choice in product(range(STRATEGIES), repeat=LAYERS))


@pytest.mark.parametrize("seed", range(40))
def test_a_stage_is_solved_exactly(seed: int) -> None:
    problem = _problem(seed)
    best_s = _enumerated(problem)
    found = solve_stage(problem, labels_max=10**6)
    assert found.proven
    assert found.time_s == pytest.approx(best_s, rel=1e-12)
    if np.isfinite(best_s):
        assert _cost(problem, found.choice) == pytest.approx(best_s, rel=1e-12)


@pytest.mark.parametrize("seed", range(40))
def test_the_bound_is_never_above_the_optimum_and_the_one_switch_start_never_below(seed: int) -> None:
    problem = _problem(seed)
    best_s = _enumerated(problem)
    bounds = stage_lower_bounds(problem.tables, in_flight=problem.in_flight, capacity_bytes=problem.capacity_bytes)
    assert bounds[0, LAYERS] <= best_s * (1 + 1e-12)
    assert one_switch(problem).time_s >= best_s * (1 - 1e-12)
    loose = stage_lower_bounds(problem.tables, in_flight=problem.in_flight, capacity_bytes=10**9)
    fastest = problem.tables.time_s.min(axis=1)[problem.types]
    assert loose[1, 4] == pytest.approx(fastest[1:4].sum(), rel=1e-12)
    assert np.isinf(bounds[3, 3])


def test_a_spent_budget_is_admitted() -> None:
    unproven = [solve_stage(_problem(seed), labels_max=0) for seed in range(40)]
    assert any(not solution.proven for solution in unproven)
    for seed, solution in enumerate(unproven):
        if np.isfinite(solution.time_s):
            assert solution.time_s >= solve_stage(_problem(seed), labels_max=10**6).time_s


def test_nothing_that_fits_is_an_infinite_time() -> None:
    assert np.isinf(solve_stage(replace(_problem(1), capacity_bytes=1), labels_max=10**6).time_s)
