"""Learning from measured runs: factors for the predicted steps of other plans."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import log

from scheduler.learning.plan_features import PlanFeatures, describe_layout
from scheduler.learning.step_time_posterior import (
    MeasuredPlan,
    Spread,
    StepTimeFactor,
    StepTimePosterior,
    choose_spread,
    summarize_model,
)
from scheduler.solver.calibration.measured_runs import MeasuredRun
from scheduler.solver.evaluate import evaluate_unchecked
from scheduler.solver.profiles.hardware_profile import HardwareProfile


def measure_plans(runs: Sequence[MeasuredRun], hardware: HardwareProfile) -> tuple[MeasuredPlan, ...]:
    """Return the runs as measured plans, relative to predictions under `hardware`. Those of one model are one job's.

    Plans are not checked: a run was possible where it was made, even if the solver would not plan it.
    """
    measured = []
    for run in runs:
        judged = evaluate_unchecked(run.plan, run.build_request(hardware))
        features = PlanFeatures(judged.terms, describe_layout(run.plan, run.shape))
        measured.append(MeasuredPlan(features, log(run.iteration_time_s / judged.iteration_time_s), run.model.name))
    return tuple(measured)


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
