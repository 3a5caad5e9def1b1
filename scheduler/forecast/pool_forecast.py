"""Forecast of a pool by its lending policy: the model's, or the owner's profile before, raised for known events.

The forecaster never sees a raised forecast. It calibrates its own one against demand.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from scheduler.domain.fleet import Forecast
from scheduler.domain.known_events import KnownEvent
from scheduler.domain.lending_policy import LendingPolicy
from scheduler.domain.time_zones import to_local

PROFILE_MARGIN = 2.0
"""Safety of a profile for levels above the median: demand may be twice what the profile has (decision 32)."""
PROFILE_METHOD = "demand profile"
_HOUR_S = 3_600.0


class Forecaster(Protocol):
    def forecast(self, now_s: float, horizon_s: float, *, quantiles: tuple[float, ...]) -> Forecast:
        """Return quantiles of the largest demand from now to `horizon_s` later."""


class ObservingForecaster(Forecaster, Protocol):
    def observe(self, time_s: float, gpus: float) -> None:
        """Record that demand is `gpus` from `time_s` on."""


def forecast_pool(
    forecaster: Forecaster | None,
    rules: LendingPolicy,
    levels: tuple[float, ...],
    *,
    now_s: float,
    horizon_s: float,
    observed_gpus: float,
    period_s: float,
) -> Forecast:
    """Return the forecast over a horizon, and over the pool's shortest loan if that is longer.

    Args:
        forecaster: of the pool; None before its first reading, which requires a profile.
        levels: quantiles, ascending.
        observed_gpus: newest demand; 0 before the first reading.
        period_s: time between two forecasts. An event counts two periods before the horizon reaches it, so that nodes
            are back in time although one pass comes late.
    """

    def look_ahead(span_s: float) -> Forecast:
        made = None if forecaster is None else forecaster.forecast(now_s, span_s, quantiles=levels)
        if made is None or (rules.demand_profile and not made.is_calibrated):
            made = forecast_by_profile(rules, levels, now_s=now_s, horizon_s=span_s, observed_gpus=observed_gpus)
        return raise_for_events(made, rules.known_events, until_s=now_s + span_s + 2 * period_s)

    forecast = look_ahead(horizon_s)
    if rules.loan_s_min <= horizon_s:
        return forecast
    return forecast.with_min_loan_forecast(look_ahead(rules.loan_s_min))


def raise_for_events(forecast: Forecast, events: Iterable[KnownEvent], *, until_s: float) -> Forecast:
    """Raise each quantile to the largest that an event between the forecast and `until_s` leads to, and name the event.

    Events do not add up: of several, the one counts that leads to the largest demand at the highest level.
    """
    near = [event for event in events if event.overlaps(forecast.made_at_s, until_s)]
    if not near:
        return forecast
    raised = tuple(max(event.raise_demand(gpus) for event in near) for gpus in forecast.gpus)
    if raised == forecast.gpus:
        return forecast
    largest = max(near, key=lambda event: event.raise_demand(forecast.gpus[-1]))
    return replace(forecast, gpus=raised, event=largest.name)


def forecast_by_profile(
    rules: LendingPolicy, levels: tuple[float, ...], *, now_s: float, horizon_s: float, observed_gpus: float
) -> Forecast:
    """Return a forecast from the owner's profile: its largest hour within the horizon, times a margin above the median.

    If demand is above the profile now, the whole profile is scaled to it. The forecast is not calibrated.
    """
    profile, zone = rules.demand_profile, rules.time_zone
    hours = list_local_hours(zone, now_s, now_s + horizon_s, count=len(profile))
    expected, now_expected = max(profile[hour] for hour in hours), profile[hours[0]]
    scale = max(1.0, observed_gpus / now_expected) if now_expected > 0 else 1.0
    gpus = [max(observed_gpus, expected * scale * (PROFILE_MARGIN if level > 0.5 else 1.0)) for level in levels]
    return Forecast(now_s, horizon_s, levels, tuple(gpus), PROFILE_METHOD, is_calibrated=False)


def list_local_hours(zone: str, start_s: float, end_s: float, *, count: int) -> Sequence[int]:
    """Return the local hours from `start_s` to `end_s`, as positions in a profile of `count` hours, in order.

    A profile of 168 hours begins on Monday.
    """
    # Offsets of zones are multiples of a quarter of an hour, so no local hour begins and ends between two samples.
    step_s = _HOUR_S / 4
    later = range(math.floor(start_s / step_s) + 1, math.floor(end_s / step_s) + 1)
    times = (to_local(zone, at_s) for at_s in (start_s, *(step_s * number for number in later)))
    return [(local.weekday() * 24 + local.hour) % count for local in times]
