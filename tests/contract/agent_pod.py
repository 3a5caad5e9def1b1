"""A pod agent as a process, against a fake API."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from textwrap import dedent
from typing import Any

from scheduler.domain.parallel_plan import plan_to_json
from scheduler.domain.scaling_curve import build_data_parallel_plan
from scheduler.executors.local_run import find_marked_processes
from tests.http_server import LoopbackServer, QuietHandler

PATIENCE_S = 60.0
NOTHING: dict[str, Any] = {
    "generation": 0, "begun": False, "ranks": [], "notice": None, "kill": "", "done": False, "failed": False,
    "poll_after_s": 0.1,
}  # fmt: skip
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
    """An HTTP server that keeps the newest report and returns `reply`; None breaks the connection."""

    def __init__(self) -> None:
        self.reply: dict[str, Any] | None = dict(NOTHING)
        self.reports: list[dict[str, Any]] = []
        self.requests: list[tuple[str, str | None]] = []
        self.connections = 0
        desk = self

        class Handler(QuietHandler, BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                desk.connections += 1
                super().setup()

            def do_POST(self) -> None:
                report = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                desk.requests.append((self.path, self.headers["Authorization"]))
                if desk.reply is None:
                    self.close_connection = True
                    return
                desk.reports.append(report)
                body = json.dumps(desk.reply).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        server = LoopbackServer(Handler)
        self.url, self.close = server.url, server.close

    @property
    def report(self) -> dict[str, Any]:
        return self.reports[-1] if self.reports else {}


class Pod:
    def __init__(self, folder: Path, desk: Desk) -> None:
        self.folder, self.desk = folder, desk
        self.start()

    def start(self, *, preload: str = "json") -> None:
        env = {
            **os.environ,
            "EBBTIDE_JOB_ID": "a/b",
            "EBBTIDE_NODE": "n0",
            "EBBTIDE_POD": "p1",
            "EBBTIDE_URL": f"{self.desk.url}/base/",
            "EBBTIDE_TOKEN": "eba_secret",
            "EBBTIDE_RUN_ROOT": str(self.folder / "run"),
            "EBBTIDE_GRACE_S": "5",
        }
        with (self.folder / "agent.log").open("ab") as log:
            command = [sys.executable, "-m", "scheduler.worker.pod_agent", "--preload", preload]
            self.process = subprocess.Popen(command, env=env, stdout=log, stderr=log)

    def order(self, script: str, *, generation: int = 1, ranks: int = 2, **more: Any) -> None:
        """Set the reply: start these ranks, which run `script`."""
        path = self.folder / "rank.py"
        path.write_text(dedent(script))
        self.desk.reply = {
            **NOTHING,
            "generation": generation,
            "begun": True,
            "world_size": ranks,
            "command": ["python", str(path)],
            "checkpoint_dir": "",
            "plan": plan_to_json(build_data_parallel_plan("cpu", ranks)),
            "ranks": [
                {"rank": rank, "local_rank": rank, "gpu": rank, "env": {"RANK": str(rank), "EBBTIDE_RUN_ROOT": ""}}
                for rank in range(ranks)
            ],
            **more,
        }

    def tell(self, **fields: Any) -> None:
        assert self.desk.reply is not None
        self.desk.reply = {**self.desk.reply, **fields}

    def wait(self, reached: Callable[[], bool]) -> None:
        limit_s = time.monotonic() + PATIENCE_S
        while not reached():
            assert time.monotonic() < limit_s, f"{self.desk.report}\n{(self.folder / 'agent.log').read_text()}"
            time.sleep(0.01)

    def codes(self, generation: int = 1) -> list[int | None]:
        report = self.desk.report
        return [rank["exit_code"] for rank in report["ranks"]] if report.get("generation") == generation else []

    def phases(self) -> list[str]:
        return [(rank["status"] or {}).get("phase", "") for rank in self.desk.report.get("ranks", [])]

    def log(self) -> str:
        return (self.folder / "agent.log").read_text()

    def end(self, code: int) -> None:
        assert self.process.wait(PATIENCE_S) == code, self.log()
        assert not find_marked_processes(self.folder / "run")


@contextmanager
def agent_pod(folder: Path) -> Iterator[Pod]:
    desk = Desk()
    made = Pod(folder, desk)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.wait()
        desk.close()
        made.wait(lambda: not find_marked_processes(folder / "run"))
