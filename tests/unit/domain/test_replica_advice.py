"""Proposed replicas: they rise at once, fall after the window, and never flap in a stationary rate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.domain.replica_advice import ReplicaAdvice, advise_replicas, count_demanded_gpus
from scheduler.domain.serving import ModelLoad, ScaleTarget, ServedModel, SizingMode, SizingPolicy

POLICY = SizingPolicy(SizingMode.ADVISE, stabilization_s=600.0)
SERVED = ServedModel("chat", "h100-80g", 1.0, 0.05, sizing=POLICY)
STEP_S = 15.0


def a_load(needed: int, *, ahead: int | None = None, steady: int | None = None) -> ModelLoad:
    ahead = needed if ahead is None else ahead
    return ModelLoad(
        "chat", 1.0, 1.0, needed, 2, 1.0, ahead, ahead if steady is None else steady, 0.5, 0.02, 0.5, "tpot"
    )


def follow(loads: list[ModelLoad], policy: SizingPolicy = POLICY, step_s: float = STEP_S) -> list[int]:
    """Return the proposals after each of the loads."""
    advice, counts = tuple[ReplicaAdvice, ...](), []
    for number, load in enumerate(loads):
        advice = advise_replicas(advice, [replace(SERVED, sizing=policy)], [load], number * step_s)
        counts.append(advice[0].replicas)
    return counts


def test_more_is_proposed_at_once_and_less_after_the_window() -> None:
    counts = follow([a_load(4), a_load(9), *[a_load(3)] * 45])
    assert counts[:2] == [4, 9]
    window = int(POLICY.stabilization_s / STEP_S)
    assert counts[1 : 2 + window] == [9] * (window + 1)
    assert counts[2 + window] == 3


def test_expected_rate_counts_and_the_bounds_hold() -> None:
    assert follow([a_load(4, ahead=7)]) == [7]
    bounded = replace(POLICY, replicas_min=2, replicas_max=5)
    assert follow([a_load(0), a_load(9)], bounded) == [2, 5]


def test_change_of_the_bounds_counts_at_the_next_reading() -> None:
    advice = advise_replicas((), [SERVED], [a_load(9)], 0.0)
    lower = replace(SERVED, sizing=replace(POLICY, replicas_max=4))
    assert advise_replicas(advice, [lower], [a_load(9)], 15.0)[0].replicas == 4


def test_model_that_is_not_sized_has_no_advice() -> None:
    off = replace(SERVED, sizing=SizingPolicy())
    assert advise_replicas((), [off], [a_load(3)], 0.0) == ()
    assert advise_replicas((), [], [a_load(3)], 0.0) == ()


def test_scaled_models_demand_what_is_proposed_and_others_what_they_need() -> None:
    advice = advise_replicas((), [SERVED], [a_load(4, ahead=7)], 0.0)
    assert count_demanded_gpus([SERVED], [a_load(4)], advice) == 8.0
    scaled = SizingPolicy(SizingMode.SCALE, target=ScaleTarget("apps/v1", "Deployment", "ns", "chat", "deployments"))
    assert count_demanded_gpus([replace(SERVED, sizing=scaled)], [a_load(4)], advice) == 14.0


@settings(max_examples=30, deadline=None)
@given(
    rate=st.floats(0.5, 500.0),
    per_replica=st.floats(0.3, 20.0),
    seed=st.integers(0, 999),
    is_normal=st.booleans(),
)
def test_proposal_settles_in_a_stationary_rate_with_noise(
    rate: float, per_replica: float, seed: int, is_normal: bool
) -> None:
    generator = np.random.default_rng(seed)
    noise = generator.normal(0, 0.02, 960).clip(-0.07, 0.07) if is_normal else generator.uniform(-0.02, 0.02, 960)
    rates = rate * (1 + noise)
    loads = [a_load(int(np.ceil(each / per_replica)), steady=int(np.ceil(each * 1.05 / per_replica))) for each in rates]
    counts = follow(loads)
    assert all(count >= load.replicas for count, load in zip(counts, loads, strict=True))
    falls = [number for number in range(1, len(counts)) if counts[number] < counts[number - 1]]
    assert not falls or counts[falls[0] :] == [counts[falls[0]]] * (len(counts) - falls[0])


@settings(max_examples=30, deadline=None)
@given(needed=st.lists(st.integers(0, 30), min_size=1, max_size=80))
def test_proposal_never_falls_short_and_keeps_a_bounded_window(needed: list[int]) -> None:
    advice = tuple[ReplicaAdvice, ...]()
    for number, count in enumerate(needed):
        advice = advise_replicas(advice, [SERVED], [a_load(count, steady=count + 1)], number * STEP_S)
        assert advice[0].replicas >= count
        begin = max(0, number - int(POLICY.stabilization_s / STEP_S))
        assert advice[0].replicas <= max(needed[begin : number + 1]) + 1
        kept = [each.replicas for each in advice[0].recent]
        assert kept == sorted(set(kept), reverse=True)


@pytest.mark.parametrize(
    "values",
    [
        {"replicas_min": -1},
        {"replicas_min": 3, "replicas_max": 2},
        {"replicas_max": 0},
        {"start_s": 0.0},
        {"stabilization_s": -1.0},
        {"mode": SizingMode.SCALE},
    ],
)
def test_invalid_policy_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"sizing\."):
        replace(POLICY, **values)
