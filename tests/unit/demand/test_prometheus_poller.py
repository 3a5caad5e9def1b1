"""PrometheusPoller against a misbehaving server. tests/contract uses a real one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest

from scheduler.demand.presets import PrometheusQuery, PromqlTerm
from scheduler.demand.prometheus_api import RESPONSE_BYTES_MAX
from scheduler.demand.prometheus_poller import HISTORY_RETRY_S, PrometheusPoller
from scheduler.domain.demand_source import KnownDemand, PoolDemand, UnknownDemand, UnknownDemandReason
from tests.kubernetes.waiting import eventually
from tests.unit.kubernetes.scripted_server import Answer, ScriptedServer

ASKED = PrometheusQuery((PromqlTerm("gpus"),), 300.0)


def is_answered(known: PoolDemand) -> bool:
    return not (isinstance(known, UnknownDemand) and known.reason is UnknownDemandReason.NOT_ASKED_YET)


@contextmanager
def watching(url: str, on_change: Callable[[], None] = lambda: None) -> Iterator[PrometheusPoller]:
    watch = PrometheusPoller(url, on_change=on_change, interval_s=3600.0, timeout_s=2.0)
    watch.start()
    try:
        yield watch
    finally:
        watch.stop()


def first_answer(url: str) -> PoolDemand:
    with watching(url) as watch:
        watch.set_queries({ASKED: time.time()})
        eventually(lambda: is_answered(watch.get_demand(ASKED, time.time())), what="an answer")
        return watch.get_demand(ASKED, time.time())


def a_vector(value: float) -> Answer:
    series: dict[str, Any] = {"metric": {}, "value": [time.time(), str(value)]}
    return Answer(body={"status": "success", "data": {"resultType": "vector", "result": [series]}})


@pytest.mark.parametrize(
    "answer",
    [Answer(503, "down"), Answer(cut=True), Answer(after_s=3.0), Answer(307, headers={"Location": "/elsewhere"})],
    ids=["503", "cut", "slow", "redirect"],
)
def test_failures_count_as_unreachable(answer: Answer) -> None:
    with ScriptedServer(answer).running() as server:
        found = first_answer(server.url)
    assert isinstance(found, UnknownDemand)
    assert found.reason is UnknownDemandReason.UNREACHABLE
    assert server.url in found.message


def test_endless_response_is_cut_off() -> None:
    with ScriptedServer(Answer(body=" " * (RESPONSE_BYTES_MAX + 1))).running() as server:
        found = first_answer(server.url)
    assert isinstance(found, UnknownDemand)
    assert found.reason is UnknownDemandReason.MANY_SERIES


def test_password_is_not_in_the_message() -> None:
    with ScriptedServer(Answer(503, "down")).running() as server:
        found = first_answer(server.url.replace("http://", "http://reader:secret@"))
    assert isinstance(found, UnknownDemand)
    assert "secret" not in found.message
    assert server.tokens[0] is not None


def test_new_query_runs_at_once_and_notifies() -> None:
    called: list[bool] = []
    sampled_at_s = time.time()
    with (
        ScriptedServer(a_vector(5.0), a_vector(sampled_at_s)).running() as server,
        watching(server.url, lambda: called.append(True)) as watch,
    ):
        assert not is_answered(watch.get_demand(ASKED, sampled_at_s))
        watch.set_queries({ASKED: time.time()})
        eventually(lambda: called, what="a call")
        assert watch.get_demand(ASKED, sampled_at_s + 1.0) == KnownDemand(5.0, sampled_at_s)
        assert server.heard == ["POST /api/v1/query"] * 2
        late = watch.get_demand(ASKED, sampled_at_s + ASKED.stale_after_s + 1.0)
        assert isinstance(late, UnknownDemand)
        assert late.reason is UnknownDemandReason.STALE
        ahead = watch.get_demand(ASKED, sampled_at_s - 1.0)
        assert ahead == KnownDemand(5.0, sampled_at_s - 1.0)


def test_gap_is_filled_after_a_failure_although_the_present_reading_is_known_by_then() -> None:
    now_s = time.time()
    clock_s = count(now_s, 2 * HISTORY_RETRY_S)
    history = [[now_s - 900.0, "3"]]
    matrix = {"status": "success", "data": {"resultType": "matrix", "result": [{"metric": {}, "values": history}]}}
    polled = a_vector(5.0), a_vector(now_s)
    with ScriptedServer(*polled, Answer(503, "down"), *polled, Answer(body=matrix)).running() as server:
        watch = PrometheusPoller(
            server.url,
            on_change=lambda: watch.set_queries({ASKED: now_s}),
            interval_s=3600.0,
            timeout_s=2.0,
            now=lambda: next(clock_s),
        )
        watch.set_queries({ASKED: now_s - 3_600.0})
        watch.start()
        found = eventually(lambda: watch.take_history(ASKED), what="the history")
        watch.stop()
    assert found == ((history[0][0], 3.0),)
    assert len(server.heard) == 6
