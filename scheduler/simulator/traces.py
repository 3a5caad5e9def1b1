"""Demand traces: from the rows of a file to GPUs over time, repeated with seeded changes for as long as it takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from heapq import merge
from itertools import count, pairwise
from random import Random
from statistics import median

from scheduler.documents.cluster import ClusterDocument
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
    """One trace a pool, in GPUs.

    Raises:
        DemandError: a row names no inference pool of the cluster, or gives `load` for a pool without `peak_gpus`.
    """
    by_pool: dict[str, list[DemandRow]] = {}
    peaks = {pool.name: pool.peak_gpus for pool in cluster.pools if pool.kind is PoolKind.INFERENCE}
    for row in rows:
        if row.pool not in peaks:
            allowed = ", ".join(peaks) or "none: the cluster has no inference pool"
            raise DemandError(f"demand line {row.line}: pool: got {row.pool!r}; allowed: {allowed}")
        by_pool.setdefault(row.pool, []).append(row)
    return tuple(_trace(pool, pool_rows, peaks) for pool, pool_rows in by_pool.items())


def _trace(pool: str, rows: list[DemandRow], peaks: Mapping[str, float | None]) -> DemandTrace:
    times_s = tuple(row.time_s for row in rows)
    first = rows[0]
    for row in rows:
        if row.is_load != first.is_load:
            raise DemandError(
                f"demand line {row.line}: pool {pool} mixes gpus and load; allowed: one of them in all its rows"
            )
    if not first.is_load:
        return DemandTrace(pool, times_s, tuple(row.amount for row in rows))
    peak_gpus = peaks[pool]
    if peak_gpus is None:
        raise DemandError(f"demand line {first.line}: load: pool {pool} has no peak_gpus; allowed: give it, or gpus")
    loads = without_gaps([row.amount for row in rows])
    largest = max(loads)
    scale = peak_gpus / largest if largest > 0 else 0.0
    return DemandTrace(pool, times_s, tuple(load * scale for load in loads))


def without_gaps(loads: list[float]) -> list[float]:
    """Missing values replaced by the last one before them (the first one after, at the beginning)."""
    floor = MISSING_SHARE * median(loads)
    last = next((load for load in loads if load > floor), 0.0)
    filled = []
    for load in loads:
        last = load if load > floor else last
        filled.append(last)
    return filled
