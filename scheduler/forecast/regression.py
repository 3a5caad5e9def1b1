"""Regression of a pool's demand on its candidate forecasts, shrunk towards the coefficients of all pools."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from scheduler.forecast.candidates import NAMES, Candidates
from scheduler.forecast.demand_history import FloatArray, IntArray

_LAGS = (1, 2, 3)
_BASE = NAMES.index("deseasonalised exponential smoothing 0.3")
FEATURES = len(NAMES) + len(_LAGS)
_SHRINKAGE = 0.002
_INTERCEPT_SHRINKAGE = 0.00002
_HALF_LIFE_SEASONS = 9.0
_REFITS_PER_SEASON = 2


@dataclass(frozen=True, slots=True, eq=False)
class NormalEquations:
    """Weighted sums of a least-squares fit of log demand: `products` (FEATURES, FEATURES), `targets` (FEATURES,)."""

    products: FloatArray
    targets: FloatArray
    weight: float = 0.0

    @classmethod
    def empty(cls) -> NormalEquations:
        return cls(np.zeros((FEATURES, FEATURES)), np.zeros(FEATURES))

    def add_rows(
        self, features: FloatArray, targets: FloatArray, weights: FloatArray, *, decay: float
    ) -> NormalEquations:
        """Return the sums with rows added; the present ones count `decay` times as much as before."""
        weighted = features * weights[:, None]
        return NormalEquations(
            decay * self.products + weighted.T @ features,
            decay * self.targets + weighted.T @ targets,
            decay * self.weight + float(weights.sum()),
        )

    def solve(self, prior: FloatArray) -> FloatArray:
        """Return the coefficients, (FEATURES,), shrunk towards `prior`; the prior itself without a row."""
        if self.weight <= 0:
            return prior
        penalty = np.full(FEATURES, _SHRINKAGE)
        penalty[-1] = _INTERCEPT_SHRINKAGE
        products = self.products / self.weight + np.diag(penalty)
        return np.asarray(np.linalg.solve(products, self.targets / self.weight + penalty * prior))


def compute_prior(pools: Iterable[NormalEquations]) -> FloatArray:
    """Return the coefficients of a fit to all pools, each with the same weight, (FEATURES,); zeros without a pool."""
    total = NormalEquations.empty()
    for pool in pools:
        if pool.weight > 0:
            share = NormalEquations(pool.products / pool.weight, pool.targets / pool.weight, 1.0)
            total = NormalEquations(
                total.products + share.products, total.targets + share.targets, total.weight + share.weight
            )
    return total.solve(np.zeros(FEATURES))


def compute_features(candidates: Candidates, points: FloatArray, origins: IntArray) -> tuple[FloatArray, FloatArray]:
    """Return features, (m, FEATURES), and the base, (m,): logs of forecasts and of recent demand less the base's."""
    logs = np.log(points + candidates.offset)
    base = logs[:, _BASE]
    recent = [candidates.log_peaks[np.maximum(origins - lag, 0)] - base for lag in _LAGS]
    others = np.delete(logs, _BASE, axis=1) - base[:, None]
    return np.column_stack([others, *recent, np.ones(len(origins))]), base


@dataclass(frozen=True, slots=True, eq=False)
class WalkForward:
    """Past forecasts of a regression that was refitted each half day from outcomes known by then.

    Args:
        points: (n,), in GPUs.
        equations: of all known outcomes.
        coefficients: (FEATURES,), for the next bins.
    """

    points: FloatArray
    equations: NormalEquations
    coefficients: FloatArray


def regress(candidates: Candidates, points: FloatArray, prior: FloatArray) -> WalkForward:
    """Forecast at each bin from the forecasts of other methods there, `points` of shape (n, len(NAMES)).

    Outcomes half as old as nine days count half.
    """
    count, block = len(candidates), max(1, candidates.season.bins // _REFITS_PER_SEASON)
    features, base = compute_features(candidates, points, np.arange(count))
    targets = np.log(candidates.outcomes + candidates.offset) - base
    decay_per_bin = 0.5 ** (1.0 / (_HALF_LIFE_SEASONS * candidates.season.bins))
    equations, known, logs = NormalEquations.empty(), 0, np.empty(count)
    for start in range(0, count + block, block):
        start = min(start, count)
        end = max(known, start - candidates.horizon.bins - 1)
        rows = np.arange(known, end)[~np.isnan(targets[known:end])]
        weights = decay_per_bin ** (end - 1 - rows)
        equations = equations.add_rows(features[rows], targets[rows], weights, decay=decay_per_bin ** (end - known))
        known, coefficients = end, equations.solve(prior)
        logs[start : start + block] = base[start : start + block] + features[start : start + block] @ coefficients
    return WalkForward(candidates.bound(candidates.from_log(logs), np.arange(count)), equations, coefficients)


def apply_regression(
    candidates: Candidates, points: FloatArray, origins: IntArray, coefficients: FloatArray
) -> FloatArray:
    """Return the regression's forecasts, (m,), in GPUs, from those of other methods at `origins`, (m, len(NAMES))."""
    features, base = compute_features(candidates, points, origins)
    return candidates.bound(candidates.from_log(base + features @ coefficients), origins)
