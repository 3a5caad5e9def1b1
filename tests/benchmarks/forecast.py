"""Forecasts of the shared demand series against single methods, and the time of fits and forecasts.

A cell is one series at one horizon: 10, 20 and 60 minutes for series sampled every ten minutes, otherwise 5, 15 and 60.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import exp, log
from statistics import mean, median
from time import process_time

import numpy as np

from cli.commands.forecast import read_series
from scheduler.forecast.backtest import COMBINATION, ETS, BacktestReport, run_backtest
from scheduler.forecast.candidates import Target
from scheduler.forecast.forecaster import PoolForecaster, fit_due
from tests.benchmarks.regime import data_folder

STEP_S = 300.0
HISTORY_STEPS, TIMED_STEPS = 28 * 288, 288
FILES = ("servegen_m_small", "servegen_m_mid", "azure_functions_fn0_to_4", "nab_twitter_volume_5min")
HORIZONS_S = (300.0, 900.0, 3_600.0)
SINGLE = ("persistence", "daily seasonal", ETS)


def rows() -> list[tuple[str, str, str]]:
    """Return (name, target, measured)."""
    return [*time_forecasts(), *(row for target in Target for row in judge_forecasts(target))]


def time_forecasts() -> Iterator[tuple[str, str, str]]:
    generator = np.random.default_rng(7)
    times_s = np.arange(HISTORY_STEPS + TIMED_STEPS) * STEP_S
    gpus = (300 + 200 * np.sin(2 * np.pi * times_s / 86_400)) * np.exp(0.1 * generator.standard_normal(len(times_s)))
    forecaster, taken_s = PoolForecaster(), list[float]()
    for time_s, demand in zip(times_s[:HISTORY_STEPS].tolist(), gpus.tolist(), strict=False):
        forecaster.observe(time_s, demand)
    forecaster.forecast(time_s, 1_200.0)
    fit_due([forecaster], time_s)
    begin_s = process_time()
    [task] = forecaster.list_due_fits(time_s + 86_400.0, np.zeros(len(forecaster.equations[0].targets))).values()
    task.run()
    fit_s = process_time() - begin_s
    for time_s, demand in zip(times_s[HISTORY_STEPS:].tolist(), gpus[HISTORY_STEPS:].tolist(), strict=True):
        begin_s = process_time()
        forecaster.observe(time_s, demand)
        forecaster.forecast(time_s, 1_200.0)
        taken_s.append(process_time() - begin_s)
    yield "forecast: reading and forecast, 28 days of 5 minutes", "5 ms", f"{median(taken_s) * 1e3:.1f} ms"
    yield "forecast: fits of 100 pools, two horizons each", "60 s", f"{200 * fit_s:.0f} s"


def judge_forecasts(target: Target) -> Iterator[tuple[str, str, str]]:
    cells = [(horizon_s, report) for horizon_s, report in backtest_cells(target)]
    ratios = {horizon_s: [_compare(report) for at_s, report in cells if at_s == horizon_s] for horizon_s in HORIZONS_S}
    for horizon_s, found in ratios.items():
        best = min(_geometric_mean(each[name] for each in found) for name in SINGLE)
        name = f"forecast: loss of {target} at {horizon_s / 60:.0f} min, relative to the best single method"
        yield name, "0.97", f"{1 / best:.3f}"
    worst = [1 / min(each.values()) for found in ratios.values() for each in found]
    above = sum(ratio > 1.03 for ratio in worst)
    yield f"forecast: worst cell of {target}, relative to its best single method", "1.03", f"{max(worst):.3f}"
    yield f"forecast: cells of {target} above 1.03", "0", f"{above} of {len(worst)}"
    covered, beyond = zip(*(_find_coverage(report) for _, report in cells), strict=True)
    inside = sum(0.93 <= share <= 0.97 for share in covered) / len(covered)
    yield f"forecast: cells of {target} with 93 to 97% below q95", "90%", f"{inside:.0%}"
    yield f"forecast: coverage of q95 of {target}", "91 to 98.5%", f"{min(covered):.1%} to {max(covered):.1%}"
    yield f"forecast: mean share of {target} above q99.9", "0.15%", f"{mean(beyond):.2%}"


def backtest_cells(target: Target) -> Iterator[tuple[float, BacktestReport]]:
    for name in FILES:
        for series in read_series(data_folder() / "demand" / f"{name}.csv.gz"):
            for horizon_s in HORIZONS_S:
                yield horizon_s, run_backtest(series.times_s, series.amounts, horizon_s=horizon_s, target=target)


def _compare(report: BacktestReport) -> dict[str, float]:
    """Return the loss of each single method, relative to that of the combination."""
    losses = {score.method: score.loss for score in report.scores}
    return {name: losses[name] / losses[COMBINATION] for name in SINGLE}


def _find_coverage(report: BacktestReport) -> tuple[float, float]:
    """Return the share of outcomes at or below q95, and the share above q99.9."""
    (score,) = [each for each in report.scores if each.method == COMBINATION]
    return score.coverage[0], 1.0 - score.coverage[1]


def _geometric_mean(ratios: Iterator[float]) -> float:
    return exp(mean(log(ratio) for ratio in ratios))


if __name__ == "__main__":
    for row in rows():
        print(" | ".join(row))
