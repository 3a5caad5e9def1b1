"""DemandForecaster: forecasts of the lending pools' demand, for full passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from typing import Protocol

from scheduler.domain.commands import Command, ForecastMade
from scheduler.domain.fleet import Forecast, Pool, PoolKind
from scheduler.domain.snapshot import Snapshot
from scheduler.forecast.demand_history import FloatArray
from scheduler.forecast.forecaster import FitTask, list_quantiles
from scheduler.forecast.pool_model import PoolModel
from scheduler.forecast.regression import NormalEquations, compute_prior
from scheduler.scheduling.policies.lending_promise import find_working_quantile
from scheduler.store.protocol import Store


class Forecaster(Protocol):
    """Interface of scheduler.forecast.forecaster.PoolForecaster."""

    @property
    def equations(self) -> tuple[NormalEquations, ...]: ...

    def observe(self, time_s: float, gpus: float) -> None: ...

    def forecast(self, now_s: float, horizon_s: float, *, quantiles: tuple[float, ...]) -> Forecast: ...

    def list_due_fits(self, now_s: float, prior: FloatArray) -> Mapping[float, FitTask]: ...

    def accept(self, horizon_s: float, model: PoolModel) -> None: ...


class DemandForecaster:
    """Forecasters of the lending pools, fed with the stored demand readings.

    A pool whose history was back-filled gets a new forecaster, which reads all of it.

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
        self._backfills: dict[str, int] = {}

    def make_forecasts(self, snapshot: Snapshot, now_s: float) -> tuple[Command, ...]:
        """Return a new forecast for each inference pool that lends and has demand readings."""
        self._accept_fitted()
        made = [self._make_forecast(snapshot, pool, now_s) for pool in snapshot.pools.values() if _lends(pool)]
        self._submit_due_fits(now_s)
        return tuple(command for command in made if command is not None)

    def close(self) -> None:
        self._fits.shutdown(wait=True, cancel_futures=True)

    def _make_forecast(self, snapshot: Snapshot, pool: Pool, now_s: float) -> Command | None:
        reading = snapshot.demand.get(pool.name)
        if reading is None:
            return None
        if self._backfills.setdefault(pool.name, reading.backfills) != reading.backfills:
            self._discard_forecaster(pool.name)
            self._backfills[pool.name] = reading.backfills
        forecaster = self._forecasters.get(pool.name)
        if forecaster is None:
            forecaster = self._forecasters[pool.name] = self._new_forecaster()
        self._feed_new_readings(forecaster, pool.name, now_s)
        if pool.name not in self._last_reading_s:  # its last reading is older than the history that is read
            return None
        rules, levels = pool.lending, list_quantiles(find_working_quantile(pool.lending, reading.shortages))
        forecast = forecaster.forecast(now_s, rules.horizon_s, quantiles=levels)
        if rules.loan_s_min > rules.horizon_s:
            forecast = forecast.with_min_loan_forecast(forecaster.forecast(now_s, rules.loan_s_min, quantiles=levels))
        return Command(f"forecast/{pool.name}/{now_s}", now_s, ForecastMade(pool.name, forecast), actor="forecast")

    def _discard_forecaster(self, pool: str) -> None:
        """Forget what was learned from the readings of a pool, and the fits that are under way."""
        self._forecasters.pop(pool, None)
        self._last_reading_s.pop(pool, None)
        for key in [key for key in self._fits_in_flight if key[0] == pool]:
            self._fits_in_flight.pop(key).cancel()

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


def _lends(pool: Pool) -> bool:
    return pool.kind is PoolKind.INFERENCE and pool.lending.enabled
