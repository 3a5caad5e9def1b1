"""DemandWatch: keeps a forecaster for each lending pool up to date, and turns it into commands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from scheduler.domain.command import Command, ForecastMade
from scheduler.domain.fleet import Pool, PoolKind
from scheduler.domain.forecast import Forecast
from scheduler.domain.snapshot import Snapshot
from scheduler.store.protocol import Store


class Forecaster(Protocol):
    """What the watch needs of scheduler.forecast.forecaster.SeasonalForecaster."""

    def observe(self, time_s: float, gpus: float) -> None: ...

    def forecast(self, now_s: float, horizon_s: float, *, quantiles: tuple[float, ...]) -> Forecast: ...


class DemandWatch:
    """A new leader reads the recorded demand once; after that each reading passes by in the snapshot."""

    def __init__(self, store: Store, new_forecaster: Callable[[], Forecaster], *, memory_s: float) -> None:
        self._store = store
        self._new_forecaster = new_forecaster
        self._memory_s = memory_s
        self._forecasters: dict[str, Forecaster] = {}
        self._seen_s: dict[str, float] = {}

    def forecasts(self, snapshot: Snapshot, now_s: float) -> tuple[Command, ...]:
        """A fresh forecast for each inference pool that lends and whose demand is known."""
        made = [self._forecast(snapshot, pool, now_s) for pool in snapshot.pools.values() if _lends(pool)]
        return tuple(command for command in made if command is not None)

    def _forecast(self, snapshot: Snapshot, pool: Pool, now_s: float) -> Command | None:
        if pool.name not in snapshot.demand:
            return None
        forecaster = self._forecasters.get(pool.name)
        if forecaster is None:
            forecaster = self._forecasters[pool.name] = self._new_forecaster()
        self._catch_up(forecaster, pool.name, now_s)
        if pool.name not in self._seen_s:  # its last reading is older than what is remembered
            return None
        rules, levels = pool.lending, _levels(pool)
        forecast = forecaster.forecast(now_s, rules.horizon_s, quantiles=levels)
        if rules.loan_s_min > rules.horizon_s:
            forecast = forecast.lasting(forecaster.forecast(now_s, rules.loan_s_min, quantiles=levels))
        return Command(f"forecast/{pool.name}/{now_s}", now_s, ForecastMade(pool.name, forecast), actor="forecast")

    def _catch_up(self, forecaster: Forecaster, pool: str, now_s: float) -> None:
        since_s = self._seen_s.get(pool, now_s - self._memory_s)
        for reading in self._store.readings(pool, since_s=since_s):
            if reading.at_s > self._seen_s.get(pool, float("-inf")):
                forecaster.observe(reading.at_s, reading.asked_gpus)
                self._seen_s[pool] = reading.at_s


def _lends(pool: Pool) -> bool:
    return pool.kind is PoolKind.INFERENCE and pool.lending.enabled


def _levels(pool: Pool) -> tuple[float, ...]:
    """What people like to see, and the level that the pool's owner lends by."""
    return tuple(sorted({0.5, 0.9, 0.95, 0.99, pool.lending.quantile}))
