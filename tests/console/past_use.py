"""A month of recorded use for the console tests, without a tick for each minute of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from scheduler.domain.capacity_history import MINUTES, TEN_MINUTES, CapacityBin, PoolUse, build_bins
from scheduler.domain.fleet import DemandReading, ForecastFan
from scheduler.forecast.binned_demand import DemandWindow
from scheduler.forecast.fan import FAN_QUANTILES, forecast_fan
from scheduler.forecast.seasonality import Season
from scheduler.runtime.fleet_history import FleetHistory
from scheduler.scheduling.past_fleet import capture_fleet, encode_past_fleet
from scheduler.store.api_protocol import ApiStore
from scheduler.store.protocol import Commit
from tests.console.console_site import ConsoleSite

DAY_S = 86_400.0


def add_past_use(store: ApiStore, now_s: float, *, days: float, nodes: int, epoch: int = 0) -> None:
    """Record use, demand, checkpoints and a forecast fan of the pools `inference` and `training`."""
    previous = store.load().snapshot
    bins = tuple(_build_past_bins(now_s, days, 8 * nodes))
    readings = tuple(("inference", DemandReading(at_s, gpus, gpus)) for at_s, gpus in _list_demand(now_s, days, nodes))
    snapshot = replace(previous, generation=previous.generation + 1)
    store.commit(Commit(previous, snapshot, epoch=epoch, capacity=bins, backfill=readings))
    past = capture_fleet(snapshot, store.get_last_event_number())
    for hours in (0.1, 1, 2, 5, 24, 100):
        at_s = int(now_s - 3600 * hours)
        store.capacity.add_checkpoint(at_s, encode_past_fleet(replace(past, at_s=float(at_s))), epoch=epoch)
    store.capacity.put_fans((_make_fan(now_s, readings),), epoch=epoch)


def write_checkpoint(site: ConsoleSite) -> None:
    """Record the fleet as it is now."""
    epoch = site.lead().epoch
    FleetHistory(site.store, clock=site.clock, epoch=lambda: epoch, season_s=DAY_S).step()


def get_past_demand(at_s: float, gpus: int) -> float:
    """Return the demand of a pool of `gpus` GPUs, with a peak at 15:00 UTC."""
    course = 0.5 - 0.5 * math.cos(2 * math.pi * (at_s / DAY_S - 0.125))
    ripple = 0.04 * math.sin(at_s / 1700) + 0.03 * math.sin(at_s / 460)
    weekend = 0.75 if (at_s // DAY_S) % 7 >= 5 else 1.0
    return gpus * max(0.05, min(1.0, (0.25 + 0.6 * course + ripple) * weekend))


def _list_demand(now_s: float, days: float, nodes: int) -> Iterator[tuple[float, float]]:
    for number in range(int(days * 288)):
        at_s = now_s - days * DAY_S + 300 * number
        yield at_s, get_past_demand(at_s, 8 * nodes)


def _build_past_bins(now_s: float, days: float, gpus: int) -> Iterator[CapacityBin]:
    """Yield bins of a minute for the last day, and one in ten minutes before, which lasts as long."""
    lent_before = 0
    for age_s in range(int(days * DAY_S), 0, -TEN_MINUTES.step_s):
        at_s = (now_s - age_s) // TEN_MINUTES.step_s * TEN_MINUTES.step_s
        demand = get_past_demand(at_s, gpus)
        down = 8 if 0.3 < (at_s / DAY_S) % 1 < 0.36 else 0
        lent = int((gpus - demand) * 0.8) // 8 * 8
        idle = lent // 5 if int(at_s // 3600) % 5 == 0 else 0
        served = min(int(demand), gpus - lent - down)
        use = PoolUse(
            inference=served, lent_used=lent - idle, lent_idle=idle, free=gpus - lent - down - served, down=down,
            lent_nodes=lent // 8, demand_gpus=demand, pending_jobs=4, pending_gpus=32,
        )  # fmt: skip
        busy = int(gpus * 0.85 + 0.1 * gpus * math.sin(at_s / 9000))
        own = PoolUse(used=busy, free=gpus - busy)
        change = (lent - lent_before) // 8
        counts = {"lends": max(0, change), "recalls": max(0, -change), "returns": max(0, -change)}
        yield CapacityBin(pool="inference", step_s=MINUTES.step_s, at_s=int(at_s), **counts)
        lent_before = lent
        for pool, each in (("inference", use), ("training", own)):
            if age_s <= DAY_S:
                yield from build_bins(pool, each, from_s=at_s, to_s=min(now_s, at_s + TEN_MINUTES.step_s))
            else:
                [minute] = build_bins(pool, each, from_s=at_s, to_s=at_s + MINUTES.step_s)
                yield _stretch(minute, 10)


def _stretch(minute: CapacityBin, factor: int) -> CapacityBin:
    sums = {name: getattr(minute, name) * factor for name in CapacityBin.__slots__ if name.endswith(("_s", "seconds"))}
    return replace(minute, **{name: value for name, value in sums.items() if name not in ("step_s", "at_s")})


def _make_fan(now_s: float, readings: tuple[tuple[str, DemandReading], ...]) -> ForecastFan:
    window = DemandWindow(300.0, 28 * 288)
    for _, reading in readings:
        window.observe(reading.at_s, reading.gpus)
    demand = window.read(now_s)
    found = forecast_fan(demand, Season(DAY_S, demand.step_s))
    assert found is not None
    at_s = tuple(float(each) * demand.step_s for each in found.bins)
    gpus = tuple(tuple(float(each) for each in row) for row in found.gpus)
    return ForecastFan("inference", now_s, demand.step_s, FAN_QUANTILES, at_s, gpus, "test")
