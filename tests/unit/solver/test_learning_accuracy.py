"""Step times learned from a few measured plans: errors on plans that were not drawn, on published measurements."""

from __future__ import annotations

import numpy as np
import pytest

from tests.benchmarks.accuracy import VTRAIN_ROWS
from tests.benchmarks.learning import DENSE, SCATTERED, learn_rubick, learn_vtrain


@pytest.mark.parametrize(("count", "most"), [(7, 0.12), (10, 0.105)])
def test_rubick_placements_are_predicted_from_a_few_rows(count: int, most: float) -> None:
    """Means are over all rows of all models but the scattered one, in 20 draws."""
    errors = learn_rubick(count)
    learned = np.concatenate([errors.learned[model] for model in DENSE])
    by_scalar = np.concatenate([errors.by_scalar[model] for model in DENSE])
    assert learned.mean() <= most
    assert learned.mean() <= 0.7 * by_scalar.mean()
    assert errors.learned[SCATTERED].mean() <= errors.by_scalar[SCATTERED].mean()
    inside = np.concatenate([errors.inside[model] for model in DENSE])
    assert 0.7 <= inside.mean() <= 0.9


def test_rows_of_other_models_do_no_harm() -> None:
    errors = learn_rubick(10, history=True, choose=False)
    assert np.concatenate([errors.learned[model] for model in DENSE]).mean() <= 0.105


def test_vtrain_runs_are_predicted_from_20_of_them() -> None:
    """The mean over a few samples counts, because a single sample varies by half a percent."""
    for which in ("single", "multi"):
        by_scalar, learned = learn_vtrain(which, VTRAIN_ROWS, range(3))
        assert learned.mean() <= 0.08
        assert learned.mean() < by_scalar.mean()
