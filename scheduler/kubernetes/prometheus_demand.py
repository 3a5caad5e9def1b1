"""Inference demand from Prometheus: response parsing, and a thread that polls the queries of all Pools.

Source: https://prometheus.io/docs/prometheus/latest/querying/api/
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx

from scheduler.kubernetes.resources.fleet import KnownDemand, PoolDemand, UnknownDemand, UnknownDemandReason
from scheduler.kubernetes.resources.meta import format_time

GPUS_MAX = 1e6
TIME_S_MAX = 1e11
"""Seconds since 1970. Timestamps in milliseconds are larger."""
_MESSAGE_MAX_LENGTH = 500
_QUERY_ERROR_TYPES = ("bad_data", "execution")


@dataclass(frozen=True, slots=True)
class QueryValue:
    """A query's value. `at_s` is the evaluation time; a scalar has no older sample."""

    value: float
    at_s: float
    is_scalar: bool


def parse_query_response(status: int, body: bytes) -> QueryValue | UnknownDemand:
    """Return the single value of a response, or why there is none."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return UnknownDemand(UnknownDemandReason.UNREACHABLE, f"HTTP status {status} without JSON")
    match document:
        case {"status": "success", "data": {"resultType": "scalar", "result": [int() | float() as at_s, str(text)]}}:
            return _parse_value(text, at_s, is_scalar=True)
        case {"status": "success", "data": {"resultType": "vector", "result": list(series)}}:
            return _parse_vector(series)
        case {"status": "success", "data": {"resultType": str(kind)}}:
            return UnknownDemand(
                UnknownDemandReason.BAD_QUERY, f"the query returns a {kind[:40]}; it must return one series or a scalar"
            )
        case {"status": "error", "errorType": str(kind), "error": str(message)}:
            gap = UnknownDemandReason.BAD_QUERY if kind in _QUERY_ERROR_TYPES else UnknownDemandReason.UNREACHABLE
            return UnknownDemand(gap, f"{kind[:40]}: {message[:_MESSAGE_MAX_LENGTH]}")
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


def _parse_vector(series: list[object]) -> QueryValue | UnknownDemand:
    match series:
        case []:
            return UnknownDemand(
                UnknownDemandReason.NO_SERIES, "the query returns no series; it must return one series or a scalar"
            )
        case [{"value": [int() | float() as at_s, str(text)]}]:
            return _parse_value(text, at_s, is_scalar=False)
        case [_]:
            return UnknownDemand(
                UnknownDemandReason.NOT_A_NUMBER, "the query returns a histogram; it must return a number of GPUs"
            )
    return UnknownDemand(
        UnknownDemandReason.MANY_SERIES,
        f"the query returns {len(series)} series; it must return one series or a scalar",
    )


def _parse_value(text: str, at_s: float, *, is_scalar: bool) -> QueryValue | UnknownDemand:
    try:
        return QueryValue(float(text), float(at_s), is_scalar)
    except ValueError:
        return UnknownDemand(
            UnknownDemandReason.NOT_A_NUMBER, f"the query returns {text[:40]!r}; it must return a number of GPUs"
        )


QUERY_INTERVAL_S = 15.0
TIMEOUT_S = 10.0
QUERIES_PER_STALE_PERIOD = 4
"""Number of times that each query runs before its last result becomes stale."""
RESPONSE_BYTES_MAX = 4 * 2**20
JOIN_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class PrometheusQuery:
    """PromQL, and the age at which a sample becomes stale."""

    promql: str
    stale_after_s: float


class PrometheusPoller:
    """Poller of queries in its own thread.

    `url` is like http://prometheus:9090, optionally with credentials and a path before /api. `on_change` is called by
    the thread after each round with a different result.
    """

    def __init__(
        self,
        url: str,
        *,
        on_change: Callable[[], None],
        interval_s: float = QUERY_INTERVAL_S,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._url = f"{url.rstrip('/')}/api/v1/query"
        self._display_url = _strip_credentials(url)
        self._timeout_s = timeout_s
        self._interval_s = interval_s
        self._on_change = on_change
        self._lock = threading.Lock()
        self._queries: frozenset[PrometheusQuery] = frozenset()
        self._results: dict[PrometheusQuery, PoolDemand] = {}
        self._last: dict[str, KnownDemand] = {}
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prometheus", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, *, join_s: float = JOIN_TIMEOUT_S) -> None:
        """Stop the thread. A request in progress is abandoned, because the thread is a daemon."""
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(join_s)

    def set_queries(self, queries: Iterable[PrometheusQuery]) -> None:
        """Poll these queries and no others. New ones run at once."""
        with self._lock:
            new_queries = frozenset(queries)
            has_changes = bool(new_queries - self._queries)
            self._queries = new_queries
            if has_changes:
                self._wake.set()

    def get_demand(self, query: PrometheusQuery, now_s: float) -> PoolDemand:
        """Return the last result, if it is not stale."""
        with self._lock:
            result = self._results.get(
                query, UnknownDemand(UnknownDemandReason.NOT_ASKED_YET, f"{self._display_url} has not responded yet")
            )
        if isinstance(result, UnknownDemand):
            return result
        if now_s - result.at_s > query.stale_after_s:
            return UnknownDemand(
                UnknownDemandReason.STALE,
                f"the newest sample is from {format_time(result.at_s)}, more than {query.stale_after_s:g} s ago",
            )
        return KnownDemand(result.gpus, min(result.at_s, now_s))

    def _run(self) -> None:
        with httpx.Client(timeout=self._timeout_s) as client:
            while True:
                with self._lock:
                    queries = self._queries
                    self._wake.clear()
                if self._stop.is_set():
                    return
                results = {
                    query: self._evaluate(client, query) for query in sorted(queries, key=lambda each: each.promql)
                }
                with self._lock:
                    has_changes = results != self._results
                    self._results = results
                texts = {query.promql for query in queries}
                self._last = {text: last for text, last in self._last.items() if text in texts}
                if has_changes:
                    self._on_change()
                staleness_s = (query.stale_after_s / QUERIES_PER_STALE_PERIOD for query in queries)
                self._wake.wait(min((self._interval_s, *staleness_s)))

    def _evaluate(self, client: httpx.Client, query: PrometheusQuery) -> PoolDemand:
        result = self._query_with_sample_time(client, query)
        if isinstance(result, KnownDemand):
            self._last[query.promql] = result
        elif result.reason is UnknownDemandReason.NO_SERIES and query.promql in self._last:
            last = format_time(self._last[query.promql].at_s)
            return UnknownDemand(UnknownDemandReason.STALE, f"the query has returned no series since {last}")
        return result

    def _query_with_sample_time(self, client: httpx.Client, query: PrometheusQuery) -> PoolDemand:
        """Return the value with the time of its sample.

        An instant query returns its evaluation time, so a second query for the same moment asks for timestamp(). PromQL
        knows the sample time of plain selectors only; computed series get the evaluation time. `lookback_delta`
        excludes samples older than `stale_after_s` from them. Prometheus 2.42 ignores it and looks back 5 minutes.
        """
        value = self._run_query(client, query.promql, query.stale_after_s)
        if isinstance(value, UnknownDemand):
            return value
        if value.is_scalar:
            return to_demand(value, value.at_s)
        # The line breaks end a comment at the end of the query.
        sampled = self._run_query(client, f"timestamp(\n{query.promql}\n)", query.stale_after_s, at_s=value.at_s)
        return sampled if isinstance(sampled, UnknownDemand) else to_demand(value, sampled.value)

    def _run_query(
        self, client: httpx.Client, text: str, lookback_s: float, *, at_s: float | None = None
    ) -> QueryValue | UnknownDemand:
        form = {"query": text, "lookback_delta": f"{lookback_s:.3f}", "timeout": f"{self._timeout_s:.3f}"}
        if at_s is not None:
            form["time"] = f"{at_s:.3f}"
        try:
            with client.stream("POST", self._url, data=form) as result:
                body = bytearray()
                for chunk in result.iter_bytes():
                    body += chunk
                    if len(body) > RESPONSE_BYTES_MAX:
                        return UnknownDemand(
                            UnknownDemandReason.MANY_SERIES, f"the response is larger than {RESPONSE_BYTES_MAX} bytes"
                        )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            message = str(error) or type(error).__name__
            return UnknownDemand(UnknownDemandReason.UNREACHABLE, f"{self._display_url}: {message}")
        value = parse_query_response(result.status_code, bytes(body))
        if isinstance(value, UnknownDemand) and value.reason is UnknownDemandReason.UNREACHABLE:
            return UnknownDemand(value.reason, f"{self._display_url}: {value.message}")
        return value


def _strip_credentials(url: str) -> str:
    """Return the URL without user and password, for messages that many people can read."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
