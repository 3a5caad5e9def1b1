"""Forecasts: one incremental forecaster for each pool that lends, fed with what it has seen so far."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Protocol

from scheduler.domain.command import ForecastMade
from scheduler.domain.fleet import LendingPolicy, Pool, PoolKind
from scheduler.domain.forecast import Forecast
from scheduler.forecast.forecaster import SeasonalForecaster
from scheduler.simulator.pending import Pending
from scheduler.simulator.traces import DemandChange, DemandTrace

SEASONAL = "seasonal"


class Forecaster(Protocol):
    def observe(self, time_s: float, gpus: float) -> None:
        """Demand was `gpus` from `time_s` on."""

    def forecast(self, now_s: float, horizon_s: float) -> Forecast:
        """Quantiles of the largest demand from now to `horizon_s` later."""


class OracleForecaster:
    """Knows the demand to come, its repetitions too, and answers with the largest of it.

    It looks one period between forecasts beyond the horizon: what rises in that time can be answered at the next
    forecast, and by then it is too late for a node to be home and serving.
    """

    def __init__(self, trace: DemandTrace, *, seed: int, period_s: float) -> None:
        self._coming = Pending(trace.changes(seed), lambda change: change.at_s)
        self._known: deque[DemandChange] = deque()
        self._period_s = period_s

    def observe(self, time_s: float, gpus: float) -> None:
        """It knew already."""

    def forecast(self, now_s: float, horizon_s: float) -> Forecast:
        while self._coming.next_s <= now_s + horizon_s + self._period_s:
            self._known.append(self._coming.take())
        while len(self._known) > 1 and self._known[1].at_s <= now_s:
            self._known.popleft()
        end_s = max(now_s, self._known[0].at_s) + horizon_s + self._period_s
        largest = max(change.gpus for change in self._known if change.at_s <= end_s)
        return Forecast(now_s, horizon_s, (0.999,), (largest,), "oracle")


MakeForecaster = Callable[[DemandTrace, int, float], Forecaster]
FORECASTERS: Mapping[str, MakeForecaster] = MappingProxyType(
    {
        SEASONAL: lambda trace, seed, period_s: SeasonalForecaster(),
        "oracle": lambda trace, seed, period_s: OracleForecaster(trace, seed=seed, period_s=period_s),
    }
)
"""By name: from a trace, the seed of its repetitions and the time between two forecasts to a pool's forecaster."""


class Forecasts:
    """A forecast looks ahead over the pool's horizon: the time it takes to get a node back and serving again."""

    def __init__(
        self,
        pools: Iterable[Pool],
        traces: Iterable[DemandTrace],
        make: Callable[[DemandTrace], Forecaster] = lambda trace: SeasonalForecaster(),
    ) -> None:
        by_pool = {trace.pool: trace for trace in traces}
        self._pools = tuple(
            pool for pool in pools if pool.kind is PoolKind.INFERENCE and pool.lending.enabled and pool.name in by_pool
        )
        self._forecasters = {pool.name: make(by_pool[pool.name]) for pool in self._pools}
        self._heard_of: set[str] = set()

    def observe(self, change: DemandChange) -> None:
        forecaster = self._forecasters.get(change.pool)
        if forecaster is not None:
            forecaster.observe(change.at_s, change.gpus)
            self._heard_of.add(change.pool)

    def made_at(self, now_s: float) -> tuple[ForecastMade, ...]:
        """A forecast for every pool that lends and whose demand has begun."""
        return tuple(
            ForecastMade(pool.name, _forecast(self._forecasters[pool.name], pool.lending, now_s))
            for pool in self._pools
            if pool.name in self._heard_of
        )


def _forecast(forecaster: Forecaster, rules: LendingPolicy, now_s: float) -> Forecast:
    forecast = forecaster.forecast(now_s, rules.horizon_s)
    if rules.loan_s_min <= rules.horizon_s:
        return forecast
    return forecast.lasting(forecaster.forecast(now_s, rules.loan_s_min))
