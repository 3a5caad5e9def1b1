"""How an agent's client reacts to failures: 429 Too Many Requests, and the first report after an outage."""

from __future__ import annotations

import json
import os
import select
import time
from http.server import BaseHTTPRequestHandler

import pytest

from ebbtide.progress import TooManyRequestsError
from scheduler.agent.control_plane_client import ControlPlaneClient
from tests.http_server import LoopbackServer, QuietHandler


@pytest.mark.parametrize(("header", "expected_s"), [("3", 3.0), ("9999", 10.0), ("soon", 1.0), (None, 1.0)])
def test_retry_after_is_bounded_and_has_a_default(header: str | None, expected_s: float) -> None:
    assert TooManyRequestsError(header).retry_after_s == expected_s


def test_client_waits_for_retry_after_even_with_an_urgent_report() -> None:
    requested_at_s: list[float] = []

    class Handler(QuietHandler, BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            requested_at_s.append(time.monotonic())
            self.rfile.read(int(self.headers["Content-Length"]))
            content = json.dumps({"poll_after_s": 10}).encode()
            self.send_response(200 if len(requested_at_s) > 1 else 429)
            self.send_header("Retry-After", "1")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    wake_read_fd, wake_write_fd = os.pipe()
    with LoopbackServer(Handler) as server:
        client = ControlPlaneClient(
            server.url, "/v1/jobs/a/agents/n", read_token=lambda: "t0ken", wake_fd=wake_write_fd
        )
        client.submit({"generation": 1}, urgent=True)
        while not requested_at_s:
            time.sleep(0.01)
        client.submit({"generation": 2}, urgent=True)
        assert select.select([wake_read_fd], [], [], 60.0)[0]
        reply = client.take_reply()
        client.close(within_s=0.0)
    os.close(wake_read_fd)
    os.close(wake_write_fd)
    assert reply is not None
    assert reply.report == {"generation": 2}
    assert requested_at_s[1] - requested_at_s[0] >= 1.0, "without Retry-After the backoff is at most 0.5 s"


def test_first_report_and_the_first_after_a_failure_ask_for_a_reply_at_once() -> None:
    """A reply extends the lease of the ranks: one that waits would lose it, if the next outage comes first."""
    waits_s: list[float] = []

    class Handler(QuietHandler, BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            waits_s.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["wait_s"])
            content = json.dumps({"poll_after_s": 0}).encode()
            self.send_response(503 if len(waits_s) == 3 else 200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    wake_read_fd, wake_write_fd = os.pipe()
    with LoopbackServer(Handler) as server:
        client = ControlPlaneClient(
            server.url, "/report", read_token=lambda: "t0ken", wake_fd=wake_write_fd, reply_wait_s=20.0
        )
        client.submit({"runs": [], "wait_s": 20.0}, urgent=True)
        deadline_s = time.monotonic() + 60.0
        while len(waits_s) < 5 and time.monotonic() < deadline_s:
            time.sleep(0.01)
        client.close(within_s=0.0)
    os.close(wake_read_fd)
    os.close(wake_write_fd)
    assert waits_s[:5] == [0.0, 20.0, 20.0, 0.0, 20.0]
