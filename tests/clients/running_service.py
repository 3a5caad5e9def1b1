"""A service that `ebbtide serve` started in an empty folder, with a token of an admin, as outside programs meet it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ebbtide.client import Client
from tests.loopback import find_free_port

TIMEOUT_S = 120.0
_POLL_PERIOD_S = 0.1


class RunningService:
    """The processes of a service. `token` is that of an admin."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self._folder = folder
        port = find_free_port()
        self.url = f"http://127.0.0.1:{port}"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("EBBTIDE_")}
        given = {f"EBBTIDE_{name.upper()}": value for name, value in settings.items()}
        self.env = {
            **inherited,
            "XDG_CONFIG_HOME": str(folder / "config"),
            "EBBTIDE_AUTH": "on",
            "EBBTIDE_PORT": str(port),
            **given,
        }
        with (folder / "serve.log").open("wb") as log:
            self._process = subprocess.Popen(self._command("serve"), cwd=folder, env=self.env, stdout=log, stderr=log)
        self._wait_ready()
        self.token = self.run("token", "create", "-q", "--name", "root", "--grant", "admin").strip()

    def run(self, *words: str) -> str:
        """Run a command of the service's user, and return what it prints."""
        done = subprocess.run(
            self._command(*words), cwd=self._folder, env=self.env, capture_output=True, text=True, timeout=TIMEOUT_S
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def log(self) -> str:
        return (self._folder / "serve.log").read_text()[-8000:]

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "cli", *words]

    def _wait_ready(self) -> None:
        deadline_s = time.monotonic() + TIMEOUT_S
        with Client(self.url) as client:
            while not client.is_ready():
                assert self.is_alive(), self.log()
                assert time.monotonic() < deadline_s, self.log()
                time.sleep(_POLL_PERIOD_S)


@contextmanager
def run_service(folder: Path, **settings: str) -> Iterator[RunningService]:
    service = RunningService(folder, **settings)
    try:
        yield service
    finally:
        service.close()
