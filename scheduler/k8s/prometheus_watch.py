"""PrometheusWatch: asks Prometheus the queries of Pools time and again, in a thread of its own: nobody waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx

from scheduler.k8s.demand_reading import Demand, Gap, Known, Unknown
from scheduler.k8s.prometheus_answer import Figure, demand_of, figure_of
from scheduler.k8s.resources.metadata import time_text

PERIOD_S = 15.0
TIMEOUT_S = 10.0
PERIODS_A_STALENESS = 4
"""Each query is asked so often before its last answer counts as stale."""
ANSWER_BYTES_MAX = 4 * 2**20
STOP_S = 2.0


@dataclass(frozen=True, slots=True)
class Query:
    """PromQL, and the age at which a sample says nothing of the present any more."""

    text: str
    stale_after_s: float


class PrometheusWatch:
    """`url` as in http://prometheus:9090, with a path before /api where there is one, and a name and password if need
    be. `on_change` is called by the thread after each round that brought something else."""

    def __init__(
        self,
        url: str,
        *,
        on_change: Callable[[], None],
        period_s: float = PERIOD_S,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._url = f"{url.rstrip('/')}/api/v1/query"
        self._place = _without_user(url)
        self._timeout_s = timeout_s
        self._period_s = period_s
        self._on_change = on_change
        self._lock = threading.Lock()
        self._queries: frozenset[Query] = frozenset()
        self._answers: dict[Query, Known] = {}
        self._last: dict[str, Demand] = {}
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prometheus", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, *, join_s: float = STOP_S) -> None:
        """An answer that is still being waited for is waited for no longer: the thread is a daemon."""
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(join_s)

    def ask(self, queries: Iterable[Query]) -> None:
        """From now on these, and no others; new ones at once."""
        with self._lock:
            wanted = frozenset(queries)
            is_news = bool(wanted - self._queries)
            self._queries = wanted
            if is_news:
                self._wake.set()

    def demand(self, query: Query, now_s: float) -> Known:
        """What was answered last, if it is not too old by now."""
        with self._lock:
            answer = self._answers.get(query, Unknown(Gap.NOT_ASKED_YET, f"{self._place} is being asked"))
        if isinstance(answer, Unknown):
            return answer
        if now_s - answer.at_s > query.stale_after_s:
            allowed = f"at most {query.stale_after_s:g} s ago"
            return Unknown(Gap.STALE, f"the newest sample is of {time_text(answer.at_s)}; allowed: {allowed}")
        return Demand(answer.gpus, min(answer.at_s, now_s))

    def _run(self) -> None:
        with httpx.Client(timeout=self._timeout_s) as client:
            while True:
                with self._lock:
                    queries = self._queries
                    self._wake.clear()
                if self._stop.is_set():
                    return
                answers = {query: self._answer(client, query) for query in sorted(queries, key=lambda each: each.text)}
                with self._lock:
                    is_news = answers != self._answers
                    self._answers = answers
                texts = {query.text for query in queries}
                self._last = {text: last for text, last in self._last.items() if text in texts}
                if is_news:
                    self._on_change()
                hurry_s = (query.stale_after_s / PERIODS_A_STALENESS for query in queries)
                self._wake.wait(min((self._period_s, *hurry_s)))

    def _answer(self, client: httpx.Client, query: Query) -> Known:
        answer = self._measure(client, query)
        if isinstance(answer, Demand):
            self._last[query.text] = answer
        elif answer.gap is Gap.NO_SERIES and query.text in self._last:
            last = time_text(self._last[query.text].at_s)
            return Unknown(Gap.STALE, f"the query gives no series since that of {last}")
        return answer

    def _measure(self, client: httpx.Client, query: Query) -> Known:
        """The value with the time of its sample. An instant query's answer bears the time at which it was evaluated,
        so a second one asks for the sample's, as of the same moment. PromQL knows that of a plain selector alone. What
        is computed from series gets the time of the query; no sample that is older than `stale_after_s` takes part
        there, where Prometheus knows `lookback_delta` (Debian's 2.42 does not, and takes what is 5 minutes old)."""
        figure = self._query(client, query.text, query.stale_after_s)
        if isinstance(figure, Unknown):
            return figure
        if figure.is_scalar:
            return demand_of(figure, figure.at_s)
        # The line breaks end a comment at the end of the query.
        sampled = self._query(client, f"timestamp(\n{query.text}\n)", query.stale_after_s, at_s=figure.at_s)
        return sampled if isinstance(sampled, Unknown) else demand_of(figure, sampled.value)

    def _query(
        self, client: httpx.Client, text: str, lookback_s: float, *, at_s: float | None = None
    ) -> Figure | Unknown:
        form = {"query": text, "lookback_delta": f"{lookback_s:.3f}", "timeout": f"{self._timeout_s:.3f}"}
        if at_s is not None:
            form["time"] = f"{at_s:.3f}"
        try:
            with client.stream("POST", self._url, data=form) as answer:
                body = bytearray()
                for chunk in answer.iter_bytes():
                    body += chunk
                    if len(body) > ANSWER_BYTES_MAX:
                        return Unknown(Gap.MANY_SERIES, f"the answer has more than {ANSWER_BYTES_MAX} bytes")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            said = str(error) or type(error).__name__
            return Unknown(Gap.UNREACHABLE, f"{self._place}: {said}")
        figure = figure_of(answer.status_code, bytes(body))
        if isinstance(figure, Unknown) and figure.gap is Gap.UNREACHABLE:
            return Unknown(figure.gap, f"{self._place}: {figure.message}")
        return figure


def _without_user(url: str) -> str:
    """For people to read: conditions are seen by many."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
