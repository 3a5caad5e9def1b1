"""PoolForecaster: quantile forecasts of a pool's largest demand ahead, from readings that arrive over time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from scheduler.domain.fleet import Forecast
from scheduler.domain.reading_bins import ReadingBin
from scheduler.forecast.binned_demand import BinnedDemand, DemandWindow
from scheduler.forecast.candidates import Candidates, Horizon
from scheduler.forecast.coverage import TRACKED_LEVELS, WorkingLevels
from scheduler.forecast.demand_history import FloatArray
from scheduler.forecast.pool_model import METHODS, PastForecasts, PoolModel, RecentForecasts, forecast_recent
from scheduler.forecast.regression import NormalEquations, compute_prior
from scheduler.forecast.seasonality import DAY_S, STEPS_PER_SEASON, Season

QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)
HISTORY_SEASONS = 28
_OFFSET_SHARE = 0.05
REFITS_PER_SEASON = 4
LEARNS_PER_SEASON = 24
_UNCALIBRATED_FACTOR = 2.0


@dataclass(frozen=True, slots=True, eq=False)
class FitTask:
    """The input of a fit, so that it can run elsewhere. `prior` is (FEATURES,), the coefficients of all pools."""

    demand: BinnedDemand
    season: Season
    horizon_bins: int
    prior: FloatArray

    def run(self) -> PoolModel:
        offset = compute_offset(self.demand.peaks[self.demand.known])
        candidates = Candidates(self.demand, self.season, Horizon(self.horizon_bins), offset)
        return PastForecasts(candidates, self.prior).fit(len(self.demand) - 1)


def compute_offset(peaks: FloatArray) -> float:
    """Return the GPUs to add to demand before its logarithm is taken, from the peaks of known bins, (m,)."""
    return _OFFSET_SHARE * float(peaks.mean() if len(peaks) else 0.0) + 1e-9


@dataclass(slots=True)
class _HorizonState:
    """The model of one horizon, and its working levels, which have learned from the outcomes before a bin.

    `asked_at_s` is when a forecast over the horizon was last asked for.
    """

    asked_at_s: float

    model: PoolModel | None = None
    levels: WorkingLevels = field(default_factory=WorkingLevels)
    learned_until: int | None = None
    newest: tuple[tuple[int, float, float], RecentForecasts] | None = None


class PoolForecaster:
    """Forecaster of one pool. It keeps a bounded window, so a forecast costs the same after a month and after a year.

    Equal readings, calls and models give equal forecasts. Fits are due four times a season. `list_due_fits` returns
    them and `accept` takes the results, so that a service can run them in the background.
    """

    def __init__(
        self, *, season_s: float = DAY_S, step_s: float | None = None, zone: str = "UTC", method: str | None = None
    ) -> None:
        """Args:
            method: use this one of `METHODS` alone, for comparison.

        Raises:
            ValueError: `season_s` is not a whole number of `step_s` (default: 1/288 of the season).
        """
        self._method = method
        self._base = Season(season_s, season_s / STEPS_PER_SEASON if step_s is None else step_s, zone)
        self._window = DemandWindow(self._base.step_s, HISTORY_SEASONS * self._base.bins)
        self._states: dict[float, _HorizonState] = {}

    def observe(self, time_s: float, gpus: float) -> None:
        """Record that demand is `gpus` from `time_s` on. Raises ValueError as `DemandWindow.observe` does."""
        self._window.observe(time_s, gpus)

    def observe_bin(self, readings: ReadingBin) -> None:
        """Record the readings of one bin of `step_s`. Raises ValueError as `DemandWindow.observe` does."""
        self._window.observe_bin(readings)

    @property
    def step_s(self) -> float:
        """Length of a bin in seconds."""
        return self._window.step_s

    @property
    def equations(self) -> tuple[NormalEquations, ...]:
        """Contributions of this pool to the coefficients of all pools, one for each horizon."""
        return tuple(state.model.equations for state in self._states.values() if state.model is not None)

    def forecast(self, now_s: float, horizon_s: float, *, quantiles: tuple[float, ...] = QUANTILES) -> Forecast:
        """Return quantiles of the largest demand from now until `horizon_s` later; none is below the demand now.

        Until a model of this horizon is fitted, that of another one stands in: of the next longer horizon, whose
        largest demand is no smaller, or else of the longest, in a forecast that is not calibrated. Without any, before
        a season of readings and 20 outcomes, levels above 0.5 allow for demand to rise by its own size.

        Raises:
            ValueError: there is no reading yet, `now_s` is before the last reading, the horizon is not positive or
                longer than 7 seasons, or a quantile is not in (0, 1).
        """
        if not all(0 < level < 1 for level in quantiles):
            raise ValueError(f"quantiles must be in (0, 1), got {quantiles}")
        demand = self._window.read(now_s)
        season = replace(self._base, step_s=demand.step_s)
        season.count_horizon_bins(horizon_s)
        self._states.setdefault(horizon_s, _HorizonState(now_s)).asked_at_s = now_s
        used_s = self._find_usable_horizon_s(horizon_s, season)
        if used_s is None:
            gpus = [self._window.gpus * (_UNCALIBRATED_FACTOR if level > 0.5 else 1.0) for level in quantiles]
            return Forecast(now_s, horizon_s, quantiles, tuple(gpus), "persistence", is_calibrated=False)
        state, demand, horizon = self._states[used_s], demand.mark_missing(), Horizon(season.count_horizon_bins(used_s))
        model = state.model
        assert model is not None
        self._learn_levels(state, model, demand, season, horizon)
        recent = self._forecast_now(state, model, demand, season, horizon)
        found = model.combine(recent.points, recent.scales, [state.levels.find(level) for level in quantiles])[0]
        gpus = [max(float(value), self._window.gpus) for value in found]
        is_calibrated = used_s >= horizon_s
        return Forecast(now_s, used_s, quantiles, tuple(gpus), describe_method(model), is_calibrated=is_calibrated)

    def list_due_fits(self, now_s: float, prior: FloatArray) -> Mapping[float, FitTask]:
        """Return the fits that are due now, by horizon in seconds: of horizons that were forecast before."""
        if self._window.is_empty:
            return {}
        self._forget_unused_horizons(now_s)
        season = replace(self._base, step_s=self._window.bin_s)
        newest = int(now_s / season.step_s + 1e-9)
        outdated = [each for each, state in self._states.items() if not _is_current(state.model, season, newest)]
        if not outdated:
            return {}
        demand = self._window.read(now_s).mark_missing()
        if len(demand) <= season.bins:
            return {}
        return {each: FitTask(demand, season, season.count_horizon_bins(each), prior) for each in outdated}

    def accept(self, horizon_s: float, model: PoolModel) -> None:
        """Use a fitted model for the forecasts of a horizon, unless it is no longer asked for."""
        state = self._states.get(horizon_s)
        if state is None:
            return
        state.model = model if self._method is None else model.select(self._method)
        state.newest = None

    def _find_usable_horizon_s(self, horizon_s: float, season: Season) -> float | None:
        """Return the horizon whose model serves a forecast over `horizon_s`, or None if there is no usable model."""
        usable = sorted(each for each, state in self._states.items() if _is_usable(state.model, season))
        return next((each for each in usable if each >= horizon_s), usable[-1] if usable else None)

    def _forget_unused_horizons(self, now_s: float) -> None:
        kept_s = self._base.season_s / LEARNS_PER_SEASON
        for each in [each for each, state in self._states.items() if now_s - state.asked_at_s > kept_s]:
            del self._states[each]

    def _forecast_now(
        self, state: _HorizonState, model: PoolModel, demand: BinnedDemand, season: Season, horizon: Horizon
    ) -> RecentForecasts:
        """Return the forecasts at the newest bin, which stay the same until demand changes."""
        key = demand.first_bin + len(demand), float(demand.opens[-1]), float(demand.peaks[-1])
        if state.newest is None or state.newest[0] != key:
            state.newest = key, forecast_recent(model, demand, season, horizon, 1)
        return state.newest[1]

    def _learn_levels(
        self, state: _HorizonState, model: PoolModel, demand: BinnedDemand, season: Season, horizon: Horizon
    ) -> None:
        """Adapt the working levels to the outcomes of the last hour, once an hour."""
        end = demand.first_bin + len(demand) - 1 - horizon.bins
        batch = max(1, season.bins // LEARNS_PER_SEASON)
        if state.learned_until is None or end - state.learned_until > 2 * season.bins:
            state.learned_until = end
        count = end - state.learned_until
        if count < batch:
            return
        recent = forecast_recent(model, demand, season, horizon, count + horizon.bins + 1)
        levels = [state.levels.find(level) for level in TRACKED_LEVELS]
        quantiles = model.combine(recent.points[:count], recent.scales[:count], levels)
        state.levels = state.levels.learn(recent.outcomes[:count], quantiles, overlap=horizon.bins + 1)
        state.learned_until = end


def _is_usable(model: PoolModel | None, season: Season) -> bool:
    return model is not None and model.is_calibrated and len(model.sizes_by_time) == season.bins


def _is_current(model: PoolModel | None, season: Season, end_bin: int) -> bool:
    """Return whether a model needs no fit before bin `end_bin`. One without calibration is fitted each hour."""
    if model is None or len(model.sizes_by_time) != season.bins:
        return False
    fits = REFITS_PER_SEASON if model.is_calibrated else LEARNS_PER_SEASON
    return end_bin - model.end_bin < max(1, season.bins // fits)


def list_quantiles(lending_level: float) -> tuple[float, ...]:
    """Return the levels of a forecast for a pool that lends by `lending_level`, ascending."""
    return tuple(sorted({0.5, 0.9, 0.95, 0.99, lending_level}))


def fit_due(forecasters: Iterable[PoolForecaster], now_s: float) -> None:
    """Run all fits that are due, with the coefficients of all these pools as their prior."""
    known = list(forecasters)
    prior = compute_prior(each for forecaster in known for each in forecaster.equations)
    for forecaster in known:
        for horizon_s, task in forecaster.list_due_fits(now_s, prior).items():
            forecaster.accept(horizon_s, task.run())


def describe_method(model: PoolModel) -> str:
    """Return the method with the largest weight at level 0.95, with its weight."""
    weights = model.find_weights(0.95)
    name, share = METHODS[int(weights.argmax())], float(weights.max())
    return name if share == 1.0 else f"combination, {share:.0%} {name}"
