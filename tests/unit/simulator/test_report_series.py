"""Means of step functions over intervals of round lengths."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.simulator.report import (
    POINTS_MAX,
    StepFunction,
    compute_interval_edges,
    compute_interval_means,
    compute_quantiles,
    round_up_length,
)

AT_S = st.floats(0.0, 1e7)


def test_step_function_has_exact_means() -> None:
    line = StepFunction()
    for at_s, value in ((5.0, 2.0), (10.0, 2.0), (25.0, 6.0)):
        line.set_value(at_s, value)
    assert line.compute_means(np.array([0.0, 10.0, 20.0, 30.0])).tolist() == [1.0, 2.0, 4.0]


def test_empty_step_function_is_zero() -> None:
    assert StepFunction().compute_means(np.array([0.0, 10.0, 20.0])).tolist() == [0.0, 0.0]


@given(st.lists(st.tuples(AT_S, AT_S, st.integers(1, 64)), max_size=30), AT_S, st.floats(1.0, 1e6))
def test_interval_means_match_a_sum_over_runs(
    runs: list[tuple[float, float, int]], begin_s: float, length_s: float
) -> None:
    edges_s = begin_s + length_s * np.arange(4)
    at_s = np.array([time_s for since_s, until_s, _ in runs for time_s in sorted((since_s, until_s))])
    deltas = np.array([delta for *_, gpus in runs for delta in (gpus, -gpus)], dtype=float)
    expected = [
        sum(gpus * max(0.0, min(max(a, b), right) - max(min(a, b), left)) for a, b, gpus in runs) / (right - left)
        for left, right in pairwise(edges_s.tolist())
    ]
    assert compute_interval_means(at_s, deltas, edges_s).tolist() == pytest.approx(expected, abs=0.01)


@given(AT_S, st.floats(0.0, 1e9))
def test_intervals_are_equal_round_and_few(start_s: float, length_s: float) -> None:
    edges_s = compute_interval_edges(start_s, start_s + length_s)
    assert edges_s[0] == start_s
    assert edges_s[-1] >= start_s + length_s - 1e-6 * length_s
    assert 1 <= len(edges_s) - 1 <= POINTS_MAX + 1
    assert round_up_length(round(edges_s[1] - edges_s[0])) == pytest.approx(edges_s[1] - edges_s[0])


def test_round_lengths_divide_each_other() -> None:
    lengths_s = sorted({round_up_length(least_s) for least_s in range(1, 90_000, 7)})
    assert all(longer % shorter == 0.0 for shorter, longer in pairwise(lengths_s[:-1]))
    assert (round_up_length(86_401.0), math.fmod(86_400.0, lengths_s[-2])) == (172_800.0, 0.0)


def test_many_values_become_quantiles() -> None:
    assert compute_quantiles([3.0, 1.0, 2.0]) == (1.0, 2.0, 3.0)
    assert compute_quantiles([float(value) for value in range(5_001)]) == pytest.approx(range(0, 5_001, 5))
