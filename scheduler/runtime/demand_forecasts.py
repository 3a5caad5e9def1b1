"""DemandForecaster: forecasts of demand and of request rates, for full passes."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor, Future
from dataclasses import replace
from typing import Protocol

from scheduler.domain.commands import Command, ForecastMade
from scheduler.domain.fleet import DemandReading, Pool, PoolKind, get_shortages
from scheduler.domain.reading_bins import ReadingBin
from scheduler.domain.serving import ModelRate, SizingMode, name_rate_series
from scheduler.domain.snapshot import Snapshot
from scheduler.forecast.demand_history import FloatArray
from scheduler.forecast.forecaster import FitTask, list_quantiles
from scheduler.forecast.pool_forecast import ObservingForecaster, forecast_pool
from scheduler.forecast.pool_model import PoolModel
from scheduler.forecast.regression import NormalEquations, compute_prior
from scheduler.scheduling.policies.lending_promise import find_working_quantile
from scheduler.scheduling.policies.settings import PolicySettings
from scheduler.scheduling.policies.way_back import measure_ways_back
from scheduler.store.protocol import Store

RATE_QUANTILE = 0.95
"""Level of the request rate for which replicas are proposed. The objective of a model usually has the same."""
_PERIOD_S = PolicySettings().full_pass_period_s


class FittedForecaster(ObservingForecaster, Protocol):
    """Interface of scheduler.forecast.forecaster.PoolForecaster."""

    @property
    def step_s(self) -> float: ...

    def observe_bin(self, readings: ReadingBin) -> None: ...

    @property
    def equations(self) -> tuple[NormalEquations, ...]: ...

    def list_due_fits(self, now_s: float, prior: FloatArray) -> Mapping[float, FitTask]: ...

    def accept(self, horizon_s: float, model: PoolModel) -> None: ...


class NewForecaster(Protocol):
    """Maker of a pool's forecaster, which follows the clock of a time zone."""

    def __call__(self, *, zone: str) -> FittedForecaster: ...


