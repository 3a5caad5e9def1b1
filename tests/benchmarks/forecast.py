"""Time of one forecast in the simulator: a reading and a forecast every 5 minutes, with 14 or more days of history."""

from __future__ import annotations

from statistics import median
from time import perf_counter

import numpy as np

from scheduler.forecast.forecaster import SeasonalForecaster

STEP_S = 300.0
HISTORY_STEPS = 14 * 288
TIMED_STEPS = 500


def rows() -> list[tuple[str, str, str]]:
    """Return (name, target, median)."""
    generator = np.random.default_rng(7)
    times_s = np.arange(HISTORY_STEPS + TIMED_STEPS) * STEP_S
    gpus = (300 + 200 * np.sin(2 * np.pi * times_s / 86_400)) * np.exp(0.1 * generator.standard_normal(len(times_s)))
    forecaster = SeasonalForecaster()
    for time_s, demand in zip(times_s[:HISTORY_STEPS], gpus, strict=False):
        forecaster.observe(float(time_s), float(demand))
    begin_s = perf_counter()
    forecaster.forecast(float(times_s[HISTORY_STEPS - 1]), 1_200.0)
    first_s = perf_counter() - begin_s
    taken_s = []
    for time_s, demand in zip(times_s[HISTORY_STEPS:], gpus[HISTORY_STEPS:], strict=True):
        begin_s = perf_counter()
        forecaster.observe(float(time_s), float(demand))
        forecaster.forecast(float(time_s), 1_200.0)
        taken_s.append(perf_counter() - begin_s)
    return [
        ("forecast: reading and forecast, 14 days of 5 minutes", "1 ms", f"{median(taken_s) * 1e3:.3f} ms"),
        ("forecast: first forecast of a horizon, whole window calibrated", "100 ms", f"{first_s * 1e3:.1f} ms"),
    ]


if __name__ == "__main__":
    for row in rows():
        print(" | ".join(row))
