"""The agent as a whole, with runs that have no processes and a control plane that orders nothing."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest

from scheduler.agent.agent_state import AgentIdentity, AgentState
from scheduler.agent.machine_agent import MachineAgent
from scheduler.agent.preparation import Prepare
from scheduler.agent.run_folder import AgentFolders
from scheduler.agent.run_retention import RunRetention
from scheduler.agent.supervised_run import RunState, SupervisedPhase, SupervisedRun
from scheduler.domain.run_document import RunDocument
from tests.agent.runs import python_job
from tests.http_server import LoopbackServer, QuietHandler

reports: list[Any] = []


class ReportHandler(QuietHandler, BaseHTTPRequestHandler):
    """Accepts reports, and gives the same orders each time."""

    orders: ClassVar[list[Any]] = []

    def do_POST(self) -> None:
        reports.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        reply = {"epoch": 1, "disconnect_s": 90.0, "waited_s": 0.0, "poll_after_s": 0.01, "runs": self.orders}
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


def prepare_nothing(document: RunDocument, _: threading.Event) -> SupervisedRun:
    return cast("SupervisedRun", document)


def create_agent(root: Path, url: str, recovered: list[ListedRun], output: object, prepare: Prepare) -> MachineAgent:
    retention = SimpleNamespace(start=lambda _: None, close=lambda: None)
    return MachineAgent(
        AgentState(root / "state"),
        AgentIdentity("m1", ("m1",), url, "ebm_x"),
        prepare=prepare,
        recovered=cast("list[SupervisedRun]", recovered),
        retention=cast("RunRetention", retention),
        output=cast("Any", output),
    )


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
    with LoopbackServer(ReportHandler) as server:
        agents.append(create_agent(tmp_path, server.url, [faulty, healthy], output, prepare_nothing))
        agents[0].serve()
    assert faulty.count >= 4
    assert [run["job_id"] for run in reports[-1]["runs"]] == ["faulty", "healthy"]


@pytest.mark.usefixtures("_signals")
def test_generation_that_has_ended_here_is_not_prepared_again(tmp_path: Path) -> None:
    """The order follows from a state of the job that was read before the end of the generation was recorded."""
    document, prepared = python_job("pass"), list[int]()
    folder = AgentFolders(tmp_path / "state").folder(document.job_id, 1, document.node)
    folder.create(document)
    folder.write_record("start.json", {})
    (folder.path / "settled").touch()

    class OrderHandler(ReportHandler):
        orders: ClassVar[list[Any]] = [
            {
                "job_id": document.job_id,
                "node": document.node,
                "generation": generation,
                "begin": None,
                "document": replace(document, generation=generation).to_document(),
                "notice": None,
                "kill": "",
                "is_recorded": False,
            }
            for generation in (1, 2)
        ]

    def prepare(document: RunDocument, _: threading.Event) -> SupervisedRun:
        prepared.append(document.generation)
        agents[0].stop()
        return cast("SupervisedRun", ListedRun(document.job_id, [RunState(SupervisedPhase.PREPARED)]))

    agents = list[MachineAgent]()
    output = SimpleNamespace(follow=lambda *_, **__: None, has_sent=lambda _: True, close=lambda **_: None)
    with LoopbackServer(OrderHandler) as server:
        agents.append(create_agent(tmp_path, server.url, [], output, prepare))
        agents[0].serve()
    assert prepared == [2]
