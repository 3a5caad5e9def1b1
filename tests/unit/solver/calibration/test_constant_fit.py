"""Fitting the constants of a GPU to measured runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.parallel_plan import LayerStrategy, Recompute
from scheduler.solver.calibration.constant_fit import calibrate, compute_time_errors, fit_constants, sample_runs
from scheduler.solver.calibration.hardware_constants import CONSTANTS, DEFAULT_CONSTANTS
from scheduler.solver.calibration.measured_runs import MeasuredRun, build_even_plan
from scheduler.solver.calibration.run_prediction import RunTimePredictor
from scheduler.solver.evaluate import evaluate
from scheduler.solver.profiles.catalog import load_gpu, load_model
from scheduler.solver.profiles.hardware_profile import HardwareProfile
from scheduler.solver.profiles.profile_document import ProfileError

GIVEN = load_gpu("a100-80g")
TRUE = replace(
    GIVEN,
    efficiency=0.55,
    memory_bandwidth_bytes_per_s=1.5e12,
    intra_bandwidth_bytes_per_s=1.6e11,
    inter_bandwidth_bytes_per_s=9e9,
    launch_s=7e-4,
)


def generate_runs(hardware: HardwareProfile) -> list[MeasuredRun]:
    """Return runs of different plans, as fast as the cost model predicts."""
    found = []
    for name in ("gpt2", "llama-2-7b"):
        model = load_model(name)
        for tp, dp, pp, samples in (
            (1, 8, 1, 1),
            (4, 1, 1, 8),
            (2, 4, 1, 4),
            (1, 16, 1, 2),
            (2, 4, 4, 1),
            (4, 8, 2, 2),
        ):
            for recompute, zero in ((Recompute.NONE, 0), (Recompute.FULL, 0), (Recompute.NONE, 3 if dp > 1 else 0)):
                strategy = LayerStrategy(
                    1,
                    tp=tp,
                    dp=dp,
                    recompute=recompute,
                    zero=zero,
                    shard_group=dp if zero else 1,
                    sequence_sharding=tp > 1,
                )
                plan = build_even_plan(
                    strategy,
                    layers=model.layer_count,
                    gpu=hardware.gpu,
                    pipeline=pp,
                    interleave=3 if pp == 4 else 1,
                    micro_batches=8,
                    samples_per_replica=samples,
                )
                run = MeasuredRun(model, GpuShape.packed(hardware.gpu, tp * dp * pp, 8), plan, 1.0)
                time_s = evaluate(plan, run.build_request(hardware)).iteration_time_s
                found.append(replace(run, iteration_time_s=time_s))
    return found


RUNS = generate_runs(TRUE)


def test_batched_predictions_match_evaluate() -> None:
    errors = RunTimePredictor.from_runs(RUNS, GIVEN).predict_s(TRUE) / [run.iteration_time_s for run in RUNS] - 1
    assert np.abs(errors).max() < 1e-12


def test_batched_predictions_match_on_uneven_nodes_with_shared_ports() -> None:
    """Two A800 share a port: 5 + 3 GPUs have at least 2 ports in each node, like 4 + 4 GPUs; a single GPU has 1."""
    model, hardware, times_s = load_model("gpt2"), load_gpu("a800-80g"), []
    for nodes in ([4, 4], [5, 3], [1] * 8):
        shape = GpuShape.from_node_counts([("a800-80g", gpus) for gpus in nodes])
        runs = [
            MeasuredRun(
                model,
                shape,
                build_even_plan(
                    LayerStrategy(1, dp=8 // pp),
                    layers=model.layer_count,
                    gpu="a800-80g",
                    pipeline=pp,
                    interleave=1,
                    micro_batches=8,
                    samples_per_replica=1,
                ),
                1.0,
            )
            for pp in (1, 2)
        ]
        each_s = [evaluate(run.plan, run.build_request(hardware)).iteration_time_s for run in runs]
        assert RunTimePredictor.from_runs(runs, hardware).predict_s(hardware) == pytest.approx(each_s, rel=1e-12)
        times_s.append(each_s[0])
    even_s, uneven_s, alone_s = times_s
    assert even_s <= uneven_s < 1.01 * even_s < alone_s


def test_fit_recovers_the_constants_of_generated_runs() -> None:
    found = fit_constants(RUNS, GIVEN)
    assert np.abs(compute_time_errors(RUNS, GIVEN)).mean() > 0.15
    assert np.abs(compute_time_errors(RUNS, found.hardware)).mean() < 0.01
    assert found.hardware.efficiency == pytest.approx(TRUE.efficiency, rel=0.05)
    for constant in found.constants:
        assert abs(np.log(constant.after / getattr(TRUE, constant.name))) < 2 * constant.sd


def test_fit_is_deterministic() -> None:
    assert fit_constants(RUNS[:7], GIVEN) == fit_constants(RUNS[:7], GIVEN)


def test_constants_without_evidence_stay_unchanged() -> None:
    alone = [run for run in RUNS if run.shape.nodes == 1]
    constants = {constant.name: constant for constant in fit_constants(alone, GIVEN).constants}
    across = constants["inter_bandwidth_bytes_per_s"]
    assert across.after == pytest.approx(across.before, rel=1e-9)
    assert across.told < 1e-9
    assert across.sd == pytest.approx(CONSTANTS[across.name].prior_sd)
    assert constants["efficiency"].told > 0.5


def test_fit_is_robust_to_outliers() -> None:
    odd = [replace(run, iteration_time_s=3 * run.iteration_time_s) for run in RUNS[:2]]
    found = fit_constants([*odd, *RUNS[2:]], GIVEN).hardware
    assert np.abs(compute_time_errors(RUNS[2:], found)).mean() < 0.03


def test_constants_stay_in_range() -> None:
    quick = [replace(run, iteration_time_s=run.iteration_time_s / 5) for run in RUNS[::4]]
    assert fit_constants(quick, GIVEN, (*DEFAULT_CONSTANTS, "overlap_coefficient")).hardware.efficiency <= 1
    assert fit_constants(quick, GIVEN, ("overlap_coefficient",)).hardware.overlap_coefficient >= 1


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("speed",), "constant 'speed' is unknown; allowed are efficiency"),
        (("efficiency", "efficiency"), "constant efficiency is given 2 times"),
        (("gradient_overlap",), "gradient_overlap is 0 in the profile of a100-80g; it must be above 0"),
    ],
)
def test_invalid_constants_are_named(names: tuple[str, ...], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        fit_constants(RUNS, GIVEN, names)


def test_fit_without_runs_is_rejected() -> None:
    with pytest.raises(ValueError, match="at least 1 is needed"):
        fit_constants([], GIVEN)


def test_sample_covers_all_kinds_of_plans_and_depends_only_on_the_seed() -> None:
    one, again, other = (sample_runs(RUNS, 9, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert one == again != other
    assert len(set(one)) == 9
    shapes = {
        (RUNS[at].shape.nodes > 1, RUNS[at].plan.pipeline_devices, RUNS[at].plan.stages[0].strategies[0].zero)
        for at in one
    }
    assert len(shapes) == 5
    assert sample_runs(RUNS, 99, np.random.default_rng(0)) == tuple(range(len(RUNS)))


def test_calibration_reports_errors_per_group_of_runs() -> None:
    peak_bytes = evaluate(RUNS[0].plan, RUNS[0].build_request(GIVEN)).peak_bytes_per_gpu
    planned_bytes = GIVEN.plannable_bytes(peak_bytes)
    runs = [replace(RUNS[0], peak_bytes=round(planned_bytes / 1.1)), *RUNS[1:12]]
    found = calibrate(runs, GIVEN, (0, 2, 4, 5, 7, 9), names=DEFAULT_CONSTANTS[:2], leave_one_out=True)
    assert (found.on_drawn.runs, found.on_others.runs, found.before.runs, found.memory.runs) == (6, 6, 12, 1)
    assert found.on_others.mean < found.before.mean
    assert found.left_out is not None
    assert found.left_out.mean >= found.on_drawn.mean
    assert found.memory.mean == pytest.approx(0.1, abs=0.001)
    assert found.hardware.prediction_error == found.on_others.p95
    assert found.fit.hardware.prediction_error == pytest.approx(found.on_drawn.p95)
    assert replace(found.hardware, prediction_error=0.0) == replace(found.fit.hardware, prediction_error=0.0)
