"""Constants of a GPU from measured runs: the most likely ones, given the runs and a first guess.

The errors of the prediction's logarithm count by a pseudo-Huber loss, which grows like a square near 0 and in
proportion beyond, so that a few odd runs do not set the constants. Against them stands a normal prior on the logarithm
of each constant, centred on the given profile: what the runs do not tell stays as it was. Minimised by the
Levenberg-Marquardt method with reweighting, from the prior's centre; no chance is involved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scheduler.solver.calibrate.constants import Space
from scheduler.solver.calibrate.measured_run import MeasuredRun
from scheduler.solver.calibrate.run_times import RunTimes
from scheduler.solver.instance import Floats
from scheduler.solver.profiles.hardware_profile import HardwareProfile

NOISE = 0.05
"""How far a good prediction is off: the model's own error and the measurement's, as standard deviation of a log."""

_HUBER = 0.03
_STEPS_MAX = 40
_STEP_MOST = 0.7
"""Of the logarithm of a constant, in one step: a factor of two."""
_NUDGE = 0.02
_TRIES = 8
_DONE = 1e-4


@dataclass(frozen=True, slots=True)
class FittedConstant:
    """`sd`: standard deviation of the logarithm of `after`. `told` is the share of the prior variance that the runs
    took away: near 0 the value is the given one, near 1 the runs have set it."""

    name: str
    before: float
    after: float
    sd: float
    told: float


@dataclass(frozen=True, slots=True)
class Fit:
    hardware: HardwareProfile
    constants: tuple[FittedConstant, ...]


def fit(runs: Sequence[MeasuredRun], hardware: HardwareProfile, names: tuple[str, ...] = ()) -> Fit:
    """`hardware` with the constants `names` (or the usual ones) as `runs` and it tell them together.

    Raises:
        ProfileError: a name is unknown, or its value is 0, which has no logarithm.
        ValueError: there are no runs, or the layers of one follow several strategies.
    """
    if not runs:
        raise ValueError("there are no runs to fit to; at least 1 is needed")
    problem = _Problem(
        Space.of(hardware, names),
        RunTimes.of(runs, hardware),
        np.log([run.iteration_time_s for run in runs]),
        hardware,
    )
    point = _descend(problem)
    sd = np.sqrt(np.diag(np.linalg.inv(problem.curvature(point)[0])))
    told = 1 - np.minimum(sd / problem.space.prior_sd, 1) ** 2
    found = problem.space.applied(hardware, point)
    return Fit(
        found,
        tuple(
            FittedConstant(name, getattr(hardware, name), getattr(found, name), float(sd[at]), float(told[at]))
            for at, name in enumerate(problem.space.names)
        ),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Problem:
    """Minus the logarithm of the posterior density, at a point [C] of the logarithms of the constants."""

    space: Space
    times: RunTimes
    measured: Floats
    hardware: HardwareProfile

    def errors(self, point: Floats) -> Floats:
        """[R], of the logarithm of each run's time."""
        return np.log(self.times.predicted_s(self.space.applied(self.hardware, point))) - self.measured

    def cost(self, point: Floats) -> float:
        losses = _HUBER**2 * (np.hypot(1, self.errors(point) / _HUBER) - 1)
        away = (point - self.space.centre) / self.space.prior_sd
        return float(losses.sum() / NOISE**2 + (away**2).sum() / 2)

    def curvature(self, point: Floats) -> tuple[Floats, Floats]:
        """[C, C] and the slope [C], the loss taken for a square with each run's present weight.

        The slopes of the errors are differences over a few per cent of each constant, as a prediction has kinks.
        """
        errors = self.errors(point)
        weights = 1 / np.hypot(1, errors / _HUBER) / NOISE**2
        slopes = np.empty((len(errors), len(point)))
        for at in range(len(point)):
            above, below = point.copy(), point.copy()
            above[at] = min(point[at] + _NUDGE, self.space.most[at])
            below[at] = max(point[at] - _NUDGE, self.space.least[at])
            slopes[:, at] = (self.errors(above) - self.errors(below)) / (above[at] - below[at])
        precision = 1 / self.space.prior_sd**2
        slope = slopes.T @ (weights * errors) + (point - self.space.centre) * precision
        return slopes.T @ (weights[:, None] * slopes) + np.diag(precision), slope


def _descend(problem: _Problem) -> Floats:
    point, damping = problem.space.centre, 1e-2
    cost = problem.cost(point)
    for _ in range(_STEPS_MAX):
        curvature, slope = problem.curvature(point)
        for _ in range(_TRIES):
            step = -np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), slope)
            found = point + np.clip(step, -_STEP_MOST, _STEP_MOST)
            found = np.clip(found, problem.space.least, problem.space.most)
            found_cost = problem.cost(found)
            if found_cost < cost:
                break
            damping *= 4
        else:
            return point
        gain, point, cost, damping = cost - found_cost, found, found_cost, max(damping / 5, 1e-6)
        if gain < _DONE * max(cost, 1.0):
            break
    return point
