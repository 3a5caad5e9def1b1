"""Prediction errors of runs that the fit has not seen, in three folds, and the constants fitted to all runs.

`python -m tests.benchmarks.folds` prints both. A fold is a hash of a row, so it does not change when rows are added.
Each fold is judged by constants fitted to the other two. Each source counts equally, however many rows it has.

The constants to fit start at values from datasheets and papers, because the shipped ones would leak the answer. All
others are the shipped ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import numpy as np

from scheduler.solver.calibration.constant_fit import ConstantFit, ErrorSummary, compute_time_errors, fit_constants
from scheduler.solver.calibration.measured_runs import MeasuredRun
from scheduler.solver.evaluate import evaluate
from scheduler.solver.instance import Floats
from scheduler.solver.profiles.catalog import load_gpu
from scheduler.solver.profiles.hardware_profile import HardwareProfile
from tests.benchmarks.measured_runs import A100, A100_40G, H100, llm_foundry, published

FOLDS = range(3)
CONSTANTS = (
    "efficiency",
    "attention_efficiency",
    "memory_bandwidth_bytes_per_s",
    "overlap_coefficient",
)
"""Constants of the GPU that the runs determine. Network constants belong to a cluster."""

_A100_START: dict[str, Any] = {
    "efficiency": 0.8,  # Large products reach 80% of 312 TFLOPS (FlashAttention-2, arXiv 2307.08691, section 1).
    "attention_efficiency": 0.3,  # Half of FlashAttention-2's 50 to 73% (same source).
    "overlap_coefficient": 1.1256,  # Hetu-Galvatron's profile.
    "iteration_overhead_s": 0.005,
}
START: dict[str, dict[str, Any]] = {
    A100: _A100_START | {"memory_bandwidth_bytes_per_s": 1.6e12},
    A100_40G: _A100_START | {"memory_bandwidth_bytes_per_s": 1.2e12},
    H100: _A100_START
    | {
        "efficiency": 0.7,
        "attention_efficiency": 0.175,  # Half of FlashAttention-2's 35% (FlashAttention-3, arXiv 2407.08608, abstract).
        "memory_bandwidth_bytes_per_s": 2.6e12,
    },
}


@dataclass(frozen=True, slots=True)
class FoldRuns:
    """Runs on one GPU model, their folds and their weights, and the start profile of fits."""

    hardware: HardwareProfile
    runs: tuple[MeasuredRun, ...]
    folds: tuple[int, ...]
    weights: tuple[float, ...]

    def fit(self, without: int | None = None) -> ConstantFit:
        """Return the fit to all runs but those of one fold."""
        kept = [number for number, fold in enumerate(self.folds) if fold != without]
        weights = [self.weights[number] for number in kept]
        return fit_constants([self.runs[number] for number in kept], self.hardware, CONSTANTS, weights=weights)

    def compute_held_out_errors(self, fold: int) -> Floats:
        """Return predicted / measured - 1 of the runs of `fold`, under constants fitted to the others."""
        held_out = [run for run, each in zip(self.runs, self.folds, strict=True) if each == fold]
        return compute_time_errors(held_out, self.fit(without=fold).hardware)


def read_fold_runs(gpu: str) -> FoldRuns:
    """Return the runs on a GPU model: those of llm-foundry, and on a100-80g those of Megatron-LM."""
    foundry = llm_foundry(gpu)
    sources = [list(zip(foundry.runs, (repr(sorted(row.items())) for row in foundry.rows), strict=True))]
    if gpu == A100:
        named = [pair for source in ("SC21", "2205.05198") for pair in published(source)]
        sources.append([(run, name) for name, run in named if np.isfinite(run.iteration_time_s)])
    most = max(map(len, sources))
    return FoldRuns(
        hardware=replace(load_gpu(gpu), **START[gpu]),
        runs=tuple(run for source in sources for run, _ in source),
        folds=tuple(int(sha256(row.encode()).hexdigest(), 16) % len(FOLDS) for source in sources for _, row in source),
        weights=tuple(most / len(source) for source in sources for _ in source),
    )


def compute_fitting_share(runs: tuple[MeasuredRun, ...], hardware: HardwareProfile) -> float:
    """Return the share of `runs`, all of which had enough memory, that are predicted to fit."""
    return float(np.mean([evaluate(run.plan, run.build_request(hardware)).fits for run in runs]))


def rows() -> Iterator[tuple[str, str, str]]:
    """Return (name, target, measured) of each fold, and of memory."""
    for gpu in (H100, A100, A100_40G):
        found = read_fold_runs(gpu)
        for fold in FOLDS:
            errors = ErrorSummary.from_ratios(found.compute_held_out_errors(fold))
            told = f"{errors.mean:.1%}, p95 {errors.p95:.1%}, worst {errors.worst:.1%}"
            yield f"time, {gpu}, fold {fold + 1} held out, {errors.runs} runs", "8%, p95 20%, worst 35%", told
        share = compute_fitting_share(llm_foundry(gpu).runs, load_gpu(gpu))
        yield f"memory, {gpu}, llm-foundry, runs that fit", "95%", f"{share:.1%}"


if __name__ == "__main__":
    for row in rows():
        print(" | ".join(row), flush=True)
    for gpu in (H100, A100, A100_40G):
        for constant in read_fold_runs(gpu).fit().constants:
            print(f"{gpu} {constant.name}: {constant.after:.4g}, determined by runs {constant.told:.0%}", flush=True)
