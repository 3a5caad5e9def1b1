"""The seasonal point forecast on series whose future is known."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler.forecast.seasonal import Season, compute_point_forecasts, compute_residual_scales, max_demand_ahead

DAY = Season(86_400.0, 3_600.0)


def _days(count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    hours = np.arange(24 * count)
    return 100.0 + 50.0 * np.sin(2 * np.pi * hours / 24)


def _points(series: np.ndarray[tuple[int], np.dtype[np.float64]], origins: list[int], horizon_bins: int) -> list[float]:
    points = compute_point_forecasts(series, series, np.array(origins), season=DAY, horizon_bins=horizon_bins)
    return [float(point) for point in points]


def test_a_season_must_be_a_whole_number_of_steps() -> None:
    with pytest.raises(ValueError, match="season_s must be a whole number of step_s"):
        Season(100.0, 30.0)
    with pytest.raises(ValueError, match="step_s must be positive and below season_s"):
        Season(100.0, 0.0)


def test_a_horizon_counts_the_bins_that_it_touches() -> None:
    assert DAY.count_horizon_bins(3_600.0) == 1
    assert DAY.count_horizon_bins(3_601.0) == 2
    assert DAY.count_horizon_bins(1.0) == 1
    with pytest.raises(ValueError, match="horizon_s must be positive"):
        DAY.count_horizon_bins(0.0)
    with pytest.raises(ValueError, match="horizon_s must be positive and at most"):
        DAY.count_horizon_bins(8 * 86_400.0)


def test_the_largest_demand_ahead_counts_both_ends() -> None:
    peaks = np.array([5.0, 1.0, 2.0, 9.0, 0.0])
    assert max_demand_ahead(peaks, np.array([0, 1, 3]), 2 - 1).tolist() == [5.0, 2.0, 9.0]


def test_less_than_a_season_of_history_gives_persistence() -> None:
    series = _days(1)
    assert _points(series, [5, 20], 3) == [series[5], series[20]]


@pytest.mark.parametrize("horizon_bins", [1, 3, 24, 30])
def test_purely_seasonal_demand_is_forecast_exactly(horizon_bins: int) -> None:
    series = _days(6)
    origins = [72, 80, 95]
    expected = [series[origin : origin + horizon_bins + 1].max() for origin in origins]
    assert _points(series, origins, horizon_bins) == pytest.approx(expected)


def test_rise_starts_from_the_current_level() -> None:
    series = _days(3)
    series[48:] += 40.0
    assert _points(series, [50], 3) == pytest.approx([series[50:54].max()])


def test_one_unusual_day_does_not_change_the_usual_rise() -> None:
    series = _days(7)
    series[24 * 4 + 3] = 900.0
    assert _points(series, [24 * 6 + 1], 3) == pytest.approx([series[24 * 6 + 1 : 24 * 6 + 5].max()])


def test_point_forecast_reads_nothing_after_its_origin() -> None:
    series = _days(4)
    changed = series.copy()
    changed[81:] = 1_000.0
    assert _points(series, [80], 5) == _points(changed, [80], 5)


def test_residual_units_are_positive_even_without_demand() -> None:
    nothing = np.zeros(48)
    assert compute_residual_scales(nothing, np.zeros(3), np.arange(3), season=DAY).tolist() == [1.0, 1.0, 1.0]


def test_residual_units_do_not_depend_on_how_origins_are_batched() -> None:
    series = _days(4)
    origins = np.arange(40, 60)
    together = compute_residual_scales(series, series[origins], origins, season=DAY)
    single = [compute_residual_scales(series, series[[k]], np.array([k]), season=DAY)[0] for k in origins]
    assert together == pytest.approx(np.array(single))
