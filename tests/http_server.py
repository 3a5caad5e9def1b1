"""Small HTTP servers on loopback for tests."""

from __future__ import annotations

import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

_LOOK_PERIOD_S = 0.01


class QuietHandler:
    """Mixin before BaseHTTPRequestHandler that disables its log lines."""

    def log_message(self, *words: object) -> None:
        """Log nothing."""


class LoopbackServer:
    """Serves from construction until `close`, which may be called repeatedly. With a context, it serves TLS."""

    def __init__(self, handler: type[BaseHTTPRequestHandler], tls: ssl.SSLContext | None = None) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(_LOOK_PERIOD_S,))
        self._thread.start()
        self.address = f"127.0.0.1:{self._server.server_port}"
        self.url = f"{'http' if tls is None else 'https'}://{self.address}"

    def close(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()

    def __enter__(self) -> LoopbackServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
