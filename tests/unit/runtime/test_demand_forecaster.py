"""DemandForecaster feeds its forecasters and makes forecasts for lending pools."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from scheduler.domain.commands import ForecastMade
from scheduler.domain.fleet import DemandReading, Forecast
from scheduler.domain.known_events import KnownEvent
from scheduler.domain.lending_policy import LendingPolicy
from scheduler.domain.reading_bins import ReadingBin
from scheduler.domain.replica_advice import ReplicaAdvice
from scheduler.domain.serving import ServedModel, SizingMode, SizingPolicy, name_rate_series
from scheduler.domain.snapshot import Snapshot
from scheduler.forecast.demand_history import FloatArray
from scheduler.forecast.forecaster import FitTask
from scheduler.forecast.pool_model import PoolModel
from scheduler.forecast.regression import FEATURES, NormalEquations
from scheduler.forecast.seasonality import Season
from scheduler.runtime.demand_forecasts import DemandForecaster
from scheduler.store.memory_store import MemoryStore
from scheduler.store.protocol import Commit
from tests.builders import a_fleet, a_snapshot
from tests.unit.forecast.demands import DAY_S, HOUR_S, bin_values, make_days


class RecordingForecaster:
    """Forecaster that records its calls, and whose fits are due at each call."""

    equations: tuple[NormalEquations, ...] = ()
    step_s = 1e-3

    def __init__(self) -> None:
        self.heard: list[tuple[float, float]] = []
        self.accepted: list[tuple[float, PoolModel]] = []
        self.task: FitTask | None = None

    def observe(self, time_s: float, gpus: float) -> None:
        self.heard.append((time_s, gpus))

    def observe_bin(self, readings: ReadingBin) -> None:
        self.heard.append((readings.last_at_s, readings.last_gpus))

    def forecast(self, now_s: float, horizon_s: float, *, quantiles: tuple[float, ...]) -> Forecast:
        return Forecast(now_s, horizon_s, quantiles, (float(len(self.heard)),) * len(quantiles), "listener")

    def list_due_fits(self, now_s: float, prior: FloatArray) -> Mapping[float, FitTask]:
        return {600.0: self.task} if self.task is not None else {}

    def accept(self, horizon_s: float, model: PoolModel) -> None:
        self.accepted.append((horizon_s, model))


class Rig:
    def __init__(self, lending: LendingPolicy | None = None) -> None:
        self.snapshot: Snapshot = a_snapshot(a_fleet(training=1, inference=2, lending=lending))
        self.store = MemoryStore(self.snapshot)
        self.listeners: list[RecordingForecaster] = []
        self.zones: list[str] = []
        self.fits = ThreadPoolExecutor(1)
        self.watch = DemandForecaster(self.store, self._new, history_s=1000.0, fits=self.fits)
        self.store.acquire_lease("rig", now_s=0.0, ttl_s=1e9)

    def set_lending(self, **lending: Any) -> None:
        pool = self.snapshot.pools["inference"]
        changed = replace(pool, lending=replace(pool.lending, **lending))
        self.snapshot = replace(self.snapshot, pools={**self.snapshot.pools, "inference": changed})

    def record(self, at_s: float, gpus: float) -> None:
        reading = DemandReading(at_s, min(gpus, 16.0), gpus)
        following = replace(
            self.snapshot, generation=self.snapshot.generation + 1, demand={"inference": reading}, now_s=at_s
        )
        self.store.commit(Commit(self.snapshot, following, 1, readings=(("inference", reading),)))
        self.snapshot = following

    def _new(self, *, zone: str) -> RecordingForecaster:
        self.zones.append(zone)
        self.listeners.append(RecordingForecaster())
        return self.listeners[-1]


def test_new_leader_reads_stored_readings_once_and_then_new_ones() -> None:
    rig = Rig()
    for at_s, gpus in ((100.0, 9.0), (1500.0, 1.0), (1600.0, 20.0)):
        rig.record(at_s, gpus)
    rig.watch.make_forecasts(rig.snapshot, 2000.0)
    assert rig.listeners[0].heard == [(1500.0, 1.0), (1600.0, 20.0)]
    rig.record(2100.0, 3.0)
    rig.watch.make_forecasts(rig.snapshot, 2200.0)
    rig.watch.make_forecasts(rig.snapshot, 2300.0)
    assert rig.listeners[0].heard == [(1500.0, 1.0), (1600.0, 20.0), (2100.0, 3.0)]
    assert len(rig.listeners) == 1


def test_back_filled_history_is_read_by_a_new_forecaster_without_the_fits_of_the_old_one() -> None:
    rig = Rig()
    rig.record(1600.0, 20.0)
    rig.watch.make_forecasts(rig.snapshot, 2000.0)
    _, gpus = make_days(3, noise=0.1)
    rig.listeners[0].task = FitTask(bin_values(gpus), Season(DAY_S, HOUR_S), 1, np.zeros(FEATURES))
    rig.watch.make_forecasts(rig.snapshot, 2000.0)
    older = DemandReading(1500.0, 1.0, 1.0)
    known = replace(rig.snapshot.demand["inference"], backfills=1)
    following = replace(rig.snapshot, generation=rig.snapshot.generation + 1, demand={"inference": known})
    rig.store.commit(Commit(rig.snapshot, following, 1, backfill=(("inference", older),)))
    rig.watch.make_forecasts(following, 2100.0)
    rig.watch.close()
    rig.watch.make_forecasts(following, 2200.0)
    assert [listener.heard for listener in rig.listeners] == [[(1600.0, 20.0)], [(1500.0, 1.0), (1600.0, 20.0)]]
    assert [listener.accepted for listener in rig.listeners] == [[], []]


def test_forecast_uses_the_horizon_of_the_pool() -> None:
    rig = Rig(LendingPolicy(return_deadline_s=100.0, cold_start_s=50.0))
    rig.record(1.0, 2.0)
    (command,) = rig.watch.make_forecasts(rig.snapshot, 10.0)
    assert isinstance(command.body, ForecastMade)
    forecast = command.body.forecast
    assert (command.body.pool, forecast.made_at_s, forecast.horizon_s) == ("inference", 10.0, 150.0)


def test_forecast_includes_the_quantile_of_the_pool() -> None:
    rig = Rig(LendingPolicy(quantile=0.973))
    rig.record(1.0, 2.0)
    (command,) = rig.watch.make_forecasts(rig.snapshot, 10.0)
    assert isinstance(command.body, ForecastMade)
    assert 0.973 in command.body.forecast.quantiles


def test_rate_of_a_sized_model_is_forecast_over_the_start_of_a_replica() -> None:
    rig = Rig(LendingPolicy(enabled=False, time_zone="Asia/Kolkata"))
    sizing = SizingPolicy(SizingMode.ADVISE, start_s=90.0)
    served = ServedModel("chat", "h100-80g", 1.0, 0.05, sizing=sizing)
    pools = {**rig.snapshot.pools, "inference": replace(rig.snapshot.pools["inference"], serving=(served,))}
    reading = DemandReading(1.0, 2.0, 2.0, advice=(ReplicaAdvice("chat", 2, 1.0),))
    following = replace(rig.snapshot, generation=1, demand={"inference": reading}, pools=pools, now_s=1.0)
    rates = tuple((name_rate_series("inference", "chat"), DemandReading(at_s, 7.0, 7.0)) for at_s in (0.5, 1.0))
    rig.store.commit(Commit(rig.snapshot, following, 1, readings=(("inference", reading), *rates)))
    (command,) = rig.watch.make_forecasts(following, 10.0)
    assert isinstance(command.body, ForecastMade)
    [rate] = command.body.forecast.rates
    assert (rate.model, rate.made_at_s, rate.horizon_s, rate.rate_per_s) == ("chat", 10.0, 90.0, 2.0)
    assert [listener.heard for listener in rig.listeners] == [[(1.0, 2.0)], [(0.5, 7.0), (1.0, 7.0)]]
    assert rig.zones == ["Asia/Kolkata"] * 2, "rates follow the clock of their pool"


def test_pools_without_lending_or_readings_get_no_forecast() -> None:
    silent = Rig()
    assert silent.watch.make_forecasts(silent.snapshot, 10.0) == ()
    closed = Rig(LendingPolicy(enabled=False))
    closed.record(1.0, 2.0)
    assert closed.watch.make_forecasts(closed.snapshot, 10.0) == ()


def test_pool_with_only_old_readings_gets_no_forecast() -> None:
    rig = Rig()
    rig.record(100.0, 9.0)
    assert rig.watch.make_forecasts(rig.snapshot, 1200.0) == ()
    rig.record(1300.0, 2.0)
    assert len(rig.watch.make_forecasts(rig.snapshot, 1400.0)) == 1


def test_minimum_loan_beyond_the_horizon_adds_a_second_forecast() -> None:
    rig = Rig(LendingPolicy(loan_s_min=3600.0))
    rig.record(100.0, 9.0)
    (made,) = rig.watch.make_forecasts(rig.snapshot, 200.0)
    assert isinstance(made.body, ForecastMade)
    assert (made.body.forecast.horizon_s, len(made.body.forecast.lasting_gpus)) == (600.0, 5)


def test_models_are_fitted_in_the_background_and_used_by_a_later_pass() -> None:
    rig = Rig()
    rig.record(100.0, 9.0)
    rig.watch.make_forecasts(rig.snapshot, 200.0)
    _, gpus = make_days(3, noise=0.1)
    listener = rig.listeners[0]
    listener.task = FitTask(bin_values(gpus), Season(DAY_S, HOUR_S), 1, np.zeros(FEATURES))
    rig.watch.make_forecasts(rig.snapshot, 300.0)
    assert listener.accepted == []
    listener.task = None
    rig.watch.close()
    rig.watch.make_forecasts(rig.snapshot, 400.0)
    ((horizon_s, model),) = listener.accepted
    assert (horizon_s, model.is_calibrated) == (600.0, True)


def test_changed_zone_begins_a_new_forecaster_with_the_stored_readings() -> None:
    rig = Rig(LendingPolicy(time_zone="Asia/Kolkata"))
    rig.record(100.0, 9.0)
    rig.watch.make_forecasts(rig.snapshot, 200.0)
    _, gpus = make_days(3, noise=0.1)
    rig.listeners[0].task = FitTask(bin_values(gpus), Season(DAY_S, HOUR_S), 1, np.zeros(FEATURES))
    rig.watch.make_forecasts(rig.snapshot, 300.0)
    rig.set_lending(time_zone="Europe/Berlin")
    rig.watch.make_forecasts(rig.snapshot, 400.0)
    rig.watch.close()
    rig.watch.make_forecasts(rig.snapshot, 500.0)
    assert rig.zones == ["Asia/Kolkata", "Europe/Berlin"]
    assert [listener.heard for listener in rig.listeners] == [[(100.0, 9.0)]] * 2
    assert rig.listeners[1].accepted == [], "the fit was for the earlier clock"


def test_pool_without_readings_forecasts_by_its_profile() -> None:
    rig = Rig(LendingPolicy(demand_profile=(3.0,) * 24))
    (command,) = rig.watch.make_forecasts(rig.snapshot, 10.0)
    assert isinstance(command.body, ForecastMade)
    assert (command.body.forecast.method, command.body.forecast.gpus[0]) == ("demand profile", 3.0)
    assert rig.listeners == []


def test_known_event_raises_what_is_stored_and_not_what_the_model_learns_from() -> None:
    rig = Rig(LendingPolicy(known_events=(KnownEvent("launch", 600.0, 60.0, gpus=12.0),)))
    rig.record(1.0, 2.0)
    (command,) = rig.watch.make_forecasts(rig.snapshot, 10.0)
    assert isinstance(command.body, ForecastMade)
    assert (set(command.body.forecast.gpus), command.body.forecast.event) == ({12.0}, "launch")
    assert rig.listeners[0].heard == [(1.0, 2.0)]
