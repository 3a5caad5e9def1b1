"""What a fit is worth: constants from a drawn part of the runs, errors on that part and on the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from scheduler.solver.calibrate.fit import Fit, fit
from scheduler.solver.calibrate.measured_run import MeasuredRun
from scheduler.solver.calibrate.run_times import RunTimes
from scheduler.solver.evaluate import evaluate
from scheduler.solver.instance import Floats
from scheduler.solver.profiles.hardware_profile import HardwareProfile


@dataclass(frozen=True, slots=True)
class Errors:
    """Of |predicted / measured - 1| over `runs` runs; all 0 over none."""

    runs: int
    mean: float
    median: float
    p95: float
    worst: float

    @classmethod
    def of(cls, ratios: Floats) -> Errors:
        """From predicted / measured - 1."""
        if not len(ratios):
            return cls(0, 0.0, 0.0, 0.0, 0.0)
        size = np.abs(ratios)
        return cls(len(size), *map(float, (size.mean(), np.median(size), np.percentile(size, 95), size.max())))


@dataclass(frozen=True, slots=True)
class Calibration:
    """`drawn` are the numbers of the runs that were fitted to. `before` is of all runs under the given profile,
    `left_out` of each drawn run under constants from the other drawn ones. `memory` is of the runs that tell it."""

    fit: Fit
    drawn: tuple[int, ...]
    before: Errors
    on_drawn: Errors
    on_others: Errors
    left_out: Errors | None
    memory: Errors


def draw(runs: Sequence[MeasuredRun], count: int, generator: np.random.Generator) -> tuple[int, ...]:
    """Numbers of `count` of the runs (or of all), ascending: from each kind of plan in turn one at random.

    Kinds differ in the constants that they tell, so that a small draw should not miss one. Large kinds come first.
    """
    kinds: dict[tuple[object, ...], list[int]] = {}
    for number in generator.permutation(len(runs)).tolist():
        kinds.setdefault(_kind(runs[number]), []).append(number)
    largest_first = sorted(kinds.values(), key=len, reverse=True)
    in_turn = [number for turn in zip_longest(*largest_first) for number in turn if number is not None]
    return tuple(sorted(in_turn[:count]))


def _kind(run: MeasuredRun) -> tuple[object, ...]:
    one = run.plan.stages[0].strategies[0]
    degrees = run.shape.nodes > 1, run.plan.devices > 1, one.tp > 1, one.ulysses > 1, one.ring > 1, one.ep > 1
    return *degrees, one.zero, one.offload, one.recompute


def calibrate(
    runs: Sequence[MeasuredRun],
    hardware: HardwareProfile,
    drawn: Sequence[int],
    *,
    names: tuple[str, ...] = (),
    leave_one_out: bool = False,
) -> Calibration:
    """Fits to the runs of these numbers; raises as `fit` does."""
    chosen = [runs[number] for number in drawn]
    found = fit(chosen, hardware, names)
    errors = time_errors(runs, found.hardware)
    others = np.setdiff1d(np.arange(len(runs)), drawn)
    return Calibration(
        fit=found,
        drawn=tuple(drawn),
        before=Errors.of(time_errors(runs, hardware)),
        on_drawn=Errors.of(errors[list(drawn)]),
        on_others=Errors.of(errors[others]),
        left_out=Errors.of(left_out_errors(chosen, hardware, names)) if leave_one_out else None,
        memory=Errors.of(memory_errors(runs, found.hardware)),
    )


def time_errors(runs: Sequence[MeasuredRun], hardware: HardwareProfile) -> Floats:
    """[R]: predicted / measured - 1."""
    measured_s = np.array([run.iteration_time_s for run in runs])
    return np.asarray(RunTimes.of(runs, hardware).predicted_s(hardware) / measured_s - 1)


def left_out_errors(runs: Sequence[MeasuredRun], hardware: HardwareProfile, names: tuple[str, ...] = ()) -> Floats:
    """[R]: as `time_errors`, each run under constants that were fitted to the other ones."""
    return np.concatenate(
        [
            time_errors([run], fit([*runs[:number], *runs[number + 1 :]], hardware, names).hardware)
            for number, run in enumerate(runs)
        ]
    )


def memory_errors(runs: Sequence[MeasuredRun], hardware: HardwareProfile) -> Floats:
    """The same of memory, over the runs that tell it: what the plan needs, without the reserve."""
    return np.array(
        [
            hardware.plannable_bytes(evaluate(run.plan, run.request(hardware)).peak_bytes_per_gpu) / run.peak_bytes - 1
            for run in runs
            if run.peak_bytes
        ]
    )
