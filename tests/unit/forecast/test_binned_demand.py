"""The rolling window of a pool's demand: bins, gaps and coarser bins."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.domain.fleet import DemandReading
from scheduler.domain.reading_bins import bin_readings
from scheduler.forecast.binned_demand import DemandWindow
from tests.unit.forecast.demands import DAY_S, HOUR_S, bin_values, make_days


def observe_all(window: DemandWindow, times_s: list[float], gpus: list[float]) -> None:
    for time_s, value in zip(times_s, gpus, strict=True):
        window.observe(time_s, value)


def test_largest_reading_of_a_bin_counts_and_the_newest_is_the_demand_now() -> None:
    window = DemandWindow(100.0, 50)
    observe_all(window, [0.0, 30.0, 60.0, 130.0, 140.0], [2.0, 9.0, 3.0, 4.0, 1.0])
    demand = window.read(145.0)
    assert (demand.opens.tolist(), demand.peaks.tolist()) == ([2.0, 1.0], [9.0, 4.0])
    assert demand.known.all()


@pytest.mark.parametrize(("time_s", "gpus"), [(float("nan"), 1.0), (1.0, float("inf")), (1.0, -1.0)])
def test_invalid_reading_is_rejected(time_s: float, gpus: float) -> None:
    with pytest.raises(ValueError, match="must be finite"):
        DemandWindow(100.0, 50).observe(time_s, gpus)


def test_readings_must_be_in_time_order() -> None:
    window = DemandWindow(100.0, 50)
    with pytest.raises(ValueError, match="at least one demand reading"):
        window.read(0.0)
    window.observe(1_000.0, 4.0)
    with pytest.raises(ValueError, match=r"time_s must not be before the last reading's 1000\.0, got 999\.0"):
        window.observe(999.0, 4.0)
    with pytest.raises(ValueError, match="now_s must not be before the last reading"):
        window.read(999.0)


def test_bins_without_readings_for_an_hour_are_missing() -> None:
    window = DemandWindow(300.0, 500)
    observe_all(window, [0.0, 300.0, 600.0, 30_000.0], [5.0, 5.0, 6.0, 7.0])
    demand = window.read(30_000.0)
    assert np.flatnonzero(~demand.known).tolist() == list(range(15, 100))
    assert demand.peaks[50] == 6.0


def test_sparse_readings_make_coarser_bins_and_no_gaps() -> None:
    times_s, gpus = make_days(3, step_s=HOUR_S)
    window = DemandWindow(300.0, 2_000)
    observe_all(window, times_s.tolist(), gpus.tolist())
    demand = window.read(float(times_s[-1]))
    assert (demand.step_s, len(demand), bool(demand.known.all())) == (3_600.0, 72, True)
    assert demand.peaks == pytest.approx(gpus)


def test_gap_of_years_is_filled_in_bounded_time() -> None:
    window = DemandWindow(300.0, 8_064)
    observe_all(window, [0.0, 1e12], [5.0, 8.0])
    demand = window.read(1e12)
    assert (len(demand), int(demand.known.sum())) == (8_064, 1)


def test_rare_near_zero_bins_are_gaps_and_frequent_ones_are_quiet_hours() -> None:
    _, gpus = make_days(10)
    gpus[[50, 51, 130]] = 0.1
    demand = bin_values(gpus).mark_missing()
    assert np.flatnonzero(~demand.known).tolist() == [50, 51, 130]
    assert demand.peaks[[50, 51, 130]].tolist() == [gpus[49], gpus[49], gpus[129]]
    gpus[::4] = 0.0
    assert bin_values(gpus).mark_missing().known.all()


def test_window_keeps_its_newest_bins() -> None:
    window = DemandWindow(HOUR_S, 48)
    times_s, gpus = make_days(9)
    observe_all(window, times_s.tolist(), gpus.tolist())
    demand = window.read(9 * DAY_S - HOUR_S)
    assert len(demand) == 48
    assert demand.peaks.tolist() == gpus[-48:].tolist()


@settings(max_examples=200)
@given(
    intervals_s=st.lists(st.sampled_from([0.0, 1.0, 29.5, 30.0, 100.0, 301.0, 700.0, 4_000.0, 90_000.0]), max_size=80),
    gpus=st.lists(st.floats(0.0, 100.0), min_size=80, max_size=80),
    start_s=st.sampled_from([0.0, 12.5, 300.0]),
)
def test_bins_of_readings_have_the_effect_of_all_readings(
    intervals_s: list[float], gpus: list[float], start_s: float
) -> None:
    times_s = start_s + np.cumsum([0.0, *intervals_s])
    readings = [DemandReading(at_s, each, each) for at_s, each in zip(times_s.tolist(), gpus, strict=False)]
    one, other = DemandWindow(100.0, 600), DemandWindow(100.0, 600)
    for reading in readings:
        one.observe(reading.at_s, reading.asked_gpus)
    for each in bin_readings(readings, 100.0):
        other.observe_bin(each)
    assert (other.gpus, other.observed_at_s, other.bin_s) == (one.gpus, one.observed_at_s, one.bin_s)
    for window in (one, other):
        window.observe(times_s[-1] + 5_000.0, 1.0)  # opens bins, which are known if readings are usually as far apart
    found, expected = other.read(times_s[-1] + 9_000.0), one.read(times_s[-1] + 9_000.0)
    assert (found.first_bin, found.step_s) == (expected.first_bin, expected.step_s)
    for name in ("opens", "peaks", "known"):
        assert np.array_equal(getattr(found, name), getattr(expected, name))
