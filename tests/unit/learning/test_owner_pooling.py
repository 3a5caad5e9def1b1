"""Predictions for one owner: its own rows in full, others by a pull of one percent each."""

from __future__ import annotations

import pytest

from scheduler.domain.step_measurements import StepMeasurement
from scheduler.learning.owner_pooling import PLANS_MIN, OwnerRows, predict_for_owner
from scheduler.learning.plan_features import PlanFeatures

PLAN = PlanFeatures((0.8, 0.1, 0.1, 0.0, 0.0, 0.0), (1.0, 2.0))


def rows(ratio: float, count: int = PLANS_MIN) -> OwnerRows:
    return {"m": (StepMeasurement.from_ratio("j", "o", PLAN.terms, PLAN.layout, ratio),) * count}


def test_own_measurements_count_in_full() -> None:
    assert predict_for_owner({"a": rows(1.5)}, "a", "m", PLAN).mean == pytest.approx(1.5, rel=0.03)


def test_each_other_owner_pulls_by_one_percent() -> None:
    measured = {f"o{number}": rows(1.5) for number in range(5)}
    assert predict_for_owner(measured, "a", "m", PLAN).mean == pytest.approx(1.02**2.5)
    crowd = {f"o{number}": rows(1.5) for number in range(80)}
    assert predict_for_owner(crowd, "a", "m", PLAN).mean == pytest.approx(1.5, rel=0.03)


def test_owners_with_few_plans_do_not_count_for_others() -> None:
    assert predict_for_owner({"o": rows(1.5, PLANS_MIN - 1)}, "a", "m", PLAN).mean == 1.0
