"""Share of the oracle's GPU-hours that a shortage target of 0.1% permits, and what a constant margin would have lent.

The margin is the best one with hindsight: the largest lending of all constants, added to demand or multiplied with it,
that leaves at most 0.1% of the intervals short. No service can know it. Demand is scaled to 95% of 64 nodes of 8 GPUs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from statistics import mean

import numpy as np

from cli.commands.forecast import read_series
from scheduler.domain.lending_policy import LendingPolicy
from scheduler.forecast.demand_history import FloatArray
from scheduler.scheduling.policies.lending_promise import list_working_quantiles
from scheduler.simulator.lending_frontier import PROMISE, LendingPool, RecordedDemand, forecast_recording
from tests.benchmarks.forecast import FILES
from tests.benchmarks.regime import data_folder

POOL, PEAK_SHARE, TARGET = LendingPool(64, 8, 0.02), 0.95, 0.001
RULES = LendingPolicy(shortage_target=TARGET)
FACTORS, ADDED_GPUS = np.arange(1.0, 4.0, 0.02), np.arange(0.0, 400.0, 4.0)


def rows() -> Iterator[tuple[str, str, str]]:
    """Return (name, target, measured)."""
    shares, shorts = list[float](), list[float]()
    for name, recorded in _record_all():
        ours = recorded.judge(PROMISE, None, recorded.lend_by_promise(RULES))
        shares.append(ours.oracle_share)
        shorts.append(ours.short_ratio)
        factor = _find_best(recorded, (factor * recorded.peaks for factor in FACTORS))
        added = _find_best(recorded, (recorded.peaks + gpus for gpus in ADDED_GPUS))
        told = f"{ours.oracle_share:.1%}, short {ours.short_ratio:.3%}"
        yield f"{name}: lent", "75%, short 0.1%" if name == "servegen_m_small" else "", told
        yield f"{name}: best constant factor, and added GPUs, with hindsight", "", f"{factor:.1%}, {added:.1%}"
    yield f"mean of {len(shares)} series: lent", "", f"{mean(shares):.1%}, short {mean(shorts):.3%}"


def _record_all() -> Iterator[tuple[str, RecordedDemand]]:
    for file in FILES:
        for series in read_series(data_folder() / "demand" / f"{file}.csv.gz"):
            amounts = np.array(series.amounts)
            gpus = amounts / amounts.max() * PEAK_SHARE * POOL.gpus
            name = file if file.startswith("servegen") else f"{file.partition('_')[0]} {series.name}"
            levels = list_working_quantiles(RULES)
            yield (
                name,
                forecast_recording(series.times_s, gpus, POOL, horizon_s=RULES.horizon_s, zone="UTC", levels=levels),
            )


def _find_best(recorded: RecordedDemand, needs: Iterable[FloatArray]) -> float:
    """Return the largest share of the oracle's GPU-hours of all `needs`, (n,) each, that keep the target."""
    points = [recorded.judge("hindsight", None, POOL.count_lendable(needed)) for needed in needs]
    return max((point.oracle_share for point in points if point.short_ratio <= TARGET), default=0.0)
