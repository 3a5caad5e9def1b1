"""DemandHistory: validation, retention and resampling; and the filling of gaps."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler.forecast.demand_history import DemandHistory, fill_gaps


@pytest.mark.parametrize(
    ("times_s", "gpus", "named"),
    [
        ([0.0, 1.0], [1.0], "equally long"),
        ([0.0, float("nan")], [1.0, 2.0], "times_s must be finite"),
        ([0.0, 1.0], [1.0, float("nan")], "gpus must be finite, got nan at index 1"),
        ([0.0, 1.0], [1.0, float("inf")], "gpus must be finite"),
        ([0.0, 1.0], [1.0, -2.0], "gpus must not be negative, got -2.0"),
        ([5.0, 4.0], [1.0, 2.0], "times_s must ascend, got 4.0 after 5.0"),
        ([5.0, 5.0], [1.0, 2.0], "times_s must ascend"),
    ],
)
def test_invalid_history_is_rejected_by_field(times_s: list[float], gpus: list[float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        DemandHistory.from_sequences(times_s, gpus)


def test_two_dimensional_history_is_rejected() -> None:
    with pytest.raises(ValueError, match="gpus must have one dimension"):
        DemandHistory(np.zeros(1), np.zeros((1, 1)))


def test_history_copies_its_arrays_read_only() -> None:
    gpus = np.array([1.0, 2.0])
    history = DemandHistory(np.array([0.0, 1.0]), gpus)
    gpus[0] = 9.0
    assert history.gpus.tolist() == [1.0, 2.0]
    with pytest.raises(ValueError, match="read-only"):
        history.gpus[0] = 3.0


def test_append_leaves_the_old_history_unchanged() -> None:
    old = DemandHistory.from_sequences([0.0], [1.0])
    assert len(old.append(10.0, 2.0)) == 2
    assert len(old) == 1
    with pytest.raises(ValueError, match="times_s must ascend"):
        old.append(0.0, 2.0)


def test_retention_keeps_the_reading_that_applies_at_its_start() -> None:
    history = DemandHistory.from_sequences([], [])
    for time_s in range(0, 100, 10):
        history = history.append(float(time_s), float(time_s), retention_s=25.0)
    assert history.times_s.tolist() == [60.0, 70.0, 80.0, 90.0]


def test_resampling_holds_the_last_value() -> None:
    history = DemandHistory.from_sequences([3.0, 10.0, 31.0], [1.0, 2.0, 3.0])
    grid = history.resample(10.0)
    assert grid.times_s.tolist() == [0.0, 10.0, 20.0, 30.0]
    assert grid.gpus.tolist() == [1.0, 2.0, 2.0, 2.0]


def test_resampling_needs_a_positive_step_and_keeps_an_empty_history() -> None:
    assert len(DemandHistory.from_sequences([], []).resample(1.0)) == 0
    with pytest.raises(ValueError, match="step_s must be positive, got 0"):
        DemandHistory.from_sequences([0.0], [1.0]).resample(0.0)


def test_gaps_take_the_value_before_them() -> None:
    filled = fill_gaps([0.0, 100.0, 0.3, float("nan"), 90.0, 50.0])
    assert filled.tolist() == [100.0, 100.0, 100.0, 100.0, 90.0, 50.0]


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
