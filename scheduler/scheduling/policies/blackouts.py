"""Blackouts: whether an instant is in a time without new loans.

Cron expressions are evaluated by cronsim, which treats daylight saving as Debian's cron does (decision 32).
"""

from __future__ import annotations

import math
from functools import lru_cache

from cronsim import CronSim

from scheduler.domain.lending_policy import DAY_S, Blackout, LendingPolicy
from scheduler.domain.time_zones import to_local

_MINUTE_S = 60.0


def is_in_blackout(rules: LendingPolicy, now_s: float) -> bool:
    """Return whether a blackout of the pool covers `now_s`, in seconds since 1970."""
    return any(_covers(window, now_s, rules.time_zone) for window in rules.blackouts)


def _covers(window: Blackout, now_s: float, pool_zone: str) -> bool:
    """Windows of equal length end in the order in which they start, so the first one that has not ended decides."""
    if window.cron:
        zone = window.time_zone or pool_zone
        return _find_next_time_s(window.cron, zone, math.floor((now_s - window.end_s) / _MINUTE_S)) <= (
            now_s - window.start_s
        )
    second = now_s % DAY_S if window.time_zone in ("", "UTC") else _find_second_of_day(window.time_zone, now_s)
    if window.start_s <= window.end_s:
        return window.start_s <= second < window.end_s
    return second >= window.start_s or second < window.end_s


def _find_second_of_day(zone: str, now_s: float) -> float:
    """Return the local time of day, in seconds by the clock on the wall."""
    local = to_local(zone, now_s)
    return local.hour * 3_600.0 + local.minute * 60.0 + local.second + local.microsecond * 1e-6


@lru_cache(maxsize=1_024)
def _find_next_time_s(cron: str, zone: str, minute: int) -> float:
    """Return the first time of a cron expression after a minute, counted from 1970; infinite if there is none.

    Times are at whole minutes, so all instants of a minute have the same next time. In an hour that the clock repeats,
    cronsim begins with the times of its first pass, which are over in the second.
    """
    after_s = minute * _MINUTE_S
    times_s = (each.timestamp() for each in CronSim(cron, to_local(zone, after_s)))
    return next((each for each in times_s if each > after_s), math.inf)
