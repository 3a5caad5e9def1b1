"""The agent as a whole, with runs that have no processes and a control plane that orders nothing."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from scheduler.agent.agent_state import AgentIdentity, AgentState
from scheduler.agent.machine_agent import MachineAgent
from scheduler.agent.run_retention import RunRetention
from scheduler.agent.supervised_run import RunState, SupervisedPhase, SupervisedRun
from scheduler.domain.run_document import RunDocument
from tests.agent.runs import python_job
from tests.http_server import LoopbackServer, QuietHandler

reports: list[Any] = []


class ReportHandler(QuietHandler, BaseHTTPRequestHandler):
    """Accepts reports and orders nothing."""

    def do_POST(self) -> None:
        reports.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        reply = {"epoch": 1, "disconnect_s": 90.0, "waited_s": 0.0, "poll_after_s": 0.01, "runs": []}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(reply).encode())


class ListedRun:
    """A begun run whose polls return what a list says; the last entry stays."""

    has_begun = True
    gpu_ids: tuple[str, ...] = ()

    def __init__(self, job_id: str, polls: list[RunState | Exception]) -> None:
        self.document: RunDocument = python_job("pass", job_id=job_id, hang_timeout_s=None)
        self.folder = SimpleNamespace(path=Path("/nowhere"))
        self._polls = polls
        self.count = 0

    def poll(self) -> RunState:
        self.count += 1
        outcome = self._polls[min(self.count, len(self._polls)) - 1]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


@pytest.fixture
def _signals() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    signal.set_wakeup_fd(-1)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_signals")
def test_error_with_one_run_leaves_the_agent_and_other_runs_alone(tmp_path: Path) -> None:
    live = RunState(SupervisedPhase.RUNNING)
    faulty = ListedRun("faulty", [live, TypeError("a record of a form that nobody expected")])
    healthy = ListedRun("healthy", [live])
    agents = list[MachineAgent]()

    def follow(*_: object, **__: object) -> None:
        if healthy.count >= 4:
            agents[0].stop()

    output = SimpleNamespace(follow=follow, has_sent=lambda _: True, close=lambda **_: None)
    retention = SimpleNamespace(start=lambda _: None, close=lambda: None)
    with LoopbackServer(ReportHandler) as server:
        agent = MachineAgent(
            AgentState(tmp_path / "state"),
            AgentIdentity("m1", ("m1",), server.url, "ebm_x"),
            prepare=lambda document, _: cast("SupervisedRun", document),
            recovered=cast("list[SupervisedRun]", [faulty, healthy]),
            retention=cast("RunRetention", retention),
            output=cast("Any", output),
        )
        agents.append(agent)
        agent.serve()
    assert faulty.count >= 4
    assert [run["job_id"] for run in reports[-1]["runs"]] == ["faulty", "healthy"]
