"""Demands for tests of the forecast."""

from __future__ import annotations

import numpy as np

from scheduler.forecast.binned_demand import BinnedDemand
from scheduler.forecast.demand_history import FloatArray

HOUR_S, DAY_S = 3_600.0, 86_400.0


def make_days(
    days: int, *, step_s: float = HOUR_S, noise: float = 0.0, seed: int = 1, drift: float = 0.0
) -> tuple[FloatArray, FloatArray]:
    """Return times in seconds and GPUs of a daily wave, both (n,)."""
    times_s = np.arange(0.0, days * DAY_S, step_s)
    wave = 100.0 + 60.0 * np.sin(2 * np.pi * times_s / DAY_S)
    errors = noise * np.random.default_rng(seed).standard_normal(len(times_s))
    return times_s, wave * np.exp(errors + drift * times_s / DAY_S)


def bin_values(gpus: FloatArray, *, step_s: float = HOUR_S) -> BinnedDemand:
    """Return demand with one reading at the beginning of each bin, (n,)."""
    return BinnedDemand(0, step_s, gpus.copy(), gpus.copy(), np.ones(len(gpus), dtype=np.bool_))
