"""The client of an engine's sleep mode, against an engine over a socket."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from scheduler.executors.engine_sleep import Engine, EngineClient, ReplicaError
from tests.sleeping_engine import SleepingEngine, serving_engine


@pytest.fixture
def engine() -> Iterator[SleepingEngine]:
    with serving_engine() as found:
        yield found


@pytest.fixture
def client() -> Iterator[EngineClient]:
    made = EngineClient(threading.Event())
    yield made
    made.close()


def at(engine: SleepingEngine, *, level: int = 1, timeout_s: float = 1.0) -> Engine:
    return Engine(f"http://127.0.0.1:{engine.port}", level, timeout_s)


def test_engine_sleeps_and_wakes_and_repeated_orders_change_nothing(
    client: EngineClient, engine: SleepingEngine
) -> None:
    for _ in range(2):
        client.bring(at(engine), asleep=True)
    assert (engine.is_sleeping, engine.orders) == (True, ["POST /sleep?level=1"])
    for _ in range(2):
        client.bring(at(engine), asleep=False)
    assert (engine.is_sleeping, engine.orders[1:]) == (False, ["POST /wake_up"])


def test_engine_that_dropped_its_weights_loads_them_before_it_serves(
    client: EngineClient, engine: SleepingEngine
) -> None:
    client.bring(at(engine, level=2), asleep=True)
    client.bring(at(engine, level=2), asleep=False)
    assert not engine.is_sleeping
    assert engine.orders[1:] == ["POST /wake_up?tags=weights", "POST /collective_rpc", "POST /wake_up?tags=kv_cache"]


def test_slow_engine_is_waited_for(client: EngineClient, engine: SleepingEngine) -> None:
    engine.order_s = 0.3
    client.bring(at(engine, timeout_s=10.0), asleep=True)
    assert engine.is_sleeping


def test_engine_that_is_too_slow_or_lies_is_given_up_in_time(client: EngineClient, engine: SleepingEngine) -> None:
    for change in ({"order_s": 30.0}, {"lies": True}, {"drips": True}, {"body": "[]"}, {"status": 503}):
        for name, value in {"order_s": 0.0, "lies": False, "drips": False, "body": "", "status": 0, **change}.items():
            setattr(engine, name, value)
        began_s = time.monotonic()
        with pytest.raises(ReplicaError) as raised:
            client.bring(at(engine, timeout_s=0.5), asleep=True)
        assert not raised.value.is_final
        assert time.monotonic() - began_s < 3.0, change


@pytest.mark.parametrize("status", [400, 401, 404])
def test_refusal_is_final(client: EngineClient, engine: SleepingEngine, status: int) -> None:
    engine.status = status
    with pytest.raises(ReplicaError) as raised:
        client.bring(at(engine, timeout_s=60.0), asleep=True)
    assert raised.value.is_final
    assert len(engine.requests) == 1


def test_redirect_is_not_followed(client: EngineClient, engine: SleepingEngine) -> None:
    with serving_engine() as other:
        engine.redirect = f"http://127.0.0.1:{other.port}/is_sleeping"
        with pytest.raises(ReplicaError) as raised:
            client.bring(at(engine, timeout_s=60.0), asleep=True)
    assert raised.value.is_final
    assert other.requests == []


def test_large_response_is_refused(client: EngineClient, engine: SleepingEngine) -> None:
    engine.body = "x" * 1_000_000
    with pytest.raises(ReplicaError) as raised:
        client.bring(at(engine, timeout_s=60.0), asleep=True)
    assert raised.value.is_final


def test_engine_that_starts_again_meanwhile_is_asked_again(client: EngineClient, engine: SleepingEngine) -> None:
    engine.status = 503
    threading.Timer(0.3, setattr, (engine, "status", 0)).start()
    client.bring(at(engine, timeout_s=10.0), asleep=True)
    assert engine.is_sleeping


def test_closed_port_is_an_error(client: EngineClient) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        with pytest.raises(ReplicaError) as raised:
            client.bring(Engine(f"http://127.0.0.1:{reserved.getsockname()[1]}", 1, 0.3), asleep=False)
    assert not raised.value.is_final


def test_order_that_no_longer_counts_is_given_up(client: EngineClient, engine: SleepingEngine) -> None:
    engine.lies = True
    answers = iter([True, True, False])
    assert client.bring(at(engine, timeout_s=60.0), asleep=True, is_wanted=lambda: next(answers)) is False
    assert client.bring(at(engine), asleep=True, is_wanted=lambda: False) is False
    assert len(engine.orders) == 1


def test_stop_ends_the_wait(engine: SleepingEngine) -> None:
    stop = threading.Event()
    stop.set()
    engine.lies, client = True, EngineClient(stop)
    began_s = time.monotonic()
    with pytest.raises(ReplicaError):
        client.bring(at(engine, timeout_s=60.0), asleep=True)
    assert time.monotonic() - began_s < 5.0
    client.close()
