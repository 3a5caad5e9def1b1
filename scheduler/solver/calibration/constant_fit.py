"""Fit of a GPU's constants to measured runs, and the errors of the predictions before and after.

The fit finds the most probable constants, given the runs and a first guess. Errors of the prediction's logarithm enter
with a pseudo-Huber loss, which is quadratic near 0 and linear beyond, so that a few odd runs do not determine the
constants. A normal prior on the logarithm of each constant, centered on the given profile, keeps what the runs do not
determine. The Levenberg-Marquardt method with reweighting minimizes the sum, starting at the prior's center. It is
deterministic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import numpy as np

from scheduler.solver.calibration.hardware_constants import ConstantSpace
from scheduler.solver.calibration.measured_runs import MeasuredRun
from scheduler.solver.calibration.run_prediction import RunTimePredictor
from scheduler.solver.evaluate import evaluate
from scheduler.solver.instance import Floats
from scheduler.solver.profiles.hardware_profile import HardwareProfile
from scheduler.solver.profiles.training_software import AttentionKernel

PREDICTION_NOISE = 0.05
"""Standard deviation of the logarithm of a good prediction: the errors of model and measurement together."""

_HUBER_WIDTH = 0.03
_MAX_STEPS = 40
_MAX_LOG_STEP = 0.7
"""Largest change of a constant's logarithm in one step: a factor of two."""

_DIFFERENCE_STEP = 0.02
_MAX_DAMPING_TRIES = 8
_RELATIVE_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class FittedConstant:
    """A constant before and after the fit. `sd` is the standard deviation of the logarithm of `after`.

    `told` is the share of the prior variance that the runs removed. Near 0 the value is the given one; near 1 the runs
    have determined it.
    """

    name: str
    before: float
    after: float
    sd: float
    told: float


@dataclass(frozen=True, slots=True)
class ConstantFit:
    hardware: HardwareProfile
    constants: tuple[FittedConstant, ...]


def fit_constants(
    runs: Sequence[MeasuredRun],
    hardware: HardwareProfile,
    names: tuple[str, ...] = (),
    *,
    weights: Sequence[float] = (),
) -> ConstantFit:
    """Return `hardware` with the constants `names` (or the default ones) fitted to `runs`.

    By default, attention gets an efficiency of its own if a run has a fused attention core. If the kernel of such a run
    is not stated, the fitted efficiency is that of the software in use, so no kernel is faster. The result's
    `prediction_error` is that of `runs`.

    Args:
        weights: how often each run counts; once by default.

    Raises:
        ProfileError: a name is unknown, or its value is 0, which has no logarithm.
        ValueError: there are no runs, or the layers of one follow several strategies.
    """
    if not runs:
        raise ValueError("there are no runs to fit to; at least 1 is needed")
    if not names:
        hardware = _prepare_attention(runs, hardware)
    problem = _PosteriorProblem(
        ConstantSpace.from_profile(hardware, names),
        RunTimePredictor.from_runs(runs, hardware),
        np.log([run.iteration_time_s for run in runs]),
        hardware,
        np.array(weights or [1.0] * len(runs)),
    )
    point = _minimize(problem)
    sd = np.sqrt(np.diag(np.linalg.inv(problem.compute_curvature(point)[0])))
    told = 1 - np.minimum(sd / problem.space.prior_sd, 1) ** 2
    fitted = problem.space.apply(hardware, point)
    errors = ErrorSummary.from_ratios(np.expm1(problem.compute_errors(point)))
    fitted = replace(fitted, prediction_error=errors.p95)
    return ConstantFit(
        fitted,
        tuple(
            FittedConstant(name, getattr(hardware, name), getattr(fitted, name), float(sd[at]), float(told[at]))
            for at, name in enumerate(problem.space.names)
        ),
    )


