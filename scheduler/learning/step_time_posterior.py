"""Posterior of the ratio of measured to predicted step times, from measured plans of several models on one GPU model.

The logarithm of the ratio is log(sum of terms x exp(constant)) of the plan, plus residuals of its model, its layout and
its job, plus noise. The logarithms of the constants and the residuals have normal priors, so this is a Gaussian process
(Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, sections 2.2 and 2.7). Its kernel is the product
of two plans' shares of each term, plus for plans of one model a squared exponential of their layouts. The constants
have a part that all models share and a part of each model, because kernels differ between models.

Noise has Student's t distribution. It is a normal distribution whose variance is divided by a weight of each row, so a
stalled job or a throttled GPU loses its weight (Lange, Little and Taylor, JASA 84, 1989, section 2).

The rows of a model are summarized once, at the constants that are most probable given these rows alone. The shared
constants of all models follow from the sums of the summaries. This would be exact if shares did not depend on the
constants, because residuals of different models are independent given the constants.

Arrays are [N] for the rows of a model and [K] for terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, isfinite

import numpy as np
from numpy.typing import NDArray

from scheduler.learning.plan_features import TERM_SD, PlanFeatures

Floats = NDArray[np.float64]

INTERVAL_SDS = 1.2816
"""Standard deviations to either side of the mean that hold 80% of a normal distribution."""
_STUDENT_FREEDOM = 4.0
"""Degrees of freedom of the noise. Few, so that a row far from the others has next to no weight."""
_FIRST_GUESS_SD = 0.5
"""Standard deviation of the rows around their median from which their weights start."""
_STEPS = 8
_MAX_LOG_STEP = 0.7
"""Largest change of a constant's logarithm in one step: a factor of two."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Prior standard deviations of the logarithm of a ratio. The defaults are judgment.

    `constants` is a factor on those of TERM_SD for the part that all models share, and `own_constants` for the part of
    each model. `model` is that of all plans of a model, `job` of all plans of a job, and `layout` of plans of a model
    whose layouts are within `doublings` of each other.
    """

    constants: float = 0.7
    own_constants: float = 0.7
    model: float = 0.2
    layout: float = 0.2
    doublings: float = 2.0
    job: float = 0.05
    noise: float = 0.05

    def scale(self, factor: float, *, noise: float) -> Spread:
        """Return the spread with all deviations but the noise multiplied by `factor`."""
        names = ("constants", "own_constants", "model", "layout", "job")
        return replace(self, **{name: factor * getattr(self, name) for name in names}, noise=noise)

    def scale_residuals(self, factor: float) -> Spread:
        """Return the spread with the deviations of models and layouts multiplied by `factor`."""
        return replace(self, model=factor * self.model, layout=factor * self.layout)

    @property
    def constant_variances(self) -> Floats:
        """[K]"""
        return (self.constants * np.array(TERM_SD)) ** 2

    @property
    def own_constant_variances(self) -> Floats:
        """[K]"""
        return (self.own_constants * np.array(TERM_SD)) ** 2


@dataclass(frozen=True, slots=True)
class MeasuredPlan:
    """A measured step: the features of its plan, log(measured / predicted), and the job that measured it.

    Raises:
        ValueError: `log_ratio` is not finite.
    """

    features: PlanFeatures
    log_ratio: float
    job: str = ""

    def __post_init__(self) -> None:
        if not isfinite(self.log_ratio):
            raise ValueError(f"log_ratio must be finite, got {self.log_ratio}")


@dataclass(frozen=True, slots=True)
class StepTimeFactor:
    """The expected logarithm of measured / predicted for one plan, and the standard deviation of a measurement."""

    log_mean: float
    log_sd: float

    @property
    def mean(self) -> float:
        """The factor for the predicted step time: the median of the distribution."""
        return exp(self.log_mean)

    @property
    def interval(self) -> tuple[float, float]:
        """The least and the greatest factor of the central 80%."""
        half = INTERVAL_SDS * self.log_sd
        return exp(self.log_mean - half), exp(self.log_mean + half)


@dataclass(frozen=True, slots=True, eq=False)
class ModelSummary:
    """Evidence of the rows of one model for the shared constants, and for its residual given these.

    Attributes:
        center: [K] own and shared constants together, at which the model is linear.
        shares: [N, K] of the terms at `center`; `targets` [N] are the ratios without the part that is independent of
            the constants.
        inverse: [N, N] inverse covariance of the rows given the shared constants.
        precision: [K, K] of the shared constants, without their prior.
        information: [K] precision times the shared constants that fit the rows best.
        weights: [N] of the rows: about 1 for a row that agrees with the others, near 0 for an outlier.
        log_density: logarithm of the density of the rows given shared constants of 0, up to a constant.
    """

    rows: tuple[MeasuredPlan, ...]
    layouts: Floats
    center: Floats
    shares: Floats
    targets: Floats
    inverse: Floats
    precision: Floats
    information: Floats
    weights: Floats
    log_density: float


def summarize_model(rows: Sequence[MeasuredPlan], spread: Spread) -> ModelSummary:
    """Summarize the rows of one model, of which there must be at least one."""
    terms, ratios = _normalize([row.features for row in rows]), np.array([row.log_ratio for row in rows])
    layouts = np.array([row.features.layout for row in rows])
    residual = _compute_residual_covariance(rows, layouts, rows, layouts, spread)
    own = spread.own_constant_variances
    prior = own + spread.constant_variances
    center, weights = np.zeros(len(prior)), _weigh((ratios - np.median(ratios)) / _FIRST_GUESS_SD)
    for _ in range(_STEPS):
        log_sums, shares = _expand(terms, center)
        noise = spread.noise**2 / weights
        covariance = (shares * prior) @ shares.T + residual + np.diag(noise)
        solved = np.linalg.solve(covariance, ratios - log_sums + shares @ center)
        center = center + np.clip(prior * (shares.T @ solved) - center, -_MAX_LOG_STEP, _MAX_LOG_STEP)
        weights = _weigh(noise * solved / spread.noise)
    log_sums, shares = _expand(terms, center)
    covariance = (shares * own) @ shares.T + residual + np.diag(spread.noise**2 / weights)
    inverse, targets = np.asarray(np.linalg.inv(covariance)), ratios - log_sums + shares @ center
    weight_density = 0.5 * _STUDENT_FREEDOM * float((np.log(weights) - weights).sum())
    determinant = float(np.linalg.slogdet(covariance)[1])
    return ModelSummary(
        rows=tuple(rows),
        layouts=layouts,
        center=center,
        shares=shares,
        targets=targets,
        inverse=inverse,
        precision=shares.T @ inverse @ shares,
        information=shares.T @ (inverse @ targets),
        weights=weights,
        log_density=weight_density - 0.5 * (determinant + float(targets @ inverse @ targets)),
    )


@dataclass(frozen=True, slots=True, eq=False)
class StepTimePosterior:
    """Posterior of the shared constants of one GPU model: mean [K] and covariance [K, K] of their logarithms.

    They are relative to the constants of the predictions. `log_evidence` is the logarithm of the density of the rows,
    up to a constant. The spread with the greatest one explains them best.
    """

    spread: Spread
    mean: Floats
    covariance: Floats
    log_evidence: float

    @classmethod
    def from_summaries(cls, summaries: Sequence[ModelSummary], spread: Spread) -> StepTimePosterior:
        """Return the posterior after the rows of any number of models, all summarized under `spread`."""
        prior, evidence = spread.constant_variances, sum(each.log_density for each in summaries)
        precision, information = np.diag(1 / prior), np.zeros(len(prior))
        for each in summaries:
            precision += each.precision
            information += each.information
        covariance = np.asarray(np.linalg.inv(precision))
        mean = covariance @ information
        evidence += 0.5 * float(information @ mean - np.linalg.slogdet(precision)[1] - np.log(prior).sum())
        return cls(spread, mean, covariance, evidence)

    def estimate_constants(self, model: ModelSummary | None = None) -> Floats:
        """Return the expected logarithms [K] of the constants, shared and own together, of a model.

        Args:
            model: the rows of the model; None if it has none.
        """
        if model is None:
            return self.mean
        gain = (model.shares * self.spread.own_constant_variances).T @ model.inverse
        return np.asarray(self.mean + gain @ (model.targets - model.shares @ self.mean))

    def predict(self, features: PlanFeatures, model: ModelSummary | None = None, *, job: str = "") -> StepTimeFactor:
        """Return the factor for the predicted step of a plan.

        Args:
            model: the rows of the plan's model; None if it has none.
            job: the job that would run the plan; empty for a new one.
        """
        (log_sum,), (shares,) = _expand(_normalize([features]), self.mean)
        spread, own = self.spread, self.spread.own_constant_variances
        log_mean, sensitivity = float(log_sum), shares
        variance = float(shares**2 @ own) + spread.model**2 + spread.layout**2 + spread.job**2 + spread.noise**2
        if model is not None:
            asked = (MeasuredPlan(features, 0.0, job),)
            residual = _compute_residual_covariance(
                asked, np.array([features.layout]), model.rows, model.layouts, spread
            )
            covariance = residual[0] + (shares * own) @ model.shares.T
            gain = covariance @ model.inverse
            log_mean += float(gain @ (model.targets - model.shares @ self.mean))
            variance -= float(gain @ covariance)
            sensitivity = shares - gain @ model.shares
        variance += float(sensitivity @ self.covariance @ sensitivity)
        return StepTimeFactor(log_mean, float(np.sqrt(variance)))


def _normalize(features: Sequence[PlanFeatures]) -> Floats:
    """Return the terms [N, K], scaled so that those of each plan sum to 1."""
    terms = np.array([each.terms for each in features])
    return np.asarray(terms / terms.sum(axis=1, keepdims=True))


def _expand(terms: Floats, constants: Floats) -> tuple[Floats, Floats]:
    """Return log(sum of terms x exp(constant)) [N], and its derivatives [N, K], which are the shares of the terms."""
    scaled = terms * np.exp(constants)
    sums = scaled.sum(axis=1)
    return np.log(sums), scaled / sums[:, None]


def _weigh(deviations: Floats) -> Floats:
    """Return the weights of rows that deviate by this many standard deviations of the noise."""
    return np.asarray((_STUDENT_FREEDOM + 1) / (_STUDENT_FREEDOM + deviations**2))


def _compute_residual_covariance(
    rows: Sequence[MeasuredPlan], layouts: Floats, others: Sequence[MeasuredPlan], other_layouts: Floats, spread: Spread
) -> Floats:
    """Return the covariance [N, M] of the residuals of two lists of plans of one model."""
    squares = ((layouts[:, None] - other_layouts) ** 2).sum(axis=-1)
    same_job = np.array([[row.job != "" and row.job == other.job for other in others] for row in rows])
    alike = np.exp(-0.5 * squares / spread.doublings**2)
    return np.asarray(spread.model**2 + spread.layout**2 * alike + spread.job**2 * same_job)


_SCALES = (0.03125, 0.125, 0.25, 0.5, 1.0, 2.0)
_NOISE_SDS = (0.03, 0.05, 0.08)


def choose_spread(models: Sequence[Sequence[MeasuredPlan]]) -> Spread:
    """Return the spread under which the rows of `models` are most probable (type II maximum likelihood; Rasmussen and
    Williams, section 5.4.1).

    Only the noise and the scale of all other deviations are chosen, from a small grid, because few rows determine
    little. Rows predicted by constants that were fitted to them choose a small scale.
    """

    def compute_evidence(spread: Spread) -> float:
        summaries = [summarize_model(rows, spread) for rows in models]
        return StepTimePosterior.from_summaries(summaries, spread).log_evidence

    grid = [Spread().scale(factor, noise=noise) for factor in _SCALES for noise in _NOISE_SDS]
    return max(grid, key=compute_evidence)
