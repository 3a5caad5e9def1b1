"""The cost model compared with published measurements: shipped constants, and fits to sampled runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from scheduler.solver.calibration.constant_fit import ErrorSummary, compute_memory_errors, compute_time_errors
from scheduler.solver.calibration.run_prediction import RunTimePredictor
from scheduler.solver.evaluate import evaluate
from scheduler.solver.profiles.catalog import load_gpu
from tests.benchmarks.accuracy import VTRAIN_GUESS, sample_fits
from tests.benchmarks.folds import FOLDS, compute_fitting_share, read_fold_runs
from tests.benchmarks.measured_runs import A100, A100_40G, H100, H100_96G, llm_foundry, published, vtrain

SEEDS = range(3)


def test_megatron_a100_times_within_5_percent_on_average_and_12_at_most() -> None:
    runs = [
        run for source in ("SC21", "2205.05198") for _, run in published(source) if np.isfinite(run.iteration_time_s)
    ]
    errors = np.abs(compute_time_errors(runs, load_gpu(A100)))
    assert len(errors) == 18
    assert errors.mean() <= 0.05
    assert errors.max() <= 0.12


def test_megatron_a100_memory_within_5_percent() -> None:
    errors = np.abs(compute_memory_errors([run for _, run in published("2205.05198")], load_gpu(A100)))
    assert len(errors) == 8
    assert errors.mean() <= 0.05


def test_torchtitan_h100_time_and_memory_within_10_percent() -> None:
    runs = [run for _, run in published("torchtitan")]
    assert len(runs) == 4
    assert np.abs(compute_time_errors(runs, H100_96G)).mean() <= 0.1
    assert np.abs(compute_memory_errors(runs, H100_96G)).mean() <= 0.1


@pytest.mark.parametrize(("which", "runs", "most"), [("single", 720, 0.08), ("multi", 65, 0.08)])
def test_fit_to_20_vtrain_runs_predicts_the_others(which: str, runs: int, most: float) -> None:
    """The mean over a few samples counts, because a single sample varies by half a percent."""
    blind = replace(load_gpu(A100), **VTRAIN_GUESS)
    means = [errors.mean() for errors in sample_fits(vtrain(which), blind, 20, SEEDS)]
    assert len(vtrain(which)) == runs
    assert np.mean(means) <= most


@pytest.mark.parametrize("gpu", [H100, A100, A100_40G])
def test_runs_that_the_fit_has_not_seen_are_predicted(gpu: str) -> None:
    """Of three folds, each is judged by a fit to the other two."""
    found = read_fold_runs(gpu)
    assert Counter(found.folds).keys() == set(FOLDS)
    for fold in FOLDS:
        errors = ErrorSummary.from_ratios(found.compute_held_out_errors(fold))
        assert errors.mean <= 0.08
        assert errors.p95 <= 0.2
        assert errors.worst <= 0.35


@pytest.mark.parametrize("gpu", [H100, A100, A100_40G])
def test_shipped_constants_are_those_of_all_runs(gpu: str) -> None:
    shipped = load_gpu(gpu)
    for constant in read_fold_runs(gpu).fit().constants:
        assert getattr(shipped, constant.name) == pytest.approx(constant.after, rel=0.01), constant.name


def test_every_run_of_llm_foundry_is_expressed_and_fits_in_memory() -> None:
    found = {gpu: llm_foundry(gpu) for gpu in (H100, A100, A100_40G)}
    assert {gpu: (len(each.runs), len(each.refused)) for gpu, each in found.items()} == {
        H100: (34, 0),
        A100: (45, 0),
        A100_40G: (46, 0),
    }
    shares = [compute_fitting_share(each.runs, load_gpu(gpu)) for gpu, each in found.items()]
    assert min(shares) >= 0.95


def test_batched_predictions_match_evaluate_on_measured_runs() -> None:
    runs = [run for source in ("SC21", "2205.05198") for _, run in published(source)]
    each_s = [evaluate(run.plan, run.build_request(load_gpu(A100))).iteration_time_s for run in runs]
    assert RunTimePredictor.from_runs(runs, load_gpu(A100)).predict_s(load_gpu(A100)) == pytest.approx(
        each_s, rel=1e-12
    )
