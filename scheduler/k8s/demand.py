"""DemandSources: where each Pool's inference demand comes from, as readings for the store and claims for the Pool.

Where nothing is known, nothing is told: the last reading grows stale in the store, and nothing new is lent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from scheduler.domain.command import Command, ReportDemand
from scheduler.domain.snapshot import Snapshot
from scheduler.k8s.client import Cluster
from scheduler.k8s.demand_reading import Demand, Gap, Known, Unknown
from scheduler.k8s.deployment_watch import DeploymentWatch
from scheduler.k8s.intake import ACTOR, Taken
from scheduler.k8s.prometheus_watch import PERIODS_A_STALENESS, PrometheusWatch, Query
from scheduler.k8s.resources.conditions import DEMAND_KNOWN, Claim
from scheduler.k8s.resources.metadata import time_text
from scheduler.k8s.resources.pool import DemandKind, PoolResource

TELL_AGAIN_S = 60.0
"""A demand that does not change is told this often, and more often where it would count as stale soon."""

_NO_URL = Unknown(Gap.UNREACHABLE, "EBBTIDE_PROMETHEUS_URL: got nothing; allowed: the URL of a Prometheus")


@dataclass(frozen=True, slots=True)
class Told:
    """By the uid of a Pool: `readings` of those whose demand is known, the same until there is another one to tell;
    `claims` of all but those whose demand somebody pushes."""

    readings: Mapping[str, Command] = field(default_factory=dict)
    claims: Mapping[str, tuple[Claim, ...]] = field(default_factory=dict)

    @property
    def commands(self) -> tuple[Command, ...]:
        return tuple(self.readings.values())


def tell(pools: Iterable[PoolResource], known: Mapping[str, Known], before: Told) -> Told:
    """What is `known` now, by the uid of a Pool, after what was told before."""
    readings, claims = dict[str, Command](), dict[str, tuple[Claim, ...]]()
    for pool in pools:
        found = known[pool.uid]
        claims[pool.uid] = _claims(pool, found)
        if isinstance(found, Demand):
            readings[pool.uid] = _newest(pool, found, before.readings.get(pool.uid))
    return Told(readings, claims)


def with_demand(taken: Taken, told: Told, snapshot: Snapshot) -> Taken:
    """What was taken in, with the readings that the snapshot does not have and what is to say on the Pools."""
    new = tuple(command for command in told.commands if not _is_known(command, snapshot))
    every = {**told.claims, **dict(_pushed(taken.fleet.pools, snapshot))}
    claims = {uid: (*taken.claims.get(uid, ()), *more) for uid, more in every.items()}
    return replace(taken, commands=(*taken.commands, *new), claims={**taken.claims, **claims})


class DemandSources:
    """Used by one thread, which never waits here: watches and queries run in threads of their own, the former only
    while a Pool needs them. `on_change` is called by those threads when there may be something new."""

    def __init__(
        self, cluster: Cluster, *, prometheus_url: str = "", on_change: Callable[[], None] = lambda: None
    ) -> None:
        self._deployments = DeploymentWatch(cluster, on_change=on_change)
        self._prometheus = PrometheusWatch(prometheus_url, on_change=on_change) if prometheus_url else None
        self._told = Told()

    def start(self) -> None:
        """Once."""
        if self._prometheus is not None:
            self._prometheus.start()

    def stop(self) -> None:
        self._deployments.close()
        if self._prometheus is not None:
            self._prometheus.stop()

    def look(self, pools: Iterable[PoolResource], now_s: float) -> Told:
        """What is known now of these Pools' demand; whoever is not among them is not asked for any more."""
        pools = [pool for pool in pools if pool.demand.kind is not DemandKind.PUSH]
        self._follow(pools)
        self._told = tell(pools, {pool.uid: self._known(pool, now_s) for pool in pools}, self._told)
        return self._told

    def _follow(self, pools: Iterable[PoolResource]) -> None:
        kinds = {pool.demand.kind for pool in pools}
        if DemandKind.DEPLOYMENTS in kinds:
            self._deployments.open()
        else:
            self._deployments.close(join_s=0.0)
        if self._prometheus is not None:
            self._prometheus.ask(_query(pool) for pool in pools if pool.demand.kind is DemandKind.PROMETHEUS)

    def _known(self, pool: PoolResource, now_s: float) -> Known:
        if pool.demand.kind is DemandKind.DEPLOYMENTS:
            return self._deployments.demand(pool.demand.selector, now_s)
        return _NO_URL if self._prometheus is None else self._prometheus.demand(_query(pool), now_s)


def _query(pool: PoolResource) -> Query:
    return Query(pool.demand.query, pool.demand.stale_after_s)


def _newest(pool: PoolResource, demand: Demand, told: Command | None) -> Command:
    """The reading that was told before, until the number is another one or it is time to tell it again."""
    report = ReportDemand(pool.pool.name, demand.gpus)
    again_s = min(TELL_AGAIN_S, pool.demand.stale_after_s / PERIODS_A_STALENESS)
    if told is not None and told.body == report and demand.at_s - told.at_s < again_s:
        return told
    return Command(f"demand-{pool.uid}-{demand.at_s:.3f}-{demand.gpus:g}", demand.at_s, report, ACTOR)


def _pushed(pools: Iterable[PoolResource], snapshot: Snapshot) -> Iterator[tuple[str, tuple[Claim, ...]]]:
    """What Pools say that others push the demand of, where they have said when it is stale."""
    for pool in pools:
        stale_s, reading = pool.pool.lending.demand_stale_s, snapshot.demand.get(pool.pool.name)
        if pool.demand.kind is not DemandKind.PUSH or stale_s is None:
            continue
        if reading is None:
            claim = Claim(DEMAND_KNOWN, False, Gap.NOT_PUSHED_YET.value, "nobody has pushed its demand yet")
        elif snapshot.now_s - reading.at_s > stale_s:
            said = f"demand was last pushed at {time_text(reading.at_s)}; allowed: at most {stale_s:g} s ago"
            claim = Claim(DEMAND_KNOWN, False, Gap.STALE.value, said)
        else:
            claim = Claim(DEMAND_KNOWN, True, "Pushed")
        yield pool.uid, (claim,)


def _claims(pool: PoolResource, known: Known) -> tuple[Claim, ...]:
    """A new leader lets stand what was said before, until it knows by itself."""
    if isinstance(known, Demand):
        return (Claim(DEMAND_KNOWN, True, "Read"),)
    if known.gap is Gap.NOT_ASKED_YET and pool.demand_claims:
        return pool.demand_claims
    return (Claim(DEMAND_KNOWN, False, known.gap.value, known.message),)


def _is_known(command: Command, snapshot: Snapshot) -> bool:
    assert isinstance(command.body, ReportDemand)
    reading = snapshot.demand.get(command.body.pool)
    if reading is None or reading.at_s < command.at_s:
        return False
    return reading.at_s > command.at_s or reading.asked_gpus == command.body.gpus
