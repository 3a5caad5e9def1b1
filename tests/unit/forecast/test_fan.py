"""Forecast fan: quantiles cover unseen demand as often as they say, and follow the course of the day."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler.forecast.binned_demand import BinnedDemand
from scheduler.forecast.fan import FAN_QUANTILES, forecast_fan
from scheduler.forecast.seasonality import STEPS_PER_SEASON, Season

DAY_S = 86_400.0
SEASON = Season(DAY_S, DAY_S / STEPS_PER_SEASON)


def make_demand(days: float, seed: int = 0, *, bins: int = STEPS_PER_SEASON) -> np.ndarray:
    """Return demand with a day, a week and errors that persist for hours."""
    chance, count = np.random.default_rng(seed), int(days * bins)
    at = np.arange(count) / bins
    usual = 100 + 60 * np.sin(2 * np.pi * (at - 0.3)) - 25 * (at % 7 >= 5)
    errors = np.zeros(count)
    for each in range(1, count):
        errors[each] = 0.98 * errors[each - 1] + chance.normal(0, 0.02)
    return np.asarray(np.maximum(usual * np.exp(errors), 0.0))


def as_bins(demand: np.ndarray, known: np.ndarray | None = None) -> BinnedDemand:
    everywhere = np.ones(len(demand), dtype=bool)
    return BinnedDemand(0, SEASON.step_s, demand, demand, everywhere if known is None else known)


def test_quantiles_cover_unseen_demand_as_often_as_they_say() -> None:
    hits, chances = np.zeros(len(FAN_QUANTILES)), 0
    for seed in range(12):
        demand = make_demand(28, seed)
        for origin in (20 * STEPS_PER_SEASON, 23 * STEPS_PER_SEASON + 100, 26 * STEPS_PER_SEASON + 200):
            fan = forecast_fan(as_bins(demand[: origin + 1]), SEASON)
            assert fan is not None
            inside = fan.bins < len(demand)
            hits += (demand[fan.bins[inside]][:, None] <= fan.gpus[inside]).sum(axis=0)
            chances += int(inside.sum())
    cover = hits / chances
    assert cover == pytest.approx([0.5, 0.9, 0.95, 0.999], abs=0.06)


def test_fan_follows_the_day_and_widens() -> None:
    demand = make_demand(28)
    fan = forecast_fan(as_bins(demand), SEASON)
    assert fan is not None
    assert (fan.bins[0], fan.bins[-1]) == (len(demand), len(demand) - 1 + STEPS_PER_SEASON)
    assert np.all(np.diff(fan.gpus, axis=1) >= 0)
    median, widths = fan.gpus[:, 0], fan.gpus[:, -1] / fan.gpus[:, 0]
    assert median.max() > 2 * median.min()
    assert widths[-1] > 1.2 * widths[0]
    assert len(fan.bins) < 70


@pytest.mark.parametrize("days", [2, 3, 9])
def test_short_histories_have_a_fan_after_two_days(days: int) -> None:
    assert forecast_fan(as_bins(make_demand(days - 0.01)), SEASON) is None or days > 2
    fan = forecast_fan(as_bins(make_demand(days + 0.5)), SEASON)
    assert fan is not None
    assert np.isfinite(fan.gpus).all()


def test_constant_and_missing_demand_give_finite_quantiles() -> None:
    flat = forecast_fan(as_bins(np.full(3 * STEPS_PER_SEASON, 7.0)), SEASON)
    assert flat is not None
    assert flat.gpus == pytest.approx(7.0, rel=0.02)
    none = forecast_fan(as_bins(np.zeros(3 * STEPS_PER_SEASON)), SEASON)
    assert none is not None
    assert none.gpus == pytest.approx(0.0, abs=1e-6)
    known = np.arange(4 * STEPS_PER_SEASON) % 3 == 0
    assert forecast_fan(as_bins(make_demand(4), known), SEASON) is None


def test_coarse_bins_and_short_seasons_have_a_fan() -> None:
    for season in (Season(DAY_S, 3600.0), Season(600.0, 600.0 / STEPS_PER_SEASON), Season(10.0, 5.0)):
        demand = make_demand(9.5, bins=season.bins)
        bins = BinnedDemand(0, season.step_s, demand, demand, np.ones(len(demand), dtype=bool))
        fan = forecast_fan(bins, season)
        assert fan is not None
        assert fan.bins[-1] == len(demand) - 1 + season.bins
