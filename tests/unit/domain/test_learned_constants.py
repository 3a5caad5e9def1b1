"""Learned constants: levels change only by whole steps, and the step of a plan follows from its terms."""

from __future__ import annotations

from dataclasses import replace
from math import log

import pytest

from scheduler.domain.learned_constants import (
    LEVEL_MAX,
    LEVEL_RATIO,
    CurveConstants,
    describe_constants,
    list_factors,
    predict_step_s,
    settle_levels,
)
from scheduler.domain.scaling_curve import CurveRequest, build_data_parallel_plan

NETWORK_SLOW = (("a100-80g", (0, 0, 3, 0, 0, 0)),)


@pytest.mark.parametrize(
    ("known", "levels_exact", "settled"),
    [(0, 0.99, 0), (0, 1.01, 1), (0, 2.6, 3), (3, 2.1, 3), (3, 1.9, 2), (0, -1.4, -1), (0, 99.0, LEVEL_MAX)],
)
def test_a_level_stays_until_it_has_moved_by_a_whole_one(known: int, levels_exact: float, settled: int) -> None:
    assert settle_levels((known,), (levels_exact * log(LEVEL_RATIO),)) == (settled,)


def test_the_step_of_a_plan_follows_from_its_terms() -> None:
    plan = replace(
        build_data_parallel_plan("a100-80g", 8),
        iteration_time_s=7.0,
        profile_time_s=10.0,
        terms=(0.6, 0.1, 0.3, 0.0, 0.0, 0.0),
    )
    assert predict_step_s(plan, ()) == pytest.approx(10.0)
    assert predict_step_s(plan, NETWORK_SLOW) == pytest.approx(7.0 + 3.0 * LEVEL_RATIO**3)
    assert predict_step_s(replace(plan, terms=()), NETWORK_SLOW) == 7.0


def test_other_gpu_models_keep_their_profiles() -> None:
    assert list_factors(NETWORK_SLOW, "h100-80g") == (1.0,) * 6
    assert list_factors(NETWORK_SLOW, "a100-80g")[2] == pytest.approx(LEVEL_RATIO**3)


def test_constants_have_a_curve_of_their_own() -> None:
    request = CurveRequest("gpt2", "", 64, 1024)
    learned = replace(request, constants=NETWORK_SLOW)
    assert learned.key.startswith(f"{request.key}/learned-")
    assert learned.model_key == request.model_key


def test_a_plan_is_outdated_until_it_is_from_the_newest_curve() -> None:
    constants = CurveConstants(newest=NETWORK_SLOW)
    assert (constants.is_curve_current, constants.needs_new_plan) == (False, True)
    solved = constants.with_current_curve()
    assert (solved.is_curve_current, solved.needs_new_plan) == (True, True)
    assert not solved.with_new_plan().needs_new_plan


def test_only_what_differs_is_described() -> None:
    assert describe_constants(NETWORK_SLOW) == "network of a100-80g takes 2 times as long as in its profile"
