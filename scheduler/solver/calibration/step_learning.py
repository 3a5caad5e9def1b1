"""Learning from measured runs: terms of their predicted steps, and factors for the steps of other plans."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np

from scheduler.learning.plan_features import TERMS, PlanFeatures, describe_layout
from scheduler.learning.step_time_posterior import (
    MeasuredPlan,
    Spread,
    StepTimeFactor,
    StepTimePosterior,
    choose_spread,
    summarize_model,
)
from scheduler.solver.calibration.measured_runs import MeasuredRun
from scheduler.solver.calibration.run_prediction import RunTimePredictor
from scheduler.solver.instance import Floats
from scheduler.solver.profiles.hardware_profile import HardwareProfile

_LOG_STEP = 0.02
"""Change of a constant's logarithm by which its term is measured."""


def measure_plans(runs: Sequence[MeasuredRun], hardware: HardwareProfile) -> tuple[MeasuredPlan, ...]:
    """Return the runs as measured plans, relative to predictions under `hardware`. Those of one model are one job's.

    Raises:
        ValueError: a run's layers follow several strategies.
    """
    predicted_s, terms = _compute_terms(runs, hardware)
    return tuple(
        MeasuredPlan(
            PlanFeatures(tuple(shares), describe_layout(run.plan, run.shape)),
            float(np.log(run.iteration_time_s / time_s)),
            run.model.name,
        )
        for run, time_s, shares in zip(runs, predicted_s.tolist(), terms.tolist(), strict=True)
    )


def _compute_terms(runs: Sequence[MeasuredRun], hardware: HardwareProfile) -> tuple[Floats, Floats]:
    """Return predicted step times in seconds [R] and their terms [R, K], in the order of TERMS.

    A term is the derivative of the step time's logarithm by that of the constant, or of its inverse if the constant is
    a rate. Work that other work hides has no term.
    """
    predictor = RunTimePredictor.from_runs(runs, hardware)
    predicted_s = predictor.predict_s(hardware)
    terms = np.zeros((len(runs), len(TERMS)))
    for at, name in enumerate(TERMS[:-1]):
        if value := getattr(hardware, name):
            slower = value * np.exp(-_LOG_STEP if _is_rate(name) else _LOG_STEP)
            slower_s = predictor.predict_s(replace(hardware, **{name: slower}))
            terms[:, at] = np.log(slower_s / predicted_s) / _LOG_STEP
    terms = np.maximum(terms, 0.0)
    terms[:, -1] = np.maximum(1 - terms.sum(axis=1), 0.0)
    return predicted_s, terms / terms.sum(axis=1, keepdims=True)


def _is_rate(name: str) -> bool:
    return name.endswith(("efficiency", "_bytes_per_s"))


def learn_factors(
    rows: Sequence[MeasuredPlan], models: Sequence[Hashable], drawn: Sequence[int], spread: Spread | None = None
) -> tuple[StepTimeFactor, ...]:
    """Return the factor of each row's predicted step, as learned from the rows with the indices `drawn`.

    Args:
        models: the model of each row, or a key of it. Rows of one model share its residual.
        spread: by default the one under which the drawn rows are most probable.
    """
    known: dict[Hashable, list[MeasuredPlan]] = {}
    for number in drawn:
        known.setdefault(models[number], []).append(rows[number])
    chosen = choose_spread(list(known.values())) if spread is None else spread
    summaries = {model: summarize_model(measured, chosen) for model, measured in known.items()}
    posterior = StepTimePosterior.from_summaries(list(summaries.values()), chosen)
    return tuple(
        posterior.predict(row.features, summaries.get(model), job=row.job)
        for row, model in zip(rows, models, strict=True)
    )
