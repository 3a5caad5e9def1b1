"""A fast service in its own process, which tests use over HTTP as a user does."""

from __future__ import annotations

import contextlib
import json
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from api.client import Client
from api.event_views import EventView
from scheduler.executors.local_run import find_marked_processes
from scheduler.store.schema_migration import migrate
from tests.e2e.fast_service import settings
from tests.loopback import find_free_port

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 240.0
_POLL_PERIOD_S = 0.05


class ServiceHarness:
    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.client = Client(f"http://127.0.0.1:{port}")
        migrate(settings(folder, port).database_url)
        command = [sys.executable, "-m", "tests.e2e.fast_service", str(folder), str(port)]
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)

    def open(self, *, nodes: int, gpus: int) -> None:
        """Wait for the service and add `nodes` nodes of `gpus` slots each."""
        self.wait(self.client.is_ready)
        self.client.create_pool({"name": "training", "kind": "training"})
        for node in range(nodes):
            self.client.add_node({"name": f"t{node}", "pool": "training", "gpu": "cpu", "gpus": gpus})

    def wait(self, reached: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not reached():
            assert self._process.poll() is None, self._log()
            assert time.monotonic() < deadline_s, self._log()
            time.sleep(_POLL_PERIOD_S)

    def events(self, job_id: str, code: str) -> list[EventView]:
        return [event for event in self.client.job_events(job_id) if event["code"] == code]

    def reports(self, job_id: str) -> list[dict[str, Any]]:
        """Return the progress reports that ranks of the job have sent over HTTP, from the commands in the inbox."""
        with contextlib.closing(sqlite3.connect(self.folder / "ebbtide.sqlite")) as database:
            rows = database.execute("SELECT body FROM inbox WHERE id LIKE ? ORDER BY number", (f"progress-{job_id}-%",))
            return [json.loads(body)["body"] for (body,) in rows]

    def run_dir(self, job_id: str, generation: int) -> Path:
        return self.folder / f"run/jobs/{job_id}/gen-{generation}"

    def end(self) -> None:
        """Stop the service and check that none of its processes is left."""
        self._process.send_signal(signal.SIGTERM)
        assert self._process.wait(TIMEOUT_S) == 0, self._log()
        assert not find_marked_processes(self.folder / "run")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for left in find_marked_processes(self.folder / "run"):
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()
        self.client.close()

    @property
    def _log_path(self) -> Path:
        return self.folder / "service.log"

    def _log(self) -> str:
        return self._log_path.read_text()[-5000:]


@contextmanager
def run_service(folder: Path) -> Iterator[ServiceHarness]:
    port = find_free_port()
    harness = ServiceHarness(folder, port)
    try:
        yield harness
    finally:
        harness.close()
