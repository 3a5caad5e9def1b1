"""The strategies of one device compared with every choice, and the guarantees of the parts of that search."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from scheduler.solver.search.label_setting import find_fastest_below
from scheduler.solver.search.local_search import improve_choice
from scheduler.solver.search.stage_problem import LagrangianRelaxation, StageProblem
from scheduler.solver.search.stage_search import solve_stage
from tests.unit.solver.search.random_stages import random_stage

SEEDS = range(60)
PLENTY = 10**6


@pytest.mark.parametrize("has_host", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_stage_solution_matches_enumeration(seed: int, has_host: bool) -> None:
    stage = random_stage(seed, has_host=has_host)
    found = solve_stage(stage.problem, labels_max=PLENTY)
    assert found.time_s == pytest.approx(stage.fastest_s, rel=1e-12)
    assert found.bound_s >= found.time_s * (1 - 1e-11)
    if found.choice:
        time_s, memory = stage.priced
        chosen = (stage.choices == found.choice).all(axis=1)
        assert time_s[chosen] == pytest.approx(found.time_s, rel=1e-12)
        assert memory[chosen] <= stage.capacity_bytes
        assert stage.is_within_host[chosen]


def test_some_stages_are_slower_or_impossible_because_of_the_host() -> None:
    stages = [random_stage(seed, has_host=True) for seed in SEEDS]
    ratios = [random_stage(seed).fastest_s / stage.fastest_s for seed, stage in zip(SEEDS, stages, strict=True)]
    assert sum(0 < ratio < 1 for ratio in ratios) >= 10
    assert any(ratio == 0 for ratio in ratios)


@pytest.mark.parametrize("seed", SEEDS)
def test_weighing_choices_adds_up_layers_changes_borders_and_the_largest_buffer(seed: int) -> None:
    stage = random_stage(seed)
    time_s, memory = stage.problem.evaluate_choices(stage.choices)
    assert np.allclose(time_s, stage.priced[0], rtol=1e-12)
    assert (memory == stage.priced[1]).all()


@pytest.mark.parametrize("has_host", [False, True])
@pytest.mark.parametrize("tolerance", [0.001, 0.05, 0.3])
def test_tolerance_holds_and_saves_labels(tolerance: float, has_host: bool) -> None:
    exact, rough = 0, 0
    for seed in SEEDS:
        stage = random_stage(seed, has_host=has_host)
        found = solve_stage(stage.problem, tolerance=tolerance, labels_max=PLENTY)
        exact += solve_stage(stage.problem, labels_max=PLENTY).labels
        rough += found.labels
        best_s = stage.fastest_s
        assert found.bound_s <= best_s * (1 + 1e-12)
        assert best_s <= found.time_s * (1 + 1e-12)
        assert found.time_s == found.bound_s or found.time_s * (1 - tolerance) <= found.bound_s * (1 + 1e-12)
    assert rough < exact


@pytest.mark.parametrize("has_host", [False, True])
@pytest.mark.parametrize("labels_max", [0, 20])
def test_exhausted_budget_gives_a_valid_bound(labels_max: int, has_host: bool) -> None:
    unproven = 0
    for seed in SEEDS:
        stage = random_stage(seed, has_host=has_host)
        found = solve_stage(stage.problem, labels_max=labels_max)
        assert found.bound_s <= stage.fastest_s * (1 + 1e-12) <= found.time_s * (1 + 1e-11)
        unproven += found.bound_s < found.time_s * (1 - 1e-11)
    assert unproven > 0


def test_infeasible_stage_has_infinite_time_and_bound() -> None:
    stage = random_stage(1)
    found = solve_stage(replace(stage.problem, capacity_bytes=1), labels_max=PLENTY)
    assert (found.time_s, found.bound_s, found.choice) == (np.inf, np.inf, ())


@pytest.mark.parametrize("seed", SEEDS)
def test_every_price_bounds_the_stage_from_below_and_its_choices_have_the_priced_cost(seed: int) -> None:
    stage = random_stage(seed)
    relaxation = LagrangianRelaxation.for_capacity(
        stage.problem, np.arange(stage.costs.strategies), stage.capacity_bytes
    )
    bounds, choices = relaxation.find_shortest_paths(stage.prices)
    time_s, memory = stage.problem.evaluate_choices(choices)
    bare = memory - stage.costs.working_bytes[choices].max(axis=1)
    assert bounds == pytest.approx(time_s + stage.prices * (bare - stage.capacity_bytes), rel=1e-9)
    assert (bounds <= stage.fastest_s * (1 + 1e-12)).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_label_setting_finds_the_best_choice_below_its_limit_or_proves_that_there_is_none(seed: int) -> None:
    stage = random_stage(seed)
    bare = replace(stage.problem, working_bytes=np.zeros_like(stage.problem.working_bytes))
    time_s, memory = bare.evaluate_choices(stage.choices)
    fitting_s = np.where(memory <= stage.capacity_bytes, time_s, np.inf)
    best_s = float(fitting_s.min())
    relaxation = LagrangianRelaxation.for_capacity(bare, np.arange(stage.costs.strategies), stage.capacity_bytes)
    for price in (0.0, float(stage.prices[-1])):
        for ratio, rounding in ((3.0, 0.0), (1.01, 0.0), (1 - 1e-9, 0.0), (3.0, 0.2)):
            limit_s = ratio * best_s if np.isfinite(best_s) else 100.0
            rounding_s = rounding * limit_s
            found = find_fastest_below(
                relaxation, price=price, limit_s=limit_s, rounding_s=rounding_s, labels_max=PLENTY
            )
            assert found.complete
            assert bool(found.choice) == (best_s < limit_s)
            if found.choice:
                reached_s, size = bare.evaluate_choices(np.array([found.choice]))
                assert size[0] <= stage.capacity_bytes
                assert best_s * (1 - 1e-12) <= reached_s[0] <= best_s * (1 + 1e-12) + rounding_s


def test_label_setting_stops_at_its_budget() -> None:
    relaxation = LagrangianRelaxation.for_capacity(random_stage(1).problem, np.arange(5), 10**9)
    found = find_fastest_below(relaxation, price=0.0, limit_s=100.0, rounding_s=0.0, labels_max=4)
    assert (found.choice, found.complete) == ((), False)


@pytest.mark.parametrize("seed", SEEDS)
def test_local_search_ends_in_a_choice_that_fits_and_never_gets_slower_on_the_way(seed: int) -> None:
    stage = random_stage(seed)
    problem, allowed = stage.problem, np.arange(stage.costs.strategies)
    fits = stage.priced[1] <= stage.capacity_bytes
    for start in stage.choices[:: len(stage.choices) // 7]:
        before_s, size = (entry[0] for entry in problem.evaluate_choices(start[None]))
        ended = improve_choice(problem, allowed, start)
        after_s, weight = (entry[0] for entry in problem.evaluate_choices(ended[None]))
        if size <= stage.capacity_bytes:
            assert weight <= stage.capacity_bytes
            assert after_s <= before_s * (1 + 1e-12)
        elif not fits.any():
            assert weight > stage.capacity_bytes
        assert (problem.layouts[ended] == problem.layouts[start]).all()


def test_two_moves_at_once_reach_what_one_cannot() -> None:
    problem = StageProblem(
        step_s=np.array([[10.0, 5.0], [1.0, 2.0]]),
        memory_bytes=np.array([[0, 10], [10, 0]]),
        working_bytes=np.zeros(2, dtype=np.int64),
        layouts=np.zeros(2, dtype=np.int64),
        reshard_s=np.zeros((1, 1, 1)),
        prices=np.zeros(1),
        capacity_bytes=10,
    )
    assert improve_choice(problem, np.arange(2), np.array([0, 0])).tolist() == [1, 1]
