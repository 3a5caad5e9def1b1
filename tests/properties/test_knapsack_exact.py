"""The knapsack solver against a full dynamic program, on 1,000 random instances."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random

import pytest

from scheduler.scheduling.policies.knapsack import Item, solve_knapsack

Groups = Mapping[str, list[Item]]
INSTANCES = 200


def any_order(random: Random) -> list[Item]:
    """Counts with gaps, and times in any order."""
    counts = sorted(random.sample(range(1, 21), random.randint(1, 8)))
    return [Item(gpus, float(random.randint(0, 1_000))) for gpus in counts]


def falling(random: Random) -> list[Item]:
    """Counts with gaps, each faster than the one before."""
    items = any_order(random)
    times_s = sorted((item.remaining_s for item in items), reverse=True)
    return [Item(item.gpus, time_s) for item, time_s in zip(items, times_s, strict=True)]


def curve(random: Random) -> list[Item]:
    """Counts within a node and whole nodes, with falling gains; the present count costs no reconfiguration."""
    least, work_s, power = random.choice((1, 2, 4, 8)), random.expovariate(1e-4), random.uniform(0.6, 1.0)
    counts = [gpus for gpus in (1, 2, 3, 4, 6, 8, 16, 24, 32) if least <= gpus <= 4 * least]
    present = random.choice(counts)
    return [Item(gpus, work_s / gpus**power + (60.0 if gpus != present else 0.0)) for gpus in counts]


def nodes(random: Random) -> list[Item]:
    """Whole nodes only, so that part of the budget cannot be used."""
    work_s = random.expovariate(1e-4)
    return [Item(8 * count, work_s / count) for count in range(1, random.randint(2, 5))]


def alike(random: Random) -> list[Item]:
    """Every GPU gains nearly the same for every job."""
    counts = sorted(random.sample(range(1, 21), random.randint(2, 6)))
    return [Item(gpus, 5_000.0 - 100.0 * gpus - random.randint(0, 3)) for gpus in counts]


def best_s(groups: Groups, budget: int) -> float:
    """Return the most time that can be saved within the budget."""
    best = [0.0] * (budget + 1)
    for items in groups.values():
        gains = [(item.gpus - items[0].gpus, items[0].remaining_s - item.remaining_s) for item in items]
        best = [max(best[left - gpus] + gain for gpus, gain in gains if gpus <= left) for left in range(budget + 1)]
    return best[budget]


@pytest.mark.parametrize("make", [any_order, falling, curve, nodes, alike])
def test_knapsack_is_as_good_as_the_dynamic_program(make: Callable[[Random], list[Item]]) -> None:
    random = Random(make.__name__)
    for _ in range(INSTANCES):
        groups = {f"j{at}": make(random) for at in range(random.randint(1, 10))}
        budget = random.randint(0, 60)
        counts = solve_knapsack(groups, budget)
        chosen = {job: next(item for item in items if item.gpus == counts[job]) for job, items in groups.items()}
        assert sum(item.gpus - groups[job][0].gpus for job, item in chosen.items()) <= budget
        saved_s = sum(groups[job][0].remaining_s - item.remaining_s for job, item in chosen.items())
        assert saved_s == pytest.approx(best_s(groups, budget), rel=1e-9, abs=1e-6)
