import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from scheduler.worker.environment import RankEnvironment
from scheduler.worker.notice import NoticeAction
from scheduler.worker.progress import Progress, ProgressReporter
from tests.http_server import LoopbackServer, QuietHandler

PROGRESS = Progress(
    generation=4, step=7, loss=2.5, samples_per_s=30.0, checkpoint_step=5, peak_bytes=9, frozen_layers=4
)


@dataclass
class Controller:
    """Answers every progress report with `reply`, and keeps what it got."""

    reply: dict[str, Any]
    url: str = ""
    got: list[tuple[str, str, Any]] = field(default_factory=list)
    refusals: int = 0


@contextmanager
def _controller(reply: dict[str, Any]) -> Iterator[Controller]:
    controller = Controller(reply)

    class Handler(QuietHandler, BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            controller.got.append((self.path, self.headers["Authorization"], body))
            answer = json.dumps(controller.reply).encode()
            if len(controller.got) <= controller.refusals:
                self.send_response(429)
                self.send_header("Retry-After", "2")
            else:
                self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

    with LoopbackServer(Handler) as server:
        controller.url = server.url
        yield controller


def _eventually(condition: Callable[[], bool]) -> bool:
    for _ in range(500):
        if condition():
            return True
        time.sleep(0.02)
    return False


def test_progress_goes_out_with_the_token_and_the_reply_brings_a_notice() -> None:
    with _controller({"notice": {"action": "replan", "step": 9, "seconds_left": 20}}) as controller:
        poster = ProgressReporter(RankEnvironment(job_id="team/a", url=controller.url, token="t0ken"))
        poster.submit(PROGRESS)
        assert _eventually(lambda: poster.poll() is not None)
        poster.close()
    heard = poster.poll()
    assert heard is not None
    assert (heard.action, heard.step, heard.seconds_left) == (NoticeAction.REPLAN, 9, 20.0)
    path, authorization, body = controller.got[0]
    assert (path, authorization) == ("/v1/jobs/team%2Fa/progress", "Bearer t0ken")
    figures = {"step": 7, "loss": 2.5, "samples_per_s": 30.0, "checkpoint_step": 5}
    assert body == {"generation": 4, **figures, "peak_bytes": 9, "frozen_layers": 4}


def test_many_steps_in_a_second_are_one_request() -> None:
    with _controller({"notice": None}) as controller:
        poster = ProgressReporter(RankEnvironment(url=controller.url))
        for _ in range(50):
            poster.submit(PROGRESS)
            time.sleep(0.005)
        assert _eventually(lambda: len(controller.got) > 0)
        poster.close()
    assert len(controller.got) < 5


def test_a_notice_that_is_repeated_stays_the_same_request() -> None:
    with _controller({"notice": {"action": "checkpoint", "step": None, "seconds_left": 20}}) as controller:
        poster = ProgressReporter(RankEnvironment(url=controller.url))
        poster.submit(PROGRESS)
        assert _eventually(lambda: poster.poll() is not None)
        first = poster.poll()
        controller.reply = {"notice": {"action": "checkpoint", "step": None, "seconds_left": 19}}
        poster.submit(PROGRESS)
        assert _eventually(lambda: len(controller.got) == 2 and poster.poll() != first)
        second = poster.poll()
        poster.close()
    assert first is not None
    assert second is not None
    assert second.request_id == first.request_id
    assert second.received_at_s == first.received_at_s is not None


def test_an_absent_control_plane_is_logged_once_and_harms_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with _controller({}) as controller:
        url = controller.url
    with caplog.at_level(logging.WARNING):
        poster = ProgressReporter(RankEnvironment(url=url))
        poster.submit(PROGRESS)
        assert _eventually(lambda: len(caplog.records) > 0)
        poster.submit(PROGRESS)
        time.sleep(1.3)
        poster.close()
    assert poster.poll() is None
    assert [record.getMessage().startswith("progress is not heard at") for record in caplog.records] == [True]


def test_who_is_told_to_wait_waits_and_is_heard_then() -> None:
    with _controller({"notice": {"action": "leave", "step": 9, "seconds_left": 20}}) as controller:
        controller.refusals = 1
        poster = ProgressReporter(RankEnvironment(job_id="a", url=controller.url, token="t0ken"))
        poster.submit(PROGRESS)
        assert _eventually(lambda: len(controller.got) == 1)
        begun_s = time.monotonic()
        poster.submit(PROGRESS)
        assert _eventually(lambda: poster.poll() is not None)
        assert time.monotonic() - begun_s > 1.5, "without the answer's word it would have been 1 s"
        poster.close()
