"""Pending: what is still to come of one kind, in order of time, seen one item ahead.

Demand traces: from the rows of a file to GPUs over time, repeated with seeded changes for as long as it takes.

Forecasts: one incremental forecaster for each pool that lends, fed with what it has seen so far.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from heapq import merge
from itertools import count, pairwise
from random import Random
from statistics import median
from types import MappingProxyType
from typing import Generic, Protocol, TypeVar

from scheduler.documents.simulation import ClusterDocument, ClusterPoolDocument
from scheduler.documents.trace_files import DemandRow
from scheduler.domain.commands import ForecastMade
from scheduler.domain.fleet import Forecast, LendingPolicy, Pool, PoolKind
from scheduler.forecast.forecaster import SeasonalForecaster

T = TypeVar("T")


class LookaheadIterator(Generic[T]):
    """Draws items when they are needed, so that the iterator may be endless."""

    def __init__(self, items: Iterator[T], at_s: Callable[[T], float]) -> None:
        self._items = items
        self._at_s = at_s
        self._next: T | None = next(items, None)
        self.taken_count = 0

    @property
    def next_at_s(self) -> float:
        """When the next item is due; infinite where there is none."""
        return math.inf if self._next is None else self._at_s(self._next)

    def take(self) -> T:
        """The next item.

        Raises:
            IndexError: nothing is left.
        """
        if self._next is None:
            raise IndexError("nothing is left to come")
        item, self._next = self._next, next(self._items, None)
        self.taken_count += 1
        return item


MISSING_SHARE = 0.01
"""A load below this share of the pool's median is a gap in the recording, not a quiet time."""
LEVEL_SPREAD = 0.1
"""A repetition's level lies within this share of the original's, evenly."""
NOISE_SPREAD = 0.02
"""Standard deviation of each value's own change in a repetition, as a share of it."""


class DemandError(ValueError):
    """A demand trace that does not fit the cluster; the message names the line, the value and what is allowed."""


@dataclass(frozen=True, slots=True)
class DemandChange:
    """From `at_s` on `pool` needs `gpus` GPUs. `first_pass` is false in repetitions of the trace."""

    at_s: float
    pool: str
    gpus: float
    first_pass: bool = True


@dataclass(frozen=True, slots=True)
class DemandTrace:
    """One pool's demand as a step function: `gpus[i]` from `times_s[i]` on, the last one until the period ends."""

    pool: str
    times_s: tuple[float, ...]
    gpus: tuple[float, ...]

    @property
    def period_s(self) -> float:
        """From the first value to the end of the last, which lasts as long as a typical one."""
        steps_s = [later - earlier for earlier, later in pairwise(self.times_s)]
        return self.times_s[-1] - self.times_s[0] + (median(steps_s) if steps_s else 86_400.0)

    def iter_changes(self, seed: int) -> Iterator[DemandChange]:
        """The trace itself, then repetitions of it without end."""
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
    """The changes of all pools in order of time, without end where there is a trace at all."""
    return merge(*(trace.iter_changes(seed) for trace in traces), key=lambda change: change.at_s)


def build_demand_traces(rows: Iterable[DemandRow], cluster: ClusterDocument) -> tuple[DemandTrace, ...]:
    """One trace a pool, in GPUs: the series of its name, or the one that its `demand` names.

    Raises:
        DemandError: a row is of no inference pool of the cluster, or gives `load` for a pool without `peak_gpus`; a
            pool has no series in a file of many, or not the one that it names; or there is no row although the
            cluster has an inference pool.
    """
    by_series: dict[str, list[DemandRow]] = {}
    for row in rows:
        by_series.setdefault(row.pool, []).append(row)
    pools = [pool for pool in cluster.pools if pool.kind is PoolKind.INFERENCE]
    taken = [pool.demand_series for pool in pools]
    if pools and not by_series:
        names = ", ".join(pool.name for pool in pools)
        raise DemandError(f"demand: none is given; needed, because the cluster has inference pools: {names}")
    for series, (first, *_) in by_series.items():
        if series not in taken and not first.shared:
            allowed = ", ".join(taken) or "none: the cluster has no inference pool"
            raise DemandError(f"{first.path} line {first.line}: pool: got {series!r}; allowed: {allowed}")
    for pool in pools:
        if pool.demand_series not in by_series:
            rows_of = (
                "a series, which `demand` of the pool may name" if first.shared else "rows of every inference pool"
            )
            raise DemandError(
                f"{first.path} line 1: no demand of pool {pool.name}: got {', '.join(by_series)}; allowed: {rows_of}"
            )
    return tuple(_build_trace(pool, by_series[pool.demand_series]) for pool in pools)


