"""Pool sizes: against the referee, their monotony, their errors and their cost."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from time import process_time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import poisson

from scheduler.serving.capacity import BindingLimit, CapacityError, LatencyObjective, predict_pool, size_pool
from scheduler.serving.latency_tails import compute_erlang_c
from scheduler.serving.replica_model import BatchLimits, IterationCosts, ReplicaModel
from scheduler.serving.request_mix import RequestMix, build_request_mix
from tests.serving.capacity_comparison import GRID, Cell, compare_cell, compare_cells
from tests.serving.length_mixes import CHAT, LONG_OUTPUT, draw_lengths

COSTS = IterationCosts(0.012, 80e-6, 2e-9, 60e-6, 9e-8)
REPLICA = ReplicaModel(COSTS, BatchLimits(2_048, 256, 380_000), 2)
OBJECTIVE = LatencyObjective(1.0, 0.05)
LENGTHS = draw_lengths(np.random.default_rng(3), (CHAT,), 2_000).tolist()
SMALL_GRID = (
    Cell("h100", "chat", 40, 1),
    Cell("a100", "bimodal", 25, 4),
    Cell("4090", "long output", 2, 1),
)
SHARE_WITHIN_ONE, SHARE_TOO_FEW = 0.97, 0.01


def _mix(rate_per_s: float, scv: float = 1.0) -> RequestMix:
    return build_request_mix(rate_per_s, LENGTHS, arrival_scv=scv)


@pytest.mark.parametrize("cell", SMALL_GRID, ids=str)
def test_pool_is_as_small_as_the_simulated_one(cell: Cell) -> None:
    compared = compare_cell(cell, 21)
    assert compared.model >= compared.referee
    assert compared.is_within_one, compared


@pytest.mark.full
def test_pools_of_the_whole_grid_are_as_small_as_the_simulated_ones() -> None:
    compared = list(compare_cells(GRID, 500))
    assert np.mean([each.is_within_one for each in compared]) >= SHARE_WITHIN_ONE
    assert np.mean([each.model < each.referee for each in compared]) <= SHARE_TOO_FEW


@settings(max_examples=20)
@given(rate=st.floats(0.1, 300), factor=st.floats(1.01, 3), scv=st.floats(0.5, 6))
def test_more_requests_or_tighter_bounds_never_need_fewer_replicas(rate: float, factor: float, scv: float) -> None:
    base = size_pool(_mix(rate, scv), REPLICA, OBJECTIVE)
    assert size_pool(_mix(rate * factor, scv), REPLICA, OBJECTIVE).replicas >= base.replicas
    loose = LatencyObjective(OBJECTIVE.ttft_s * factor, OBJECTIVE.tpot_s * factor)
    assert size_pool(_mix(rate, scv), REPLICA, loose).replicas <= base.replicas
    assert base.gpus == 2 * base.replicas
    assert base.ttft_s <= OBJECTIVE.ttft_s
    assert base.tpot_s <= OBJECTIVE.tpot_s


def test_overloaded_pool_meets_nothing() -> None:
    tails = predict_pool(_mix(500), REPLICA, 1)
    assert tails.compute_ttft_tail(10.0) == 1.0
    assert tails.compute_tpot_tail(10.0) == 1.0
    assert tails.compute_overflow() == 1.0
    assert not tails.state.is_stable


def test_small_cache_binds_before_latency() -> None:
    lengths = draw_lengths(np.random.default_rng(4), (LONG_OUTPUT,), 2_000).tolist()
    mix = build_request_mix(5.0, lengths)
    small = replace(REPLICA, limits=BatchLimits(2_048, 256, 20_000))
    limited = size_pool(mix, small, OBJECTIVE)
    assert limited.binding is BindingLimit.KV_CACHE
    assert limited.replicas > size_pool(mix, REPLICA, OBJECTIVE).replicas


def test_few_sequences_bind() -> None:
    narrow = replace(REPLICA, limits=BatchLimits(2_048, 4, 380_000))
    assert size_pool(_mix(20.0), narrow, OBJECTIVE).binding is BindingLimit.SEQUENCES


def test_unreachable_objectives_name_the_field() -> None:
    with pytest.raises(CapacityError, match=r"objective\.tpot"):
        size_pool(_mix(1.0), REPLICA, LatencyObjective(1.0, 0.011))
    with pytest.raises(CapacityError, match=r"objective\.ttft"):
        size_pool(_mix(1.0), REPLICA, LatencyObjective(0.02, 0.05))
    tiny = replace(REPLICA, limits=BatchLimits(2_048, 256, 100))
    with pytest.raises(CapacityError, match="KV cache"):
        size_pool(_mix(1.0), tiny, OBJECTIVE)


@pytest.mark.parametrize(
    ("field", "value"), [("ttft_s", 0.0), ("tpot_s", inf), ("percentile", 1.0), ("percentile", 0.0)]
)
def test_invalid_objective_is_rejected(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        replace(OBJECTIVE, **{field: value})


@pytest.mark.parametrize(
    ("servers", "offered"), [(1, 0.7), (5, 3.0), (50, 45.0), (399, 380.0), (401, 380.0), (2_000, 1_950.0)]
)
def test_erlang_c_equals_its_definition(servers: int, offered: float) -> None:
    last = poisson.pmf(servers, offered) / (1 - offered / servers)
    assert compute_erlang_c(servers, offered) == pytest.approx(
        last / (poisson.cdf(servers - 1, offered) + last), rel=1e-6
    )


def test_erlang_c_at_its_ends() -> None:
    assert compute_erlang_c(3, 3.0) == 1.0
    assert compute_erlang_c(3, 0.0) == 0.0


def test_size_takes_milliseconds() -> None:
    mix = _mix(60.0)
    size_pool(mix, REPLICA, OBJECTIVE)
    begin_s = process_time()
    for _ in range(10):
        size_pool(mix, REPLICA, OBJECTIVE)
    assert (process_time() - begin_s) / 10 < 0.01
