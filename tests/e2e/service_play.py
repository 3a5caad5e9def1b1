"""A hurried service in a process of its own, which a test speaks to as a user does: over HTTP."""

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
from tests.e2e.hurried_service import settings
from tests.loopback import find_free_port

ROOT = Path(__file__).parents[2]
PATIENCE_S = 240.0
_LOOK_PERIOD_S = 0.05


class ServicePlay:
    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.client = Client(f"http://127.0.0.1:{port}")
        migrate(settings(folder, port).database_url)
        command = [sys.executable, "-m", "tests.e2e.hurried_service", str(folder), str(port)]
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)

    def open(self, *, nodes: int, gpus: int) -> None:
        """So many nodes of so many slots each."""
        self.wait(self.client.is_ready)
        self.client.create_pool({"name": "training", "kind": "training"})
        for node in range(nodes):
            self.client.add_node({"name": f"t{node}", "pool": "training", "gpu": "cpu", "gpus": gpus})

    def wait(self, reached: Callable[[], bool]) -> None:
        limit_s = time.monotonic() + PATIENCE_S
        while not reached():
            assert self._process.poll() is None, self._log()
            assert time.monotonic() < limit_s, self._log()
            time.sleep(_LOOK_PERIOD_S)

    def events(self, job_id: str, code: str) -> list[EventView]:
        return [event for event in self.client.job_events(job_id) if event["code"] == code]

    def reports(self, job_id: str) -> list[dict[str, Any]]:
        """What ranks of the job have sent over HTTP: the bodies of its commands in the inbox, taken in or not."""
        with contextlib.closing(sqlite3.connect(self.folder / "ebbtide.sqlite")) as database:
            rows = database.execute("SELECT body FROM inbox WHERE id LIKE ? ORDER BY number", (f"progress-{job_id}-%",))
            return [json.loads(body)["body"] for (body,) in rows]

    def run_dir(self, job_id: str, generation: int) -> Path:
        return self.folder / f"run/jobs/{job_id}/gen-{generation}"

    def end(self) -> None:
        """The service is told to end; nothing that it started is left."""
        self._process.send_signal(signal.SIGTERM)
        assert self._process.wait(PATIENCE_S) == 0, self._log()
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
def service_play(folder: Path) -> Iterator[ServicePlay]:
    port = find_free_port()
    made = ServicePlay(folder, port)
    try:
        yield made
    finally:
        made.close()
