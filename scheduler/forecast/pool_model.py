"""PoolModel: the quantile forecast of one pool and horizon, a weighted mean of all methods. Its fit and its use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from scheduler.forecast.binned_demand import BinnedDemand
from scheduler.forecast.calibration import (
    CALIBRATION_MIN_RESIDUALS,
    compute_recent_memory,
    compute_recent_sizes,
    compute_residual_quantile,
    compute_scales,
    compute_sizes_by_time,
    mix_scales,
)
from scheduler.forecast.candidates import NAMES, Candidates, Horizon
from scheduler.forecast.demand_history import FloatArray
from scheduler.forecast.regression import NormalEquations, apply_regression, regress
from scheduler.forecast.seasonality import WEEKS, Season

METHODS = (*NAMES, "regression")
RESIDUAL_SEASONS = 14
# Weights at a level are those at the nearest of these levels.
WEIGHT_LEVELS = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
OFFSET_LEVELS = (*(round(0.01 * each, 2) for each in range(1, 100)), 0.995, 0.998, 0.999, 0.9995, 0.9999, 0.99999)
_JUDGED_SEASONS = 4
_JUDGED_SCALE_SEASONS = 3.0
_SHARPNESS = 15.0


@dataclass(frozen=True, slots=True, eq=False)
class PoolModel:
    """A fitted forecast of one pool and horizon. M is the number of `METHODS`.

    Args:
        end_bin: number of the first bin that the fit has not seen.
        offset: GPUs that are added to demand before the logarithm is taken.
        equations: what the pool contributes to the coefficients of all pools.
        coefficients: (FEATURES,), of the regression.
        long_sizes: (M,), usual error of the last days, in GPUs.
        sizes_by_time: (bins of a season, M), usual error at each local time of day, in GPUs; NaN where unknown.
        offsets: (len(OFFSET_LEVELS), M), quantiles of errors, in scales.
        weights: (len(WEIGHT_LEVELS), M); each row sums to 1.
        residuals: number of outcomes that calibrate the quantiles.
    """

    end_bin: int
    offset: float
    equations: NormalEquations
    coefficients: FloatArray
    long_sizes: FloatArray
    sizes_by_time: FloatArray
    offsets: FloatArray
    weights: FloatArray
    residuals: int

    @property
    def is_calibrated(self) -> bool:
        return self.residuals >= CALIBRATION_MIN_RESIDUALS

    def select(self, method: str) -> PoolModel:
        """Return the model with all weight on one of `METHODS`."""
        chosen = np.array([float(name == method) for name in METHODS])
        return replace(self, weights=np.tile(chosen, (len(WEIGHT_LEVELS), 1)))

    def combine(self, points: FloatArray, scales: FloatArray, levels: Sequence[float]) -> FloatArray:
        """Return quantiles of demand, (m, len(levels)), from points and scales of all methods, (m, M), in GPUs.

        Levels ascend, and so do the quantiles of each row.
        """
        columns = [
            np.maximum(points + scales * self._find_offsets(level), 0.0) @ self.find_weights(level) for level in levels
        ]
        return np.asarray(np.maximum.accumulate(np.stack(columns, axis=1), axis=1))

    def find_weights(self, level: float) -> FloatArray:
        """Return the weight of each method at a level, (M,)."""
        return np.asarray(self.weights[int(np.argmin(np.abs(np.array(WEIGHT_LEVELS) - level)))])

    def forecast_each(self, level: float, points: FloatArray, scales: FloatArray) -> FloatArray:
        """Return the quantile of demand at a level by each method alone, (m, M), in GPUs."""
        return np.asarray(np.maximum(points + scales * self._find_offsets(level), 0.0))

    def _find_offsets(self, level: float) -> FloatArray:
        upper = min(int(np.searchsorted(OFFSET_LEVELS, level)), len(OFFSET_LEVELS) - 1)
        lower = upper if upper == 0 or OFFSET_LEVELS[upper] <= level else upper - 1
        span = OFFSET_LEVELS[upper] - OFFSET_LEVELS[lower]
        share = (level - OFFSET_LEVELS[lower]) / span if span else 0.0
        return np.asarray(self.offsets[lower] + share * (self.offsets[upper] - self.offsets[lower]))


class PastForecasts:
    """Forecasts that every method would have made at each bin of a history, with their errors and scales.

    Args:
        prior: (FEATURES,), coefficients of the regression of all pools.
    """

    def __init__(self, candidates: Candidates, prior: FloatArray) -> None:
        self.candidates = candidates
        basic = candidates.compute_points(np.arange(len(candidates)))
        self._regression = regress(candidates, basic, prior)
        self.points = np.column_stack([basic, self._regression.points])
        self.errors = candidates.outcomes[:, None] - self.points
        first_bin, season = candidates.demand.first_bin, candidates.season
        self.scales = compute_scales(self.errors, first_bin, season, candidates.horizon.bins)
        self._residuals = self.errors / self.scales

    def fit(self, end: int) -> PoolModel:
        """Fit a model from the bins before position `end`, all of which are closed."""
        candidates, season, bins = self.candidates, self.candidates.season, self.candidates.horizon.bins
        known = max(0, end - bins)
        first = min(known, max(season.bins, known - RESIDUAL_SEASONS * season.bins))
        judged = max(first, known - _JUDGED_SEASONS * season.bins)
        earlier = self._compute_offsets(max(season.bins, first - known + judged), judged, WEIGHT_LEVELS)
        if earlier is None:
            earlier = self._compute_offsets(first, known, WEIGHT_LEVELS)
        offsets = self._compute_offsets(first, known, OFFSET_LEVELS)
        first_bin, sizes = candidates.demand.first_bin, np.abs(self.errors[judged:known])
        numbers = first_bin + end + np.arange(season.bins)
        by_time = compute_sizes_by_time(self.errors[:known], first_bin, season, bins, numbers)
        sizes = sizes[~np.isnan(sizes[:, 0])]
        return PoolModel(
            end_bin=first_bin + end,
            offset=candidates.offset,
            equations=self._regression.equations,
            coefficients=self._regression.coefficients,
            long_sizes=sizes.mean(axis=0) if len(sizes) else np.ones(len(METHODS)),
            sizes_by_time=by_time[np.argsort(season.find_time_of_day(numbers), kind="stable")],
            offsets=np.zeros((len(OFFSET_LEVELS), len(METHODS))) if offsets is None else offsets,
            weights=self._compute_weights(judged, known, earlier),
            residuals=int(np.count_nonzero(~np.isnan(self._residuals[first:known, 0]))),
        )

    def _compute_offsets(self, first: int, end: int, levels: Sequence[float]) -> FloatArray | None:
        """Return quantiles of the residuals of bins `first` to `end`, (len(levels), M); None with too few."""
        kept = self._residuals[first : max(first, end)]
        kept = np.sort(kept[~np.isnan(kept[:, 0])], axis=0)
        if len(kept) < CALIBRATION_MIN_RESIDUALS:
            return None
        overlap = self.candidates.horizon.bins + 1
        return np.array(
            [[compute_residual_quantile(column, level, overlap=overlap) for column in kept.T] for level in levels]
        )

    def _compute_weights(self, first: int, end: int, offsets: FloatArray | None) -> FloatArray:
        """Return the weight of each method at each level, from its pinball loss in bins `first` to `end`.

        The loss of newer bins counts more. A method whose loss is p% above the least has about 15 p% less weight.
        """
        outcomes = self.candidates.outcomes[first:end]
        usable = ~np.isnan(outcomes)
        if offsets is None or not usable.any():
            return np.full((len(WEIGHT_LEVELS), len(METHODS)), 1.0 / len(METHODS))
        ages = (end - first - 1 - np.arange(end - first))[usable]
        shares = np.exp(-ages / (_JUDGED_SCALE_SEASONS * self.candidates.season.bins))
        points, scales = self.points[first:end][usable], self.scales[first:end][usable]
        rows = []
        for level, row in zip(WEIGHT_LEVELS, offsets, strict=True):
            excess = outcomes[usable][:, None] - np.maximum(points + scales * row, 0.0)
            loss = shares @ np.maximum(level * excess, (level - 1.0) * excess) / shares.sum() + 1e-12
            weights = (loss / loss.min()) ** -_SHARPNESS
            rows.append(weights / weights.sum())
        return np.array(rows)


@dataclass(frozen=True, slots=True, eq=False)
class RecentForecasts:
    """Points and scales of all methods at the newest m bins, (m, M), in GPUs, and the outcomes there, (m,)."""

    points: FloatArray
    scales: FloatArray
    outcomes: FloatArray


def forecast_recent(
    model: PoolModel, demand: BinnedDemand, season: Season, horizon: Horizon, count: int
) -> RecentForecasts:
    """Return the forecasts of a fitted model at the newest `count` bins."""
    count, bins = min(count, len(demand)), horizon.bins
    needed = count + bins + compute_recent_memory(season)
    demand = demand.keep_newest(needed + (max(WEEKS) + 1) * season.bins)
    newest = np.arange(len(demand) - count, len(demand))
    origins = np.arange(max(0, len(demand) - needed), len(demand))
    candidates = Candidates(demand, season, horizon, model.offset, first_origin=int(origins[0]))
    basic = candidates.compute_points(origins)
    points = np.column_stack([basic, apply_regression(candidates, basic, origins, model.coefficients)])
    recent = compute_recent_sizes(candidates.outcomes[origins][:, None] - points, season, bins)[-count:]
    by_time = model.sizes_by_time[season.find_time_of_day(candidates.demand.first_bin + newest)]
    by_time = np.where(np.isnan(by_time), model.long_sizes, by_time)
    scales = mix_scales(np.where(np.isnan(recent), model.long_sizes, recent), by_time, model.long_sizes)
    return RecentForecasts(points[-count:], scales, candidates.outcomes[newest])
