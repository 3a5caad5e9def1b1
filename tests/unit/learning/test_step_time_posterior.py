"""Posterior of step times: constants shared by models, residuals of one model, outliers and intervals."""

from __future__ import annotations

from math import inf, log

import numpy as np
import pytest

from scheduler.domain.parallel_plan import STEP_TERMS
from scheduler.learning.plan_features import TERM_SD, PlanFeatures
from scheduler.learning.step_time_posterior import (
    MeasuredPlan,
    Spread,
    StepTimePosterior,
    choose_spread,
    summarize_model,
)

SPREAD = Spread()


def features(products: float, network: float = 0.0, *, tensor: float = 0.0) -> PlanFeatures:
    """Return a plan that spends these shares on products and between nodes; the rest has no cause."""
    terms = dict.fromkeys(STEP_TERMS, 0.0) | {
        "compute": products,
        "network": network,
        "fixed": 1 - products - network,
    }
    return PlanFeatures(tuple(terms.values()), (tensor, 0.0, 0.0))


def measure(plan: PlanFeatures, products: float, network: float) -> float:
    """Return log(measured / predicted) if products and network are slower by these factors."""
    shares = dict(zip(STEP_TERMS, plan.terms, strict=True))
    slow = shares["compute"] * products + shares["network"] * network + shares["fixed"]
    return log(slow)


def mixed_plans(count: int) -> list[PlanFeatures]:
    shares = np.linspace(0.1, 0.8, count)
    return [features(0.9 - share, share, tensor=float(number % 3)) for number, share in enumerate(shares)]


def test_a_slow_constant_moves_plans_in_proportion_to_their_shares() -> None:
    rows = [MeasuredPlan(plan, measure(plan, 1.0, 2.0)) for plan in mixed_plans(8)]
    posterior = StepTimePosterior.from_summaries([summarize_model(rows, SPREAD)], SPREAD)
    of_network = posterior.predict(features(0.2, 0.7)).log_mean
    of_products = posterior.predict(features(0.9, 0.0)).log_mean
    assert of_network > 0.15
    assert abs(of_products) < 0.1


def test_rows_of_a_model_predict_its_other_plans() -> None:
    rows = [MeasuredPlan(plan, measure(plan, 1.4, 2.5)) for plan in mixed_plans(8)]
    summary = summarize_model(rows, SPREAD)
    posterior = StepTimePosterior.from_summaries([summary], SPREAD)
    asked = features(0.45, 0.45, tensor=1.0)
    factor = posterior.predict(asked, summary)
    low, high = factor.interval
    assert factor.mean == pytest.approx(np.exp(measure(asked, 1.4, 2.5)), rel=0.03)
    assert low < factor.mean < high
    assert factor.log_sd < posterior.predict(asked).log_sd


def test_without_rows_the_prediction_is_the_cost_models() -> None:
    factor = StepTimePosterior.from_summaries([], SPREAD).predict(features(1.0))
    prior = TERM_SD[0] ** 2 * (SPREAD.constants**2 + SPREAD.own_constants**2)
    rest = SPREAD.model**2 + SPREAD.layout**2 + SPREAD.job**2 + SPREAD.noise**2
    assert factor.mean == 1.0
    assert factor.log_sd == pytest.approx((prior + rest) ** 0.5)


def test_rows_of_the_same_job_count_more() -> None:
    rows = [MeasuredPlan(features(0.9), log(1.5), "a")]
    summary = summarize_model(rows, Spread(job=0.3))
    posterior = StepTimePosterior.from_summaries([summary], Spread(job=0.3))
    own = posterior.predict(features(0.9), summary, job="a").log_mean
    assert own > posterior.predict(features(0.9), summary, job="b").log_mean > 0.0


@pytest.mark.parametrize("factor", [0.01, 100.0])
def test_a_row_that_is_off_by_100_has_next_to_no_weight(factor: float) -> None:
    plans = mixed_plans(8)
    rows = [MeasuredPlan(plan, measure(plan, 1.3, 1.3)) for plan in plans]
    odd = [*rows, MeasuredPlan(features(0.5, 0.3, tensor=1.0), log(1.3 * factor))]
    clean, disturbed = summarize_model(rows, SPREAD), summarize_model(odd, SPREAD)
    assert disturbed.weights[-1] < 0.01
    assert disturbed.weights[:-1].min() > 0.5
    for plan in plans:
        expected = StepTimePosterior.from_summaries([clean], SPREAD).predict(plan, clean).log_mean
        found = StepTimePosterior.from_summaries([disturbed], SPREAD).predict(plan, disturbed).log_mean
        assert abs(found - expected) < log(1.02)


def test_measurements_that_contradict_each_other_give_a_finite_wide_answer() -> None:
    rows = [MeasuredPlan(features(0.9), log(100.0)), MeasuredPlan(features(0.9), log(0.01))]
    summary = summarize_model(rows, SPREAD)
    factor = StepTimePosterior.from_summaries([summary], SPREAD).predict(features(0.9), summary)
    assert np.isfinite([factor.log_mean, factor.log_sd]).all()
    assert 0.5 < factor.mean < 2.0


def test_models_combine_in_any_order() -> None:
    summaries = [
        summarize_model([MeasuredPlan(plan, measure(plan, slow, 1.5)) for plan in mixed_plans(4)], SPREAD)
        for slow in (1.2, 1.3, 1.4)
    ]
    forward = StepTimePosterior.from_summaries(summaries, SPREAD)
    backward = StepTimePosterior.from_summaries(summaries[::-1], SPREAD)
    np.testing.assert_allclose(forward.mean, backward.mean, rtol=1e-9)
    one = StepTimePosterior.from_summaries(summaries[:1], SPREAD)
    assert (np.diag(forward.covariance) <= np.diag(one.covariance) + 1e-12).all()


def test_the_chosen_spread_follows_the_scatter_of_the_rows() -> None:
    scatter = np.random.default_rng(0).normal(size=8)
    plans = mixed_plans(8)
    exact = choose_spread([[MeasuredPlan(plan, 0.0) for plan in plans]])
    noisy = choose_spread([[MeasuredPlan(plan, 0.3 * each) for plan, each in zip(plans, scatter, strict=True)]])
    assert (exact.model, exact.noise) < (noisy.model, noisy.noise)


def test_values_without_a_logarithm_are_rejected() -> None:
    with pytest.raises(ValueError, match="log_ratio must be finite, got inf"):
        MeasuredPlan(features(1.0), inf)
    with pytest.raises(ValueError, match="terms must be 6 shares"):
        PlanFeatures((1.0,), ())
    with pytest.raises(ValueError, match="not all 0"):
        PlanFeatures((0.0,) * len(STEP_TERMS), ())
