"""Prediction for one owner from the measurements of all: its own in full, those of others within a limit per owner.

Measurements come from the jobs of users, and a user may report anything. So each other owner pulls a prediction towards
its own by at most half of INFLUENCE_MAX, however far it is. The pulls balance where f minimizes f^2 / 2 + c x (sum of
|f - value of an owner|), c being that half. The minimum is the median of the n values and of c x (n, n - 2, ... -n).
False reports of one owner therefore move the predictions of others by at most INFLUENCE_MAX, whatever the others
report. Owners that agree are believed after about 1 owner per percent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import log
from statistics import median

from scheduler.domain.step_measurements import StepMeasurement
from scheduler.learning.plan_features import PlanFeatures
from scheduler.learning.step_time_posterior import (
    MeasuredPlan,
    ModelSummary,
    Spread,
    StepTimeFactor,
    StepTimePosterior,
    summarize_model,
)

INFLUENCE_MAX = log(1.02)
"""Largest change of the logarithm of a prediction by the reports of one other owner."""
PLANS_MIN = 3
"""Measured plans of an owner on a GPU model from which the owner counts for others."""

Rows = tuple[StepMeasurement, ...]
OwnerRows = Mapping[str, Rows]
"""Measured plans of one owner on one GPU model, by model."""

_SPREAD = Spread()
_RESIDUAL_SPREADS = tuple(_SPREAD.scale_residuals(factor) for factor in (0.3, 1.0))
"""Spreads for a cost model that is wrong only in its constants, and for one that is not."""


def predict_for_owner(
    measured: Mapping[str, OwnerRows], owner: str, model: str, features: PlanFeatures, *, job: str = ""
) -> StepTimeFactor:
    """Return the factor for the predicted step of a plan that a job of `owner` would run.

    Args:
        measured: measured plans on the GPU model, by owner.
        model: key of the plan's model.
    """
    own, prior = _predict(measured.get(owner, {}), model, features, job), _predict({}, model, features, "")
    others = [
        _predict(rows, model, features, "").log_mean
        for name, rows in sorted(measured.items())
        if name != owner and sum(map(len, rows.values())) >= PLANS_MIN
    ]
    # The pooled value replaces the mean of the prior, of which the own rows leave this share.
    share_left = min(own.log_sd**2 / prior.log_sd**2, 1.0)
    return StepTimeFactor(own.log_mean + share_left * _pool(others), own.log_sd)


def estimate_own_constants(rows: OwnerRows, model: str) -> tuple[float, ...]:
    """Return the logarithms of the constants, in the order of STEP_TERMS, that an owner's own rows say about a model.

    Other owners have no part in them, because they could not agree to more than INFLUENCE_MAX each. Residuals are as
    large as explains the rows best: where the cost model is right but for its constants, few rows suffice.
    """
    posteriors = []
    for spread in _RESIDUAL_SPREADS:
        summaries = {name: _summarize(plans, spread) for name, plans in rows.items()}
        posteriors.append((StepTimePosterior.from_summaries(tuple(summaries.values()), spread), summaries.get(model)))
    posterior, summary = max(posteriors, key=lambda each: each[0].log_evidence)
    return tuple(posterior.estimate_constants(summary).tolist())


def _pool(log_means: Sequence[float]) -> float:
    """Return the value towards which the owners pull together."""
    count, pull = len(log_means), 0.5 * INFLUENCE_MAX
    return median([*log_means, *(pull * (count - 2 * number) for number in range(count + 1))])


@lru_cache(maxsize=8192)
def _summarize(rows: Rows, spread: Spread = _SPREAD) -> ModelSummary:
    plans = [MeasuredPlan(PlanFeatures(row.terms, row.layout), row.log_ratio, row.job) for row in rows]
    return summarize_model(plans, spread)


def _predict(rows: OwnerRows, model: str, features: PlanFeatures, job: str) -> StepTimeFactor:
    summaries = {name: _summarize(plans) for name, plans in rows.items()}
    posterior = StepTimePosterior.from_summaries(tuple(summaries.values()), _SPREAD)
    return posterior.predict(features, summaries.get(model), job=job)
