"""An agent pod as processes, against a fake API."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from textwrap import dedent
from typing import Any

import psutil

from scheduler.domain.run_document import RankSeat, RunDocument
from scheduler.domain.scaling_curve import build_data_parallel_plan
from tests.http_server import LoopbackServer, QuietHandler
from tests.processes import find_run_processes, kill_tree

PATIENCE_S = 60.0
JOB, NODE = "a/b", "n0"
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
OBEY = """
    import json, os, pathlib, time
    run_dir, rank = pathlib.Path(os.environ["EBBTIDE_RUN_DIR"]), os.environ["RANK"]
    def say(phase, step):
        part = run_dir / f"part-{rank}"
        part.write_text(json.dumps({"phase": phase, "step": step}))
        part.rename(run_dir / f"status-{rank}.json")
    say("running", 1)
    while not (run_dir / "notice.json").exists():
        time.sleep(0.01)
    say("left", 2)
"""
STUBBORN = OBEY.replace('(run_dir / "notice.json").exists()', "False")


class Desk:
    """A control plane for one pod: an HTTP server that keeps the reports and orders what it was told.

    `is_reachable`: False breaks each connection. `malformed`: returned instead of a reply.
    """

    def __init__(self) -> None:
        self.document: RunDocument | None = None
        self.notice: dict[str, Any] | None = None
        self.kill = ""
        self.epoch = 1
        self.disconnect_s = 600.0
        self.waited_s = 0.0
        self.ending: dict[str, bool] = {"done": False, "failed": False}
        self.is_reachable = True
        self.malformed: dict[str, Any] | None = None
        self.archive = b""
        self.reports: list[dict[str, Any]] = []
        self.requests: list[tuple[str, str | None]] = []
        self.connections = 0
        desk = self

        class Handler(QuietHandler, BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                desk.connections += 1
                super().setup()

            def do_GET(self) -> None:
                desk.requests.append((self.path, self.headers["Authorization"]))
                self.send_response(200)
                self.send_header("Content-Length", str(len(desk.archive)))
                self.end_headers()
                self.wfile.write(desk.archive)

            def do_POST(self) -> None:
                report = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                desk.requests.append((self.path, self.headers["Authorization"]))
                if not desk.is_reachable:
                    self.close_connection = True
                    return
                desk.reports.append(report)
                body = json.dumps(desk.malformed or desk.reply(report)).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        server = LoopbackServer(Handler)
        self.url, self.close = server.url, server.close

    @property
    def report(self) -> dict[str, Any]:
        return self.reports[-1] if self.reports else {}

    @property
    def run(self) -> dict[str, Any]:
        """The only run of the newest report."""
        runs = self.report.get("runs", [])
        return runs[0] if runs else {"generation": 0, "ranks": []}

    def reply(self, report: dict[str, Any]) -> dict[str, Any]:
        """Return what a control plane would order that begins a run once the older one has ended."""
        run: dict[str, Any] = next(iter(report["runs"]), {"generation": 0, "ranks": [], "prepared": 0})
        wanted = 0 if self.document is None else self.document.generation
        is_alive = any(rank["exit_code"] is None for rank in run["ranks"])
        prepared = run.get("prepared", 0)
        order: dict[str, Any] = {
            "job_id": JOB,
            "node": NODE,
            "generation": wanted,
            "document": None,
            "begin": None,
            "notice": None,
            "kill": "",
            "is_recorded": bool(run["generation"]) and not is_alive,
        }
        if self.document is not None and max(run["generation"], prepared) < wanted:
            order["document"] = self.document.to_document()
        if wanted and prepared == wanted and not is_alive:
            order["begin"] = {"host": report["address"], "port": run["master_port"]}
        if is_alive:
            order |= {"notice": self.notice, "kill": self.kill}
        head = {"epoch": self.epoch, "disconnect_s": self.disconnect_s, "poll_after_s": 0.1}
        head["waited_s"] = self.waited_s
        return {**head, "runs": [order] if report["runs"] or wanted else [], **self.ending}


class Pod:
    """The processes of one pod. `folder / "run"` is the volume of its state.

    Args:
        command: starts the agent; more arguments follow.
        variables: environment of the image. None: that of this process.
        host: name of this machine in the pod.
    """

    def __init__(
        self, folder: Path, desk: Desk, *, command: Sequence[str], variables: Mapping[str, str] | None, host: str
    ) -> None:
        self.folder, self.desk = folder, desk
        self._url = desk.url.replace("127.0.0.1", host)
        self._command = tuple(command)
        self._variables = {**os.environ, "PATH": PATH} if variables is None else variables
        (folder / "token").write_text("eba_secret\n")
        self.start()

    def start(self, *arguments: str, **more: str) -> None:
        env = {
            **self._variables,
            "EBBTIDE_JOB_ID": JOB,
            "EBBTIDE_NODE": NODE,
            "EBBTIDE_POD": "p1",
            "EBBTIDE_URL": f"{self._url}/base/",
            "EBBTIDE_TOKEN_FILE": str(self.folder / "token"),
            "EBBTIDE_RUN_ROOT": str(self.folder / "run"),
            "EBBTIDE_GRACE_S": "5",
            **more,
        }
        with self.log_path.open("ab") as log:
            command = [*self._command, "--preload", "json", *arguments]
            self.process = subprocess.Popen(command, env=env, cwd=self.folder, stdout=log, stderr=log)

    @property
    def log_path(self) -> Path:
        return self.folder / "pod.log"

    @property
    def agent(self) -> psutil.Process:
        """The process of the agent: the child of PID 1 that is no supervisor."""
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):
                if "scheduler.agent.pod_daemon" in child.cmdline():
                    return child
        raise LookupError("no agent runs")

    def run_dir(self, generation: int = 1) -> Path:
        return self.folder / f"run/jobs/a%2Fb/gen-{generation}@{NODE}"

    def order(self, script: str, *, generation: int = 1, ranks: int = 2, **more: Any) -> None:
        """Order a run whose ranks run `script`."""
        path = self.folder / "rank.py"
        path.write_text(dedent(script))
        self.desk.notice, self.desk.kill = None, ""
        self.desk.document = a_document(generation, ranks, **{"command": ("python", str(path)), **more})

    def wait(self, reached: Callable[[], bool]) -> None:
        limit_s = time.monotonic() + PATIENCE_S
        while not reached():
            assert time.monotonic() < limit_s, f"{self.desk.report}\n{self.log()}"
            time.sleep(0.01)

    def wait_until_running(self, ranks: int = 2, generation: int = 1) -> None:
        self.wait(lambda: self.desk.run["generation"] == generation and self.phases() == ["running"] * ranks)

    def codes(self, generation: int = 1) -> list[int | None]:
        run = next((run for run in reversed(self.runs()) if run["generation"] == generation), None)
        return [] if run is None else [rank["exit_code"] for rank in run["ranks"]]

    def last(self, generation: int = 1) -> dict[str, Any]:
        """Return the newest report about a generation."""
        return next(run for run in reversed(self.runs()) if run["generation"] == generation)

    def runs(self) -> list[dict[str, Any]]:
        return [run for report in self.desk.reports for run in report["runs"]]

    def phases(self) -> list[str]:
        return [(rank["status"] or {}).get("phase", "") for rank in self.desk.run["ranks"]]

    def log(self) -> str:
        return self.log_path.read_text()

    def end(self, code: int) -> None:
        assert self.process.wait(PATIENCE_S) == code, self.log()
        assert not find_run_processes(self.folder / "run")


def a_document(generation: int, ranks: int, **more: Any) -> RunDocument:
    fields: dict[str, Any] = {
        "job_id": JOB,
        "owner": "ada",
        "node": NODE,
        "generation": generation,
        "nodes": 1,
        "node_rank": 0,
        "world_size": ranks,
        "ranks": tuple(RankSeat(rank, rank, rank + 4) for rank in range(ranks)),
        "plan": build_data_parallel_plan("cpu", ranks),
        **more,
    }
    return RunDocument(**fields)


@contextmanager
def agent_pod(
    folder: Path,
    *,
    command: Sequence[str] = (sys.executable, "-I", "-m", "scheduler.agent.pod"),
    variables: Mapping[str, str] | None = None,
    host: str = "127.0.0.1",
) -> Iterator[Pod]:
    with contextlib.closing(Desk()) as desk:
        made = Pod(folder, desk, command=command, variables=variables, host=host)
        try:
            yield made
        finally:
            kill_tree(made.process)
            made.wait(lambda: not find_run_processes(folder / "run"))
