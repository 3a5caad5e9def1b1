"""Lengths from histograms: means, correlations, holes, and replicas against those of the true joint distribution."""

from __future__ import annotations

from math import inf, nan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from scheduler.domain.serving import RequestLength
from scheduler.serving.capacity import LatencyObjective, size_pool
from scheduler.serving.measured_lengths import (
    POINTS_MAX,
    HistogramError,
    TokenHistogram,
    build_histogram,
    clip_lengths,
    join_lengths,
    summarize_lengths,
)
from scheduler.serving.replica_model import BatchLimits, IterationCosts, ReplicaModel
from scheduler.serving.request_mix import build_request_mix
from tests.serving.capacity_comparison import PERCENTILE, SETUPS
from tests.serving.length_mixes import MIXES, draw_lengths

BOUNDS = tuple(float(digit * 10**power) for power in range(5) for digit in (1, 2, 5))
RATES = {"h100": 100.0, "a100": 40.0, "4090": 15.0}


def observe(tokens: NDArray[np.int64], *, sums: bool = True, bounds: tuple[float, ...] = BOUNDS) -> TokenHistogram:
    cumulative = {bound: float((tokens <= bound).sum()) for bound in bounds}
    return build_histogram({**cumulative, inf: float(len(tokens))}, float(tokens.sum()) if sums else None)


def couple(rows: NDArray[np.int64], correlation: float) -> NDArray[np.int64]:
    """Return rows with the same prompts and the same outputs, paired with a correlation of ranks."""
    normal = np.random.default_rng(2).standard_normal(rows.shape)
    normal[:, 1] = correlation * normal[:, 0] + np.sqrt(1 - correlation**2) * normal[:, 1]
    paired = np.empty_like(rows)
    for side in (0, 1):
        paired[np.argsort(normal[:, side]), side] = np.sort(rows[:, side])
    return paired


def size(setup: str, lengths: tuple[RequestLength, ...]) -> int:
    chosen = SETUPS[setup]
    replica = ReplicaModel(IterationCosts(*chosen.numbers[:5]), BatchLimits(*chosen.numbers[5:8]), 1)
    pairs, repeats = [(each.prompt, each.output) for each in lengths], [each.requests for each in lengths]
    mix = build_request_mix(RATES[setup], pairs, repeats=repeats)
    return size_pool(mix, replica, LatencyObjective(chosen.ttft_s, chosen.tpot_s, PERCENTILE)).replicas


def to_lengths(rows: NDArray[np.int64]) -> tuple[RequestLength, ...]:
    return tuple(RequestLength(prompt, output) for prompt, output in rows.tolist())


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("mix", MIXES)
def test_replicas_from_histograms_are_those_of_the_true_lengths(setup: str, mix: str) -> None:
    kv_tokens = SETUPS[setup].numbers.kv_tokens
    rows = np.minimum(draw_lengths(np.random.default_rng(1), MIXES[mix], 8_000), kv_tokens // 3)
    prompts, outputs = observe(rows[:, 0]), observe(rows[:, 1])
    found = {
        correlation: size(setup, clip_lengths(join_lengths(prompts, outputs, correlation=correlation), kv_tokens))
        for correlation in (-1.0, 0.0, 1.0)
    }
    independent = size(setup, to_lengths(couple(rows, 0.0)))
    assert independent - 1 <= found[0.0] <= max(independent + 1, 1.05 * independent)
    assert found[-1.0] <= found[0.0] <= found[1.0]
    assert found[1.0] >= size(setup, to_lengths(couple(rows, 0.9)))


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 40_000), min_size=1, max_size=60),
    outputs=st.lists(st.integers(1, 9_000), min_size=1, max_size=60),
    correlation=st.floats(-1, 1),
)
def test_any_correlation_keeps_both_means(prompts: list[int], outputs: list[int], correlation: float) -> None:
    sides = np.array(prompts), np.array(outputs)
    lengths = join_lengths(observe(sides[0]), observe(sides[1]), correlation=correlation)
    assert len(lengths) <= POINTS_MAX**2
    assert sum(each.requests for each in lengths) == pytest.approx(1.0, abs=1e-3)
    summary = summarize_lengths(lengths)
    for found, tokens in ((summary.prompt_mean, sides[0]), (summary.output_mean, sides[1])):
        assert found == pytest.approx(tokens.mean(), rel=0.02, abs=1.0)


def test_correlation_pairs_long_with_long_or_with_short() -> None:
    half = build_histogram({1.0: 0.0, 10.0: 5.0, 1_000.0: 10.0, inf: 10.0}, 5 * 10.0 + 5 * 1_000.0)
    for correlation, expected in ((1.0, 1.0), (-1.0, 0.0), (0.0, 0.5), (0.5, 0.75)):
        lengths = join_lengths(half, half, correlation=correlation)
        same = sum(each.requests for each in lengths if (each.prompt > 10) is (each.output > 10))
        assert same == pytest.approx(expected, abs=1e-6)


def test_lengths_beyond_the_last_bound_follow_from_the_sum() -> None:
    tokens = np.full(100, 30_000)
    known, unknown = (
        summarize_lengths(join_lengths(*[observe(tokens, sums=sums, bounds=(100.0, 5_000.0))] * 2)).prompt_mean
        for sums in (True, False)
    )
    assert known == pytest.approx(30_000, rel=0.01)
    assert 5_000 < unknown < 12_500


def test_holes_and_restarts_in_buckets() -> None:
    assert build_histogram({10.0: 4.0, 20.0: nan, 50.0: 9.0, inf: 10.0}) == build_histogram(
        {10.0: 4.0, 50.0: 9.0, inf: 10.0}
    )
    assert build_histogram({10.0: 4.0, 20.0: 3.0, inf: 10.0}).requests == (4.0, 0.0, 6.0)
    assert build_histogram({10.0: 0.0, inf: 0.0}).total == 0.0
    assert build_histogram({inf: 4.0}, nan).tokens is None


@pytest.mark.parametrize("cumulative", [{}, {10.0: 4.0}, {10.0: 4.0, inf: nan}])
def test_histogram_without_its_end_is_an_error(cumulative: dict[float, float]) -> None:
    with pytest.raises(HistogramError, match="Inf"):
        build_histogram(cumulative)


def test_histogram_of_one_bucket_needs_the_sum() -> None:
    only_end = build_histogram({inf: 4.0}, 400.0)
    assert {each.prompt for each in join_lengths(only_end, only_end)} == {100}
    with pytest.raises(HistogramError):
        join_lengths(build_histogram({inf: 4.0}), only_end)
    with pytest.raises(HistogramError):
        join_lengths(build_histogram({10.0: 0.0, inf: 0.0}), only_end)


def test_served_requests_fit_the_cache() -> None:
    lengths = (RequestLength(90, 20, 0.5), RequestLength(500, 50, 0.25), RequestLength(10, 10, 0.25))
    clipped = clip_lengths(lengths, 100)
    assert all(each.prompt + each.output <= 100 for each in clipped)
    assert sum(each.requests for each in clipped) == 1.0
    assert RequestLength(10, 10, 0.25) in clipped
