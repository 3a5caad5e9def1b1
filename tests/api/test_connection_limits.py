"""Connections of a real API process: half-open requests, deadlines, and what must not be limited."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import httpx
import pytest

from tests.api.stream_process import StreamProcess

HALF_REQUEST = b"GET /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "
PATIENCE_S = 30.0


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StreamProcess]:
    limits = {"header_timeout_s": "5", "idle_timeout_s": "3", "connections_max": "400", "connections_per_address": "20"}
    process = StreamProcess(tmp_path_factory.mktemp("limits"), **limits)
    yield process
    process.close()


@contextmanager
def opened(site: StreamProcess, source: str = "127.0.0.1", sent: bytes = b"") -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", site.port), PATIENCE_S, source_address=(source, 0)) as connection:
        connection.sendall(sent)
        yield connection


def read_to_end(connection: socket.socket) -> bytes:
    """Return all that the server sends until it closes the connection."""
    received = b""
    try:
        while part := connection.recv(65_536):
            received += part
    except ConnectionResetError:
        pass
    return received


def measure_requests(site: StreamProcess, count: int = 10) -> float:
    """Return the slowest time of requests on new connections, in seconds."""
    slowest_s = 0.0
    for _ in range(count):
        started_s = time.monotonic()
        assert httpx.get(f"http://127.0.0.1:{site.port}/v1/jobs", trust_env=False).status_code == 200
        slowest_s = max(slowest_s, time.monotonic() - started_s)
    return slowest_s


def count_closed(site: StreamProcess, reason: str) -> float:
    text = httpx.get(f"http://127.0.0.1:{site.port}/metrics", trust_env=False).text
    found = re.search(rf'ebbtide_connections_closed_total{{reason="{reason}"}} (\S+)', text)
    assert found is not None
    return float(found[1])


@pytest.mark.parametrize("addresses", [1, 250])
def test_half_open_requests_lock_nobody_out(site: StreamProcess, addresses: int) -> None:
    reason = "address-limit" if addresses == 1 else "total-limit"
    before = count_closed(site, reason)
    with ExitStack() as stack:
        for number in range(1000):
            source = f"127.0.{1 + number % addresses}.1"
            stack.enter_context(opened(site, source, HALF_REQUEST))
        assert measure_requests(site) < 2.0
        until_s = time.monotonic() + PATIENCE_S
        while count_closed(site, reason) == before:  # the limit per address spares connections of the last second
            assert time.monotonic() < until_s
            for _ in range(25):
                stack.enter_context(opened(site, "127.0.1.1", HALF_REQUEST))
            time.sleep(1.1)
    assert count_closed(site, "refused") == 0.0


def test_a_header_that_never_ends_is_closed_at_its_deadline(site: StreamProcess) -> None:
    with opened(site, sent=HALF_REQUEST) as connection:
        started_s = time.monotonic()
        connection.settimeout(0.2)
        received = b""
        while not received and time.monotonic() < started_s + PATIENCE_S:
            try:
                connection.sendall(b"x")  # one byte at a time restarts no deadline
                received = connection.recv(100)
            except TimeoutError:
                continue
        assert received.startswith(b"HTTP/1.1 408 ")
        assert 4.0 < time.monotonic() - started_s < 20.0


def test_a_connection_without_a_request_is_closed(site: StreamProcess) -> None:
    with opened(site) as connection:
        assert read_to_end(connection) == b""


def test_a_large_header_is_refused(site: StreamProcess) -> None:
    with opened(site, sent=HALF_REQUEST) as connection:
        connection.sendall(b"x" * 400_000)
        read_to_end(connection)
    assert count_closed(site, "header-size") >= 1.0


def test_an_unread_body_does_not_hold_a_connection(site: StreamProcess) -> None:
    """The response comes before the body, and bytes that trickle in afterwards restart no deadline."""
    head = b"POST /v1/nowhere HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100000\r\n\r\n"
    with opened(site, sent=head) as connection:
        assert connection.recv(65_536).startswith(b"HTTP/1.1 404 ")
        started_s = time.monotonic()
        with suppress(BrokenPipeError, ConnectionResetError):
            while time.monotonic() < started_s + PATIENCE_S:
                connection.sendall(b"x")
                time.sleep(0.2)
        assert time.monotonic() - started_s < 20.0


def test_slow_uploads_and_idle_streams_go_on(site: StreamProcess) -> None:
    document = b'{"command": ["true"], "gpus": 1}'
    head = f"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(document)}\r\n\r\n"
    with site.follow("/v1/events") as stream, opened(site, sent=head.encode()) as connection:
        for at in range(0, len(document), 4):
            time.sleep(0.8)  # 6 s in all: longer than both timeouts
            connection.sendall(document[at : at + 4])
        assert re.match(rb"HTTP/1\.1 (200|4\d\d) ", connection.recv(65_536))
        site.commit(None, "job-1")
        assert next(stream.messages())["data"]["subject"] == "job-1"
