"""HTTP server for the liveness probe `/healthz` and the readiness probe `/readyz` of a process without an API."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

_CLIENT_TIMEOUT_S = 5.0


class ProbeServer:
    """Server of probes.

    It runs in its own threads from construction until exit, so that a hanging main loop is detected.

    `liveness_error` and `readiness_error` return the problem, or an empty string. They may be replaced at any time.

    Raises:
        ValueError: the address cannot be used.
    """

    def __init__(self, host: str, port: int) -> None:
        self.liveness_error: Callable[[], str] = lambda: ""
        self.readiness_error: Callable[[], str] = lambda: "starting, or waiting for the database"
        try:
            self._server = ThreadingHTTPServer((host, port), _make_handler(self))
        except OSError as error:
            raise ValueError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
        self._server.daemon_threads = True
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="probes", daemon=True)
        self._thread.start()

    def __enter__(self) -> ProbeServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _make_handler(server: ProbeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _CLIENT_TIMEOUT_S

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            probe = {"/healthz": server.liveness_error, "/readyz": server.readiness_error}.get(path)
            if probe is None:
                self._respond(404, "unknown path; use /healthz or /readyz")
            else:
                error = probe()
                self._respond(503 if error else 200, error or "ok")

        def _respond(self, status: int, text: str) -> None:
            body = f"{text}\n".encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words: object) -> None:
            """Log nothing: probes arrive every few seconds."""

    return Handler
