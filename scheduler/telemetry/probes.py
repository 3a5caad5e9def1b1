"""Probes over HTTP for a process that serves no HTTP otherwise: `/healthz` says whether to start it anew, `/readyz`
whether it could do its work.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

_CLIENT_TIMEOUT_S = 5.0


class ProbeServer:
    """Answers from its making until it is closed, in threads of its own: a loop that hangs does not keep it from saying
    so. `unlive` and `unready` say what is wrong, nothing where all is well; they may be replaced at any time.

    Raises:
        ValueError: the address is not to be had.
    """

    def __init__(self, host: str, port: int) -> None:
        self.liveness_error: Callable[[], str] = lambda: ""
        self.readiness_error: Callable[[], str] = lambda: "it is starting, or waits for the database"
        try:
            self._server = ThreadingHTTPServer((host, port), _make_handler(self))
        except OSError as wrong:
            raise ValueError(f"cannot listen on {host}:{port}: {wrong.strerror or wrong}") from wrong
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

        def do_GET(self) -> None:  # the name is http.server's
            asked = {"/healthz": server.liveness_error, "/readyz": server.readiness_error}.get(
                self.path.partition("?")[0]
            )
            if asked is None:
                self._say(404, "there are /healthz and /readyz")
            else:
                fault = asked()
                self._say(503 if fault else 200, fault or "ok")

        def _say(self, status: int, text: str) -> None:
            body = f"{text}\n".encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words: object) -> None:
            """Probes come every few seconds: nobody wants to read of them."""

    return Handler
