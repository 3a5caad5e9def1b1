"""The demo's service: a child process with its own folder and port."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from cli.commands.demo import DEMO_URL
from cli.local_service import TOKEN_FILE, read_token_file
from ebbtide.client import Client

READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 60.0


class DemoError(Exception):
    """The demo cannot continue."""


class DemoService:
    """The service process. Its jobs may write to `ledgers`."""

    def __init__(self, folder: Path, settings: Mapping[str, str]) -> None:
        self.folder = folder
        self.ledgers = folder / "ledger"
        self.ledgers.mkdir()
        self.ledgers.chmod(0o1777)  # jobs run as another user
        self.url = f"http://127.0.0.1:{_choose_port(urlsplit(DEMO_URL).port or 0)}"
        self._log = (folder / "service.log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "cli", "demo", "serve"],
            env={**os.environ, **self._build_environment(settings)},
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _build_environment(self, settings: Mapping[str, str]) -> dict[str, str]:
        port = self.url.rpartition(":")[2]
        own = {
            "EBBTIDE_DATABASE_URL": f"sqlite:///{self.folder / 'ebbtide.sqlite'}",
            "EBBTIDE_RUN_DIR": str(self.folder / "run"),
            "EBBTIDE_PORT": port,
            "EBBTIDE_HOST": "127.0.0.1",
            "EBBTIDE_AUTH": "on",
            "EBBTIDE_AGENT_WRITABLE": str(self.ledgers),
            "EBBTIDE_AGENT_LEAVE_WITHIN": "20s",
        }
        return {**own, **settings}

    @property
    def token(self) -> str:
        """The token of the user who runs the demo, once the service is ready."""
        return read_token_file(self.folder / "run" / TOKEN_FILE)

    def wait_until_ready(self) -> Client:
        """Return a client with the service's token once the service is ready."""
        client = Client(self.url)
        give_up_at_s = time.monotonic() + READY_TIMEOUT_S
        while not client.is_ready():
            if self._process.poll() is not None:
                raise DemoError(f"the service exited with code {self._process.returncode}; see {self._log.name}")
            if time.monotonic() > give_up_at_s:
                raise DemoError(f"the service was not ready within {READY_TIMEOUT_S:.0f} s; see {self._log.name}")
            time.sleep(0.2)
        client.close()
        return Client(self.url, token=self.token)

    def stop(self) -> None:
        """Stop the service and wait for it. Its agent ends the jobs."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._log.close()

    def find_leftover_processes(self) -> list[int]:
        """Return the IDs of processes whose command line or environment names the demo's folder."""
        return [process.pid for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return any(str(self.folder) in text for text in (*process.cmdline(), *process.environ().values()))
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            return False


def _choose_port(wanted: int) -> int:
    """Return the wanted port if it is free, else another free one."""
    for port in (wanted, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return int(probe.getsockname()[1])
    raise DemoError("no port of 127.0.0.1 is free")