def _prepare_attention(runs: Sequence[MeasuredRun], hardware: HardwareProfile) -> HardwareProfile:
    """Return `hardware` with an efficiency of attention to fit, and the kernels that it stands for."""
    fused = [run for run in runs if any(layer.has_fused_attention for layer in run.model.layers)]
    if not fused:
        return hardware
    is_stated = all(run.model.software.attention is not AttentionKernel.PROFILE for run in fused)
    return replace(
        hardware,
        attention_efficiency=hardware.attention_efficiency or hardware.efficiency,
        attention_generation=hardware.attention_generation if is_stated else 1,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _PosteriorProblem:
    """Negative logarithm of the posterior density, at a point [C] of the logarithms of the constants."""

    space: ConstantSpace
    times: RunTimePredictor
    measured_log_s: Floats
    hardware: HardwareProfile
    weights: Floats

    def compute_errors(self, point: Floats) -> Floats:
        """Return [R]: the error of the logarithm of each run's time."""
        return np.log(self.times.predict_s(self.space.apply(self.hardware, point))) - self.measured_log_s

    def compute_cost(self, point: Floats) -> float:
        losses = _HUBER_WIDTH**2 * (np.hypot(1, self.compute_errors(point) / _HUBER_WIDTH) - 1)
        away = (point - self.space.center) / self.space.prior_sd
        return float((self.weights * losses).sum() / PREDICTION_NOISE**2 + (away**2).sum() / 2)

    def compute_curvature(self, point: Floats) -> tuple[Floats, Floats]:
        """Return [C, C] and the gradient [C], with the loss as a square at each run's current weight.

        The derivatives of the errors are differences over a few percent of each constant, because a prediction has
        kinks.
        """
        errors = self.compute_errors(point)
        weights = self.weights / np.hypot(1, errors / _HUBER_WIDTH) / PREDICTION_NOISE**2
        slopes = np.empty((len(errors), len(point)))
        for at in range(len(point)):
            above, below = point.copy(), point.copy()
            above[at] = min(point[at] + _DIFFERENCE_STEP, self.space.upper[at])
            below[at] = max(point[at] - _DIFFERENCE_STEP, self.space.lower[at])
            slopes[:, at] = (self.compute_errors(above) - self.compute_errors(below)) / (above[at] - below[at])
        precision = 1 / self.space.prior_sd**2
        slope = slopes.T @ (weights * errors) + (point - self.space.center) * precision
        return slopes.T @ (weights[:, None] * slopes) + np.diag(precision), slope


def _minimize(problem: _PosteriorProblem) -> Floats:
    point, damping = problem.space.center, 1e-2
    cost = problem.compute_cost(point)
    for _ in range(_MAX_STEPS):
        curvature, slope = problem.compute_curvature(point)
        for _ in range(_MAX_DAMPING_TRIES):
            step = -np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), slope)
            found = point + np.clip(step, -_MAX_LOG_STEP, _MAX_LOG_STEP)
            found = np.clip(found, problem.space.lower, problem.space.upper)
            found_cost = problem.compute_cost(found)
            if found_cost < cost:
                break
            damping *= 4
        else:
            return point
        gain, point, cost, damping = cost - found_cost, found, found_cost, max(damping / 5, 1e-6)
        if gain < _RELATIVE_TOLERANCE * max(cost, 1.0):
            break
    return point


@dataclass(frozen=True, slots=True)
class ErrorSummary:
    """Summary of |predicted / measured - 1| over `runs` runs; all 0 if there are none."""

    runs: int
    mean: float
    median: float
    p95: float
    worst: float

    @classmethod
    def from_ratios(cls, ratios: Floats) -> ErrorSummary:
        """Summarize predicted / measured - 1."""
        if not len(ratios):
            return cls(0, 0.0, 0.0, 0.0, 0.0)
        size = np.abs(ratios)
        return cls(len(size), *map(float, (size.mean(), np.median(size), np.percentile(size, 95), size.max())))


