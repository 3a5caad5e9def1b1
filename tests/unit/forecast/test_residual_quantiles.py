"""Residual quantiles: conformal ranks, and a fitted tail for few residuals."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler.forecast.calibration import compute_residual_quantile


def test_level_within_the_sample_uses_the_conformal_rank() -> None:
    ordered = np.arange(99.0)
    assert compute_residual_quantile(ordered, 0.9) == 89.0
    assert compute_residual_quantile(ordered, 0.5) == 49.0


def test_level_beyond_the_sample_exceeds_the_largest_residual() -> None:
    ordered = np.sort(np.random.default_rng(1).exponential(size=200))
    assert compute_residual_quantile(ordered, 0.9999) > ordered[-1]


def test_the_fitted_tail_finds_the_quantile_of_an_exponential() -> None:
    estimates = [
        compute_residual_quantile(np.sort(np.random.default_rng(seed).exponential(size=500)), 0.999)
        for seed in range(40)
    ]
    assert float(np.mean(estimates)) == pytest.approx(-np.log(0.001), rel=0.15)


def test_overlapping_outcomes_count_as_fewer_residuals() -> None:
    ordered = np.sort(np.random.default_rng(2).exponential(size=2_000))
    assert compute_residual_quantile(ordered, 0.999, overlap=5) >= compute_residual_quantile(ordered, 0.999)


@pytest.mark.parametrize("count", [20, 60, 300, 3_000])
@pytest.mark.parametrize("overlap", [1, 4])
def test_quantiles_never_cross(count: int, overlap: int) -> None:
    ordered = np.sort(np.random.default_rng(count).standard_t(df=3, size=count))
    levels = np.concatenate([np.linspace(0.001, 0.999, 200), [0.9999]])
    quantiles = [compute_residual_quantile(ordered, float(level), overlap=overlap) for level in levels]
    assert quantiles == sorted(quantiles)
