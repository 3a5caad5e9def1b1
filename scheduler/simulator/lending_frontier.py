"""Lending frontier: GPU-hours that a forecast would have lent, against how often inference would have been short."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from scheduler.domain.lending_policy import LendingPolicy
from scheduler.domain.shortages import ShortageRecord
from scheduler.forecast.backtest import REPORTED, Readings, forecast_past, walk_forward
from scheduler.forecast.candidates import Target
from scheduler.forecast.demand_history import FloatArray
from scheduler.forecast.seasonality import DAY_S, STEPS_PER_SEASON, Season
from scheduler.scheduling.policies.lending_promise import find_working_quantile, list_working_quantiles

LEVELS = (0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 0.998, 0.999, 0.9995, 0.9999)
ORACLE, PROMISE = "oracle", "shortage target"
_COMPARED = ("combination", "daily seasonal", "persistence")


@dataclass(frozen=True, slots=True)
class LendingPool:
    """The nodes of an inference pool: `nodes` of `node_gpus` GPUs, of which a share `headroom` stays free.

    Loans of `partial_nodes` of them take `lendable_gpus` GPUs, and loans of the others take the whole node.
    """

    nodes: int
    node_gpus: int
    headroom: float
    partial_nodes: int = 0
    lendable_gpus: int = 1

    @property
    def gpus(self) -> int:
        return self.nodes * self.node_gpus

    def with_whole_nodes(self) -> LendingPool:
        """Return the pool as it is if all loans take whole nodes."""
        return replace(self, partial_nodes=0)

    def count_lendable(self, needed_gpus: FloatArray) -> FloatArray:
        """Return the GPUs of nodes, and then of parts of nodes, that inference does not need, (m,)."""
        spare_gpus = np.maximum(self.gpus * (1.0 - self.headroom) - needed_gpus, 0.0)
        whole = np.clip(np.floor(spare_gpus / self.node_gpus), 0, self.nodes - self.partial_nodes) * self.node_gpus
        parts = np.clip(np.floor((spare_gpus - whole) / self.lendable_gpus), 0, self.partial_nodes)
        lendable: FloatArray = whole + parts * self.lendable_gpus
        return lendable


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """One forecast at one quantile, or at those that a promise chooses.

    Args:
        quantile: of the forecast; None if it follows from a promised share of short intervals.
        oracle_share: GPU-hours lent, as a share of those that a forecast without error lends in whole nodes.
        short_ratio: share of intervals in which demand exceeds the GPUs that are not lent, or not back yet.
    """

    method: str
    quantile: float | None
    gpu_hours: float
    oracle_share: float
    short_ratio: float


@dataclass(frozen=True, slots=True)
class RecordedDemand:
    """Demand and forecasts of one recording, and the nodes of its pool.

    Args:
        peaks: (n,), the largest demand of each bin in GPUs.
        bins: the horizon in bins.
        lendable: (n,), GPUs of whole nodes that can be lent at each bin without a shortage within the horizon.
        levels: of `needed`, ascending.
        needed: (n, len(_COMPARED), len(levels)), demand that a loan must leave room for; infinite before a calibration.
    """

    pool: LendingPool
    step_s: float
    peaks: FloatArray
    bins: int
    lendable: FloatArray
    levels: tuple[float, ...]
    needed: FloatArray

    def judge(self, method: str, quantile: float | None, lent: FloatArray) -> FrontierPoint:
        """Return what lending `lent` GPUs at each bin, (n,), gains and costs. A return takes the horizon."""
        best, capacity = float(self.lendable.sum()), self.pool.gpus
        away = sliding_window_view(np.append(np.zeros(self.bins), lent), self.bins + 1).max(axis=1)
        is_short = (away > 0) & (np.minimum(self.peaks, capacity) > capacity - away)
        gpu_hours = float(lent.sum()) * self.step_s / 3_600.0
        share = float(lent.sum()) / best if best else 1.0
        return FrontierPoint(method, quantile, gpu_hours, share, float(is_short.mean()))

    def lend_by_promise(self, rules: LendingPolicy) -> FloatArray:
        """Return the GPUs that a pool lends at each bin, (n,), at the working quantile of its promise."""
        capacity = self.pool.gpus
        by_level = self.pool.count_lendable(self.needed[:, 0])
        lent, record = np.zeros(len(self.peaks)), ShortageRecord()
        for index, peak in enumerate(self.peaks.tolist()):
            away = int(lent[max(0, index - self.bins) : index].max(initial=0.0))
            spare = capacity - min(peak, capacity)
            record = record.observe(index * self.step_s, spare_gpus=spare, lent_gpus=away, cold_start_s=0.0)
            lent[index] = by_level[index, self.levels.index(find_working_quantile(rules, record))]
        return lent


def forecast_recording(
    times_s: Readings, gpus: Readings, pool: LendingPool, *, horizon_s: float, zone: str, levels: Sequence[float]
) -> RecordedDemand:
    """Forecast a recording at all its bins, in one pass.

    Raises:
        ValueError: as `forecast_past` raises it.
    """
    season = Season(DAY_S, DAY_S / STEPS_PER_SEASON, zone)
    past = forecast_past(times_s, gpus, horizon_s=horizon_s, target=Target.PEAK, season=season)
    demand, columns = past.candidates.demand, [REPORTED.index(name) for name in _COMPARED]
    needed = np.full((len(demand), len(columns), len(levels)), np.inf)
    for origins, quantiles in walk_forward(past, 0, levels):
        needed[origins] = np.maximum(quantiles[:, columns], demand.opens[origins][:, None, None])
    bins = past.candidates.horizon.bins
    beyond = np.append(demand.peaks, np.full(bins, demand.peaks[-1]))
    lendable = pool.with_whole_nodes().count_lendable(sliding_window_view(beyond, bins + 1).max(axis=1))
    return RecordedDemand(pool, demand.step_s, demand.peaks, bins, lendable, tuple(levels), needed)


def compute_frontier(
    times_s: Readings,
    gpus: Readings,
    pool: LendingPool,
    *,
    rules: LendingPolicy,
    zone: str = "UTC",
    levels: Sequence[float] = LEVELS,
) -> tuple[FrontierPoint, ...]:
    """Lend and return on a recorded demand, in one pass, everything that each forecast allows.

    A node that is asked back serves inference after the horizon of `rules`. Nothing is lent before a forecast is
    calibrated; the oracle lends from the first interval on. Demand above the pool's capacity makes no loan short. If
    `rules` promise a share of short intervals, the first point keeps that promise by the service's combined forecast.

    Raises:
        ValueError: as `forecast_past` raises it, or a level is not in (0, 1).
    """
    if not all(0 < level < 1 for level in levels):
        raise ValueError(f"levels must be in (0, 1), got {tuple(levels)}")
    promised = list_working_quantiles(rules)
    recorded = forecast_recording(
        times_s, gpus, pool, horizon_s=rules.horizon_s, zone=zone, levels=sorted({*levels, *promised})
    )
    points = [recorded.judge(PROMISE, None, recorded.lend_by_promise(rules))] if promised else []
    for column, name in enumerate(_COMPARED):
        for level in levels:
            needed = recorded.needed[:, column, recorded.levels.index(level)]
            points.append(recorded.judge(name, level, pool.count_lendable(needed)))
    return (*points, recorded.judge(ORACLE, 1.0, recorded.lendable))
