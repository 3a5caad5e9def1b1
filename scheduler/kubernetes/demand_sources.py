"""DemandSources: the inference demand of each Pool, as commands for the store and conditions for the Pool.

Unknown demand is not reported: the last reading becomes stale in the store, and new loans stop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from scheduler.demand.presets import PrometheusQuery, build_query
from scheduler.demand.prometheus_poller import PrometheusPoller
from scheduler.demand.reports import (
    NO_PROMETHEUS_URL,
    ReportBuilder,
    build_history,
    list_newest_reading_times,
    next_reading,
)
from scheduler.domain.commands import Command, ReportDemand
from scheduler.domain.demand_source import KnownDemand, PoolDemand, UnknownDemandReason
from scheduler.domain.fleet import DemandReading, Forecast
from scheduler.domain.snapshot import Snapshot
from scheduler.kubernetes.client import KubernetesClient
from scheduler.kubernetes.deployment_demand import DeploymentWatch
from scheduler.kubernetes.resources.fleet import DemandSourceKind, PoolResource
from scheduler.kubernetes.resources.meta import DEMAND_KNOWN, Condition, format_time
from scheduler.kubernetes.spec_commands import ACTOR, SpecCommands


@dataclass(frozen=True, slots=True)
class PoolReadings:
    """Demand by Pool uid.

    `readings` are the newest known readings, unchanged until the next report. `conditions` exist for all Pools but
    those with pushed demand. `histories` fill gaps before the readings.
    """

    readings: Mapping[str, Command] = field(default_factory=dict)
    conditions: Mapping[str, tuple[Condition, ...]] = field(default_factory=dict)
    histories: tuple[Command, ...] = ()

    @property
    def commands(self) -> tuple[Command, ...]:
        return (*self.readings.values(), *self.histories)


def compute_readings(
    pools: Iterable[PoolResource],
    demand_by_uid: Mapping[str, PoolDemand],
    previous: PoolReadings,
    forecasts: Mapping[str, Forecast] = MappingProxyType({}),
    builder: ReportBuilder | None = None,
) -> PoolReadings:
    """Return the readings after `previous`, from the current state of the sources, and forecasts by pool."""
    builder = builder or ReportBuilder()
    readings, conditions = dict[str, Command](), dict[str, tuple[Condition, ...]]()
    for pool in pools:
        demand = demand_by_uid[pool.uid]
        conditions[pool.uid] = _demand_conditions(pool, demand)
        if isinstance(demand, KnownDemand):
            before, stale_s = previous.readings.get(pool.uid), pool.demand.stale_after_s
            report = builder.build(pool.pool, demand, forecasts.get(pool.pool.name))
            readings[pool.uid] = next_reading(report, pool.uid, demand, stale_s, before, actor=ACTOR)
    return PoolReadings(readings, conditions)


def with_demand(spec_commands: SpecCommands, readings: PoolReadings, snapshot: Snapshot) -> SpecCommands:
    """Return the commands with new readings, and the conditions with those about demand."""
    new = tuple(command for command in readings.commands if not _is_applied(command, snapshot))
    additions = {**readings.conditions, **dict(_build_pushed_conditions(spec_commands.fleet.pools, snapshot))}
    conditions = {uid: (*spec_commands.conditions.get(uid, ()), *added) for uid, added in additions.items()}
    return replace(
        spec_commands, commands=(*spec_commands.commands, *new), conditions={**spec_commands.conditions, **conditions}
    )


class DemandSources:
    """Watches and queries for all Pools. Used by one thread, which never blocks.

    Watches run only while a Pool needs them, in their own threads, which call `on_change`.
    """

    def __init__(
        self, cluster: KubernetesClient, *, prometheus_url: str = "", on_change: Callable[[], None] = lambda: None
    ) -> None:
        self._deployments = DeploymentWatch(cluster, on_change=on_change)
        self._prometheus = PrometheusPoller(prometheus_url, on_change=on_change) if prometheus_url else None
        self._builder = ReportBuilder()
        self._readings = PoolReadings()

    def start(self) -> None:
        if self._prometheus is not None:
            self._prometheus.start()

    def stop(self) -> None:
        self._deployments.stop()
        if self._prometheus is not None:
            self._prometheus.stop()

    def read(
        self,
        pools: Iterable[PoolResource],
        now_s: float,
        newest: Mapping[str, DemandReading] = MappingProxyType({}),
        forecasts: Mapping[str, Forecast] = MappingProxyType({}),
    ) -> PoolReadings:
        """Return the current demand of these Pools, and stop watching all others.

        `newest` are the newest stored readings by pool. A gap after them is filled from the history of Prometheus.
        `forecasts` are the newest ones by pool.
        """
        pools = [pool for pool in pools if pool.demand.kind is not DemandSourceKind.PUSH]
        queries = {
            pool.pool.name: build_query(pool.demand.prometheus, pool.pool.serving)
            for pool in pools
            if pool.demand.prometheus
        }
        self._update_watches(pools, queries, newest)
        demand = {pool.uid: self._current_demand(pool, queries, now_s) for pool in pools}
        found = compute_readings(pools, demand, self._readings, forecasts, self._builder)
        self._readings = replace(found, histories=self._take_histories(queries, now_s))
        return self._readings

    def _update_watches(
        self,
        pools: Iterable[PoolResource],
        queries: Mapping[str, PrometheusQuery],
        newest: Mapping[str, DemandReading],
    ) -> None:
        if any(pool.demand.kind is DemandSourceKind.DEPLOYMENTS for pool in pools):
            self._deployments.start()
        else:
            self._deployments.stop(join_s=0.0)
        if self._prometheus is not None:
            self._prometheus.set_queries(list_newest_reading_times(queries, newest))

    def _current_demand(self, pool: PoolResource, queries: Mapping[str, PrometheusQuery], now_s: float) -> PoolDemand:
        if pool.demand.kind is DemandSourceKind.DEPLOYMENTS:
            return self._deployments.get_demand(pool.demand.selector, now_s)
        if self._prometheus is None:
            return NO_PROMETHEUS_URL
        return self._prometheus.get_demand(queries[pool.pool.name], now_s)

    def _take_histories(self, queries: Mapping[str, PrometheusQuery], now_s: float) -> tuple[Command, ...]:
        if self._prometheus is None:
            return ()
        taken = {query: self._prometheus.take_history(query) for query in set(queries.values())}
        return tuple(
            command
            for name, query in queries.items()
            for command in build_history(name, taken[query], now_s, actor=ACTOR)
        )


def _build_pushed_conditions(
    pools: Iterable[PoolResource], snapshot: Snapshot
) -> Iterator[tuple[str, tuple[Condition, ...]]]:
    """Yield conditions of Pools with pushed demand that set a staleness limit."""
    for pool in pools:
        stale_s, reading = pool.pool.lending.demand_stale_s, snapshot.demand.get(pool.pool.name)
        if pool.demand.kind is not DemandSourceKind.PUSH or stale_s is None:
            continue
        if reading is None:
            condition = Condition(
                DEMAND_KNOWN, False, UnknownDemandReason.NOT_PUSHED_YET.value, "no demand was pushed yet"
            )
        elif snapshot.now_s - reading.at_s > stale_s:
            message = f"demand was last pushed at {format_time(reading.at_s)}; push it at least every {stale_s:g} s"
            condition = Condition(DEMAND_KNOWN, False, UnknownDemandReason.STALE.value, message)
        else:
            condition = Condition(DEMAND_KNOWN, True, "Pushed")
        yield pool.uid, (condition,)


def _demand_conditions(pool: PoolResource, demand: PoolDemand) -> tuple[Condition, ...]:
    """Return the condition. A new leader keeps the previous one until it has its own reading."""
    if isinstance(demand, KnownDemand):
        return (Condition(DEMAND_KNOWN, True, "Read"),)
    if demand.reason is UnknownDemandReason.NOT_ASKED_YET and pool.demand_conditions:
        return pool.demand_conditions
    return (Condition(DEMAND_KNOWN, False, demand.reason.value, demand.message),)


def _is_applied(command: Command, snapshot: Snapshot) -> bool:
    if not isinstance(command.body, ReportDemand):
        return False
    reading = snapshot.demand.get(command.body.pool)
    if reading is None or reading.at_s < command.at_s:
        return False
    if reading.at_s > command.at_s:
        return True
    return reading.loads == command.body.loads if command.body.loads else reading.asked_gpus == command.body.gpus
