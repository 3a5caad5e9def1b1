"""The referee against brute force on tiny instances, and at the edges of HiGHS's arithmetic."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from scheduler.solver.instance import Instance, price
from scheduler.solver.referee.milp import CLOSENESS, floor_s, solve, solve_all
from tests.builders_loop import a_loop
from tests.builders_solver import BruteForce, a_tiny_instance, brute_force, is_uneven_or_mixed

SEEDS = range(60)
FORMS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"groups": 2},
    {"groups": 3},
    {"interleave": 2},
    {"pinned": True},
    {"groups": 2, "pinned": True},
    {"interleave": 2, "pinned": True},
)


def _tiny(seed: int) -> Instance:
    form = FORMS[seed % len(FORMS)]
    return a_tiny_instance(random.Random(f"referee {seed}"), **form)


@pytest.fixture(scope="module")
def enumerated() -> list[tuple[Instance, BruteForce]]:
    return [(instance, brute_force(instance)) for instance in map(_tiny, SEEDS)]


def test_the_optimum_is_that_of_brute_force(enumerated: list[tuple[Instance, BruteForce]]) -> None:
    for instance, every in enumerated:
        found = solve(instance)
        assert found.proven
        assert found.objective_s == pytest.approx(every.time_s, rel=CLOSENESS)
        assert (found.solution is None) == (every.solution is None)
        assert found.bound_s <= every.time_s * (1 + CLOSENESS)
        assert floor_s(instance) <= every.unlimited_s * (1 + CLOSENESS)
        if found.solution:
            judged = price(instance, found.solution)
            assert judged.fits
            assert judged.time_s == found.objective_s


def test_memory_binds_and_optima_are_uneven_in_the_drawn_instances(
    enumerated: list[tuple[Instance, BruteForce]],
) -> None:
    optima = [every.solution for _, every in enumerated if every.solution]
    assert sum(every.binding for _, every in enumerated) >= 0.4 * len(enumerated)
    assert sum(map(is_uneven_or_mixed, optima)) >= 0.2 * len(enumerated)


def test_the_loop_returns_the_best_of_its_instances() -> None:
    loop = a_loop(random.Random("loop"), layers=6, kinds=2, gpus=4, batch=4)
    alone = [solve(instance).objective_s for instance in loop]

    for shared in (True, False):
        best = solve_all(loop, shared=shared)
        assert best.proven
        assert best.objective_s == pytest.approx(min(alone), rel=CLOSENESS)
        assert alone[best.number] == pytest.approx(best.objective_s, rel=CLOSENESS)
        assert best.bound_s == pytest.approx(best.objective_s, rel=CLOSENESS)


def test_nothing_below_the_cutoff_is_none_and_proven() -> None:
    instance = next(one for one in map(_tiny, SEEDS) if brute_force(one).solution)
    best_s = solve(instance).objective_s

    at_the_optimum = solve(instance, cutoff_s=best_s * (1 - 1e-4))

    assert (at_the_optimum.solution, at_the_optimum.proven) == (None, True)
    assert at_the_optimum.bound_s >= best_s * (1 - 2e-4)
    assert solve(instance, cutoff_s=best_s * (1 + 1e-4)).objective_s == pytest.approx(best_s)


def test_no_time_proves_nothing() -> None:
    instance = a_loop(random.Random("slow"), layers=16, kinds=16, gpus=8, batch=8)[-1]
    found = solve(instance, time_limit_s=0.0)
    assert not found.proven
    assert 0.0 < floor_s(instance) <= found.bound_s < inf


@pytest.mark.parametrize("seed", range(4))
def test_a_solution_one_byte_over_the_limit_is_refused(seed: int) -> None:
    # HiGHS takes it for one that fits: the byte is far below its tolerance.
    loop = a_loop(random.Random(f"byte {seed}"), layers=6, kinds=1, gpus=4, batch=8)
    best = solve_all(loop)
    assert best.solution
    instance = loop[best.number]
    need = max(price(instance, best.solution).memory_bytes)

    exact = solve(replace(instance, capacity_bytes=(need,)))
    short = solve(replace(instance, capacity_bytes=(need - 1,)))

    assert exact.objective_s == pytest.approx(best.objective_s, rel=CLOSENESS)
    assert short.proven
    assert short.objective_s >= exact.objective_s * (1 - CLOSENESS)
    if short.solution:
        assert max(price(instance, short.solution).memory_bytes) < need


def test_more_chunks_than_layers_have_no_solution() -> None:
    instance = a_loop(random.Random("deep"), layers=6, kinds=1, gpus=4, batch=4)[-1]
    short = replace(instance, types=instance.types[:3], hand_over_s=instance.hand_over_s[..., :4])
    assert (solve(short).solution, solve(short).proven) == (None, True)


def test_without_highspy_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "highspy", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install ebbtide\[milp\]"):
        solve(_tiny(0))
