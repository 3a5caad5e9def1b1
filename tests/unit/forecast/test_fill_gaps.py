"""Gaps in a recording of demand."""

from __future__ import annotations

import pytest

from scheduler.forecast.demand_history import fill_gaps


def test_gaps_take_the_value_before_them() -> None:
    filled = fill_gaps([0.0, 100.0, 0.3, float("nan"), 90.0, 50.0])
    assert filled.tolist() == [100.0, 100.0, 100.0, 100.0, 90.0, 50.0]


def test_quiet_is_no_gap() -> None:
    assert fill_gaps([100.0, 2.0, 100.0]).tolist() == [100.0, 2.0, 100.0]


def test_zero_is_no_gap_if_demand_is_mostly_zero() -> None:
    assert fill_gaps([0.0, 0.0, 5.0, 0.0]).tolist() == [0.0, 0.0, 5.0, 0.0]


def test_fill_gaps_rejects_invalid_input() -> None:
    with pytest.raises(ValueError, match="must have a known value"):
        fill_gaps([float("nan")])
    with pytest.raises(ValueError, match="negative or infinite"):
        fill_gaps([1.0, -1.0])
    with pytest.raises(ValueError, match="missing_below"):
        fill_gaps([1.0], missing_below=1.0)
    assert fill_gaps([]).tolist() == []
