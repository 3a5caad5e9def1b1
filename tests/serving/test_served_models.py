"""Replicas for the requests of a pool: bounds of the memoised sizes, their cost, and errors that name the field."""

from __future__ import annotations

from dataclasses import replace
from time import process_time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.domain.replica_advice import ReplicaAdvice, advise_replicas
from scheduler.domain.serving import (
    MeasuredRun,
    ModelRate,
    ReportedRequests,
    RequestLength,
    ServedModel,
    SizingMode,
    SizingPolicy,
)
from scheduler.serving.capacity import CapacityError, size_pool
from scheduler.serving.request_mix import build_request_mix
from scheduler.serving.served_models import (
    RATE_STEP,
    ServedModelError,
    build_replica,
    check_served_model,
    get_objective,
    size_requests,
)
from scheduler.solver.profiles.catalog import load_gpu, load_model

LENGTHS = (RequestLength(60, 40, 30), RequestLength(450, 300, 20), RequestLength(1_500, 500, 8))
SERVED = ServedModel(
    "llama-3-8b",
    "rtx-4090",
    1.0,
    0.05,
    measurements=(
        MeasuredRun(206, 202, 0.0195, 0.0492, rate_per_s=1),
        MeasuredRun(206, 202, 0.0226, 0.0569, rate_per_s=4),
    ),
    lengths=LENGTHS,
)
REPLICA = build_replica(SERVED, load_gpu(SERVED.gpu), load_model(SERVED.model))[0]
PAIRS = [(each.prompt, each.output) for each in LENGTHS]
REPEATS = [each.requests for each in LENGTHS]


def report(rate: float, scv: float = 1.0) -> ReportedRequests:
    return ReportedRequests(SERVED.model, rate, scv)


@settings(max_examples=25, deadline=None)
@given(rate=st.floats(0.05, 400), factor=st.floats(1.0, 3), scv=st.floats(0.5, 6))
def test_replicas_cover_the_objective_and_grow_with_the_rate(rate: float, factor: float, scv: float) -> None:
    load = size_requests(SERVED, report(rate, scv), rate * factor)
    assert load.replicas <= load.ahead_replicas <= load.steady_replicas
    exact = size_pool(build_request_mix(rate, PAIRS, arrival_scv=scv, repeats=REPEATS), REPLICA, get_objective(SERVED))
    assert exact.replicas <= load.replicas
    higher = build_request_mix(rate * (1 + RATE_STEP), PAIRS, arrival_scv=scv * 1.05, repeats=REPEATS)
    assert load.replicas <= size_pool(higher, REPLICA, get_objective(SERVED)).replicas
    assert load.ttft_s <= SERVED.ttft_s
    assert load.tpot_s <= SERVED.tpot_s


def test_no_requests_need_no_replicas_but_an_expected_rate_does() -> None:
    load = size_requests(SERVED, report(0.0), 20.0)
    assert (load.replicas, load.ttft_s, load.binding) == (0, 0.0, "none")
    assert load.ahead_replicas > 0
    assert size_requests(SERVED, report(20.0), 5.0).ahead_rate_per_s == 20.0


def test_lengths_of_a_report_replace_those_of_the_pool() -> None:
    longer = replace(report(20.0), lengths=(RequestLength(3_000, 800),))
    assert size_requests(SERVED, longer, 20.0).replicas > size_requests(SERVED, report(20.0), 20.0).replicas


@settings(max_examples=10, deadline=None)
@given(rate=st.floats(2, 200), seed=st.integers(0, 99))
def test_proposal_settles_in_a_stationary_rate_and_covers_it(rate: float, seed: int) -> None:
    sized = replace(SERVED, sizing=SizingPolicy(SizingMode.ADVISE, stabilization_s=300.0))
    noise = np.random.default_rng(seed).uniform(-0.02, 0.02, 120)
    advice, counts = tuple[ReplicaAdvice, ...](), list[int]()
    for number, each in enumerate(rate * (1 + noise)):
        load = size_requests(SERVED, report(each), each)
        advice = advise_replicas(advice, [sized], [load], 15.0 * number)
        counts.append(advice[0].replicas)
        assert counts[-1] >= load.replicas
    falls = [number for number in range(1, len(counts)) if counts[number] < counts[number - 1]]
    assert not falls or len(set(counts[falls[0] :])) == 1


def test_reading_at_a_known_rate_costs_far_less_than_5_ms() -> None:
    rates = [60.0 + 0.2 * step for step in range(20)]
    for rate in rates:
        size_requests(SERVED, report(rate), rate)
    begin_s = process_time()
    for rate in rates:
        size_requests(SERVED, report(rate), rate)
    assert (process_time() - begin_s) / len(rates) < 0.0025


@pytest.mark.parametrize(
    ("served", "field"),
    [
        (replace(SERVED, model="llama-3-9b"), "model"),
        (replace(SERVED, gpu="rtx-4091"), "gpu"),
    ],
)
def test_unknown_profiles_name_the_field(served: ServedModel, field: str) -> None:
    with pytest.raises(ServedModelError) as raised:
        check_served_model(served)
    assert raised.value.field == field


@pytest.mark.parametrize(
    ("served", "words"),
    [
        (replace(SERVED, tpot_s=0.005), "objective.tpot"),
        (replace(SERVED, ttft_s=0.01), "objective.ttft"),
        (replace(SERVED, model="llama-3.1-70b", measurements=()), "tensorDegree"),
        (replace(SERVED, lengths=(RequestLength(900_000, 10),)), "KV cache"),
    ],
)
def test_objective_out_of_reach_names_the_figure(served: ServedModel, words: str) -> None:
    with pytest.raises(ServedModelError, match=words):
        check_served_model(served)


def test_report_that_no_pool_can_serve_is_refused() -> None:
    with pytest.raises(CapacityError, match="KV cache"):
        size_requests(SERVED, replace(report(1.0), lengths=(RequestLength(900_000, 10),)), 1.0)
    with pytest.raises(CapacityError, match="rate"):
        size_requests(SERVED, report(1e8), 1e8)
    with pytest.raises(ServedModelError, match="lengths"):
        size_requests(replace(SERVED, lengths=()), report(1.0), 1.0)


def test_expected_rate_counts_while_it_is_calibrated_and_fresh() -> None:
    rate = ModelRate("chat", 1_000.0, 300.0, 0.95, 30.0)
    assert rate.find_rate(20.0, 1_100.0) == 30.0
    assert rate.find_rate(40.0, 1_100.0) == 40.0
    assert rate.find_rate(20.0, 2_000.0) == 20.0
    assert replace(rate, is_calibrated=False).find_rate(20.0, 1_100.0) == 20.0
