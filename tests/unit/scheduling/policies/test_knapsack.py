"""The multiple-choice knapsack: its choices, and its gap when the budget of work runs out."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from scheduler.scheduling.policies.knapsack import Item, Selection, solve_knapsack, solve_multiple_choice


def linear(least: int, most: int, work_s: float) -> list[Item]:
    return [Item(gpus, work_s / gpus) for gpus in range(least, most + 1)]


def test_gpus_go_where_they_save_most() -> None:
    groups = {"short": linear(2, 8, 2_000.0), "long": linear(2, 8, 200_000.0)}
    assert solve_knapsack(groups, 6) == {"short": 2, "long": 8}


def test_item_that_does_not_fit_yields_to_the_best_that_do() -> None:
    """By gain per GPU the wide step is first, but it leaves one GPU unused; the narrow steps use all three."""
    groups = {"wide": [Item(1, 100.0), Item(3, 38.0)], "narrow": [Item(1, 100.0), Item(2, 75.0), Item(4, 30.0)]}
    assert solve_knapsack(groups, 3) == {"wide": 3, "narrow": 2}
    groups["narrow"] = [Item(1, 100.0), Item(4, 10.0)]
    assert solve_knapsack(groups, 3) == {"wide": 1, "narrow": 4}


def test_count_below_the_hull_is_taken_if_nothing_else_fits() -> None:
    assert solve_knapsack({"j": [Item(1, 100.0), Item(2, 99.0), Item(8, 10.0)]}, 3) == {"j": 2}


def test_no_group_gets_a_count_that_slows_it_down() -> None:
    assert solve_knapsack({"j": [Item(1, 100.0), Item(2, 50.0), Item(3, 60.0)]}, 9) == {"j": 2}


@pytest.mark.parametrize("budget", [0, -5])
def test_zero_budget_gives_first_items(budget: int) -> None:
    assert solve_knapsack({"a": linear(2, 8, 100.0), "b": [Item(4, 9.0)]}, budget) == {"a": 2, "b": 4}


def test_no_groups_give_an_empty_result() -> None:
    assert solve_knapsack({}, 8) == {}


def hard(random: Random, groups: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return groups with steps of 6, 10 or 15 that gain nearly the same per GPU: few sums meet the budget, and many
    come close."""
    weights, values = [], []
    for _ in range(groups):
        steps = [random.choice((6, 10, 15)) for _ in range(6)]
        weights += [0, *np.cumsum(steps)]
        values += [0.0, *np.cumsum([100.0 * step + random.random() for step in steps])]
    return np.array(weights), np.array(values), np.arange(0, 7 * groups, 7)


def worth(choice: Selection, values: np.ndarray) -> float:
    return float(values[choice.items].sum())


def test_exhausted_work_budget_gives_the_best_choice_and_a_valid_gap() -> None:
    random, open_gaps = Random(7), 0
    for _ in range(30):
        weights, values, starts = hard(random, 12)
        budget = random.randint(20, 400)
        proven = solve_multiple_choice(weights, values, starts, budget)
        assert proven.gap == 0.0
        for cells_max in (0, 100, 1_000):
            cut = solve_multiple_choice(weights, values, starts, budget, cells_max=cells_max)
            assert weights[cut.items].sum() <= budget
            assert worth(cut, values) <= worth(proven, values) + 1e-6 <= worth(cut, values) + cut.gap + 2e-6
            open_gaps += cut.gap > 0.0
    assert open_gaps > 30
