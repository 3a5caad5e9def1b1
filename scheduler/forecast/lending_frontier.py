"""Lending frontier: GPU-hours that a forecast would have lent, against how often inference would have been short."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from scheduler.forecast.backtest import REPORTED, Readings, forecast_past, walk_forward
from scheduler.forecast.candidates import Target
from scheduler.forecast.demand_history import FloatArray
from scheduler.forecast.seasonality import DAY_S, STEPS_PER_SEASON, Season

LEVELS = (0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 0.998, 0.999, 0.9995, 0.9999)
ORACLE = "oracle"
_COMPARED = ("combination", "daily seasonal", "persistence")


@dataclass(frozen=True, slots=True)
class LendingPool:
    """The nodes of an inference pool: `nodes` of `node_gpus` GPUs, of which a share `headroom` stays free."""

    nodes: int
    node_gpus: int
    headroom: float

    def count_lendable(self, needed_gpus: FloatArray) -> FloatArray:
        """Return the whole nodes that inference does not need, (m,)."""
        spare_gpus = self.nodes * self.node_gpus * (1.0 - self.headroom) - needed_gpus
        return np.clip(np.floor(spare_gpus / self.node_gpus), 0, self.nodes)


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """One forecast at one quantile.

    Args:
        oracle_share: GPU-hours lent, as a share of those that a forecast without error lends.
        short_ratio: share of intervals in which demand exceeds the GPUs that are not lent, or not back yet.
    """

    method: str
    quantile: float
    gpu_hours: float
    oracle_share: float
    short_ratio: float


def compute_frontier(
    times_s: Readings,
    gpus: Readings,
    pool: LendingPool,
    *,
    horizon_s: float,
    zone: str = "UTC",
    levels: Sequence[float] = LEVELS,
) -> tuple[FrontierPoint, ...]:
    """Lend and return on a recorded demand, in one pass, everything that each forecast allows.

    A node that is asked back serves inference after `horizon_s`. Nothing is lent before a forecast is calibrated; the
    oracle lends from the first interval on. Demand above the pool's capacity makes no forecast short.

    Raises:
        ValueError: as `forecast_past` raises it, or a level is not in (0, 1).
    """
    if not all(0 < level < 1 for level in levels):
        raise ValueError(f"levels must be in (0, 1), got {tuple(levels)}")
    season = Season(DAY_S, DAY_S / STEPS_PER_SEASON, zone)
    past = forecast_past(times_s, gpus, horizon_s=horizon_s, target=Target.PEAK, season=season)
    demand, bins = past.candidates.demand, past.candidates.horizon.bins
    needed = np.full((len(demand), len(REPORTED), len(levels)), np.inf)
    for origins, quantiles in walk_forward(past, 0, levels):
        needed[origins] = np.maximum(quantiles, demand.opens[origins][:, None, None])
    ahead = sliding_window_view(np.append(demand.peaks, np.full(bins, demand.peaks[-1])), bins + 1).max(axis=1)
    hours = demand.step_s / 3_600.0
    best_hours = float(pool.count_lendable(ahead).sum()) * pool.node_gpus * hours

    def judge(method: str, level: float, needs: FloatArray) -> FrontierPoint:
        lendable = pool.count_lendable(needs)
        lent_hours = float(lendable.sum()) * pool.node_gpus * hours
        share = lent_hours / best_hours if best_hours else 1.0
        return FrontierPoint(method, level, lent_hours, share, _compute_short_ratio(pool, demand.peaks, lendable, bins))

    return (
        *(judge(name, level, needed[:, REPORTED.index(name), index]) for name, index, level in _list_points(levels)),
        judge(ORACLE, 1.0, ahead),
    )


def _list_points(levels: Sequence[float]) -> Iterator[tuple[str, int, float]]:
    return ((name, index, level) for name in _COMPARED for index, level in enumerate(levels))


def _compute_short_ratio(pool: LendingPool, peaks: FloatArray, lendable: FloatArray, bins: int) -> float:
    """Return the share of intervals in which demand exceeds the nodes that were not lent within the horizon before."""
    lent = sliding_window_view(np.append(np.zeros(bins), lendable), bins + 1).max(axis=1)
    capacity = pool.nodes * pool.node_gpus
    return float((np.minimum(peaks, capacity) > capacity - lent * pool.node_gpus).mean())
