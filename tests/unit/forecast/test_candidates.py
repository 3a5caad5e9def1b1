"""Point forecasts of the candidate methods on series whose future is known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.forecast.candidates import NAMES, Candidates, Horizon, Target, compute_outcomes
from scheduler.forecast.seasonality import Season
from tests.unit.forecast.demands import DAY_S, HOUR_S, bin_values, make_days

DAY = Season(DAY_S, HOUR_S)
SEASONAL = [name for name in NAMES if "seasonal" in name] + ["theta"]


def forecast(gpus: np.ndarray, origins: list[int], bins: int, target: Target = Target.PEAK) -> dict[str, list[float]]:
    candidates = Candidates(bin_values(gpus), DAY, Horizon(bins, target), 1.0)
    points = candidates.compute_points(np.array(origins))
    return {name: points[:, index].tolist() for index, name in enumerate(NAMES)}


@pytest.mark.parametrize("target", list(Target))
@pytest.mark.parametrize("bins", [1, 3, 10])
def test_seasonal_methods_follow_a_purely_seasonal_demand(bins: int, target: Target) -> None:
    _, gpus = make_days(20)
    origins = [440, 447, 455]
    ahead = [gpus[origin : origin + bins + 1] for origin in origins]
    expected = [part.max() if target is Target.PEAK else part[-1] for part in ahead]
    points = forecast(gpus, origins, bins, target)
    for name in SEASONAL:
        assert points[name] == pytest.approx(expected, rel=0.05), name


def test_persistence_expects_the_demand_of_now() -> None:
    _, gpus = make_days(9)
    assert forecast(gpus, [200], 3)["persistence"] == [gpus[200]]


def test_without_an_earlier_day_seasonal_methods_expect_the_demand_of_now() -> None:
    _, gpus = make_days(1)
    points = forecast(gpus, [20], 2)
    assert points["daily seasonal"] == points["weekly seasonal"] == [gpus[20]]


def test_one_unusual_day_does_not_change_the_usual_rise() -> None:
    _, gpus = make_days(9)
    usual = forecast(gpus, [24 * 8 + 1], 3)["daily seasonal"]
    gpus[24 * 5 + 3] = 900.0
    assert forecast(gpus, [24 * 8 + 1], 3)["daily seasonal"] == pytest.approx(usual)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), origin=st.integers(30, 300), bins=st.integers(1, 9), target=st.sampled_from(Target))
def test_no_forecast_reads_what_follows_its_origin(seed: int, origin: int, bins: int, target: Target) -> None:
    _, gpus = make_days(15, noise=0.3, seed=seed)
    changed = gpus.copy()
    changed[origin + 1 :] *= np.random.default_rng(seed).uniform(0.5, 2.0, len(gpus) - origin - 1)
    changed[-1] = gpus.max()
    gpus[-1] = changed.max()  # the bound on forecasts is a multiple of the largest demand
    changed[-1] = gpus[-1]
    known, other = forecast(gpus, [origin], bins, target), forecast(changed, [origin], bins, target)
    for name in NAMES:
        assert known[name] == pytest.approx(other[name], rel=1e-9), name


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), first=st.integers(330, 350))
def test_recent_origins_alone_give_the_same_forecasts(seed: int, first: int) -> None:
    _, gpus = make_days(15, noise=0.3, seed=seed)
    origins = np.arange(first, 360)
    whole = Candidates(bin_values(gpus), DAY, Horizon(2), 1.0).compute_points(origins)
    recent = Candidates(bin_values(gpus), DAY, Horizon(2), 1.0, first_origin=first).compute_points(origins)
    assert recent == pytest.approx(whole, rel=1e-6)


def test_outcome_is_unknown_while_a_bin_of_it_is_open_or_missing() -> None:
    demand = bin_values(np.array([3.0, 1.0, 2.0, 9.0, 4.0, 5.0]))
    assert compute_outcomes(demand, Horizon(1)) == pytest.approx([3.0, 2.0, 9.0, 9.0, np.nan, np.nan], nan_ok=True)
    assert compute_outcomes(demand, Horizon(1, Target.VALUE))[:4].tolist() == [1.0, 2.0, 9.0, 4.0]
    demand.known[2] = False
    assert np.flatnonzero(np.isnan(compute_outcomes(demand, Horizon(1)))).tolist() == [1, 2, 4, 5]


def test_local_time_moves_the_usual_course_with_daylight_saving() -> None:
    berlin = Season(DAY_S, HOUR_S, "Europe/Berlin")
    noon = np.array([(1_743_336_000 // 3600)])  # 2025-03-30 12:00 UTC, half a day after clocks went forward
    assert (noon - berlin.find_earlier(noon, (1,))[0]).tolist() == [23]
    assert berlin.find_time_of_day(noon).tolist() == [14]
    assert Season(DAY_S, HOUR_S).find_earlier(noon, (1, 7))[0].tolist() == [noon[0] - 24, noon[0] - 168]


def test_a_season_must_be_a_whole_number_of_steps() -> None:
    with pytest.raises(ValueError, match="season_s must be a whole number of step_s"):
        Season(100.0, 30.0)
    with pytest.raises(ValueError, match="step_s must be positive and below season_s"):
        Season(100.0, 0.0)
    with pytest.raises(ValueError, match="Mars/Olympus"):
        Season(100.0, 10.0, "Mars/Olympus")


def test_a_horizon_counts_the_bins_that_it_touches() -> None:
    assert [DAY.count_horizon_bins(horizon_s) for horizon_s in (1.0, 3_600.0, 3_601.0)] == [1, 1, 2]
    for horizon_s in (0.0, 8 * DAY_S):
        with pytest.raises(ValueError, match="horizon_s must be positive"):
            DAY.count_horizon_bins(horizon_s)
