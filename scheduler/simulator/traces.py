"""Demand traces: from the rows of a file to GPUs over time, repeated with seeded changes for as long as it takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import merge
from itertools import count, pairwise
from random import Random
from statistics import median

from scheduler.documents.cluster import ClusterDocument, PoolDocument
from scheduler.documents.trace import DemandRow
from scheduler.domain.fleet import PoolKind

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

    def changes(self, seed: int) -> Iterator[DemandChange]:
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


def demand_changes(traces: Iterable[DemandTrace], seed: int) -> Iterator[DemandChange]:
    """The changes of all pools in order of time, without end where there is a trace at all."""
    return merge(*(trace.changes(seed) for trace in traces), key=lambda change: change.at_s)


def demand_traces(rows: Iterable[DemandRow], cluster: ClusterDocument) -> tuple[DemandTrace, ...]:
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
    taken = [pool.series for pool in pools]
    if pools and not by_series:
        names = ", ".join(pool.name for pool in pools)
        raise DemandError(f"demand: none is given; needed, because the cluster has inference pools: {names}")
    for series, (first, *_) in by_series.items():
        if series not in taken and not first.shared:
            allowed = ", ".join(taken) or "none: the cluster has no inference pool"
            raise DemandError(f"{first.path} line {first.line}: pool: got {series!r}; allowed: {allowed}")
    for pool in pools:
        if pool.series not in by_series:
            rows_of = (
                "a series, which `demand` of the pool may name" if first.shared else "rows of every inference pool"
            )
            raise DemandError(
                f"{first.path} line 1: no demand of pool {pool.name}: got {', '.join(by_series)}; allowed: {rows_of}"
            )
    return tuple(_trace(pool, by_series[pool.series]) for pool in pools)


def _trace(pool: PoolDocument, rows: list[DemandRow]) -> DemandTrace:
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
    loads = amounts if first.shared else without_gaps(amounts)
    largest = max(loads)
    if largest <= 0:
        raise DemandError(
            f"{first.path} line {first.line}: load: got '0' in all rows of pool {pool.name}; allowed: one above 0, "
            "which stands for its peak_gpus"
        )
    scale = pool.peak_gpus / largest
    return DemandTrace(pool.name, times_s, tuple(load * scale for load in loads))


def without_gaps(loads: list[float]) -> list[float]:
    """Missing values replaced by the last one before them (the first one after, at the beginning)."""
    floor = MISSING_SHARE * median(loads)
    last = next((load for load in loads if load > floor), 0.0)
    filled = []
    for load in loads:
        last = load if load > floor else last
        filled.append(last)
    return filled
