"""The line of an agent: what it does where the control plane wants to be left alone."""

from __future__ import annotations

import json
import os
import select
import time
from http.server import BaseHTTPRequestHandler

import pytest

from scheduler.worker.control_plane_client import ControlPlaneClient
from scheduler.worker.progress import TooManyRequestsError
from tests.http_server import LoopbackServer, QuietHandler


@pytest.mark.parametrize(("told", "after_s"), [("3", 3.0), ("9999", 10.0), ("soon", 1.0), (None, 1.0)])
def test_the_wait_is_what_is_told_within_reason(told: str | None, after_s: float) -> None:
    assert TooManyRequestsError(told).retry_after_s == after_s


def test_an_agent_that_is_told_to_wait_waits_even_with_urgent_news_and_is_heard_then() -> None:
    asked_at_s: list[float] = []

    class Handler(QuietHandler, BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked_at_s.append(time.monotonic())
            self.rfile.read(int(self.headers["Content-Length"]))
            answer = json.dumps({"poll_after_s": 10}).encode()
            self.send_response(200 if len(asked_at_s) > 1 else 429)
            self.send_header("Retry-After", "2")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

    heard_fd, wake_fd = os.pipe()
    with LoopbackServer(Handler) as server:
        line = ControlPlaneClient(server.url, "/v1/jobs/a/agents/n", read_token=lambda: "t0ken", wake_fd=wake_fd)
        line.submit({"generation": 1}, urgent=True)
        while not asked_at_s:
            time.sleep(0.01)
        line.submit({"generation": 2}, urgent=True)
        assert select.select([heard_fd], [], [], 60.0)[0]
        reply = line.take_reply()
        line.close(within_s=0.0)
    for each in (heard_fd, wake_fd):
        os.close(each)
    assert reply is not None
    assert reply.report == {"generation": 2}
    assert asked_at_s[1] - asked_at_s[0] >= 2.0
