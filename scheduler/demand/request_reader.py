"""RequestReader: the requests for the models of a pool, from Prometheus, and the GPUs that they need."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import ceil, inf

import httpx

from scheduler.demand.presets import PrometheusQuery
from scheduler.demand.prometheus_api import (
    GPUS_MAX,
    Buckets,
    DemandHistory,
    PrometheusApi,
    QueryValue,
    TimeSpan,
    to_demand,
)
from scheduler.demand.request_presets import PAST_LENGTH_WINDOW_S, RequestPromql
from scheduler.domain.demand_source import KnownDemand, PoolDemand, UnknownDemand, UnknownDemandReason
from scheduler.domain.serving import RATE_MAX, ReportedRequests, RequestLength
from scheduler.serving.capacity import CapacityError
from scheduler.serving.measured_lengths import (
    HistogramError,
    TokenHistogram,
    build_histogram,
    clip_lengths,
    join_lengths,
)
from scheduler.serving.served_models import ServedModelError, count_replicas, get_kv_tokens

LENGTHS_PERIOD_S = 300.0
"""Time for which lengths are used before they are queried again. They are means over an hour."""

HISTORY_PART_S = 4 * 86_400.0
"""Time of one range query. One over a month would exceed the timeout where many replicas export histograms."""

Lengths = tuple[RequestLength, ...]


@dataclass(frozen=True, slots=True)
class _Rate:
    """Requests per second at a time."""

    per_s: float
    at_s: float


class RequestReader:
    """Reader of the requests of pools. It is used by one thread, and remembers the last lengths of each model."""

    def __init__(self, api: PrometheusApi) -> None:
        self._api = api
        self._lengths: dict[RequestPromql, tuple[float, Lengths]] = {}

    def read(self, client: httpx.Client, query: PrometheusQuery) -> PoolDemand:
        """Return the GPUs for the present requests, with these, or why those of the first unknown model are unknown."""
        requests, gpus, at_s = list[ReportedRequests](), 0.0, inf
        for each in query.requests:
            found = self._read_model(client, each, query.stale_after_s)
            if isinstance(found, UnknownDemand):
                return UnknownDemand(found.reason, f"{each.served.model}: {found.message}")
            reported, replicas, read_at_s = found
            requests.append(reported)
            gpus, at_s = gpus + replicas * each.served.tensor_degree, min(at_s, read_at_s)
        demand = to_demand(QueryValue(gpus, at_s, False), at_s)
        return KnownDemand(gpus, at_s, tuple(requests)) if isinstance(demand, KnownDemand) else demand

    def read_history(
        self, client: httpx.Client, query: PrometheusQuery, span: TimeSpan
    ) -> DemandHistory | UnknownDemand:
        """Return the GPUs at each step for which the rates of all models are known."""
        sums: dict[float, float] | None = None
        for each in query.requests:
            gpus = self._read_past_gpus(client, each, span, query.stale_after_s)
            if isinstance(gpus, UnknownDemand):
                return gpus
            sums = gpus if sums is None else {at_s: sums[at_s] + gpus[at_s] for at_s in sums.keys() & gpus.keys()}
        return tuple((at_s, value) for at_s, value in sorted((sums or {}).items()) if value <= GPUS_MAX)

    def forget_all_but(self, queries: Collection[PrometheusQuery]) -> None:
        kept = {each for query in queries for each in query.requests}
        self._lengths = {each: known for each, known in self._lengths.items() if each in kept}

    def _read_model(
        self, client: httpx.Client, promql: RequestPromql, stale_after_s: float
    ) -> tuple[ReportedRequests, int, float] | UnknownDemand:
        """Return the requests for a model, the replicas that they need, and the time of the newest sample."""
        rate = self._read_rate(client, promql, stale_after_s)
        if isinstance(rate, UnknownDemand):
            return rate
        lengths = self._read_lengths(client, promql, rate, stale_after_s)
        if isinstance(lengths, UnknownDemand):
            return lengths
        requests = ReportedRequests(promql.served.model, rate.per_s, promql.arrival_scv, lengths)
        try:
            return requests, count_replicas(promql.served, requests), rate.at_s
        except (CapacityError, ServedModelError) as error:
            return UnknownDemand(UnknownDemandReason.CANNOT_SERVE, str(error))

    def _read_rate(self, client: httpx.Client, promql: RequestPromql, stale_after_s: float) -> _Rate | UnknownDemand:
        """Return the request rate at the time of its newest sample.

        A rate that is evaluated later than its newest sample falls while no sample arrives, as if requests ended.
        """
        at_s = None
        if promql.newest:
            newest = self._api.query(client, promql.newest, lookback_s=stale_after_s)
            if isinstance(newest, UnknownDemand):
                return self._read_idle_rate(client, promql, stale_after_s, newest)
            at_s = newest[0].value
        values = self._api.query(client, promql.rate, lookback_s=stale_after_s, at_s=at_s)
        if isinstance(values, UnknownDemand):
            return self._read_idle_rate(client, promql, stale_after_s, values)
        rate = values[0]
        if not 0.0 <= rate.value <= RATE_MAX:
            message = f"the request rate is {rate.value:g}; it must be 0 to {RATE_MAX:g} requests/s"
            return UnknownDemand(UnknownDemandReason.NOT_A_NUMBER, message)
        return _Rate(rate.value, rate.at_s)

    def _read_idle_rate(
        self, client: httpx.Client, promql: RequestPromql, stale_after_s: float, failure: UnknownDemand
    ) -> _Rate | UnknownDemand:
        """Return a rate of zero if the query of replicas returns zero, or else the failure."""
        if failure.reason is not UnknownDemandReason.NO_SERIES:
            return UnknownDemand(failure.reason, f"request rate: {failure.message}")
        if not promql.replicas:
            message = (
                "the servers export no request counter; check `selector`, and set `replicas` if they scale to zero"
            )
            return UnknownDemand(failure.reason, message)
        # The line break ends a comment at the end of the query.
        replicas = self._api.query(client, f"sum(\n{promql.replicas}\n)", lookback_s=stale_after_s)
        if isinstance(replicas, UnknownDemand):
            return UnknownDemand(replicas.reason, f"replicas: {replicas.message}")
        if replicas[0].value == 0:
            return _Rate(0.0, replicas[0].at_s)
        message = f"there are {replicas[0].value:g} replicas, but they export no request counter; check `selector`"
        return UnknownDemand(failure.reason, message)

    def _read_lengths(
        self, client: httpx.Client, promql: RequestPromql, rate: _Rate, stale_after_s: float
    ) -> Lengths | UnknownDemand:
        """Return the lengths of requests: the newest known ones, or else those of the served model.

        They are empty if the latter count, or if there are neither requests nor lengths.
        """
        if not promql.lengths:
            return ()
        read_at_s, known = self._lengths.get(promql, (-inf, ()))
        if rate.at_s - read_at_s < LENGTHS_PERIOD_S:
            return known
        histograms = [self._read_histogram(client, text, rate.at_s, stale_after_s) for text in promql.lengths]
        for side, histogram in zip(("prompt", "output"), histograms, strict=True):
            if isinstance(histogram, UnknownDemand):
                return UnknownDemand(histogram.reason, f"{side} lengths: {histogram.message}")
        prompts, outputs = (each for each in histograms if not isinstance(each, UnknownDemand))
        if prompts is None or outputs is None:
            if known:
                self._lengths[promql] = rate.at_s, known
            if known or promql.served.lengths or not rate.per_s:
                return known
            message = "requests arrive, but no lengths are known; set `lengths` of the served model until they are"
            return UnknownDemand(UnknownDemandReason.NO_LENGTHS, message)
        lengths = _join(promql, prompts, outputs)
        self._lengths[promql] = rate.at_s, lengths
        return lengths

    def _read_histogram(
        self, client: httpx.Client, text: str, at_s: float, stale_after_s: float
    ) -> TokenHistogram | UnknownDemand | None:
        """Return a histogram with requests; None without any."""
        found = self._api.query_buckets(client, text, lookback_s=stale_after_s, at_s=at_s)
        if isinstance(found, UnknownDemand):
            return found
        try:
            return _to_histogram(next(iter(found.values()), {}))
        except HistogramError as error:
            return UnknownDemand(UnknownDemandReason.NO_LENGTHS, str(error))

    def _read_past_gpus(
        self, client: httpx.Client, promql: RequestPromql, span: TimeSpan, stale_after_s: float
    ) -> dict[float, float] | UnknownDemand:
        past = self._read_past_lengths(client, promql, span, stale_after_s)
        if isinstance(past, UnknownDemand):
            return past
        times_s, newest = sorted(past), self._lengths.get(promql, (0.0, ()))[1]
        gpus = dict[float, float]()
        for part in span.split(HISTORY_PART_S):
            rates = self._api.query_range(client, promql.past_rate, part, lookback_s=stale_after_s)
            if isinstance(rates, UnknownDemand):
                return rates
            for at_s, per_s in rates.items():
                lengths = past[times_s[min(bisect_left(times_s, at_s), len(times_s) - 1)]] if times_s else newest
                requests = ReportedRequests(promql.served.model, max(per_s, 0.0), promql.arrival_scv, lengths)
                try:
                    gpus[at_s] = float(count_replicas(promql.served, requests) * promql.served.tensor_degree)
                except (CapacityError, ServedModelError):
                    continue  # as a reading that could not be sized, it is missing in the history
        return gpus

    def _read_past_lengths(
        self, client: httpx.Client, promql: RequestPromql, span: TimeSpan, stale_after_s: float
    ) -> Mapping[float, Lengths] | UnknownDemand:
        """Return the lengths of requests by the end of the time over which they are averaged."""
        step_s = PAST_LENGTH_WINDOW_S
        ends = TimeSpan(step_s * ceil(span.from_s / step_s), span.to_s, step_s)
        sides = [dict[float, TokenHistogram]() for _ in promql.past_lengths]
        for text, side in zip(promql.past_lengths, sides, strict=True):
            for part in ends.split(HISTORY_PART_S):
                found = self._api.query_bucket_range(client, text, part, lookback_s=stale_after_s)
                if isinstance(found, UnknownDemand):
                    return found
                side.update((at_s, known) for at_s, each in found.items() if (known := _find_histogram(each)))
        if not sides:
            return {}
        prompts, outputs = sides
        return {at_s: _join(promql, prompts[at_s], outputs[at_s]) for at_s in prompts.keys() & outputs.keys()}


def _join(promql: RequestPromql, prompts: TokenHistogram, outputs: TokenHistogram) -> Lengths:
    lengths = join_lengths(prompts, outputs, correlation=promql.correlation)
    return clip_lengths(lengths, get_kv_tokens(promql.served))


def _find_histogram(buckets: Buckets) -> TokenHistogram | None:
    """Return the histogram of a past time, or None if it has no requests or is invalid."""
    try:
        return _to_histogram(buckets)
    except HistogramError:
        return None


def _to_histogram(buckets: Buckets) -> TokenHistogram | None:
    """Return the histogram of buckets by label; None without requests. Raises HistogramError as `build_histogram`."""
    if not buckets:
        return None
    try:
        cumulative = {float(bound): count for bound, count in buckets.items() if bound}
    except ValueError:
        raise HistogramError(f"the label `le` is {sorted(buckets)[-1]!r}; it must be a number or +Inf") from None
    histogram = build_histogram(cumulative, buckets.get(""))
    return histogram if histogram.total > 0 else None
