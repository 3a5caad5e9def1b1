"""The promise of a share of short intervals, kept on demands that are made to catch lending out."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler.domain.lending_policy import LendingPolicy
from scheduler.scheduling.policies.lending_promise import list_working_quantiles
from scheduler.simulator.lending_frontier import PROMISE, LendingPool, RecordedDemand, forecast_recording
from tests.simulation.adversarial_demand import CALM_DAYS, GPUS, PER_DAY, STEP_S, TROUBLES, make_demand

RULES = LendingPolicy()
POOL = LendingPool(GPUS // 8, 8, RULES.headroom)
QUICK = ("above the capacity", "spikes after lending", "tripling each night")


def record(name: str) -> RecordedDemand:
    gpus = make_demand(name)
    known = ~np.isnan(gpus)
    times_s = np.arange(len(gpus), dtype=np.float64) * STEP_S
    levels = list_working_quantiles(RULES)
    return forecast_recording(times_s[known], gpus[known], POOL, horizon_s=RULES.horizon_s, zone="UTC", levels=levels)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in TROUBLES]
)
def test_shortages_stay_below_twice_the_target(name: str) -> None:
    recorded = record(name)
    lent = recorded.lend_by_promise(RULES)
    assert RULES.shortage_target is not None
    assert recorded.judge(PROMISE, None, lent).short_ratio < 2 * RULES.shortage_target
    assert lent[(CALM_DAYS - 1) * PER_DAY : CALM_DAYS * PER_DAY].mean() > POOL.nodes / 3
