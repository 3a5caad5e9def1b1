"""Curves for learned constants: plans for the corrected hardware, related to the profiles as they are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.learned_constants import predict_step_s
from scheduler.domain.parallel_plan import STEP_TERMS, ParallelPlan
from scheduler.domain.scaling_curve import CurveRequest
from scheduler.solver.curve import build_solve_request, solve_point
from scheduler.solver.evaluate import evaluate
from scheduler.solver.profiles.catalog import load_gpu
from scheduler.solver.profiles.hardware_profile import Collective, CollectiveTable
from scheduler.solver.profiles.learned_hardware import adjust_profile

GPU = "a100-80g"
NODES = GpuShape.packed(GPU, 32, 8)
REQUEST = CurveRequest("llama-2-7b", "", 32, 4096)
NETWORK_SLOW = (("a100-80g", (0, 0, 9, 0, 0, 0)),)


def solved(request: CurveRequest) -> ParallelPlan:
    plan = solve_point(request, NODES)
    assert isinstance(plan, ParallelPlan)
    return plan


def test_factors_of_1_change_nothing() -> None:
    profile = load_gpu(GPU)
    assert adjust_profile(profile, (1.0,) * len(STEP_TERMS), 8) == profile


@pytest.mark.parametrize(("ranks", "slower"), [(8, 2.0), (16, 3.0)])
def test_measured_collectives_are_those_of_a_node_or_of_the_network(ranks: int, slower: float) -> None:
    table = CollectiveTable(Collective.ALL_REDUCE, ranks, ((1e6, 1e-3), (1e8, 1e-2)))
    adjusted = adjust_profile(replace(load_gpu(GPU), collectives=(table,)), (1.0, 2.0, 3.0, 1.0, 1.0, 1.0), 8)
    assert [time_s for _, time_s in adjusted.collectives[0].points] == [slower * 1e-3, slower * 1e-2]


def test_a_plan_for_a_slow_network_uses_it_less() -> None:
    plain, learned = solved(REQUEST), solved(replace(REQUEST, constants=NETWORK_SLOW))
    network = STEP_TERMS.index("network")
    assert plain.terms[network] * plain.profile_time_s > learned.terms[network] * learned.profile_time_s
    assert learned.iteration_time_s < predict_step_s(plain, NETWORK_SLOW)


def test_the_prediction_by_the_profiles_stays_with_the_plan() -> None:
    learned = solved(replace(REQUEST, constants=NETWORK_SLOW))
    judged = evaluate(learned, build_solve_request(REQUEST, NODES))
    assert learned.profile_time_s == judged.iteration_time_s
    assert learned.terms == judged.terms


def test_terms_predict_at_most_the_step_under_a_slower_network() -> None:
    """They leave out the communication that computation hides now, and would not hide then."""
    plain = solved(REQUEST)
    exact = evaluate(plain, build_solve_request(replace(REQUEST, constants=NETWORK_SLOW), NODES)).iteration_time_s
    assert plain.iteration_time_s < predict_step_s(plain, NETWORK_SLOW) < exact
