"""DemandForecaster: forecasts of the lending pools' demand, for full passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import replace
from typing import Protocol

from scheduler.domain.commands import Command, ForecastMade
from scheduler.domain.fleet import DemandReading, Forecast, Pool, PoolKind
from scheduler.domain.serving import ModelRate, SizingMode, name_rate_series
from scheduler.domain.snapshot import Snapshot
from scheduler.forecast.demand_history import FloatArray
from scheduler.forecast.forecaster import FitTask, list_quantiles
from scheduler.forecast.pool_model import PoolModel
from scheduler.forecast.regression import NormalEquations, compute_prior
from scheduler.scheduling.policies.lending_promise import find_working_quantile
from scheduler.store.protocol import Store

RATE_QUANTILE = 0.95
"""Level of the request rate for which replicas are proposed. The objective of a model usually has the same."""


class Forecaster(Protocol):
    """Interface of scheduler.forecast.forecaster.PoolForecaster."""

    @property
    def equations(self) -> tuple[NormalEquations, ...]: ...

    def observe(self, time_s: float, gpus: float) -> None: ...

    def forecast(self, now_s: float, horizon_s: float, *, quantiles: tuple[float, ...]) -> Forecast: ...

    def list_due_fits(self, now_s: float, prior: FloatArray) -> Mapping[float, FitTask]: ...

    def accept(self, horizon_s: float, model: PoolModel) -> None: ...


class DemandForecaster:
    """Forecasters of the pools that lend or size models, and of the request rates of sized models.

    They are fed with the stored readings.

    Their models are fitted on an executor, so that no tick waits for a fit.
    """

    def __init__(
        self, store: Store, new_forecaster: Callable[[], Forecaster], *, history_s: float, fits: Executor
    ) -> None:
        self._store = store
        self._new_forecaster = new_forecaster
        self._history_s = history_s
        self._fits = fits
        self._fits_in_flight: dict[tuple[str, float], Future[PoolModel]] = {}
        self._forecasters: dict[str, Forecaster] = {}
        self._last_reading_s: dict[str, float] = {}

    def make_forecasts(self, snapshot: Snapshot, now_s: float) -> tuple[Command, ...]:
        """Return a new forecast for each pool that lends or sizes models and has demand readings."""
        self._accept_fitted()
        made = [self._make_forecast(snapshot, pool, now_s) for pool in snapshot.pools.values() if _is_forecast(pool)]
        self._submit_due_fits(now_s)
        return tuple(command for command in made if command is not None)

    def close(self) -> None:
        self._fits.shutdown(wait=True, cancel_futures=True)

    def _make_forecast(self, snapshot: Snapshot, pool: Pool, now_s: float) -> Command | None:
        reading = snapshot.demand.get(pool.name)
        if reading is None:
            return None
        forecaster = self._feed_forecaster(pool.name, now_s)
        if forecaster is None:
            return None
        rules, levels = pool.lending, list_quantiles(find_working_quantile(pool.lending, reading.shortages))
        forecast = forecaster.forecast(now_s, rules.horizon_s, quantiles=levels)
        if rules.loan_s_min > rules.horizon_s:
            forecast = forecast.with_min_loan_forecast(forecaster.forecast(now_s, rules.loan_s_min, quantiles=levels))
        forecast = replace(forecast, rates=self._forecast_rates(pool, reading, now_s))
        return Command(f"forecast/{pool.name}/{now_s}", now_s, ForecastMade(pool.name, forecast), actor="forecast")

    def _forecast_rates(self, pool: Pool, reading: DemandReading, now_s: float) -> tuple[ModelRate, ...]:
        """Return the largest rate of each sized model until a replica that starts now serves."""
        start_s = {each.model: each.sizing.start_s for each in pool.serving}
        rates = []
        for model in (each.model for each in reading.advice if each.model in start_s):
            forecaster = self._feed_forecaster(name_rate_series(pool.name, model), now_s)
            if forecaster is None:
                continue
            found = forecaster.forecast(now_s, start_s[model], quantiles=(RATE_QUANTILE,))
            rate_per_s, is_calibrated = found.gpus[0], found.is_calibrated
            rates.append(ModelRate(model, now_s, start_s[model], RATE_QUANTILE, rate_per_s, is_calibrated))
        return tuple(rates)

    def _feed_forecaster(self, series: str, now_s: float) -> Forecaster | None:
        """Return the forecaster of a series after its new readings; None if all are older than the history."""
        forecaster = self._forecasters.get(series)
        if forecaster is None:
            forecaster = self._forecasters[series] = self._new_forecaster()
        self._feed_new_readings(forecaster, series, now_s)
        return forecaster if series in self._last_reading_s else None

    def _feed_new_readings(self, forecaster: Forecaster, pool: str, now_s: float) -> None:
        since_s = self._last_reading_s.get(pool, now_s - self._history_s)
        for reading in self._store.list_readings(pool, since_s=since_s):
            if reading.at_s > self._last_reading_s.get(pool, float("-inf")):
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