@dataclass(frozen=True, slots=True)
class Calibration:
    """A fit with its errors.

    `drawn` are the indices of the runs that were fitted to. `before` covers all runs under the given profile,
    `left_out` each drawn run under constants fitted to the other drawn runs, and `memory` the runs with a measured
    peak.
    """

    fit: ConstantFit
    drawn: tuple[int, ...]
    before: ErrorSummary
    on_drawn: ErrorSummary
    on_others: ErrorSummary
    left_out: ErrorSummary | None
    memory: ErrorSummary

    @property
    def hardware(self) -> HardwareProfile:
        """The fitted profile. Its `prediction_error` is that of runs it is not fitted to, if there are any."""
        unseen = self.on_others if self.on_others.runs else self.left_out or self.on_drawn
        return replace(self.fit.hardware, prediction_error=unseen.p95)


def sample_runs(runs: Sequence[MeasuredRun], count: int, generator: np.random.Generator) -> tuple[int, ...]:
    """Return the ascending indices of `count` runs, or of all, taken in turn from each kind of plan.

    Runs of one kind are taken at random. Kinds determine different constants, so a small sample should not miss one.
    Large kinds come first.
    """
    kinds: dict[tuple[object, ...], list[int]] = {}
    for number in generator.permutation(len(runs)).tolist():
        kinds.setdefault(_get_run_kind(runs[number]), []).append(number)
    largest_first = sorted(kinds.values(), key=len, reverse=True)
    in_turn = [number for turn in zip_longest(*largest_first) for number in turn if number is not None]
    return tuple(sorted(in_turn[:count]))


def _get_run_kind(run: MeasuredRun) -> tuple[object, ...]:
    strategy = run.plan.stages[0].strategies[0]
    degrees = (
        run.shape.nodes > 1,
        run.plan.pipeline_devices > 1,
        strategy.tp > 1,
        strategy.ulysses > 1,
        strategy.ring > 1,
        strategy.ep > 1,
    )
    return *degrees, strategy.zero, strategy.offload, strategy.recompute


def calibrate(
    runs: Sequence[MeasuredRun],
    hardware: HardwareProfile,
    drawn: Sequence[int],
    *,
    names: tuple[str, ...] = (),
    leave_one_out: bool = False,
) -> Calibration:
    """Fit to the runs with these indices; raises as `fit_constants`."""
    chosen = [runs[number] for number in drawn]
    fitted = fit_constants(chosen, hardware, names)
    errors = compute_time_errors(runs, fitted.hardware)
    others = np.setdiff1d(np.arange(len(runs)), drawn)
    return Calibration(
        fit=fitted,
        drawn=tuple(drawn),
        before=ErrorSummary.from_ratios(compute_time_errors(runs, hardware)),
        on_drawn=ErrorSummary.from_ratios(errors[list(drawn)]),
        on_others=ErrorSummary.from_ratios(errors[others]),
        left_out=ErrorSummary.from_ratios(compute_leave_one_out_errors(chosen, hardware, names))
        if leave_one_out
        else None,
        memory=ErrorSummary.from_ratios(compute_memory_errors(runs, fitted.hardware)),
    )


def compute_time_errors(runs: Sequence[MeasuredRun], hardware: HardwareProfile) -> Floats:
    """Return [R]: predicted / measured - 1."""
    measured_s = np.array([run.iteration_time_s for run in runs])
    return np.asarray(RunTimePredictor.from_runs(runs, hardware).predict_s(hardware) / measured_s - 1)


def compute_leave_one_out_errors(
    runs: Sequence[MeasuredRun], hardware: HardwareProfile, names: tuple[str, ...] = ()
) -> Floats:
    """Return [R]: as `compute_time_errors`, each run under constants fitted to the other runs."""
    return np.concatenate(
        [
            compute_time_errors([run], fit_constants([*runs[:number], *runs[number + 1 :]], hardware, names).hardware)
            for number, run in enumerate(runs)
        ]
    )


def compute_memory_errors(runs: Sequence[MeasuredRun], hardware: HardwareProfile) -> Floats:
    """Return the same for memory without the reserve, over the runs with a measured peak."""
    return np.array(
        [
            hardware.plannable_bytes(evaluate(run.plan, run.build_request(hardware)).peak_bytes_per_gpu)
            / run.peak_bytes
            - 1
            for run in runs
            if run.peak_bytes
        ]
    )
