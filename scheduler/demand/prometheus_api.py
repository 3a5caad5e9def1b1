"""Prometheus's HTTP API: queries for one moment and over time, and the parsing of its responses.

Source: https://prometheus.io/docs/prometheus/latest/querying/api/
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import urlsplit

import httpx

from scheduler.demand.presets import PrometheusQuery, PromqlTerm
from scheduler.domain.demand_source import KnownDemand, PoolDemand, UnknownDemand, UnknownDemandReason

GPUS_MAX = 1e6
TIME_S_MAX = 1e11
"""Seconds since 1970. Timestamps in milliseconds are larger."""
RESPONSE_BYTES_MAX = 4 * 2**20
HISTORY_BYTES_MAX = 64 * 2**20
_MESSAGE_MAX_LENGTH = 500
_QUERY_ERROR_TYPES = ("bad_data", "execution")

DemandHistory = tuple[tuple[float, float], ...]
"""Times in seconds since 1970, ascending, with the number of GPUs."""


Buckets = dict[str, float]
"""Cumulative numbers of requests by the label `le`, and the sum of tokens under the empty label."""
BucketsByTime = dict[float, Buckets]


@dataclass(frozen=True, slots=True)
class TimeSpan:
    """Times of a range query: each `step_s` from `from_s` to `to_s`, in seconds since 1970."""

    from_s: float
    to_s: float
    step_s: float

    def split(self, part_s: float) -> Iterator[TimeSpan]:
        """Yield spans of at most `part_s` with the same times."""
        steps, count = max(int(part_s / self.step_s), 1), int((self.to_s - self.from_s) / self.step_s + 1e-9) + 1
        for first in range(0, count, steps):
            last = min(first + steps, count) - 1
            yield TimeSpan(self.from_s + first * self.step_s, self.from_s + last * self.step_s, self.step_s)


@dataclass(frozen=True, slots=True)
class QueryValue:
    """A query's value. `at_s` is the evaluation time; a scalar has no older sample."""

    value: float
    at_s: float
    is_scalar: bool


def parse_query_values(
    status: int, body: bytes, *, sums_series: bool = False
) -> tuple[QueryValue, ...] | UnknownDemand:
    """Return one value for each series of a response, or why there is none. Several series need `sums_series`."""
    data = _parse_data(status, body)
    match data:
        case UnknownDemand():
            return data
        case {"resultType": "scalar", "result": [int() | float() as at_s, str(text)]}:
            value = _parse_value(text, at_s, is_scalar=True)
            return value if isinstance(value, UnknownDemand) else (value,)
        case {"resultType": "vector", "result": list(series)}:
            return _parse_vector(series, sums_series=sums_series)
        case {"resultType": str(kind)}:
            return UnknownDemand(
                UnknownDemandReason.BAD_QUERY, f"the query returns a {kind[:40]}; it must return one series or a scalar"
            )
    return UnknownDemand(UnknownDemandReason.UNREACHABLE, f"HTTP status {status} and no Prometheus response")


def parse_range_response(status: int, body: bytes, *, sums_series: bool = False) -> dict[float, float] | UnknownDemand:
    """Return the sum of the series of a range query by time, in seconds since 1970; empty without any sample.

    Values that are not finite are left out. Several series need `sums_series`.
    """
    data = _parse_data(status, body)
    match data:
        case UnknownDemand():
            return data
        case {"resultType": "matrix", "result": list(series)}:
            if len(series) > 1 and not sums_series:
                return _many_series(len(series))
            return _sum_matrix(series)
    return UnknownDemand(UnknownDemandReason.UNREACHABLE, f"HTTP status {status} and no matrix")


def parse_buckets(status: int, body: bytes) -> BucketsByTime | UnknownDemand:
    """Return the buckets of a histogram by time; empty without any series. Series with the same `le` are added."""
    data = _parse_data(status, body)
    match data:
        case UnknownDemand():
            return data
        case {"resultType": "vector" | "matrix", "result": list(series)}:
            return _group_buckets(series)
        case {"resultType": str(kind)}:
            message = f"the query returns a {kind[:40]}; it must return buckets with the label `le`"
            return UnknownDemand(UnknownDemandReason.BAD_QUERY, message)
    return UnknownDemand(UnknownDemandReason.UNREACHABLE, f"HTTP status {status} and no Prometheus response")


def to_demand(value: QueryValue, sampled_at_s: float) -> PoolDemand:
    """Return the value as GPUs. Values that are negative, not finite or above `GPUS_MAX` are errors."""
    if not 0.0 <= value.value <= GPUS_MAX:
        return UnknownDemand(
            UnknownDemandReason.NOT_A_NUMBER,
            f"the query returns {value.value:g}; it must return 0 to {GPUS_MAX:.0f} GPUs",
        )
    if not 0.0 <= sampled_at_s <= TIME_S_MAX:
        return UnknownDemand(
            UnknownDemandReason.NOT_A_NUMBER,
            f"the sample is from {sampled_at_s:g} s since 1970; it must be from 0 to {TIME_S_MAX:g} s",
        )
    return KnownDemand(value.value, sampled_at_s)


