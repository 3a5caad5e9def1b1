"""DemandSources: the inference demand of each Pool, as commands for the store and conditions for the Pool.

Unknown demand is not reported: the last reading becomes stale in the store, and new loans stop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from scheduler.domain.commands import Command, ReportDemand
from scheduler.domain.snapshot import Snapshot
from scheduler.kubernetes.client import KubernetesClient
from scheduler.kubernetes.deployment_demand import DeploymentWatch
from scheduler.kubernetes.prometheus_demand import QUERIES_PER_STALE_PERIOD, PrometheusPoller, PrometheusQuery
from scheduler.kubernetes.resources.fleet import (
    DemandSourceKind,
    KnownDemand,
    PoolDemand,
    PoolResource,
    UnknownDemand,
    UnknownDemandReason,
)
from scheduler.kubernetes.resources.meta import DEMAND_KNOWN, Condition, format_time
from scheduler.kubernetes.spec_commands import ACTOR, SpecCommands

REPORT_INTERVAL_S = 60.0
"""Interval at which unchanged demand is reported. Shorter if the reading would become stale sooner."""

_NO_PROMETHEUS_URL = UnknownDemand(
    UnknownDemandReason.UNREACHABLE, "EBBTIDE_PROMETHEUS_URL is not set. Set it to the URL of a Prometheus server."
)


@dataclass(frozen=True, slots=True)
class PoolReadings:
    """Demand by Pool uid.

    `readings` are the newest known readings, unchanged until the next report. `conditions` exist for all Pools but
    those with pushed demand.
    """

    readings: Mapping[str, Command] = field(default_factory=dict)
    conditions: Mapping[str, tuple[Condition, ...]] = field(default_factory=dict)

    @property
    def commands(self) -> tuple[Command, ...]:
        return tuple(self.readings.values())


def compute_readings(
    pools: Iterable[PoolResource], demand_by_uid: Mapping[str, PoolDemand], previous: PoolReadings
) -> PoolReadings:
    """Return the readings after `previous`, from the current state of the sources."""
    readings, conditions = dict[str, Command](), dict[str, tuple[Condition, ...]]()
    for pool in pools:
        demand = demand_by_uid[pool.uid]
        conditions[pool.uid] = _demand_conditions(pool, demand)
        if isinstance(demand, KnownDemand):
            readings[pool.uid] = _next_reading(pool, demand, previous.readings.get(pool.uid))
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
        self._readings = PoolReadings()

    def start(self) -> None:
        if self._prometheus is not None:
            self._prometheus.start()

    def stop(self) -> None:
        self._deployments.stop()
        if self._prometheus is not None:
            self._prometheus.stop()

    def read(self, pools: Iterable[PoolResource], now_s: float) -> PoolReadings:
        """Return the current demand of these Pools, and stop watching all others."""
        pools = [pool for pool in pools if pool.demand.kind is not DemandSourceKind.PUSH]
        self._update_watches(pools)
        self._readings = compute_readings(
            pools, {pool.uid: self._current_demand(pool, now_s) for pool in pools}, self._readings
        )
        return self._readings

    def _update_watches(self, pools: Iterable[PoolResource]) -> None:
        kinds = {pool.demand.kind for pool in pools}
        if DemandSourceKind.DEPLOYMENTS in kinds:
            self._deployments.start()
        else:
            self._deployments.stop(join_s=0.0)
        if self._prometheus is not None:
            self._prometheus.set_queries(
                _build_query(pool) for pool in pools if pool.demand.kind is DemandSourceKind.PROMETHEUS
            )

    def _current_demand(self, pool: PoolResource, now_s: float) -> PoolDemand:
        if pool.demand.kind is DemandSourceKind.DEPLOYMENTS:
            return self._deployments.get_demand(pool.demand.selector, now_s)
        return (
            _NO_PROMETHEUS_URL if self._prometheus is None else self._prometheus.get_demand(_build_query(pool), now_s)
        )


def _build_query(pool: PoolResource) -> PrometheusQuery:
    return PrometheusQuery(pool.demand.query, pool.demand.stale_after_s)


def _next_reading(pool: PoolResource, demand: KnownDemand, previous: Command | None) -> Command:
    """Return `previous` until the number changes or the report interval has passed."""
    report = ReportDemand(pool.pool.name, demand.gpus)
    again_s = min(REPORT_INTERVAL_S, pool.demand.stale_after_s / QUERIES_PER_STALE_PERIOD)
    if previous is not None and previous.body == report and demand.at_s - previous.at_s < again_s:
        return previous
    return Command(f"demand-{pool.uid}-{demand.at_s:.3f}-{demand.gpus:g}", demand.at_s, report, ACTOR)


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
    assert isinstance(command.body, ReportDemand)
    reading = snapshot.demand.get(command.body.pool)
    if reading is None or reading.at_s < command.at_s:
        return False
    return reading.at_s > command.at_s or reading.asked_gpus == command.body.gpus
