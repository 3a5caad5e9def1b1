"""Error of the cost model against measured runs, with shipped constants and with those of `ebbtide fit`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from scheduler.solver.calibration.constant_fit import (
    ErrorSummary,
    compute_leave_one_out_errors,
    compute_memory_errors,
    compute_time_errors,
    fit_constants,
    sample_runs,
)
from scheduler.solver.calibration.measured_runs import MeasuredRun
from scheduler.solver.calibration.run_prediction import RunTimePredictor
from scheduler.solver.instance import Floats
from scheduler.solver.profiles.catalog import load_gpu
from scheduler.solver.profiles.hardware_profile import HardwareProfile
from tests.benchmarks.measured_runs import (
    A100,
    H100_96G,
    RUBICK,
    RUBICK_CONSTANTS,
    published,
    rubick,
    rubick_hardware,
    vtrain,
)

SEEDS = range(10)
VTRAIN_ROWS = 20
FIRST_GUESS: dict[str, Any] = {
    "efficiency": 0.77,
    "memory_bandwidth_bytes_per_s": 1.4e12,
    "intra_bandwidth_bytes_per_s": 2.2e11,
    "intra_latency_s": 6e-5,
    "inter_bandwidth_bytes_per_s": 1.25e10,
    "inter_latency_s": 1e-4,
}
"""Start profile of leave-one-out fits. The shipped constants come from the same runs and would leak the answer."""
VTRAIN_GUESS: dict[str, Any] = {"launch_s": 5e-4, "unaligned_slowdown": 1.0}
"""Start profile of the fits to vTrain's runs: these two shipped constants come from them."""
RUBICK_ROWS = 7

Row = tuple[str, str, str]


def rows() -> Iterator[Row]:
    """Return (name, target, measured) of each comparison."""
    papers = {name: [run for _, run in published(name)] for name in ("SC21", "2205.05198", "torchtitan")}
    timed = {name: [run for run in runs if np.isfinite(run.iteration_time_s)] for name, runs in papers.items()}
    megatron = [*timed["2205.05198"], *timed["SC21"]]
    a100, h100 = load_gpu(A100), H100_96G
    for name in ("2205.05198", "SC21"):
        yield (
            f"time, A100, {name}, {len(timed[name])} runs",
            "5% / worst 12%",
            _format_errors(compute_time_errors(timed[name], a100)),
        )
    yield (
        "time, A100, the 18 runs, shipped constants",
        "5% / worst 12%",
        _format_errors(compute_time_errors(megatron, a100)),
    )
    left_out = compute_leave_one_out_errors(megatron, replace(a100, **FIRST_GUESS))
    yield "time, A100, the 18 runs, each left out", "5% / worst 12%", _format_errors(left_out)
    yield "memory, A100, 2205.05198", "5%", _format_errors(compute_memory_errors(papers["2205.05198"], a100))
    yield "time, H100, torchtitan bf16", "10%", _format_errors(compute_time_errors(timed["torchtitan"], h100))
    yield "memory, H100, torchtitan bf16", "10%", _format_errors(compute_memory_errors(papers["torchtitan"], h100))
    for which, theirs in (("single", 8.37), ("multi", 14.73)):
        fits = sample_fits(vtrain(which), replace(a100, **VTRAIN_GUESS), VTRAIN_ROWS, SEEDS)
        means = [100 * errors.mean() for errors in fits]
        spread = f"{np.mean(means):.2f}% ({min(means):.1f} to {max(means):.1f})"
        yield f"vTrain {which} node, {VTRAIN_ROWS} rows fitted, others, {len(means)} seeds", f"8% ({theirs}%)", spread
    yield from _rubick()


def _rubick() -> Iterator[Row]:
    every = []
    for model in RUBICK:
        runs = [run for _, run in rubick(model)]
        errors = np.concatenate(list(sample_fits(runs, rubick_hardware(), RUBICK_ROWS, SEEDS, RUBICK_CONSTANTS)))
        every.append(errors)
        yield (
            f"Rubick {model}, {RUBICK_ROWS} of {len(runs)} rows fitted, others",
            "5% / p95 12%",
            _format_errors(errors),
        )
    yield "Rubick, all models", "5% / p95 12%", _format_errors(np.concatenate(every))


def sample_fits(
    runs: Sequence[MeasuredRun],
    hardware: HardwareProfile,
    count: int,
    seeds: Iterable[int],
    names: tuple[str, ...] = (),
) -> Iterator[Floats]:
    """Return, per seed, the errors |predicted / measured - 1| of the runs that were not fitted."""
    times, measured_s = RunTimePredictor.from_runs(runs, hardware), np.array([run.iteration_time_s for run in runs])
    for seed in seeds:
        drawn = sample_runs(runs, count, np.random.default_rng(seed))
        found = fit_constants([runs[number] for number in drawn], hardware, names).hardware
        yield np.delete(np.abs(times.predict_s(found) / measured_s - 1), drawn)


def _format_errors(ratios: Floats) -> str:
    errors = ErrorSummary.from_ratios(ratios)
    return f"{100 * errors.mean:.2f}%, p95 {100 * errors.p95:.1f}%, worst {100 * errors.worst:.1f}%"


if __name__ == "__main__":
    for row in rows():
        print(" | ".join(row), flush=True)
