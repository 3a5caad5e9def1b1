"""Comparison of predicted and measured steps, and of the terms of the prediction by their error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.profiling.measurement_log import DeviceFacts
from scheduler.profiling.reference_model import build_measured_run
from scheduler.profiling.tasks import StepTask, Task
from scheduler.solver.calibration.constant_fit import ErrorSummary
from scheduler.solver.evaluate import Evaluation, evaluate
from scheduler.solver.profiles.hardware_profile import HardwareProfile
from scheduler.solver.profiles.profile_document import ProfileError

_FACTOR_SD = 0.5
"""How far a term's factor strays from 1 before that counts as much as an error of `_STEP_NOISE` in one step."""

_STEP_NOISE = 0.05


@dataclass(frozen=True, slots=True)
class TermSeconds:
    """Predicted seconds of a step by cause, on the device that takes longest. Their sum is the step's time.

    `optimizer_s` includes changes of layout between layers. `bubble_s` is the time that the pipeline's devices and
    links spend on the first and last micro-batches.
    """

    compute_s: float
    tensor_s: float
    data_s: float
    optimizer_s: float
    bubble_s: float
    overhead_s: float


TERMS = tuple(field.name for field in fields(TermSeconds))


@dataclass(frozen=True, slots=True)
class ComparedStep:
    """A measured step beside its prediction. Memory is that of the whole device, context included."""

    task: StepTask
    predicted_s: float
    measured_s: float
    spread: float
    predicted_bytes: int
    measured_bytes: int
    terms: TermSeconds
    measured_forward_s: float
    measured_optimizer_s: float

    @property
    def time_error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    @property
    def memory_error(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1 if self.measured_bytes else 0.0


@dataclass(frozen=True, slots=True)
class TermError:
    """How far one term is off: its share of the predicted steps, and the factor that would suit the measured ones."""

    name: str
    share: float
    factor: float

    @property
    def effect(self) -> float:
        """Share of the step's time by which the term is off."""
        return self.share * (self.factor - 1)


@dataclass(frozen=True, slots=True)
class Validation:
    """All compared steps, with the errors of time and memory, and the terms by falling error."""

    steps: tuple[ComparedStep, ...]
    time: ErrorSummary
    memory: ErrorSummary
    terms: tuple[TermError, ...]


def select_feasible(
    tasks: Sequence[StepTask], hardware: HardwareProfile, device: DeviceFacts
) -> tuple[list[StepTask], int]:
    """Return the tasks whose plans are predicted to fit in memory, and the number of the others."""
    kept = []
    for task in tasks:
        try:
            judged = _evaluate(task, hardware, device.ranks)
        except ProfileError:
            continue
        if judged.fits:
            kept.append(task)
    return kept, len(tasks) - len(kept)


def compare_steps(
    figures: Mapping[Task, Mapping[str, float]], hardware: HardwareProfile, device: DeviceFacts
) -> Validation:
    """Return the comparison of all measured steps of the validation.

    Raises:
        ValueError: none was measured.
    """
    steps = tuple(
        _compare(task, values, hardware, device)
        for task, values in figures.items()
        if isinstance(task, StepTask) and task.purpose == "validation"
    )
    if not steps:
        raise ValueError("no step of the validation was measured. Allow more time, or use a smaller model.")
    return Validation(
        steps,
        ErrorSummary.from_ratios(np.array([each.time_error for each in steps])),
        ErrorSummary.from_ratios(np.array([each.memory_error for each in steps if each.measured_bytes])),
        _find_term_errors(steps),
    )


def _evaluate(task: StepTask, hardware: HardwareProfile, ranks: int) -> Evaluation:
    run = build_measured_run(task, {"step_s": 1.0}, gpu=hardware.gpu, ranks=ranks, precision=hardware.precision)
    return evaluate(run.plan, run.build_request(hardware))


def _compare(
    task: StepTask, values: Mapping[str, float], hardware: HardwareProfile, device: DeviceFacts
) -> ComparedStep:
    judged = _evaluate(task, hardware, device.ranks)
    context_bytes = 0 if device.kind == "cpu" else device.context_bytes
    peak_bytes = values.get("peak_bytes", 0.0)
    return ComparedStep(
        task=task,
        predicted_s=judged.iteration_time_s,
        measured_s=values["step_s"],
        spread=values.get("spread", 0.0),
        predicted_bytes=judged.peak_bytes_per_gpu,
        measured_bytes=round(peak_bytes + context_bytes) if peak_bytes else 0,
        terms=_split_terms(judged, task.plan, hardware),
        measured_forward_s=values.get("forward_s", 0.0),
        measured_optimizer_s=values.get("optimizer_s", 0.0),
    )


def _split_terms(judged: Evaluation, plan: ParallelPlan, hardware: HardwareProfile) -> TermSeconds:
    slowest = max(judged.stages, key=lambda stage: stage.time_s)
    parts, count = slowest.parts, plan.micro_batches
    work_s = count * parts.total_s
    return TermSeconds(
        compute_s=count * parts.compute_s,
        tensor_s=count * (parts.tensor_s + parts.sequence_s + parts.expert_s),
        data_s=count * parts.data_s,
        optimizer_s=count * parts.other_s,
        bubble_s=max(judged.iteration_time_s - work_s - hardware.iteration_overhead_s, 0.0),
        overhead_s=hardware.iteration_overhead_s,
    )


def _find_term_errors(steps: Sequence[ComparedStep]) -> tuple[TermError, ...]:
    """Return the factors of the terms that bring the predictions nearest to the measured steps.

    Relative errors are minimized with a normal prior around 1 on each factor. The optimizer's factor is measured.
    """
    shares = np.array([[getattr(step.terms, name) / step.measured_s for name in TERMS] for step in steps])
    predicted = np.array([[getattr(step.terms, name) / step.predicted_s for name in TERMS] for step in steps])
    left = np.ones(len(steps)) - shares.sum(axis=1)
    factors = np.ones(len(TERMS))
    timed = [step.measured_optimizer_s / step.terms.optimizer_s for step in steps if step.terms.optimizer_s]
    at = TERMS.index("optimizer_s")
    if timed and max(timed) > 0:
        factors[at] = float(np.median(timed))
        left = left - shares[:, at] * (factors[at] - 1)
    free = [number for number in range(len(TERMS)) if number != at]
    slopes = shares[:, free]
    precision = np.eye(len(free)) * (_STEP_NOISE / _FACTOR_SD) ** 2
    factors[free] += np.linalg.solve(slopes.T @ slopes + precision, slopes.T @ left)
    found = (
        TermError(name.removesuffix("_s"), float(predicted[:, number].mean()), float(factors[number]))
        for number, name in enumerate(TERMS)
    )
    return tuple(sorted(found, key=lambda each: -abs(each.effect)))
