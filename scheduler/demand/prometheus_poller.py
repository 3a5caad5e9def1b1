"""PrometheusPoller: a thread that evaluates the demand queries of all pools, and fills gaps of their history."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import httpx

from scheduler.demand.presets import PrometheusQuery
from scheduler.demand.prometheus_api import DemandHistory, PrometheusApi, TimeSpan, format_utc
from scheduler.demand.request_reader import RequestReader
from scheduler.domain.demand_source import KnownDemand, PoolDemand, UnknownDemand, UnknownDemandReason

QUERY_INTERVAL_S = 15.0
TIMEOUT_S = 10.0
QUERIES_PER_STALE_PERIOD = 4
"""Number of times that each query runs before its last result becomes stale."""
HISTORY_STEP_S = 300.0
"""Resolution of back-filled history, which is that of the forecaster at a season of one day."""
HISTORY_S = 28 * 86_400.0
"""Longest history that is back-filled: as much as the forecaster uses. It is below the 11,000 points of a query."""
GAP_S = 2 * HISTORY_STEP_S
"""A pool whose newest reading is older than this is back-filled when its source is known again."""
HISTORY_RETRY_S = 60.0
JOIN_TIMEOUT_S = 2.0

log = logging.getLogger(__name__)


class PrometheusPoller:
    """Poller of queries in its own thread.

    `url` is like http://prometheus:9090, optionally with credentials and a path before /api. `on_change` is called by
    the thread after each different result and each new history.
    """

    def __init__(
        self,
        url: str,
        *,
        on_change: Callable[[], None],
        interval_s: float = QUERY_INTERVAL_S,
        timeout_s: float = TIMEOUT_S,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._api = PrometheusApi(url, timeout_s=timeout_s)
        self._requests = RequestReader(self._api)
        self._timeout_s = timeout_s
        self._interval_s = interval_s
        self._on_change = on_change
        self._now = now
        self._lock = threading.Lock()
        self._newest_s: Mapping[PrometheusQuery, float] = {}
        self._results: dict[PrometheusQuery, PoolDemand] = {}
        self._histories: dict[PrometheusQuery, DemandHistory] = {}
        self._last: dict[PrometheusQuery, KnownDemand] = {}
        self._gaps: dict[PrometheusQuery, TimeSpan] = {}
        self._filled_to_s: dict[PrometheusQuery, float] = {}
        self._retry_at_s: dict[PrometheusQuery, float] = {}
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

    def set_queries(self, newest_s: Mapping[PrometheusQuery, float]) -> None:
        """Poll these queries and no others. New ones run at once.

        Each has the time of the newest known reading of its pool, minus infinity without one. History after it is
        queried when it is more than `GAP_S` ago.
        """
        with self._lock:
            has_changes = bool(newest_s.keys() - self._newest_s.keys())
            self._newest_s = dict(newest_s)
            if has_changes:
                self._wake.set()

    def get_demand(self, query: PrometheusQuery, now_s: float) -> PoolDemand:
        """Return the last result, if it is not stale. It is the same object until the next result."""
        with self._lock:
            result = self._results.get(
                query,
                UnknownDemand(UnknownDemandReason.NOT_ASKED_YET, f"{self._api.display_url} has not responded yet"),
            )
        if isinstance(result, UnknownDemand):
            return result
        if now_s - result.at_s > query.stale_after_s:
            return UnknownDemand(
                UnknownDemandReason.STALE,
                f"the newest sample is from {format_utc(result.at_s)}, more than {query.stale_after_s:g} s ago",
            )
        return result if result.at_s <= now_s else replace(result, at_s=now_s)

    def take_history(self, query: PrometheusQuery) -> DemandHistory:
        """Return the history that was queried since the last call, oldest first; empty if there is none."""
        with self._lock:
            return self._histories.pop(query, ())

    def _run(self) -> None:
        with httpx.Client(timeout=self._timeout_s) as client:
            while True:
                with self._lock:
                    newest_s = self._newest_s
                    self._wake.clear()
                if self._stop.is_set():
                    return
                self._forget_all_but(newest_s)
                if self._run_round(client, newest_s):
                    self._on_change()
                if self._fill_gaps(client):
                    self._on_change()
                if self._has_due_gap():
                    continue  # the next round polls first, so that demand stays fresh meanwhile
                staleness_s = (query.stale_after_s / QUERIES_PER_STALE_PERIOD for query in newest_s)
                self._wake.wait(min((self._interval_s, *staleness_s)))

    def _run_round(self, client: httpx.Client, newest_s: Mapping[PrometheusQuery, float]) -> bool:
        """Evaluate all queries once, note gaps in their history, and return whether a result changed."""
        results = dict[PrometheusQuery, PoolDemand]()
        for query, newest in newest_s.items():
            results[query] = result = self._evaluate(client, query)
            if isinstance(result, KnownDemand):
                self._note_gap(query, newest, result.at_s)
        with self._lock:
            has_changes = results != self._results
            self._results = results
        return has_changes

    def _forget_all_but(self, queries: Mapping[PrometheusQuery, float]) -> None:
        for memory in (self._last, self._gaps, self._filled_to_s, self._retry_at_s, self._histories):
            for query in memory.keys() - queries.keys():
                with self._lock:
                    memory.pop(query, None)
        self._requests.forget_all_but(queries.keys())

    def _evaluate(self, client: httpx.Client, query: PrometheusQuery) -> PoolDemand:
        result = self._requests.read(client, query) if query.requests else self._api.read_demand(client, query)
        if isinstance(result, KnownDemand):
            self._last[query] = result
        elif result.reason is UnknownDemandReason.NO_SERIES and query in self._last:
            last = format_utc(self._last[query].at_s)
            return UnknownDemand(UnknownDemandReason.STALE, f"the query has returned no series since {last}")
        return result

    def _note_gap(self, query: PrometheusQuery, newest_s: float, known_at_s: float) -> None:
        """Remember the time between the newest known reading and the present one, if that is a gap.

        It is remembered until it is filled, because the present reading is soon the newest known one.
        """
        known_to_s = max(newest_s, self._filled_to_s.get(query, float("-inf")))
        if query not in self._gaps and known_at_s - known_to_s > GAP_S:
            from_s = max(known_to_s, known_at_s - HISTORY_S) + HISTORY_STEP_S
            start_s = HISTORY_STEP_S * (from_s // HISTORY_STEP_S)
            self._gaps[query] = TimeSpan(start_s, known_at_s - 1.0, HISTORY_STEP_S)

    def _fill_gaps(self, client: httpx.Client) -> bool:
        """Read the history of gaps until the time of a round is over, and return whether there was any.

        History of requests takes seconds, in which the demand of other pools must not become stale.
        """
        end_s, has_found = time.monotonic() + self._interval_s, False
        for query, span in tuple(self._gaps.items()):
            if self._now() < self._retry_at_s.get(query, float("-inf")):
                continue
            history = self._read_history(client, query, span)
            if history:
                has_found = True
                with self._lock:
                    self._histories[query] = (*self._histories.get(query, ()), *history)
            if time.monotonic() > end_s:
                break
        return has_found

    def _has_due_gap(self) -> bool:
        now_s = self._now()
        return any(now_s >= self._retry_at_s.get(query, float("-inf")) for query in self._gaps)

    def _read_history(self, client: httpx.Client, query: PrometheusQuery, span: TimeSpan) -> DemandHistory:
        """Return the history of a gap, which then is none, or nothing if it has to be read again."""
        read_history = self._requests.read_history if query.requests else self._api.read_history
        history = read_history(client, query, span)
        if isinstance(history, UnknownDemand):
            log.warning("the history of a demand query is unknown; it is queried again: %s", history.message)
            self._retry_at_s[query] = self._now() + HISTORY_RETRY_S
            return ()
        del self._gaps[query]
        self._filled_to_s[query] = span.to_s + 1.0
        return history