class DemandForecaster:
    """Forecasters of the pools that lend or size models, and of the request rates of sized models.

    Each reads the stored readings of its series. Their models are fitted on an executor, so that no tick waits for a
    fit. A pool whose time zone has changed, or whose history was back-filled, gets a new forecaster, which reads all
    stored readings.
    """

    def __init__(
        self,
        store: Store,
        new_forecaster: NewForecaster,
        *,
        history_s: float,
        fits: Executor,
        period_s: float = _PERIOD_S,
    ) -> None:
        """Args:
        history_s: age of the oldest reading that a forecaster uses.
        period_s: time between two forecasts.
        """
        self._store = store
        self._new_forecaster = new_forecaster
        self._history_s = history_s
        self._fits = fits
        self._period_s = period_s
        self._fits_in_flight: dict[tuple[str, float], Future[PoolModel]] = {}
        self._forecasters: dict[str, FittedForecaster] = {}
        self._bases: dict[str, tuple[str, int]] = {}
        self._last_reading_s: dict[str, float] = {}

    def make_forecasts(self, snapshot: Snapshot, now_s: float) -> tuple[Command, ...]:
        """Return a new forecast for each inference pool that lends or sizes models, and has demand readings or a demand
        profile."""
        self._accept_fitted()
        pools = [pool for pool in snapshot.pools.values() if _is_forecast(pool)]
        ways = measure_ways_back(snapshot, pools)
        made = [self._make_forecast(snapshot, pool, ways[pool.name].horizon_s, now_s) for pool in pools]
        self._submit_due_fits(now_s)
        return tuple(command for command in made if command is not None)

    def close(self) -> None:
        self._fits.shutdown(wait=True, cancel_futures=True)

    def _make_forecast(self, snapshot: Snapshot, pool: Pool, horizon_s: float, now_s: float) -> Command | None:
        rules, reading = pool.lending, snapshot.demand.get(pool.name)
        forecaster = None
        if reading is not None:
            forecaster = self._find_forecaster(pool.name, (rules.time_zone, reading.backfills), now_s)
        if forecaster is None and not rules.demand_profile:
            return None
        forecast = forecast_pool(
            forecaster,
            rules,
            list_quantiles(find_working_quantile(rules, get_shortages(snapshot.demand, pool.name))),
            now_s=now_s,
            horizon_s=horizon_s,
            observed_gpus=0.0 if reading is None else reading.asked_gpus,
            period_s=self._period_s,
        )
        if reading is not None:
            forecast = replace(forecast, rates=self._forecast_rates(pool, reading, now_s))
        return Command(f"forecast/{pool.name}/{now_s}", now_s, ForecastMade(pool.name, forecast), actor="forecast")

    def _forecast_rates(self, pool: Pool, reading: DemandReading, now_s: float) -> tuple[ModelRate, ...]:
        """Return the largest rate of each sized model until a replica that starts now serves."""
        start_s = {each.model: each.sizing.start_s for each in pool.serving}
        rates = []
        for model in (each.model for each in reading.advice if each.model in start_s):
            series, basis = name_rate_series(pool.name, model), (pool.lending.time_zone, 0)  # rates have no back-fill
            forecaster = self._find_forecaster(series, basis, now_s)
            if forecaster is None:
                continue
            found = forecaster.forecast(now_s, start_s[model], quantiles=(RATE_QUANTILE,))
            rate_per_s, is_calibrated = found.gpus[0], found.is_calibrated
            rates.append(ModelRate(model, now_s, start_s[model], RATE_QUANTILE, rate_per_s, is_calibrated))
        return tuple(rates)

    def _find_forecaster(self, series: str, basis: tuple[str, int], now_s: float) -> FittedForecaster | None:
        """Return the forecaster of a series after its new readings; None if all are older than the history.

        Args:
            basis: time zone of the series, and the number of its back-fills so far.
        """
        if self._bases.get(series) != basis:
            self._bases[series] = basis
            self._replace_forecaster(series, zone=basis[0])
        self._feed_new_readings(self._forecasters[series], series, now_s)
        return self._forecasters[series] if series in self._last_reading_s else None

    def _replace_forecaster(self, series: str, *, zone: str) -> None:
        """Begin with a new forecaster, which has read nothing. Fits that are under way are for the earlier one."""
        self._forecasters[series] = self._new_forecaster(zone=zone)
        self._last_reading_s.pop(series, None)
        for key in [each for each in self._fits_in_flight if each[0] == series]:
            self._fits_in_flight.pop(key).cancel()

    def _feed_new_readings(self, forecaster: FittedForecaster, pool: str, now_s: float) -> None:
        """Feed the readings since the last ones, or at first the bins of all: one per bin instead of tens of them."""
        since_s = self._last_reading_s.get(pool)
        if since_s is None:
            bins = self._store.list_reading_bins(pool, since_s=now_s - self._history_s, bin_s=forecaster.step_s)
            for each in bins:
                forecaster.observe_bin(each)
                self._last_reading_s[pool] = each.last_at_s
            return
        for reading in self._store.list_readings(pool, since_s=since_s):
            if reading.at_s > self._last_reading_s[pool]:
                forecaster.observe(reading.at_s, reading.asked_gpus)
                self._last_reading_s[pool] = reading.at_s

    def _submit_due_fits(self, now_s: float) -> None:
        prior = compute_prior(each for forecaster in self._forecasters.values() for each in forecaster.equations)
        for name, forecaster in self._forecasters.items():
            for horizon_s, task in forecaster.list_due_fits(now_s, prior).items():
                if (name, horizon_s) not in self._fits_in_flight:
                    self._fits_in_flight[name, horizon_s] = self._fits.submit(task.run)

    def _accept_fitted(self) -> None:
        for (name, horizon_s), fit in tuple(self._fits_in_flight.items()):
            if fit.done():
                del self._fits_in_flight[name, horizon_s]
                self._forecasters[name].accept(horizon_s, fit.result())


def _is_forecast(pool: Pool) -> bool:
    is_sized = any(each.sizing.mode is not SizingMode.OFF for each in pool.serving)
    return pool.kind is PoolKind.INFERENCE and (pool.lending.enabled or is_sized)
