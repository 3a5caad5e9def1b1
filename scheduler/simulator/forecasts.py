"""Forecasts: one incremental forecaster for each pool that lends, fed with what it has seen so far."""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.domain.command import ForecastMade
from scheduler.domain.fleet import Pool, PoolKind
from scheduler.forecast.forecaster import SeasonalForecaster
from scheduler.simulator.traces import DemandChange, DemandTrace


class Forecasts:
    """A forecast looks ahead over the pool's horizon: the time it takes to get a node back and serving again."""

    def __init__(self, pools: Iterable[Pool], traces: Iterable[DemandTrace]) -> None:
        known = {trace.pool for trace in traces}
        self._pools = tuple(
            pool for pool in pools if pool.kind is PoolKind.INFERENCE and pool.lending.enabled and pool.name in known
        )
        self._forecasters = {pool.name: SeasonalForecaster() for pool in self._pools}
        self._heard_of: set[str] = set()

    def observe(self, change: DemandChange) -> None:
        forecaster = self._forecasters.get(change.pool)
        if forecaster is not None:
            forecaster.observe(change.at_s, change.gpus)
            self._heard_of.add(change.pool)

    def made_at(self, now_s: float) -> tuple[ForecastMade, ...]:
        """A forecast for every pool that lends and whose demand has begun."""
        return tuple(
            ForecastMade(pool.name, self._forecasters[pool.name].forecast(now_s, pool.lending.horizon_s))
            for pool in self._pools
            if pool.name in self._heard_of
        )
