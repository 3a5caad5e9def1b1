"""A service and the node agent of its machine, as separate processes, which tests use over HTTP as a user does."""

from __future__ import annotations

import contextlib
import json
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from cli.composition.service_machine import build_agent_command, register_service_machine, state_folder
from ebbtide.client import Client
from ebbtide.client.views import EventView
from scheduler.agent.run_folder import AgentFolders
from scheduler.domain.commands import Command, CommandBody
from scheduler.domain.job import Job
from scheduler.store.schema_migration import migrate
from scheduler.store.sql_store import SqlStore
from tests.e2e.killable_service import GRACE_S, build_settings
from tests.loopback import find_free_port

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 240.0
_POLL_PERIOD_S = 0.02
_CHECK_PERIOD_S = 0.2


class ServiceHarness:
    """A service on a free port. Ranks may write to `shared`."""

    def __init__(self, folder: Path, *, grace_s: float = GRACE_S, options: Sequence[str] = ()) -> None:
        self.folder = folder
        self.shared = folder / "shared"
        self.shared.mkdir()
        self.shared.chmod(0o1777)
        self.settings = build_settings(folder, find_free_port(), grace_s=grace_s)
        migrate(self.settings.database_url)
        self.store = SqlStore(self.settings.database_url)
        self.client = Client(f"http://127.0.0.1:{self.settings.port}")
        self.folders = AgentFolders(state_folder(self.settings))
        self._options = ["--grace", str(grace_s)]
        self._sent = 0
        self.service = self.start_service(*options)
        register_service_machine(self.settings)
        self.agent = self.start_agent()

    def start_service(self, *options: str) -> subprocess.Popen[bytes]:
        command = ["-m", "tests.e2e.killable_service", str(self.folder), str(self.settings.port), *self._options]
        self.service = self._start("service", [sys.executable, *command, *options])
        return self.service

    def start_agent(self) -> subprocess.Popen[bytes]:
        command = build_agent_command(self.settings, [sys.executable, "-m", "cli"])
        options = ["--writable", str(self.shared), "--leave-within", "60s"]
        self.agent = self._start("agent", [*command, *options])
        return self.agent

    def open(self, *, nodes: int, gpus: int) -> None:
        """Wait for the service and add `nodes` nodes of `gpus` slots each."""
        self.wait(self.client.is_ready)
        self.client.create_pool({"name": "training", "kind": "training"})
        for node in range(nodes):
            self.client.add_node({"name": f"t{node}", "pool": "training", "gpu": "cpu", "gpus": gpus})

    def send(self, body: CommandBody) -> None:
        """Send a command past the API."""
        self._sent += 1
        self.store.send(Command(f"harness-{self._sent}", time.time(), body))

    def job(self, job_id: str) -> Job | None:
        return self.store.load().snapshot.jobs.get(job_id) or self.store.get_ended_job(job_id)

    def wait(self, reached: Callable[[], bool], *, may_die: bool = False) -> None:
        """Wait until `reached()`, while service and agent run. `may_die`: the service may have been killed."""
        deadline_s, check_at_s = time.monotonic() + TIMEOUT_S, 0.0
        while not reached():
            if time.monotonic() >= check_at_s and not may_die:
                self.check(deadline_s)
                check_at_s = time.monotonic() + _CHECK_PERIOD_S
            time.sleep(_POLL_PERIOD_S)

    def check(self, deadline_s: float) -> None:
        """Check that service and agent run and that there is time left."""
        assert self.service.poll() is None, self.log()
        assert self.agent.poll() is None, self.log()
        assert time.monotonic() < deadline_s, self.log()

    def events(self, job_id: str, code: str) -> list[EventView]:
        return [event for event in self.client.job_events(job_id) if event["code"] == code]

    def reports(self, job_id: str) -> list[dict[str, Any]]:
        """Return the progress reports that ranks of the job have sent over HTTP, from the commands in the inbox."""
        with contextlib.closing(sqlite3.connect(self.folder / "ebbtide.sqlite")) as database:
            rows = database.execute("SELECT body FROM inbox WHERE id LIKE ? ORDER BY number", (f"progress-{job_id}-%",))
            return [json.loads(body)["body"] for (body,) in rows]

    def run_dirs(self, job_id: str, generation: int) -> list[Path]:
        """Return the folders of a generation, one per node."""
        return sorted(self.folders.job_folder(job_id).glob(f"gen-{generation}@*"))

    def generations(self, job_id: str) -> list[int]:
        folders = self.folders.job_folder(job_id).glob("gen-*@*/start.json")
        return sorted({int(path.parent.name.partition("@")[0].removeprefix("gen-")) for path in folders})

    def status(self, job_id: str, generation: int, rank: int = 0) -> dict[str, Any]:
        """Return the status of a rank. Its phase is empty if it has written none."""
        for folder in self.run_dirs(job_id, generation):
            with contextlib.suppress(FileNotFoundError):
                document: dict[str, Any] = json.loads((folder / f"status-{rank}.json").read_text())
                return document
        return {"phase": "", "step": 0}

    def list_processes(self) -> list[psutil.Process]:
        """Return the living supervisors and ranks. Their command line or environment names the agent's state folder."""
        state = str(self.folders.state / "jobs")
        return [process for process in psutil.process_iter() if _mentions(process, state)]

    def end(self) -> None:
        """Stop agent and service, and check that no process is left."""
        for process in (self.agent, self.service):
            process.send_signal(signal.SIGTERM)
            assert process.wait(TIMEOUT_S) == 0, self.log()
        assert not self.list_processes()

    def close(self) -> None:
        for process in (self.agent, self.service):
            process.kill()
            process.wait()
        for left in self.list_processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()
        self.client.close()
        self.store.close()

    def log(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text()[-4000:]}" for path in sorted(self.folder.glob("*.log")))

    def _start(self, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def _mentions(process: psutil.Process, text: str) -> bool:
    try:
        words = [*process.cmdline(), *process.environ().values()]
        return process.status() != psutil.STATUS_ZOMBIE and any(text in word for word in words)
    except psutil.Error:
        return False


@contextmanager
def run_service(folder: Path, *, grace_s: float = GRACE_S) -> Iterator[ServiceHarness]:
    harness = ServiceHarness(folder, grace_s=grace_s)
    try:
        yield harness
    finally:
        harness.close()