class PrometheusApi:
    """Client of one Prometheus server. `url` may have credentials and a path before /api."""

    def __init__(self, url: str, *, timeout_s: float) -> None:
        self._url = f"{url.rstrip('/')}/api/v1"
        self.display_url = _strip_credentials(url)
        self._timeout_s = timeout_s

    def read_demand(self, client: httpx.Client, query: PrometheusQuery) -> PoolDemand:
        """Return the sum of all terms, with the time of the oldest sample, or why the first unknown one is unknown."""
        gpus, at_s = 0.0, math.inf
        for number, term in enumerate(query.terms, start=1):
            result = self._read_term(client, term, query.stale_after_s)
            if isinstance(result, UnknownDemand):
                prefix = f"query {number} of {len(query.terms)}: " if len(query.terms) > 1 else ""
                return UnknownDemand(result.reason, f"{prefix}{result.message}")
            gpus, at_s = gpus + result.gpus, min(at_s, result.at_s)
        return to_demand(QueryValue(gpus, at_s, False), at_s)

    def read_history(
        self, client: httpx.Client, query: PrometheusQuery, span: TimeSpan
    ) -> DemandHistory | UnknownDemand:
        """Return the sums of all terms at each step for which every term has a value."""
        sums: dict[float, float] | None = None
        for term in query.terms:
            found = self.query_range(
                client, term.promql, span, lookback_s=query.stale_after_s, sums_series=term.sums_series
            )
            if isinstance(found, UnknownDemand):
                return found
            gpus = {at_s: value * term.gpus_each for at_s, value in found.items()}
            sums = gpus if sums is None else {at_s: sums[at_s] + gpus[at_s] for at_s in sums.keys() & gpus.keys()}
        known = sorted((sums or {}).items())
        return tuple((at_s, value) for at_s, value in known if 0.0 <= value <= GPUS_MAX)

    def _read_term(self, client: httpx.Client, term: PromqlTerm, stale_after_s: float) -> PoolDemand:
        """Return the GPUs of a term with the time of its sample.

        An instant query returns its evaluation time, so a second query for the same moment asks for timestamp(). PromQL
        knows the sample time of plain selectors only; computed series get the evaluation time. `lookback_delta`
        excludes samples older than `stale_after_s` from them. Prometheus 2.42 ignores it and looks back 5 minutes.
        """
        values = self.query(client, term.promql, lookback_s=stale_after_s, sums_series=term.sums_series)
        if isinstance(values, UnknownDemand):
            return values
        value = QueryValue(sum(each.value for each in values) * term.gpus_each, values[0].at_s, values[0].is_scalar)
        if value.is_scalar:
            return to_demand(value, value.at_s)
        # The line breaks end a comment at the end of the query.
        sampled = self.query(
            client,
            f"timestamp(\n{term.promql}\n)",
            lookback_s=stale_after_s,
            sums_series=term.sums_series,
            at_s=value.at_s,
        )
        return sampled if isinstance(sampled, UnknownDemand) else to_demand(value, min(each.value for each in sampled))

    def query(
        self,
        client: httpx.Client,
        text: str,
        *,
        lookback_s: float,
        sums_series: bool = False,
        at_s: float | None = None,
    ) -> tuple[QueryValue, ...] | UnknownDemand:
        """Return one value for each series, at a time or now."""
        form = {} if at_s is None else {"time": f"{at_s:.3f}"}
        response = self._post(client, "query", text, lookback_s=lookback_s, form=form)
        if isinstance(response, UnknownDemand):
            return response
        values = parse_query_values(*response, sums_series=sums_series)
        return self._name_server(values) if isinstance(values, UnknownDemand) else values

    def query_buckets(
        self, client: httpx.Client, text: str, *, lookback_s: float, at_s: float
    ) -> BucketsByTime | UnknownDemand:
        """Return the buckets of a histogram at a time."""
        form = {"time": f"{at_s:.3f}"}
        response = self._post(client, "query", text, lookback_s=lookback_s, form=form)
        if isinstance(response, UnknownDemand):
            return response
        buckets = parse_buckets(*response)
        return self._name_server(buckets) if isinstance(buckets, UnknownDemand) else buckets

    def query_range(
        self, client: httpx.Client, text: str, span: TimeSpan, *, lookback_s: float, sums_series: bool = False
    ) -> dict[float, float] | UnknownDemand:
        """Return the sum of all series at each step of a span."""
        response = self._post_range(client, text, span, lookback_s)
        if isinstance(response, UnknownDemand):
            return response
        return parse_range_response(*response, sums_series=sums_series)

    def query_bucket_range(
        self, client: httpx.Client, text: str, span: TimeSpan, *, lookback_s: float
    ) -> BucketsByTime | UnknownDemand:
        """Return the buckets of a histogram at each step of a span."""
        response = self._post_range(client, text, span, lookback_s)
        return response if isinstance(response, UnknownDemand) else parse_buckets(*response)

    def _name_server(self, failure: UnknownDemand) -> UnknownDemand:
        """Return the failure, with the URL of the server if it sent no valid response."""
        if failure.reason is not UnknownDemandReason.UNREACHABLE:
            return failure
        return UnknownDemand(failure.reason, f"{self.display_url}: {failure.message}")

    def _post_range(
        self, client: httpx.Client, text: str, span: TimeSpan, lookback_s: float
    ) -> tuple[int, bytes] | UnknownDemand:
        form = {"start": f"{span.from_s:.3f}", "end": f"{span.to_s:.3f}", "step": f"{span.step_s:.3f}"}
        return self._post(client, "query_range", text, lookback_s=lookback_s, form=form, bytes_max=HISTORY_BYTES_MAX)

    def _post(
        self,
        client: httpx.Client,
        path: str,
        text: str,
        *,
        lookback_s: float,
        form: Mapping[str, str],
        bytes_max: int = RESPONSE_BYTES_MAX,
    ) -> tuple[int, bytes] | UnknownDemand:
        """Return the status and the body of a response that is not longer than `bytes_max`."""
        data = {"query": text, "lookback_delta": f"{lookback_s:.3f}", "timeout": f"{self._timeout_s:.3f}", **form}
        try:
            with client.stream("POST", f"{self._url}/{path}", data=data) as result:
                body = bytearray()
                for chunk in result.iter_bytes():
                    body += chunk
                    if len(body) > bytes_max:
                        return UnknownDemand(
                            UnknownDemandReason.MANY_SERIES, f"the response is larger than {bytes_max} bytes"
                        )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            message = str(error) or type(error).__name__
            return UnknownDemand(UnknownDemandReason.UNREACHABLE, f"{self.display_url}: {message}")
        return result.status_code, bytes(body)


