"""Walk-forward backtest of the forecast, and of each method alone, on one recorded demand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from scheduler.forecast.binned_demand import BinnedDemand, DemandWindow
from scheduler.forecast.candidates import ETS_NAMES, Candidates, Horizon, Target
from scheduler.forecast.coverage import TRACKED_LEVELS, WorkingLevels
from scheduler.forecast.demand_history import FloatArray, IntArray
from scheduler.forecast.forecaster import LEARNS_PER_SEASON, REFITS_PER_SEASON, compute_offset
from scheduler.forecast.pool_model import METHODS, WEIGHT_LEVELS, PastForecasts, PoolModel
from scheduler.forecast.regression import FEATURES
from scheduler.forecast.seasonality import DAY_S, STEPS_PER_SEASON, Season

Readings = Sequence[float] | FloatArray
COVERAGE_LEVELS = (0.95, 0.999)
COMBINATION, ETS = "combination", "deseasonalised exponential smoothing"
REPORTED = (COMBINATION, *(name for name in METHODS if name not in ETS_NAMES), ETS)
_LEVELS = (*WEIGHT_LEVELS, 0.999)


@dataclass(frozen=True, slots=True)
class MethodScore:
    """Quality of one method's quantiles.

    Args:
        loss: weighted quantile loss, 2 x pinball loss / mean outcome, averaged over outcomes and `WEIGHT_LEVELS`.
        coverage: share of outcomes at or below the quantile, for each of `COVERAGE_LEVELS`.
    """

    method: str
    loss: float
    coverage: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class BacktestReport:
    """Scores of all methods of `REPORTED`, over `forecasts` forecasts of one horizon."""

    horizon_s: float
    step_s: float
    target: Target
    forecasts: int
    mean_gpus: float
    scores: tuple[MethodScore, ...]


def bin_readings(times_s: Readings, gpus: Readings, season: Season) -> BinnedDemand:
    """Return a whole recording in bins of the season's step, or longer ones if readings are further apart.

    Raises:
        ValueError: there is no reading, times do not ascend, or a value is not finite or negative.
    """
    if not len(times_s):
        raise ValueError("a backtest needs demand readings, got none")
    window = DemandWindow(season.step_s, int((times_s[-1] - times_s[0]) / season.step_s) + 2)
    for time_s, value in zip(times_s, gpus, strict=True):
        window.observe(float(time_s), float(value))
    return window.read(float(times_s[-1])).mark_missing()


def run_backtest(
    times_s: Readings,
    gpus: Readings,
    *,
    horizon_s: float,
    target: Target = Target.PEAK,
    season_s: float = DAY_S,
    zone: str = "UTC",
    test_share: float = 0.25,
) -> BacktestReport:
    """Forecast each outcome in the last `test_share` of a recording, as the service would have.

    Models are fitted four times a day, from outcomes known by then, and working levels adapt each hour.

    Raises:
        ValueError: the recording has no outcome to test, or as `forecast_past` raises it.
    """
    past = forecast_past(times_s, gpus, horizon_s=horizon_s, target=target, season=_make_season(season_s, zone))
    known = past.candidates.outcomes
    first = int(np.ceil(len(known) * (1.0 - test_share)))
    rows = [(known[origins], values) for origins, values in walk_forward(past, first, _LEVELS)]
    outcomes, quantiles = np.concatenate([each for each, _ in rows]), np.concatenate([values for _, values in rows])
    outcomes, quantiles = outcomes[~np.isnan(outcomes)], quantiles[~np.isnan(outcomes)]
    if not len(outcomes):
        raise ValueError(f"demand has no known outcome in its last {test_share:.0%}")
    scores = tuple(_score(name, outcomes, quantiles[:, index]) for index, name in enumerate(REPORTED))
    step_s, bins = past.candidates.demand.step_s, past.candidates.horizon.bins
    return BacktestReport(bins * step_s, step_s, target, len(outcomes), float(outcomes.mean()), scores)


def forecast_past(
    times_s: Readings, gpus: Readings, *, horizon_s: float, target: Target, season: Season
) -> PastForecasts:
    """Return the forecasts of all methods at each bin of a recording.

    Raises:
        ValueError: the recording lasts for two seasons or less, or as `bin_readings` raises it.
    """
    demand = bin_readings(times_s, gpus, season)
    season = replace(season, step_s=demand.step_s)
    if len(demand) <= 2 * season.bins:
        days = len(demand) / season.bins
        raise ValueError(f"demand must last for more than two seasons, to calibrate and to test, got {days:.1f}")
    horizon = Horizon(season.count_horizon_bins(horizon_s), target)
    learned = len(demand) // 2
    offset = compute_offset(demand.peaks[:learned][demand.known[:learned]])
    return PastForecasts(Candidates(demand, season, horizon, offset), np.zeros(FEATURES))


def walk_forward(past: PastForecasts, first: int, levels: Sequence[float]) -> Iterator[tuple[IntArray, FloatArray]]:
    """Yield origins from `first` on, (m,), and their quantiles, (m, len(REPORTED), len(levels)), hour by hour.

    Origins before the first calibrated model are left out. The working levels learn from two more days before `first`.
    """
    season, outcomes, bins = past.candidates.season, past.candidates.outcomes, past.candidates.horizon.bins
    block, blocks_per_fit = max(1, season.bins // LEARNS_PER_SEASON), LEARNS_PER_SEASON // REFITS_PER_SEASON
    working, tracked = WorkingLevels(), np.full((len(outcomes), len(TRACKED_LEVELS)), np.nan)
    begin = max(0, first - 2 * season.bins)
    learned, model = begin, past.fit(begin)
    for number, start in enumerate(range(begin, len(outcomes), block)):
        if number and number % blocks_per_fit == 0:
            model = past.fit(start)
        known = max(learned, start - bins)
        working, learned = working.learn(outcomes[learned:known], tracked[learned:known], overlap=bins + 1), known
        if not model.is_calibrated:
            continue
        origins = np.arange(start, min(start + block, len(outcomes)))
        points, scales = past.points[origins], past.scales[origins]
        tracked[origins] = model.combine(points, scales, [working.find(level) for level in TRACKED_LEVELS])
        if start + block > first:
            quantiles = _forecast_all(model, points, scales, [working.find(level) for level in levels], levels)
            yield origins[origins >= first], quantiles[origins >= first]


def _forecast_all(
    model: PoolModel, points: FloatArray, scales: FloatArray, working: Sequence[float], levels: Sequence[float]
) -> FloatArray:
    """Return the quantiles of each reported method, (m, len(REPORTED), len(levels))."""
    combined = model.combine(points, scales, working)
    each = np.stack([model.forecast_each(level, points, scales) for level in levels], axis=2)
    smoothing = [METHODS.index(name) for name in ETS_NAMES]
    best = smoothing[int(np.log(model.weights[:, smoothing] + 1e-300).sum(axis=0).argmax())]
    kept = [index for index, name in enumerate(METHODS) if name not in ETS_NAMES]
    return np.concatenate([combined[:, None], each[:, kept], each[:, [best]]], axis=1)


def _make_season(season_s: float, zone: str) -> Season:
    return Season(season_s, season_s / STEPS_PER_SEASON, zone)


def _score(method: str, outcomes: FloatArray, quantiles: FloatArray) -> MethodScore:
    levels = np.array(WEIGHT_LEVELS)
    excess = outcomes[:, None] - quantiles[:, : len(levels)]
    loss = 2.0 * float(np.maximum(levels * excess, (levels - 1.0) * excess).mean())
    coverage = tuple(float((outcomes <= quantiles[:, _LEVELS.index(level)]).mean()) for level in COVERAGE_LEVELS)
    return MethodScore(method, loss / max(float(outcomes.mean()), np.finfo(np.float64).tiny), coverage)
