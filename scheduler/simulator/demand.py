"""Inference demand of a simulation: traces in GPUs over time, and the forecasters that observe them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import count, pairwise
from random import Random
from statistics import median
from types import MappingProxyType
from typing import Generic, TypeVar

from scheduler.documents.simulation import ClusterDocument
from scheduler.documents.trace_files import DemandRow
from scheduler.domain.commands import ForecastMade
from scheduler.domain.fleet import Forecast, Pool, PoolKind, get_shortages
from scheduler.domain.snapshot import Snapshot
from scheduler.forecast.demand_history import fill_gaps
from scheduler.forecast.forecaster import PoolForecaster, fit_due, list_quantiles
from scheduler.forecast.pool_forecast import ObservingForecaster, forecast_pool
from scheduler.scheduling.policies.lending_promise import find_working_quantile
from scheduler.scheduling.policies.settings import PolicySettings
from scheduler.scheduling.policies.way_back import measure_ways_back

T = TypeVar("T")
_PERIOD_S = PolicySettings().full_pass_period_s


class LookaheadIterator(Generic[T]):
    """Iterator that shows the time of its next item. Items are drawn on demand, so that it may be endless."""

    def __init__(self, items: Iterator[T], at_s: Callable[[T], float]) -> None:
        self._items = items
        self._at_s = at_s
        self._next: T | None = next(items, None)
        self.taken_count = 0

    @property
    def next_at_s(self) -> float:
        """Time of the next item; infinity if there is none."""
        return math.inf if self._next is None else self._at_s(self._next)

    def take(self) -> T:
        """Return the next item.

        Raises:
            IndexError: no items are left.
        """
        if self._next is None:
            raise IndexError("no items are left")
        item, self._next = self._next, next(self._items, None)
        self.taken_count += 1
        return item


LEVEL_SPREAD = 0.1
"""The level of a repetition is uniform within this fraction of the original."""
NOISE_SPREAD = 0.02
"""Standard deviation of the noise of each value in a repetition, as a fraction of the value."""


class DemandError(ValueError):
    """The demand trace does not fit the cluster. The message names line, value and accepted values."""


@dataclass(frozen=True, slots=True)
class DemandChange:
    """The demand of a pool from `at_s` on. `first_pass` is False in repetitions of the trace."""

    at_s: float
    pool: str
    gpus: float
    first_pass: bool = True


@dataclass(frozen=True, slots=True)
class DemandTrace:
    """Demand of one pool as a step function: `gpus[i]` from `times_s[i]` on, the last until the end of the period."""

    pool: str
    times_s: tuple[float, ...]
    gpus: tuple[float, ...]

    @property
    def period_s(self) -> float:
        """Duration of the trace. The last value lasts for the median interval."""
        steps_s = [later - earlier for earlier, later in pairwise(self.times_s)]
        return self.times_s[-1] - self.times_s[0] + (median(steps_s) if steps_s else 86_400.0)

    def iter_changes(self, seed: int) -> Iterator[DemandChange]:
        """Yield the trace, then repetitions with random changes without end."""
        for at_s, gpus in zip(self.times_s, self.gpus, strict=True):
            yield DemandChange(at_s, self.pool, gpus)
        for repetition in count(1):
            random = Random(f"demand/{seed}/{self.pool}/{repetition}")
            level = random.uniform(1.0 - LEVEL_SPREAD, 1.0 + LEVEL_SPREAD)
            offset_s = repetition * self.period_s
            for at_s, gpus in zip(self.times_s, self.gpus, strict=True):
                changed = gpus * level * max(0.0, random.gauss(1.0, NOISE_SPREAD))
                yield DemandChange(at_s + offset_s, self.pool, changed, first_pass=False)


def merge_demand_changes(traces: Iterable[DemandTrace], seed: int) -> Iterator[DemandChange]:
    """Return the changes of all pools in order of time. It is endless unless there are no traces."""
    return merge(*(trace.iter_changes(seed) for trace in traces), key=lambda change: change.at_s)


def build_demand_traces(rows: Iterable[DemandRow], cluster: ClusterDocument) -> tuple[DemandTrace, ...]:
    """Return one trace per inference pool: the series named by its `demand`, or the one with its own name.

    Raises:
        DemandError: a row belongs to no inference pool; a pool without `peak_gpus` has a `load`; the series of a pool
            is missing; or there are no rows although the cluster has an inference pool.
    """
    by_series: dict[str, list[DemandRow]] = {}
    for row in rows:
        by_series.setdefault(row.pool, []).append(row)
    pools = [pool for pool in cluster.pools if pool.kind is PoolKind.INFERENCE]
    taken = [pool.demand_series for pool in pools]
    if pools and not by_series:
        names = ", ".join(pool.name for pool in pools)
        raise DemandError(f"demand: missing, but the cluster has inference pools ({names}). Add a demand file")
    for series, (first, *_) in by_series.items():
        if series not in taken and not first.shared:
            allowed = ", ".join(taken) or "none: the cluster has no inference pool"
            raise DemandError(f"{first.path} line {first.line}: pool: got {series!r}; allowed: {allowed}")
    for pool in pools:
        if pool.demand_series not in by_series:
            rows_of = "a series named by `demand` of the pool" if first.shared else "rows of every inference pool"
            raise DemandError(
                f"{first.path} line 1: no demand of pool {pool.name}: got {', '.join(by_series)}; allowed: {rows_of}"
            )
    return tuple(build_trace(pool.name, by_series[pool.demand_series], peak_gpus=pool.peak_gpus) for pool in pools)


def build_trace(pool: str, rows: Sequence[DemandRow], *, peak_gpus: float | None) -> DemandTrace:
    """Return the trace of one series, whose rows have ascending times. `peak_gpus` is the demand at the largest load.

    Raises:
        DemandError: the rows mix GPUs and load, or have a load without `peak_gpus` or without a value above 0.
    """
    times_s = tuple(row.time_s for row in rows)
    first = rows[0]
    for row in rows:
        if row.is_load != first.is_load:
            raise DemandError(
                f"{row.path} line {row.line}: pool {row.pool} mixes gpus and load; allowed: one of them in all its rows"
            )
    amounts = [row.amount for row in rows]
    if not first.is_load:
        return DemandTrace(pool, times_s, tuple(amounts))
    if peak_gpus is None:
        raise DemandError(
            f"{first.path} line {first.line}: load: pool {pool} has no peak_gpus; allowed: give it, or gpus"
        )
    loads = amounts if first.shared else fill_gaps(amounts).tolist()
    largest = max(loads)
    if largest <= 0:
        raise DemandError(
            f"{first.path} line {first.line}: load: got '0' in all rows of pool {pool}; allowed: one above 0, "
            "which stands for its peak_gpus"
        )
    scale = peak_gpus / largest
    return DemandTrace(pool, times_s, tuple(load * scale for load in loads))


COMBINED = "combined"


class OracleForecaster:
    """Forecaster that knows the largest future demand, including that of repetitions.

    It looks beyond the horizon by the time between two forecasts: for demand that rises in that time, the next forecast
    would be too late to return a node.
    """

    def __init__(self, trace: DemandTrace, *, seed: int, period_s: float) -> None:
        self._future_changes = LookaheadIterator(trace.iter_changes(seed), lambda change: change.at_s)
        self._known: deque[DemandChange] = deque()
        self._period_s = period_s

    def observe(self, time_s: float, gpus: float) -> None:
        """Do nothing: the future demand is known."""

    def forecast(self, now_s: float, horizon_s: float, *, quantiles: tuple[float, ...] = (0.999,)) -> Forecast:
        while self._future_changes.next_at_s <= now_s + horizon_s + self._period_s:
            self._known.append(self._future_changes.take())
        while len(self._known) > 1 and self._known[1].at_s <= now_s:
            self._known.popleft()
        end_s = max(now_s, self._known[0].at_s) + horizon_s + self._period_s
        largest = max(change.gpus for change in self._known if change.at_s <= end_s)
        return Forecast(now_s, horizon_s, quantiles, (largest,) * len(quantiles), "oracle")


ForecasterFactory = Callable[[DemandTrace, str, int, float], ObservingForecaster]
FORECASTERS: Mapping[str, ForecasterFactory] = MappingProxyType(
    {
        COMBINED: lambda trace, zone, seed, period_s: PoolForecaster(zone=zone),
        "seasonal": lambda trace, zone, seed, period_s: PoolForecaster(zone=zone, method="daily seasonal"),
        "persistence": lambda trace, zone, seed, period_s: PoolForecaster(zone=zone, method="persistence"),
        "oracle": lambda trace, zone, seed, period_s: OracleForecaster(trace, seed=seed, period_s=period_s),
    }
)
"""Factories by name. They take a trace, the time zone of its pool, the seed of the repetitions, and the seconds between
two forecasts."""


_MakeForecaster = Callable[[DemandTrace, str], ObservingForecaster]


class ForecastSource:
    """Forecasters of the lending pools. The horizon is the time that it takes to recall a node and serve from it.

    Args:
        make_forecaster: returns the forecaster of a pool, from its trace and its time zone.
        period_s: time between two forecasts.
    """

    def __init__(
        self,
        pools: Iterable[Pool],
        traces: Iterable[DemandTrace],
        make_forecaster: _MakeForecaster = lambda trace, zone: PoolForecaster(zone=zone),
        *,
        period_s: float = _PERIOD_S,
    ) -> None:
        by_pool = {trace.pool: trace for trace in traces}
        self._pools = tuple(
            pool for pool in pools if pool.kind is PoolKind.INFERENCE and pool.lending.enabled and pool.name in by_pool
        )
        self._forecasters = {
            pool.name: make_forecaster(by_pool[pool.name], pool.lending.time_zone) for pool in self._pools
        }
        self._pools_with_demand: set[str] = set()
        self._period_s = period_s

    def observe(self, change: DemandChange) -> None:
        forecaster = self._forecasters.get(change.pool)
        if forecaster is not None:
            forecaster.observe(change.at_s, change.gpus)
            self._pools_with_demand.add(change.pool)

    def make_forecasts(self, now_s: float, snapshot: Snapshot) -> tuple[ForecastMade, ...]:
        """Return a forecast for every lending pool with observed demand or a profile, after the fits that are due.

        `snapshot` has the records of shortages and the measured times of the way back.
        """
        fit_due((each for each in self._forecasters.values() if isinstance(each, PoolForecaster)), now_s)
        ways = measure_ways_back(snapshot, self._pools)
        return tuple(
            ForecastMade(pool.name, self._make_forecast(pool, snapshot, ways[pool.name].horizon_s, now_s))
            for pool in self._pools
            if pool.name in self._pools_with_demand or pool.lending.demand_profile
        )

    def _make_forecast(self, pool: Pool, snapshot: Snapshot, horizon_s: float, now_s: float) -> Forecast:
        reading = snapshot.demand.get(pool.name)
        return forecast_pool(
            self._forecasters[pool.name] if pool.name in self._pools_with_demand else None,
            pool.lending,
            list_quantiles(find_working_quantile(pool.lending, get_shortages(snapshot.demand, pool.name))),
            now_s=now_s,
            horizon_s=horizon_s,
            observed_gpus=0.0 if reading is None else reading.asked_gpus,
            period_s=self._period_s,
        )