def format_utc(at_s: float) -> str:
    """Format seconds since 1970 as whole seconds of UTC, such as 2026-11-27T22:00:00Z."""
    return datetime.fromtimestamp(int(at_s), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _parse_data(status: int, body: bytes) -> object:
    """Return the data of a successful response, or an UnknownDemand."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return UnknownDemand(UnknownDemandReason.UNREACHABLE, f"HTTP status {status} without JSON")
    match document:
        case {"status": "success", "data": dict(data)}:
            return data
        case {"status": "error", "errorType": str(kind), "error": str(message)}:
            gap = UnknownDemandReason.BAD_QUERY if kind in _QUERY_ERROR_TYPES else UnknownDemandReason.UNREACHABLE
            return UnknownDemand(gap, f"{kind[:40]}: {message[:_MESSAGE_MAX_LENGTH]}")
    return UnknownDemand(UnknownDemandReason.UNREACHABLE, f"HTTP status {status} and no Prometheus response")


def _parse_vector(series: list[object], *, sums_series: bool) -> tuple[QueryValue, ...] | UnknownDemand:
    if not series:
        return UnknownDemand(
            UnknownDemandReason.NO_SERIES, "the query returns no series; it must return one series or a scalar"
        )
    if len(series) > 1 and not sums_series:
        return _many_series(len(series))
    values = []
    for each in series:
        match each:
            case {"value": [int() | float() as at_s, str(text)]}:
                value = _parse_value(text, at_s, is_scalar=False)
            case _:
                value = UnknownDemand(
                    UnknownDemandReason.NOT_A_NUMBER, "the query returns a histogram; it must return a number"
                )
        if isinstance(value, UnknownDemand):
            return value
        values.append(value)
    return tuple(values)


def _many_series(count: int) -> UnknownDemand:
    return UnknownDemand(
        UnknownDemandReason.MANY_SERIES,
        f"the query returns {count} series; it must return one series or a scalar, or state `aggregate: sum`",
    )


def _group_buckets(series: list[object]) -> BucketsByTime | UnknownDemand:
    found: BucketsByTime = {}
    for each in series:
        match each:
            case {"metric": dict(labels), "values": list(samples)}:
                pass
            case {"metric": dict(labels), "value": list(sample)}:
                samples = [sample]
            case _:
                message = "the query returns native histograms; convert them to classic buckets with the label `le`"
                return UnknownDemand(UnknownDemandReason.NOT_A_NUMBER, message)
        bound = str(labels.get("le", ""))
        for sample in samples:
            match sample:
                case [int() | float() as at_s, str(text)]:
                    buckets = found.setdefault(float(at_s), {})
                    buckets[bound] = buckets.get(bound, 0.0) + _to_float(text)
    return found


def _sum_matrix(series: list[object]) -> dict[float, float]:
    sums: dict[float, float] = {}
    for each in series:
        match each:
            case {"values": list(samples)}:
                for sample in samples:
                    match sample:
                        case [int() | float() as at_s, str(text)] if math.isfinite(value := _to_float(text)):
                            sums[float(at_s)] = sums.get(float(at_s), 0.0) + value
    return sums


def _to_float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _parse_value(text: str, at_s: float, *, is_scalar: bool) -> QueryValue | UnknownDemand:
    try:
        return QueryValue(float(text), float(at_s), is_scalar)
    except ValueError:
        return UnknownDemand(
            UnknownDemandReason.NOT_A_NUMBER, f"the query returns {text[:40]!r}; it must return a number"
        )


def _strip_credentials(url: str) -> str:
    """Return the URL without user and password, for messages that many people can read."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
