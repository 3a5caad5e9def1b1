"""Reports of polled demand: which readings become commands, and when."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain

from scheduler.demand.presets import PrometheusQuery, build_query
from scheduler.demand.prometheus_api import DemandHistory
from scheduler.demand.prometheus_poller import QUERIES_PER_STALE_PERIOD, PrometheusPoller
from scheduler.domain.commands import Command, DemandSourceFailed, ReportDemand, ReportDemandHistory
from scheduler.domain.demand_source import KnownDemand, UnknownDemand, UnknownDemandReason
from scheduler.domain.fleet import DemandReading, Forecast, Pool
from scheduler.domain.serving import ModelLoad
from scheduler.domain.snapshot import Snapshot
from scheduler.serving.capacity import CapacityError
from scheduler.serving.served_models import size_requests

REPORT_INTERVAL_S = 60.0
"""Interval at which unchanged demand is reported. Shorter if the reading would become stale sooner."""
ACTOR = "demand"
NO_PROMETHEUS_URL = UnknownDemand(
    UnknownDemandReason.UNREACHABLE, "EBBTIDE_PROMETHEUS_URL is not set. Set it to the URL of a Prometheus server."
)


def build_report(pool: Pool, demand: KnownDemand, forecast: Forecast | None) -> ReportDemand:
    """Return the report of a pool's demand, with the loads of its models if it follows from requests.

    Sizes of the present rates are known from the poll, so that this costs little more than look-ups.

    Args:
        forecast: the newest one of the pool, for the rates expected within the start of a replica.
    """
    if not demand.requests:
        return ReportDemand(pool.name, demand.gpus)
    served, loads = {each.model: each for each in pool.serving}, list[ModelLoad]()
    for requests in demand.requests:
        rate_per_s = ahead_rate_per_s = requests.rate_per_s
        if forecast is not None:
            ahead_rate_per_s = forecast.find_rate(requests.model, rate_per_s, demand.at_s)
        try:
            loads.append(size_requests(served[requests.model], requests, ahead_rate_per_s))
        except CapacityError:  # of the expected rate alone: the poll has sized the present one
            loads.append(size_requests(served[requests.model], requests, rate_per_s))
    return ReportDemand.of_loads(pool.name, loads)


class ReportBuilder:
    """Builder of reports that keeps the last one of each pool while neither its demand nor its forecast has changed.

    Building one costs about a millisecond for each model, and readers ask for it in each of their rounds.
    """

    def __init__(self) -> None:
        self._built: dict[str, tuple[Pool, KnownDemand, Forecast | None, ReportDemand]] = {}

    def build(self, pool: Pool, demand: KnownDemand, forecast: Forecast | None) -> ReportDemand:
        """Return the report of `build_report`."""
        known = self._built.get(pool.name)
        if known is not None and known[0] == pool and known[1] is demand and known[2] is forecast:
            return known[3]
        report = build_report(pool, demand, forecast)
        self._built[pool.name] = pool, demand, forecast, report
        return report


def next_reading(
    report: ReportDemand,
    key: str,
    demand: KnownDemand,
    stale_after_s: float,
    previous: Command | None,
    *,
    actor: str = ACTOR,
) -> Command:
    """Return `previous` until a number of replicas changes or the report interval has passed.

    `key` is unique to the pool.
    """
    again_s = min(REPORT_INTERVAL_S, stale_after_s / QUERIES_PER_STALE_PERIOD)
    if previous is not None and demand.at_s - previous.at_s < again_s:
        assert isinstance(previous.body, ReportDemand)
        if _list_replicas(previous.body) == _list_replicas(report):
            return previous
    numbers = "-".join(f"{each:g}" for each in _list_replicas(report))
    return Command(f"demand-{key}-{demand.at_s:.3f}-{numbers}", demand.at_s, report, actor)


def _list_replicas(report: ReportDemand) -> tuple[float, ...]:
    replicas = ((load.replicas, load.ahead_replicas, load.steady_replicas) for load in report.loads)
    return (report.gpus, *chain.from_iterable(replicas))


def list_newest_reading_times(
    queries: Mapping[str, PrometheusQuery], demand: Mapping[str, DemandReading]
) -> dict[PrometheusQuery, float]:
    """Return the time of the newest reading by query, given the queries by pool; minus infinity without a reading.

    Pools that share a query share the oldest of these times.
    """
    newest_s: dict[PrometheusQuery, float] = {}
    for pool, query in queries.items():
        reading = demand.get(pool)
        at_s = float("-inf") if reading is None else reading.at_s
        newest_s[query] = min(at_s, newest_s.get(query, at_s))
    return newest_s


def build_history(pool: str, history: DemandHistory, now_s: float, *, actor: str = ACTOR) -> tuple[Command, ...]:
    """Return the command that records a pool's history; none for an empty history."""
    if not history:
        return ()
    return (Command(f"history-{pool}-{history[-1][0]:.3f}", now_s, ReportDemandHistory(pool, history), actor),)


class PoolDemandReader:
    """Demand of the pools that name a Prometheus source in the service, as commands of the controller.

    Used by the thread of the controller, which never blocks. A pool whose source fails gets an event when the reason
    changes; its last reading becomes stale.
    """

    def __init__(self, prometheus_url: str = "", *, on_change: Callable[[], None] = lambda: None) -> None:
        self._poller = PrometheusPoller(prometheus_url, on_change=on_change) if prometheus_url else None
        self._builder = ReportBuilder()
        self._reported: dict[str, Command] = {}
        self._reasons: dict[str, UnknownDemandReason] = {}
        self._has_started = False

    def close(self) -> None:
        if self._poller is not None and self._has_started:
            self._poller.stop()

    def read(self, snapshot: Snapshot, now_s: float) -> tuple[Command, ...]:
        """Return new readings, back-filled history and changed failures of all pools with a source."""
        queries = {
            name: build_query(pool.demand, pool.serving)
            for name, pool in snapshot.pools.items()
            if pool.demand is not None
        }
        for memory in (self._reported, self._reasons):
            for name in memory.keys() - queries.keys():
                memory.pop(name, None)
        if not queries and not self._has_started:
            return ()
        histories: dict[PrometheusQuery, DemandHistory] = {}
        if self._poller is not None:
            if not self._has_started:
                self._poller.start()
            self._poller.set_queries(list_newest_reading_times(queries, snapshot.demand))
            histories = {query: self._poller.take_history(query) for query in set(queries.values())}
        self._has_started = True
        return tuple(
            command
            for name, query in queries.items()
            for command in (
                *self._read_pool(snapshot, name, query, now_s),
                *build_history(name, histories.get(query, ()), now_s),
            )
        )

    def _read_pool(self, snapshot: Snapshot, name: str, query: PrometheusQuery, now_s: float) -> Iterator[Command]:
        demand = NO_PROMETHEUS_URL if self._poller is None else self._poller.get_demand(query, now_s)
        if isinstance(demand, UnknownDemand):
            if demand.reason not in (UnknownDemandReason.NOT_ASKED_YET, self._reasons.get(name)):
                self._reasons[name] = demand.reason
                failure = DemandSourceFailed(name, demand.reason.value, demand.message)
                yield Command(f"demand-failed-{name}-{now_s:.3f}", now_s, failure, ACTOR)
            return
        self._reasons.pop(name, None)
        previous = self._reported.get(name)
        report = self._builder.build(snapshot.pools[name], demand, snapshot.forecasts.get(name))
        reading = next_reading(report, name, demand, query.stale_after_s, previous)
        if reading is not previous:
            self._reported[name] = reading
            yield reading
