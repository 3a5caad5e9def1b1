"""API processes with fast webhook delivery on one database, into which the test itself commits events."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx

from ebbtide.client import Client
from scheduler.domain.events import Event, EventCode
from scheduler.store.protocol import Commit
from scheduler.store.schema_migration import migrate
from scheduler.store.sql_store import SqlStore
from tests.loopback import find_free_port
from tests.webhook_receiver import PATIENCE_S, wait_for

ROOT = Path(__file__).parents[2]


class WebhookHarness:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.database_url = f"sqlite:///{folder / 'ebbtide.sqlite'}"
        migrate(self.database_url)
        self.store = SqlStore(self.database_url)
        lease = self.store.acquire_lease("test", now_s=0.0, ttl_s=1e12)
        assert lease is not None
        self._epoch = lease.epoch
        self._processes: list[subprocess.Popen[bytes]] = []
        self._clients: list[Client] = []
        self.url = ""  # of the newest API process

    def start_api(self, **settings: str) -> tuple[subprocess.Popen[bytes], Client]:
        """Start one more API process and wait until it answers."""
        port = find_free_port()
        variables = {
            "DATABASE_URL": self.database_url,
            "RUN_DIR": str(self._folder / "run"),
            "PORT": str(port),
            "WEBHOOK_HOSTS": "127.0.0.1",
            "AUTH": "off",
            **settings,
        }
        environment = {**os.environ, **{f"EBBTIDE_{name}": value for name, value in variables.items()}}
        log_path = self._folder / f"api-{len(self._processes)}.log"
        with log_path.open("wb") as log:
            command = [sys.executable, "-m", "tests.e2e.fast_webhook_api"]
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        self._processes.append(process)
        self.url = f"http://127.0.0.1:{port}"
        client = Client(self.url)
        self._clients.append(client)
        wait_for(lambda: process.poll() is not None or _answers(f"http://127.0.0.1:{port}"), log_path.read_text)
        assert process.poll() is None, log_path.read_text()
        return process, client

    def happen(self, count: int, code: EventCode = EventCode.JOB_STARTED, subject: str = "job-1") -> list[int]:
        """Commit `count` events in one transaction and return their numbers."""
        previous = self.store.load().snapshot
        after = replace(previous, generation=previous.generation + 1)
        events = tuple(Event(float(at), code, subject, f"event {at}") for at in range(count))
        first = self._events + 1
        self.store.commit(Commit(previous, after, self._epoch, events=events))
        self._events += count
        return list(range(first, first + count))

    _events = 0

    def close(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self._processes:
            process.wait(PATIENCE_S)
        for client in self._clients:
            client.close()
        self.store.close()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/healthz").is_success
    except httpx.TransportError:
        return False


@contextmanager
def run_webhooks(folder: Path) -> Iterator[WebhookHarness]:
    harness = WebhookHarness(folder)
    try:
        yield harness
    finally:
        harness.close()
