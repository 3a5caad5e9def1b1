"""FleetHistory: checkpoints of the fleet, and forecast fans of the inference pools, every few minutes.

It runs in its own thread of the leader, so that no tick waits for it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from scheduler.domain.capacity_history import CHECKPOINT_STEP_S, HOURS
from scheduler.domain.fleet import ForecastFan, Pool, PoolKind
from scheduler.domain.snapshot import Snapshot
from scheduler.forecast.binned_demand import DemandWindow
from scheduler.forecast.fan import FAN_QUANTILES, forecast_fan
from scheduler.forecast.forecaster import HISTORY_SEASONS
from scheduler.forecast.pool_forecast import PROFILE_METHOD, forecast_by_profile
from scheduler.forecast.seasonality import STEPS_PER_SEASON, Season
from scheduler.runtime.clock import Clock
from scheduler.scheduling.past_fleet import PastFleet, capture_fleet, encode_past_fleet
from scheduler.store.api_protocol import ApiStore
from scheduler.store.protocol import FencedError, UnavailableError

_PERIOD_S = 1.0
_METHOD = "regression on the day and the week before"
_PROFILE_BINS = 48
"""Points of a fan that follows a demand profile."""


class FleetHistory:
    """Writes history while this process leads.

    Args:
        epoch: returns the epoch of the lease; 0 while this process does not lead.
        season_s: length of a day of demand.
    """

    def __init__(self, store: ApiStore, *, clock: Clock, epoch: Callable[[], int], season_s: float) -> None:
        self._store = store
        self._clock = clock
        self._epoch = epoch
        self._season_s = season_s
        self._checkpoint_at_s = self._fans_at_s = float("-inf")
        self._newest: PastFleet | None = None
        self._windows: dict[str, PoolWindow] = {}

    def run(self, stop: threading.Event) -> None:
        """Run until `stop` is set."""
        while not stop.wait(_PERIOD_S):
            with suppress(UnavailableError, FencedError):  # the control loop logs an outage; a new leader continues
                self.step()

    def step(self) -> None:
        """Write what is due, if this process leads.

        Raises:
            FencedError: another process leads now.
            UnavailableError: the database does not respond.
        """
        now_s, epoch = self._clock.now_s(), self._epoch()
        if epoch == 0:
            return
        if _is_due(self._checkpoint_at_s, CHECKPOINT_STEP_S, now_s):
            self._write_checkpoint(epoch)
            self._checkpoint_at_s = now_s
        if _is_due(self._fans_at_s, self._season_s / STEPS_PER_SEASON, now_s):
            self._write_fans(now_s, epoch)
            self._fans_at_s = now_s

    def _write_checkpoint(self, epoch: int) -> None:
        """Write the state, unless it is the same as in a checkpoint of this hour."""
        newest_event = self._store.get_last_event_number()
        past = capture_fleet(self._store.load().snapshot, newest_event)
        before, self._newest = self._newest, past
        is_new_hour = before is None or before.at_s // HOURS.step_s < past.at_s // HOURS.step_s
        if past.generation and (is_new_hour or before is None or not past.has_same_content(before)):
            self._store.capacity.add_checkpoint(math.ceil(past.at_s), encode_past_fleet(past), epoch=epoch)

    def _write_fans(self, now_s: float, epoch: int) -> None:
        snapshot = self._store.load().snapshot
        fans = []
        for pool in snapshot.pools.values():
            if pool.kind is PoolKind.INFERENCE and (fan := self._make_fan(snapshot, pool, now_s)) is not None:
                fans.append(fan)
        self._windows = {name: window for name, window in self._windows.items() if name in snapshot.pools}
        if fans:
            self._store.capacity.put_fans(tuple(fans), epoch=epoch)

    def _make_fan(self, snapshot: Snapshot, pool: Pool, now_s: float) -> ForecastFan | None:
        """Return the fan of a pool, by its readings or else by its profile, raised for known events."""
        reading = snapshot.demand.get(pool.name)
        fan = None
        if reading is not None:
            window = self._windows.get(pool.name)
            if window is None or window.backfills != reading.backfills:
                window = self._windows[pool.name] = PoolWindow(self._season_s, reading.backfills)
            window.read(self._store, pool.name, now_s)
            fan = window.forecast(pool, now_s)
        if fan is None and pool.lending.demand_profile:
            fan = forecast_fan_by_profile(pool, now_s, 0.0 if reading is None else reading.asked_gpus)
        return None if fan is None else raise_fan_for_events(fan, pool)


def _is_due(last_s: float, period_s: float, now_s: float) -> bool:
    """Return whether a period has passed since `last_s`, or the clock was set back."""
    return not last_s <= now_s < last_s + period_s


class PoolWindow:
    """The readings of one pool over the last seasons. `backfills` is the number of back-fills that it has seen."""

    def __init__(self, season_s: float, backfills: int) -> None:
        self.backfills = backfills
        self._season_s = season_s
        self._window = DemandWindow(season_s / STEPS_PER_SEASON, HISTORY_SEASONS * STEPS_PER_SEASON)

    def read(self, store: ApiStore, pool: str, now_s: float) -> None:
        """Add the stored readings of a pool that are newer than the last one: at first, bins of all."""
        if self._window.is_empty:
            since_s = now_s - HISTORY_SEASONS * self._season_s
            for each in store.list_reading_bins(pool, since_s=since_s, bin_s=self._window.step_s):
                self._window.observe_bin(each)
            return
        for reading in store.list_readings(pool, since_s=self._window.observed_at_s):
            if reading.at_s > self._window.observed_at_s:
                self._window.observe(reading.at_s, reading.asked_gpus)

    def forecast(self, pool: Pool, now_s: float) -> ForecastFan | None:
        """Return the fan of the next season, or None with too few readings."""
        if self._window.is_empty or now_s < self._window.observed_at_s:
            return None
        demand = self._window.read(now_s).mark_missing()
        season = Season(self._season_s, demand.step_s, pool.lending.time_zone)
        found = forecast_fan(demand, season)
        if found is None:
            return None
        at_s = tuple(float(each) * demand.step_s for each in found.bins)
        gpus = tuple(tuple(round(float(each), 2) for each in row) for row in found.gpus)
        return ForecastFan(pool.name, now_s, demand.step_s, FAN_QUANTILES, at_s, gpus, _METHOD)


def forecast_fan_by_profile(pool: Pool, now_s: float, observed_gpus: float) -> ForecastFan:
    """Return the fan of the next day that follows the demand profile of the pool's owner."""
    bin_s = 86_400.0 / _PROFILE_BINS
    at_s = tuple(now_s + bin_s * number for number in range(1, _PROFILE_BINS + 1))
    profile = [
        forecast_by_profile(pool.lending, FAN_QUANTILES, now_s=each, horizon_s=bin_s, observed_gpus=0.0).gpus
        for each in at_s
    ]
    now_gpus = forecast_by_profile(pool.lending, (0.5,), now_s=now_s, horizon_s=bin_s, observed_gpus=0.0).gpus[0]
    scale = max(1.0, observed_gpus / now_gpus) if now_gpus else 1.0
    gpus = tuple(tuple(scale * each for each in row) for row in profile)
    return ForecastFan(pool.name, now_s, bin_s, FAN_QUANTILES, at_s, gpus, PROFILE_METHOD)


def raise_fan_for_events(fan: ForecastFan, pool: Pool) -> ForecastFan:
    """Raise the quantiles during known events as those of lending are raised."""
    events, rows = pool.lending.known_events, []
    for at_s, row in zip(fan.at_s, fan.gpus, strict=True):
        near = [event for event in events if event.overlaps(at_s, at_s + fan.bin_s)]
        rows.append(tuple(max([gpus, *(event.raise_demand(gpus) for event in near)]) for gpus in row))
    return replace(fan, gpus=tuple(rows)) if events else fan