def _build_trace(pool: ClusterPoolDocument, rows: list[DemandRow]) -> DemandTrace:
    times_s = tuple(row.time_s for row in rows)
    first = rows[0]
    for row in rows:
        if row.is_load != first.is_load:
            raise DemandError(
                f"{row.path} line {row.line}: pool {row.pool} mixes gpus and load; allowed: one of them in all its rows"
            )
    amounts = [row.amount for row in rows]
    if not first.is_load:
        return DemandTrace(pool.name, times_s, tuple(amounts))
    if pool.peak_gpus is None:
        raise DemandError(
            f"{first.path} line {first.line}: load: pool {pool.name} has no peak_gpus; allowed: give it, or gpus"
        )
    loads = amounts if first.shared else fill_gaps(amounts)
    largest = max(loads)
    if largest <= 0:
        raise DemandError(
            f"{first.path} line {first.line}: load: got '0' in all rows of pool {pool.name}; allowed: one above 0, "
            "which stands for its peak_gpus"
        )
    scale = pool.peak_gpus / largest
    return DemandTrace(pool.name, times_s, tuple(load * scale for load in loads))


def fill_gaps(loads: list[float]) -> list[float]:
    """Missing values replaced by the last one before them (the first one after, at the beginning)."""
    floor = MISSING_SHARE * median(loads)
    last = next((load for load in loads if load > floor), 0.0)
    filled = []
    for load in loads:
        last = load if load > floor else last
        filled.append(last)
    return filled


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
        self._future_changes = LookaheadIterator(trace.iter_changes(seed), lambda change: change.at_s)
        self._known: deque[DemandChange] = deque()
        self._period_s = period_s

    def observe(self, time_s: float, gpus: float) -> None:
        """It knew already."""

    def forecast(self, now_s: float, horizon_s: float) -> Forecast:
        while self._future_changes.next_at_s <= now_s + horizon_s + self._period_s:
            self._known.append(self._future_changes.take())
        while len(self._known) > 1 and self._known[1].at_s <= now_s:
            self._known.popleft()
        end_s = max(now_s, self._known[0].at_s) + horizon_s + self._period_s
        largest = max(change.gpus for change in self._known if change.at_s <= end_s)
        return Forecast(now_s, horizon_s, (0.999,), (largest,), "oracle")


ForecasterFactory = Callable[[DemandTrace, int, float], Forecaster]
FORECASTERS: Mapping[str, ForecasterFactory] = MappingProxyType(
    {
        SEASONAL: lambda trace, seed, period_s: SeasonalForecaster(),
        "oracle": lambda trace, seed, period_s: OracleForecaster(trace, seed=seed, period_s=period_s),
    }
)
"""By name: from a trace, the seed of its repetitions and the time between two forecasts to a pool's forecaster."""


class ForecastSource:
    """A forecast looks ahead over the pool's horizon: the time it takes to get a node back and serving again."""

    def __init__(
        self,
        pools: Iterable[Pool],
        traces: Iterable[DemandTrace],
        make_forecaster: Callable[[DemandTrace], Forecaster] = lambda trace: SeasonalForecaster(),
    ) -> None:
        by_pool = {trace.pool: trace for trace in traces}
        self._pools = tuple(
            pool for pool in pools if pool.kind is PoolKind.INFERENCE and pool.lending.enabled and pool.name in by_pool
        )
        self._forecasters = {pool.name: make_forecaster(by_pool[pool.name]) for pool in self._pools}
        self._pools_with_demand: set[str] = set()

    def observe(self, change: DemandChange) -> None:
        forecaster = self._forecasters.get(change.pool)
        if forecaster is not None:
            forecaster.observe(change.at_s, change.gpus)
            self._pools_with_demand.add(change.pool)

    def make_forecasts(self, now_s: float) -> tuple[ForecastMade, ...]:
        """A forecast for every pool that lends and whose demand has begun."""
        return tuple(
            ForecastMade(pool.name, _make_forecast(self._forecasters[pool.name], pool.lending, now_s))
            for pool in self._pools
            if pool.name in self._pools_with_demand
        )


def _make_forecast(forecaster: Forecaster, rules: LendingPolicy, now_s: float) -> Forecast:
    forecast = forecaster.forecast(now_s, rules.horizon_s)
    if rules.loan_s_min <= rules.horizon_s:
        return forecast
    return forecast.with_min_loan_forecast(forecaster.forecast(now_s, rules.loan_s_min))
