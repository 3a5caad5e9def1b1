"""Progress reports over HTTP, against a server in this process."""

import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from ebbtide import progress
from ebbtide.environment import RankEnvironment
from ebbtide.notice import NoticeAction
from ebbtide.progress import ProgressReporter
from ebbtide.rank_status import RankPhase, RankStatus
from tests.http_server import LoopbackServer, QuietHandler

STATUS = RankStatus(
    RankPhase.RUNNING, step=7, loss=2.5, samples_per_s=30.0, checkpoint_step=5, peak_bytes=9, frozen_layers=4
)


@dataclass
class FakeControlPlane:
    """Answers every report with `reply`, the first `rejections` of them with 429, and records the requests."""

    reply: dict[str, Any]
    url: str = ""
    requests: list[tuple[str, str, Any]] = field(default_factory=list)
    rejections: int = 0


@contextmanager
def _serve(reply: dict[str, Any]) -> Iterator[FakeControlPlane]:
    control_plane = FakeControlPlane(reply)

    class Handler(QuietHandler, BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            control_plane.requests.append((self.path, self.headers["Authorization"], body))
            content = json.dumps(control_plane.reply).encode()
            if len(control_plane.requests) <= control_plane.rejections:
                self.send_response(429)
                self.send_header("Retry-After", "1")
            else:
                self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    with LoopbackServer(Handler) as server:
        control_plane.url = server.url
        yield control_plane


def _eventually(condition: Callable[[], bool]) -> bool:
    for _ in range(500):
        if condition():
            return True
        time.sleep(0.02)
    return False


@pytest.fixture
def short_period(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_MIN_PERIOD_S", 0.05)


def test_report_carries_the_token_and_the_reply_carries_a_notice() -> None:
    with _serve({"notice": {"action": "replan", "step": 9, "seconds_left": 20}}) as control_plane:
        reporter = ProgressReporter(
            RankEnvironment(job_id="team/a", generation=4, url=control_plane.url, token="t0ken")
        )
        reporter.submit(STATUS)
        assert _eventually(lambda: reporter.poll() is not None)
        reporter.close()
    notice = reporter.poll()
    assert notice is not None
    assert (notice.action, notice.step, notice.seconds_left) == (NoticeAction.REPLAN, 9, 20.0)
    path, authorization, body = control_plane.requests[0]
    assert (path, authorization) == ("/v1/jobs/team%2Fa/progress", "Bearer t0ken")
    assert body == {
        "generation": 4,
        "step": 7,
        "loss": 2.5,
        "samples_per_s": 30.0,
        "checkpoint_step": 5,
        "peak_bytes": 9,
        "frozen_layers": 4,
    }


def test_quick_steps_share_a_request() -> None:
    with _serve({"notice": None}) as control_plane:
        reporter = ProgressReporter(RankEnvironment(url=control_plane.url))
        for _ in range(50):
            reporter.submit(STATUS)
            time.sleep(0.005)
        assert _eventually(lambda: len(control_plane.requests) > 0)
        reporter.close()
    assert len(control_plane.requests) < 5


@pytest.mark.usefixtures("short_period")
def test_repeated_notice_keeps_its_request_id_and_receive_time() -> None:
    with _serve({"notice": {"action": "checkpoint", "step": None, "seconds_left": 20}}) as control_plane:
        reporter = ProgressReporter(RankEnvironment(url=control_plane.url))
        reporter.submit(STATUS)
        assert _eventually(lambda: reporter.poll() is not None)
        first = reporter.poll()
        control_plane.reply = {"notice": {"action": "checkpoint", "step": None, "seconds_left": 19}}
        reporter.submit(STATUS)
        assert _eventually(lambda: len(control_plane.requests) == 2 and reporter.poll() != first)
        second = reporter.poll()
        reporter.close()
    assert first is not None
    assert second is not None
    assert second.request_id == first.request_id
    assert second.received_at_s == first.received_at_s is not None


@pytest.mark.usefixtures("short_period")
def test_unreachable_control_plane_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with _serve({}) as control_plane:
        url = control_plane.url
    with caplog.at_level(logging.WARNING):
        reporter = ProgressReporter(RankEnvironment(url=url))
        reporter.submit(STATUS)
        assert _eventually(lambda: len(caplog.records) > 0)
        reporter.submit(STATUS)
        time.sleep(0.2)
        reporter.close()
    assert reporter.poll() is None
    [message] = [record.getMessage() for record in caplog.records]
    assert url in message


@pytest.mark.usefixtures("short_period")
def test_reporter_waits_as_long_as_retry_after_says() -> None:
    with _serve({"notice": {"action": "leave", "step": 9, "seconds_left": 20}}) as control_plane:
        control_plane.rejections = 1
        reporter = ProgressReporter(RankEnvironment(job_id="a", url=control_plane.url, token="t0ken"))
        reporter.submit(STATUS)
        assert _eventually(lambda: len(control_plane.requests) == 1)
        rejected_at_s = time.monotonic()
        reporter.submit(STATUS)
        assert _eventually(lambda: reporter.poll() is not None)
        assert time.monotonic() - rejected_at_s > 0.9, "without Retry-After the period is 0.05 s"
        reporter.close()
