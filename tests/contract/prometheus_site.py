"""A real Prometheus on loopback that scrapes one target, whose gauges a test can set."""

from __future__ import annotations

import shutil
import subprocess
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import httpx

from tests.http_server import LoopbackServer, QuietHandler
from tests.kubernetes.waiting import eventually
from tests.loopback import find_free_port

PROGRAM = shutil.which("prometheus")
_CONFIG = """
global: {{scrape_interval: {every}, scrape_timeout: {every}, evaluation_interval: {judged_every}}}
rule_files: [{rules}]
scrape_configs:
  - job_name: test
    static_configs: [{{targets: ["{target}"]}}]
"""


class Target:
    """Serves `text` under /metrics until it is closed."""

    def __init__(self) -> None:
        self.text = ""
        target = self

        class Handler(QuietHandler, BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.end_headers()
                self.wfile.write(target.text.encode())

        server = LoopbackServer(Handler)
        self.address, self.close = server.address, server.close


class Prometheus:
    """A Prometheus process. `data` are initial blocks of samples. `rules` are evaluated at the scrape interval."""

    def __init__(
        self, folder: Path, target: str, *, every: str = "200ms", data: Path | None = None, rules: Path | None = None
    ) -> None:
        self._folder, self._data = folder, data or folder / "data"
        judged_every = every if rules else "1m"
        config = _CONFIG.format(target=target, every=every, judged_every=judged_every, rules=rules or "")
        (folder / "prometheus.yml").write_text(config)
        self._address = f"127.0.0.1:{find_free_port()}"
        self.url = f"http://{self._address}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        assert PROGRAM is not None
        leash = ["setpriv", "--pdeathsig", "KILL", "--"] if shutil.which("setpriv") else []
        command = [
            PROGRAM,
            f"--config.file={self._folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={self._data}",
            "--storage.tsdb.retention.time=100y",
            f"--web.listen-address={self._address}",
            "--log.level=warn",
        ]
        with (self._folder / "prometheus.log").open("ab") as log:
            self._process = subprocess.Popen([*leash, *command], stdout=log, stderr=log, cwd=self._folder)
        eventually(self._is_ready, what=f"Prometheus is up: see {self._folder / 'prometheus.log'}")

    def ask(self, path: str, **question: str | float) -> Any:
        """Return the data of a response of the HTTP API; the path follows `/api/v1`."""
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=question, timeout=60.0).json()
        assert answer["status"] == "success", (question, answer)
        return answer["data"]

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _is_ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"it ended: see {self._folder / 'prometheus.log'}"
        try:
            return httpx.get(f"{self.url}/-/ready", timeout=5.0).status_code == 200
        except httpx.TransportError:
            return False
