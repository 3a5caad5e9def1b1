"""The best plan under Galvatron's model: exact, and never slower than Galvatron's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, combinations_with_replacement, pairwise, product
from pathlib import Path

import pytest

from baselines.galvatron.cost_model import GalvatronPlan, evaluate_plan
from baselines.galvatron.plan_search import search_plan
from baselines.galvatron.profile_reader import read_case
from baselines.galvatron.profiles import GalvatronCase
from baselines.galvatron.strategy_space import (
    MemoryLimitReading,
    compute_memory_limit_mb,
    enumerate_settings,
    enumerate_strategy_sets,
    split_evenly,
)
from tests.builders_galvatron import INFEASIBLE, SOLVED, load_recorded_answer

PARTS = 1 + 1e-9
"""Rounding of sums of the same terms in another order."""


@pytest.mark.parametrize("folder", SOLVED, ids=lambda folder: folder.name)
def test_our_plan_is_no_slower_than_galvatrons_in_equal_memory(folder: Path) -> None:
    case = read_case(folder)
    cap = compute_memory_limit_mb(case.memory_gb, MemoryLimitReading.KEPT_BACK)
    outcome = search_plan(case, cap)
    assert outcome.plan is not None
    judged = evaluate_plan(outcome.plan, case)
    assert judged == outcome.evaluation
    assert max(judged.memory_mb) <= cap
    assert judged.judged_s <= load_recorded_answer(folder)["iter_time_s"] * PARTS
    assert outcome.optimality_gap == 0.0
    own = search_plan(case, cap, restricted=True)
    assert own.evaluation is not None
    assert judged.judged_s <= own.evaluation.judged_s * PARTS <= load_recorded_answer(folder)["iter_time_s"] * PARTS**2
    assert own.plan is not None
    assert own.plan.sizes == split_evenly(case.model.layers, len(own.plan.stages))


@pytest.mark.parametrize("folder", SOLVED[::2], ids=lambda folder: folder.name)
@pytest.mark.parametrize("reading", MemoryLimitReading)
def test_larger_memory_limit_never_gives_a_slower_plan(folder: Path, reading: MemoryLimitReading) -> None:
    case, times_s = read_case(folder), []
    for memory_gb in (21.0, 24.0, 36.0, 64.0):
        outcome = search_plan(case, compute_memory_limit_mb(memory_gb, reading))
        times_s.append(outcome.evaluation.judged_s if outcome.evaluation else float("inf"))
        assert outcome.optimality_gap == 0.0
    assert all(later <= earlier * PARTS for earlier, later in pairwise(times_s))
    assert times_s[0] > times_s[-1]


@pytest.mark.parametrize("restricted", [True, False])
def test_infeasible_case_of_galvatron_is_infeasible_and_reports_the_least_memory(restricted: bool) -> None:
    case = read_case(INFEASIBLE)
    assert load_recorded_answer(INFEASIBLE)["best"] is None
    for reading in MemoryLimitReading:
        outcome = search_plan(case, compute_memory_limit_mb(case.memory_gb, reading), restricted=restricted)
        assert outcome.plan is None
        assert search_plan(case, int(outcome.least_mb), restricted=restricted).plan is not None
        assert search_plan(case, int(outcome.least_mb) - 1, restricted=restricted).plan is None


def test_galvatron_reserves_a_fifth_only_above_20_gb() -> None:
    assert (
        compute_memory_limit_mb(20.9, MemoryLimitReading.KEPT_BACK)
        == compute_memory_limit_mb(20.9, MemoryLimitReading.NOMINAL)
        == 21401
    )
    assert compute_memory_limit_mb(36, MemoryLimitReading.KEPT_BACK) == 36864 - 7372


@pytest.mark.parametrize(
    ("gpus", "layers", "batch", "micro_batches", "slow_down"),
    [
        (2, 4, 8, 1, 1),
        (2, 4, 8, 2, 1),
        (2, 4, 8, None, 1),
        (2, 4, 16, 8, 1),
        (2, 6, 8, 2, 10),
        (4, 2, 8, 2, 1),
        (2, 5, 8, 1, 100),
    ],
)
def test_tiny_cases_match_enumeration_of_all_plans(
    gpus: int, layers: int, batch: int, micro_batches: int | None, slow_down: float
) -> None:
    """`slow_down` of all-reduce: so that the reduction of gradients is no longer hidden."""
    full = read_case(next(folder for folder in SOLVED if "4gpu" in folder.name))
    slow = {size: ms * slow_down for size, ms in full.cluster.neighbour_ms_per_mb.items()}
    neighbor = type(full.cluster.neighbour_ms_per_mb)("allreduce", slow.items())
    cluster = replace(full.cluster, gpus=gpus, neighbour_ms_per_mb=neighbor)
    model = replace(full.model, layers=layers)
    case = replace(full, model=model, cluster=cluster, global_batch=batch, micro_batches=micro_batches)
    judged = [evaluate_plan(plan, case) for plan in enumerate_plans(case)]
    needs_mb = sorted({max(one.memory_mb) for one in judged})
    for cap in needs_mb[:: len(needs_mb) // 8]:
        best_s = min(one.judged_s for one in judged if max(one.memory_mb) <= cap)
        outcome = search_plan(case, cap)
        assert outcome.evaluation is not None
        assert outcome.evaluation.judged_s == pytest.approx(best_s, rel=1e-9)
        assert outcome.optimality_gap == 0.0
    assert search_plan(case, needs_mb[0] - 1).plan is None


def enumerate_plans(case: GalvatronCase) -> Iterator[GalvatronPlan]:
    """Yield every plan. The order within a stage does not affect Galvatron's time, so each choice comes once."""
    for setting in enumerate_settings(case, restricted=False):
        for degree, strategies in enumerate_strategy_sets(setting, restricted=False):
            for inner in combinations(range(1, case.model.layers), setting.stages - 1):
                sizes = [end - first for first, end in pairwise((0, *inner, case.model.layers))]
                choices = product(*(combinations_with_replacement(strategies, size) for size in sizes))
                for stages, embedding in product(choices, strategies):
                    if not embedding.recompute:
                        yield GalvatronPlan(stages, embedding, setting.micro_batches, degree)
