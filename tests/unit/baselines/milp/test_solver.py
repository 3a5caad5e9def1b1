"""The MILP solver against brute force on tiny instances, and at the limits of HiGHS's arithmetic."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from baselines.milp.solver import OBJECTIVE_TOLERANCE, compute_lower_bound_s, solve_instance, solve_instances
from scheduler.solver.instance import Instance, evaluate_solution
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
def priced_instances() -> list[tuple[Instance, BruteForce]]:
    return [(instance, brute_force(instance)) for instance in map(_tiny, SEEDS)]


def test_optimum_matches_brute_force(priced_instances: list[tuple[Instance, BruteForce]]) -> None:
    for instance, every in priced_instances:
        found = solve_instance(instance)
        assert found.proven
        assert found.objective_s == pytest.approx(every.time_s, rel=OBJECTIVE_TOLERANCE)
        assert (found.solution is None) == (every.solution is None)
        assert found.bound_s <= every.time_s * (1 + OBJECTIVE_TOLERANCE)
        assert compute_lower_bound_s(instance) <= every.unlimited_s * (1 + OBJECTIVE_TOLERANCE)
        if found.solution:
            judged = evaluate_solution(instance, found.solution)
            assert judged.fits
            assert judged.time_s == found.objective_s


def test_random_instances_have_binding_memory_and_uneven_optima(
    priced_instances: list[tuple[Instance, BruteForce]],
) -> None:
    optima = [every.solution for _, every in priced_instances if every.solution]
    assert sum(every.binding for _, every in priced_instances) >= 0.4 * len(priced_instances)
    assert sum(map(is_uneven_or_mixed, optima)) >= 0.2 * len(priced_instances)


def test_solve_instances_returns_the_best_instance() -> None:
    loop = a_loop(random.Random("loop"), layers=6, kinds=2, gpus=4, batch=4)
    alone = [solve_instance(instance).objective_s for instance in loop]

    for shared in (True, False):
        best = solve_instances(loop, shared=shared)
        assert best.proven
        assert best.objective_s == pytest.approx(min(alone), rel=OBJECTIVE_TOLERANCE)
        assert alone[best.number] == pytest.approx(best.objective_s, rel=OBJECTIVE_TOLERANCE)
        assert best.bound_s == pytest.approx(best.objective_s, rel=OBJECTIVE_TOLERANCE)


def test_no_solution_below_the_cutoff_is_proven() -> None:
    instance = next(one for one in map(_tiny, SEEDS) if brute_force(one).solution)
    best_s = solve_instance(instance).objective_s

    at_the_optimum = solve_instance(instance, cutoff_s=best_s * (1 - 1e-4))

    assert (at_the_optimum.solution, at_the_optimum.proven) == (None, True)
    assert at_the_optimum.bound_s >= best_s * (1 - 2e-4)
    assert solve_instance(instance, cutoff_s=best_s * (1 + 1e-4)).objective_s == pytest.approx(best_s)


def test_zero_time_limit_proves_nothing() -> None:
    instance = a_loop(random.Random("slow"), layers=16, kinds=16, gpus=8, batch=8)[-1]
    found = solve_instance(instance, time_limit_s=0.0)
    assert not found.proven
    assert 0.0 < compute_lower_bound_s(instance) <= found.bound_s < inf


@pytest.mark.parametrize("seed", range(4))
def test_solution_one_byte_over_the_limit_is_rejected(seed: int) -> None:
    # HiGHS accepts it, because one byte is far below its tolerance.
    loop = a_loop(random.Random(f"byte {seed}"), layers=6, kinds=1, gpus=4, batch=8)
    best = solve_instances(loop)
    assert best.solution
    instance = loop[best.number]
    need = max(evaluate_solution(instance, best.solution).memory_bytes)

    exact = solve_instance(replace(instance, capacity_bytes=(need,)))
    short = solve_instance(replace(instance, capacity_bytes=(need - 1,)))

    assert exact.objective_s == pytest.approx(best.objective_s, rel=OBJECTIVE_TOLERANCE)
    assert short.proven
    assert short.objective_s >= exact.objective_s * (1 - OBJECTIVE_TOLERANCE)
    if short.solution:
        assert max(evaluate_solution(instance, short.solution).memory_bytes) < need


def test_more_chunks_than_layers_have_no_solution() -> None:
    instance = a_loop(random.Random("deep"), layers=6, kinds=1, gpus=4, batch=4)[-1]
    short = replace(instance, types=instance.types[:3], hand_over_s=instance.hand_over_s[..., :4])
    assert (solve_instance(short).solution, solve_instance(short).proven) == (None, True)


def test_missing_highspy_error_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "highspy", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'ebbtide-server\[milp\]'"):
        solve_instance(_tiny(0))
